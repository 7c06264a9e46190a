"""A worked problem under construction, and the small grammar that varies its sentences."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from random import Random

from training.tiny.problem_words import NAMES

_ALTERNATIVES = re.compile(r"\[([^\[\]]*)\]")


@dataclass
class Story:
    """A problem under construction: sentences of the question, lines of the solution, and the answer."""

    rng: Random
    question: list[str] = field(default_factory=list)
    solution: list[str] = field(default_factory=list)
    answer: float = 0

    def tell(self, text: str) -> None:
        self.question.append(vary(self.rng, text))

    def solve(self, text: str) -> None:
        self.solution.append(vary(self.rng, text))

    def names(self, count: int) -> list[str]:
        return self.rng.sample(NAMES, count)

    def up_to(self, high: int, low: int = 2) -> int:
        return self.rng.randint(low, high)

    def of(self, words: tuple | list):
        return self.rng.choice(words)


def vary(rng: Random, text: str) -> str:
    """One of the sentences that `text` stands for: `[a|b|c]` is one of the three, and brackets may be nested."""
    while match := _ALTERNATIVES.search(text):
        chosen = rng.choice(match.group(1).split("|"))
        text = text[: match.start()] + chosen + text[match.end() :]
    return text


def plural(goods: str) -> str:
    """`shirt` -> `shirts`, `pair of socks` -> `pairs of socks`."""
    first, _, rest = goods.partition(" of ")
    if first == "loaf":
        first = "loaves"
    else:
        first += "es" if first.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{first} of {rest}" if rest else first


def number(value: float) -> str:
    """Without a trailing `.0`, at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
