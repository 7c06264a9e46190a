"""Makes new training prompts out of halves of others: how the target answers what it never met.

    python -m training.tiny.recombine_prompts --prompts runs/train_prompts.jsonl.xz --output runs/recombined.jsonl.xz

The target knows its training prompts by heart and answers them fluently; on unseen ones it hesitates and repeats
itself, and a drafter that only saw the former drafts the latter badly. Each new prompt is the beginning of one user
turn and the end of another of the same kind, cut between sentences or lines, in the chat markup of the second.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

_BOUNDARY = re.compile(r"(?<=[.!?])\s+|(?<=\n)")
_USER_START, _TURN_END = "<|im_start|>user\n", "<|im_end|>"


def split_turn(text: str) -> tuple[str, list[str], str]:
    """Markup before the last user turn, the turn's pieces (their separators kept), and what follows it."""
    start = text.rindex(_USER_START) + len(_USER_START)
    end = text.index(_TURN_END, start)
    turn, pieces, last = text[start:end], [], 0
    for boundary in _BOUNDARY.finditer(turn):
        pieces.append(turn[last : boundary.end()])
        last = boundary.end()
    pieces.append(turn[last:])
    return text[:start], [piece for piece in pieces if piece], text[end:]


def recombine(first: str, second: str, rng: Random) -> str:
    """The beginning of `first`'s last user turn, then the end of `second`'s."""
    _, beginning, _ = split_turn(first)
    before, ending, after = split_turn(second)
    kept = beginning[: rng.randint(1, max(1, len(beginning) - 1))]
    added = ending[rng.randint(min(1, len(ending) - 1), len(ending) - 1) :]
    return before + "".join(kept) + "".join(added) + after


def recombined_prompts(prompts: list[dict[str, str]], counts: dict[str, int], seed: int) -> Iterator[dict[str, str]]:
    """`counts[kind]` new prompts of every kind."""
    rng = Random(seed)
    for kind, count in counts.items():
        texts = [prompt["text"] for prompt in prompts if prompt["kind"] == kind]
        for _ in range(count):
            yield {"kind": kind, "text": recombine(rng.choice(texts), rng.choice(texts), rng)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--counts",
        type=json.loads,
        default={"gsm": 20_000, "code": 12_000, "dialogue": 4_000, "prose": 4_000},
        help="JSON of new prompts for each kind",
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    with lzma.open(options.prompts, "rt", encoding="utf-8") as file:
        prompts = [json.loads(line) for line in file]
    with lzma.open(options.output, "wt", encoding="utf-8", preset=4) as file:
        for prompt in recombined_prompts(prompts, options.counts, options.seed):
            file.write(json.dumps(prompt, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
