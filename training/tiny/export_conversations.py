"""Writes some of the target's regenerated answers as conversations in Open-PerfectBlend's columns.

    python -m training.tiny.export_conversations --answers runs/answers.npz --tokenizer runs/tokenizer \\
        --output training/configs/tiny_conversations.jsonl

The shipped file is what `train_ready.py --config training/configs/tiny_stage1.yaml` trains on. With `--tokenised` rows
hold the target's very tokens, `input_ids` and `assistant_mask`, finished or not: what the bundled adapter and the
ablations train on.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random

from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from training.tiny.regenerate import load_answers

TURN = re.compile(
    r"<\|im_start\|>user\n(?P<question>.*?)<\|im_end\|>\n<\|im_start\|>assistant\n<think>\n(?P<rest>.*)<\|im_end\|>",
    re.DOTALL,
)


def conversation(text: str) -> list[dict[str, str]] | None:
    """The turns of one rendered row, or None where it is no finished single turn with a closed thought."""
    found = TURN.fullmatch(text)
    if found is None or "<|im_" in found["question"] or "</think>" not in found["rest"]:
        return None
    thought, _, answer = found["rest"].partition("</think>")
    answer = answer.strip()
    if not answer:
        return None
    value = f"<think>\n{thought.strip()}\n</think>\n\n{answer}" if thought.strip() else answer
    return [{"from": "human", "value": found["question"]}, {"from": "gpt", "value": value}]


def conversation_rows(rows: list[tuple[Tensor, int]], tokenizer: PreTrainedTokenizerBase) -> Iterator[dict]:
    """Rows of Open-PerfectBlend's columns, of the answers that are finished."""
    for tokens, _ in rows:
        turns = conversation(tokenizer.decode(tokens))
        if turns is not None:
            yield {"conversations": turns, "source": "tiny"}


def tokenised_rows(rows: list[tuple[Tensor, int]]) -> Iterator[dict]:
    """Rows of tokens with a mask of the answer."""
    for tokens, start in rows:
        yield {"input_ids": tokens.tolist(), "assistant_mask": [0] * start + [1] * (len(tokens) - start)}


def main(command_line: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, nargs="+", required=True, help="one or more answers.npz")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--count", type=int, default=192, help="rows to write; 0 writes all")
    parser.add_argument("--longest", type=int, default=224, help="tokens of a row, the prompt included")
    parser.add_argument("--tokenised", action="store_true", help="write tokens instead of conversations")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(command_line)
    rows = [row for path in options.answers for row in load_answers(path) if len(row[0]) <= options.longest]
    Random(options.seed).shuffle(rows)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    lines = tokenised_rows(rows) if options.tokenised else conversation_rows(rows, tokenizer)
    written = 0
    with options.output.open("w", encoding="utf-8") as file:
        for line in islice(lines, options.count or None):
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            written += 1
    print(f"{written} conversations: {options.output}")


if __name__ == "__main__":
    main()
