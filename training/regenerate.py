"""Lets the target answer the prompts of a data set: a drafter must learn what this very target writes.

    python training/regenerate.py --target Qwen/Qwen3.8-27B --dataset mlabonne/open-perfectblend --max-samples 20000 \\
        --output runs/answers.jsonl

Each line of the output is a tokenised row (`input_ids`, `assistant_mask`, and `row`, the place of the prompt in the
data set) that train_ready.py reads as its `--dataset`. Lines are appended batch by batch; the same command goes on
where it was stopped, and a line cut in half by a crash is written again. An answer that reaches `--max-new-tokens` is
kept as it is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    # Run as a file: the repository's root is not on the path yet.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_hybridspec.bundled import resolve
from training.conversations import UnusableRowError, read_conversation
from training.data import read_rows

# Prompts sorted by length together, so that a batch needs little padding.
BATCHES_PER_BUCKET = 20


@dataclass(frozen=True)
class Prompt:
    """row: place in the data set. tokens: up to where the target begins to write."""

    row: int
    tokens: list[int]


def read_prompts(
    rows: Iterator[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, max_length: int, enable_thinking: bool
) -> Iterator[Prompt]:
    """The conversation up to the last answer of each usable row; longer ones than max_length are left out."""
    for number, row in enumerate(rows):
        try:
            messages = read_conversation(row)
        except UnusableRowError:
            continue
        encoded = tokenizer.apply_chat_template(
            messages[:-1], add_generation_prompt=True, enable_thinking=enable_thinking, return_dict=True
        )
        if len(encoded["input_ids"]) <= max_length:
            yield Prompt(number, list(encoded["input_ids"]))


@torch.no_grad()
def answer(
    model: PreTrainedModel, prompts: Sequence[Prompt], padding: int, settings: dict[str, Any]
) -> list[list[int]]:
    """The answer to each prompt, its end token included, from one left-padded batch."""
    width = max(len(prompt.tokens) for prompt in prompts)
    ids = torch.tensor([[padding] * (width - len(p.tokens)) + p.tokens for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p.tokens)) + [1] * len(p.tokens) for p in prompts], device=model.device)
    output = model.generate(input_ids=ids, attention_mask=mask, pad_token_id=padding, **settings)
    ends = model.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends or ())
    answers = []
    for row in output[:, width:].tolist():
        stop = next((index + 1 for index, token in enumerate(row) if token in ends), len(row))
        answers.append(row[:stop])
    return answers


def finished_rows(output: Path) -> set[int]:
    """Rows that an earlier run has answered; a half-written last line is cut off the file."""
    if not output.is_file():
        return set()
    done, whole = set(), 0
    with output.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            done.add(json.loads(line)["row"])
            whole += len(line)
    with output.open("rb+") as file:
        file.truncate(whole)
    return done


def batches(prompts: list[Prompt], size: int) -> Iterator[list[Prompt]]:
    """Prompts of similar length together, in an order that does not depend on what is already done."""
    step = size * BATCHES_PER_BUCKET
    for start in range(0, len(prompts), step):
        bucket = sorted(prompts[start : start + step], key=lambda prompt: len(prompt.tokens))
        for offset in range(0, len(bucket), size):
            yield bucket[offset : offset + size]


def regenerate(options: argparse.Namespace) -> int:
    """Answers the prompts that are not answered yet; returns how many. Raises ValueError for unusable options."""
    tokenizer = AutoTokenizer.from_pretrained(resolve(options.target))
    rows = iter(read_rows(options.dataset, options.dataset_split, options.seed))
    prompts = []
    for prompt in read_prompts(rows, tokenizer, options.max_prompt_length, not options.no_thinking):
        if options.max_samples is not None and len(prompts) == options.max_samples:
            break
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{options.dataset} has no prompt of at most {options.max_prompt_length} tokens.")
    done = finished_rows(options.output)
    waiting = [prompt for prompt in prompts if prompt.row not in done]
    print(f"{len(prompts)} prompts, {len(prompts) - len(waiting)} of them answered before", flush=True)
    if not waiting:
        return 0
    model = AutoModelForCausalLM.from_pretrained(resolve(options.target), dtype="auto").to(options.device).eval()
    settings = {"max_new_tokens": options.max_new_tokens, "do_sample": options.temperature > 0}
    if options.temperature > 0:
        settings |= {"temperature": options.temperature, "top_k": 0}
    padding = tokenizer.pad_token_id or 0
    options.output.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    written = 0
    with options.output.open("a", encoding="utf-8") as file:
        for batch in batches(waiting, options.batch_size):
            for prompt, tokens in zip(batch, answer(model, batch, padding, settings), strict=True):
                mask = [0] * len(prompt.tokens) + [1] * len(tokens)
                line = {"row": prompt.row, "input_ids": prompt.tokens + tokens, "assistant_mask": mask}
                file.write(json.dumps(line) + "\n")
            file.flush()
            written += len(batch)
            print(f"{written} of {len(waiting)} answered", flush=True)
    return written


def main(command_line: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 with one sentence on stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="bundled name, folder or Hub id")
    parser.add_argument("--dataset", required=True, help="Hub id or .jsonl")
    parser.add_argument("--dataset-split", default="train")
    parser.add_argument("--output", type=Path, required=True, help=".jsonl, appended to")
    parser.add_argument("--max-samples", type=int)
    parser.add_argument("--max-prompt-length", type=int, default=1024)
    parser.add_argument("--max-new-tokens", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--no-thinking", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(command_line)
    try:
        regenerate(options)
    except (ValueError, OSError) as error:
        print(f"regenerate: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
