"""Captured rounds: one line of JSON for each prompt, appended as prompts finish, and all rounds as arrays.

A file begins with a line that names what was captured. A capture that was interrupted continues after its last whole
line; a line cut short by the interruption is dropped.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .profile import PairIdentity

FORMAT = "hf-hybridspec-rounds"


@dataclass(frozen=True)
class CapturedRound:
    """One round that verified all D drafts.

    Attributes:
        confidence, entropy: D numbers, the drafter's signals.
        acceptance: D estimates of a confidence head, or None.
        num_accepted: A_D.
        new_layer0: D counts, experts of Layer 0 that each draft is the first to select.
        new_pairs: D counts, (layer, expert) pairs over all MoE layers likewise.
    """

    confidence: tuple[float, ...]
    entropy: tuple[float, ...]
    acceptance: tuple[float, ...] | None
    num_accepted: int
    new_layer0: tuple[int, ...]
    new_pairs: tuple[int, ...]


@dataclass(frozen=True)
class PromptRounds:
    """The rounds of one prompt: its hash, its kind (`gsm`, `code`, ..), and how many were left out at its end."""

    prompt: str
    kind: str
    num_excluded: int
    rounds: tuple[CapturedRound, ...]


@dataclass(frozen=True)
class CaptureSettings:
    """What all rounds of a file share."""

    pair: PairIdentity
    max_new_tokens: int


@dataclass(frozen=True)
class RoundArrays:
    """N rounds as arrays.

    Attributes:
        confidence, entropy: `[N, D]` float.
        acceptance: `[N, D]` float, or None without a confidence head.
        num_accepted: `[N]` int.
        new_layer0, new_pairs: `[N, D]` int.
        prompt: `[N]` int, index of the prompt that a round belongs to.
        kind: `[N]` str.
    """

    confidence: np.ndarray
    entropy: np.ndarray
    acceptance: np.ndarray | None
    num_accepted: np.ndarray
    new_layer0: np.ndarray
    new_pairs: np.ndarray
    prompt: np.ndarray
    kind: np.ndarray

    @property
    def num_rounds(self) -> int:
        """N."""
        return self.num_accepted.shape[0]

    @property
    def num_drafts(self) -> int:
        """D."""
        return self.confidence.shape[1]

    def __getitem__(self, index) -> "RoundArrays":
        """The rounds that `index` (a mask, a slice, indices) takes."""
        return RoundArrays(**{name: None if rows is None else rows[index] for name, rows in vars(self).items()})

    @classmethod
    def of(cls, prompts: Iterable[PromptRounds]) -> "RoundArrays":
        """All rounds of some prompts, in order.

        Raises:
            ValueError: there is no round.
        """
        prompts = list(prompts)
        rounds = [captured for prompt in prompts for captured in prompt.rounds]
        if not rounds:
            raise ValueError(
                f"None of the {len(prompts)} prompts gave a whole round: every answer ended in its first one. Give "
                "prompts with longer answers, or raise the number of new tokens."
            )
        counts = [len(prompt.rounds) for prompt in prompts]
        has_head = rounds[0].acceptance is not None
        return cls(
            confidence=np.array([r.confidence for r in rounds], dtype=np.float64),
            entropy=np.array([r.entropy for r in rounds], dtype=np.float64),
            acceptance=np.array([r.acceptance for r in rounds], dtype=np.float64) if has_head else None,
            num_accepted=np.array([r.num_accepted for r in rounds]),
            new_layer0=np.array([r.new_layer0 for r in rounds]),
            new_pairs=np.array([r.new_pairs for r in rounds]),
            prompt=np.repeat(np.arange(len(prompts)), counts),
            kind=np.repeat(np.array([prompt.kind for prompt in prompts]), counts),
        )


class RoundFile:
    """An append-only file of captured rounds.

    Raises:
        ValueError: the file holds rounds of other settings, or is no such file.
    """

    def __init__(self, path: str | os.PathLike, settings: CaptureSettings):
        self.path = Path(path)
        self._header = {"format": FORMAT, **asdict(settings)}
        self._finished: dict[str, PromptRounds] = {}
        if self.path.exists():
            self._resume()
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._append(self._header)

    @property
    def finished(self) -> dict[str, PromptRounds]:
        """Prompts captured so far, by hash."""
        return self._finished

    def append(self, prompt: PromptRounds) -> None:
        """Adds a finished prompt; it is on disk when this returns."""
        self._append(asdict(prompt))
        self._finished[prompt.prompt] = prompt

    def _append(self, record: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _resume(self) -> None:
        header, prompts, num_bytes = _read(self.path)
        comparable = json.loads(json.dumps(self._header))
        if header != comparable:
            raise ValueError(
                f"{self.path} holds rounds of another pair, device or length of answer. Delete it, or give another "
                "output."
            )
        self._finished = {prompt.prompt: prompt for prompt in prompts}
        # What an interruption left of its last line would be glued to the next one.
        with self.path.open("r+b") as file:
            file.truncate(num_bytes)


def read_rounds(path: str | os.PathLike) -> tuple[CaptureSettings, list[PromptRounds]]:
    """The settings and prompts of a file of captured rounds.

    Raises:
        ValueError: the file is missing or no such file.
    """
    header, prompts, _ = _read(Path(path))
    return CaptureSettings(PairIdentity(**header["pair"]), header["max_new_tokens"]), prompts


def _read(path: Path) -> tuple[dict[str, Any], list[PromptRounds], int]:
    """Header, prompts, and the bytes of all whole lines."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"The rounds {path} cannot be read ({error.strerror}).") from error
    whole = content[: content.rfind(b"\n") + 1]
    try:
        header, *records = [json.loads(line) for line in whole.splitlines()] or [{}]
    except ValueError as error:
        raise ValueError(
            f"{path} is no file of captured rounds ({error}). Delete it, or give another file."
        ) from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"{path} is no file of captured rounds. Delete it, or give another file.")
    return header, [_prompt_rounds(record) for record in records], len(whole)


def _prompt_rounds(record: dict[str, Any]) -> PromptRounds:
    rounds = tuple(
        CapturedRound(**{name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()})
        for entry in record["rounds"]
    )
    return PromptRounds(record["prompt"], record["kind"], record["num_excluded"], rounds)
