"""Lets the target itself answer the training prompts: a drafter learns what this very target writes.

    python -m training.tiny.regenerate --target runs/target --prompts runs/train_prompts.jsonl.xz --output runs/answers

Most answers are greedy, `--sampled-share` of them are drawn at temperature 0.8. `answers.npz` holds `tokens` uint16
(prompt, answer and its end token, all rows one after another), `starts` and `prompt_lengths` int64.
"""

from __future__ import annotations

import argparse
import json
import lzma
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3_5MoeForCausalLM

from training.tiny.fast_target import fast_forms

ANSWER_TOKENS = {"gsm": 256, "code": 384, "dialogue": 128, "prose": 256}


def answer_batch(
    model: Qwen3_5MoeForCausalLM, prompts: list[list[int]], max_new_tokens: int, sample: bool
) -> Iterator[list[int]]:
    """The answer to each prompt (token ids, its end token included), in one left-padded batch."""
    padding = model.config.pad_token_id
    ends = set(model.generation_config.eos_token_id)
    width = max(map(len, prompts))
    ids = torch.tensor([[padding] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = {"do_sample": True, "temperature": 0.8, "top_k": 0} if sample else {"do_sample": False}
    output = model.generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=max_new_tokens,
        **settings,
    )
    for row in output[:, width:].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        yield row[:end]


def batches(prompts: list[list[int]], size: int) -> Iterator[list[list[int]]]:
    """Prompts of similar length together."""
    ordered = sorted(prompts, key=len)
    starts = list(range(0, len(ordered), size))
    Random(0).shuffle(starts)
    for start in starts:
        yield ordered[start : start + size]


def read_prompts(path: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, list[list[int]]]:
    """Token ids of the prompts by kind."""
    texts: dict[str, list[str]] = {}
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            prompt = json.loads(line)
            texts.setdefault(prompt["kind"], []).append(prompt["text"])
    return {kind: tokenizer(rows, add_special_tokens=False)["input_ids"] for kind, rows in texts.items()}


def save_answers(path: Path, rows: list[list[int]], prompt_lengths: list[int]) -> None:
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    tokens = np.concatenate([np.array(row, dtype=np.uint16) for row in rows])
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(
        path,
        tokens=tokens,
        starts=np.cumsum(lengths) - lengths,
        prompt_lengths=np.array(prompt_lengths, dtype=np.int64),
    )


def load_answers(path: Path) -> list[tuple[Tensor, int]]:
    """(tokens int64 [length], prompt length) of every row."""
    with np.load(path) as data:
        tokens, starts, prompt_lengths = data["tokens"].astype(np.int64), data["starts"], data["prompt_lengths"]
    rows = np.split(tokens, starts[1:])
    return [(torch.from_numpy(row), int(length)) for row, length in zip(rows, prompt_lengths, strict=True)]


def regenerate(
    model: Qwen3_5MoeForCausalLM, prompts: dict[str, list[list[int]]], options: argparse.Namespace
) -> tuple[list[list[int]], list[int]]:
    """Prompt and answer of every prompt, kinds and lengths mixed, and the prompts' lengths."""
    rng, start = Random(options.seed), time.monotonic()
    work = [(kind, batch) for kind, of_kind in prompts.items() for batch in batches(of_kind, options.batch_size)]
    rng.shuffle(work)
    rows, prompt_lengths = [], []
    for kind, batch in work:
        sample = rng.random() < options.sampled_share
        answers = answer_batch(model, batch, options.max_new_tokens or ANSWER_TOKENS[kind], sample)
        for prompt, answer in zip(batch, answers, strict=True):
            rows.append(prompt + answer)
            prompt_lengths.append(len(prompt))
        elapsed = time.monotonic() - start
        written = sum(map(len, rows)) - sum(prompt_lengths)
        print(f"{kind}: {len(rows)} answers, {written / 1e6:.2f} M tokens, {elapsed:.0f} s", flush=True)
        if elapsed > options.seconds:
            break
    return rows, prompt_lengths


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, help="defaults to the target's folder")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True, help="answers.npz")
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--sampled-share", type=float, default=0.25)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after the batch that passes this")
    parser.add_argument("--max-new-tokens", type=int, help="instead of the length for each kind")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer or options.target)
    model = Qwen3_5MoeForCausalLM.from_pretrained(options.target).to(options.device).eval()
    prompts = read_prompts(options.prompts, tokenizer)
    with fast_forms():
        rows, prompt_lengths = regenerate(model, prompts, options)
    save_answers(options.output, rows, prompt_lengths)


if __name__ == "__main__":
    main()
