"""Training samples: a data set's rows as token ids with a true mask of what the target wrote.

Rows hold `conversations` (Open-PerfectBlend, ShareGPT), `messages`, or `input_ids` with `assistant_mask` (already
tokenised). What is left out is counted by reason, and a data set of which nothing is left is refused.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from training.conversations import UnusableRowError, read_conversation

TEMPLATES = Path(__file__).with_name("templates")


@dataclass
class DataReport:
    """What became of the rows that were read.

    kept, shortened: rows kept, and those of them that were cut to the longest length. dropped: reason -> rows.
    """

    kept: int = 0
    shortened: int = 0
    tokens: int = 0
    answer_tokens: int = 0
    dropped: Counter = field(default_factory=Counter)

    @property
    def read(self) -> int:
        return self.kept + sum(self.dropped.values())

    def __str__(self) -> str:
        reasons = "; ".join(f"{count} x {reason}" for reason, count in self.dropped.most_common())
        return (
            f"{self.kept} of {self.read} rows kept ({self.shortened} of them shortened), {self.tokens} tokens, "
            f"{self.answer_tokens} of answers; dropped: {reasons or 'none'}"
        )


@dataclass(frozen=True)
class Sample:
    """One sequence. tokens: [S] int64. answer_mask: [S] bool, tokens that the target wrote. number: place in the data
    set, from which the sample's anchors are drawn."""

    tokens: Tensor
    answer_mask: Tensor
    number: int


class SampleDataset(Dataset):
    """Samples in memory; `lengths` serves bucketing by length."""

    def __init__(self, samples: list[Sample], report: DataReport):
        self.samples = samples
        self.report = report
        self.lengths = [sample.tokens.shape[0] for sample in samples]
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Another epoch draws other anchors."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = self.samples[index]
        # `input_ids` is what the Trainer's counters and samplers look for.
        return {"input_ids": sample.tokens, "sample": sample, "epoch": self.epoch}


def read_rows(source: str, split: str = "train", seed: int = 0) -> Iterable[Mapping[str, Any]]:
    """Rows of a local `.jsonl` file (in order) or of a Hub data set (shuffled with `seed`).

    Raises ValueError for a file that does not exist or a line that is not JSON.
    """
    if source.endswith((".jsonl", ".json")):
        return _read_jsonl(Path(source))
    return load_dataset(source, split=split).shuffle(seed=seed)


def _read_jsonl(path: Path) -> list[Mapping[str, Any]]:
    if not path.is_file():
        raise ValueError(f"{path} does not exist. Give a .jsonl file or the id of a Hub data set.")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"Line {number} of {path} is not JSON ({error}). Correct or remove it.") from error
    return rows


class SampleReader:
    """Turns rows into samples.

    Args:
        tokenizer: the target's.
        chat_template: Jinja text with `{% generation %}` blocks; None takes the tokenizer's own.
        max_length: longer samples are cut; what is left must hold an anchor.
        enable_thinking: passed to the template.

    Raises ValueError if the template marks nothing as generated.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        chat_template: str | None = None,
        enable_thinking: bool = True,
    ):
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.chat_template = chat_template or tokenizer.chat_template
        self.enable_thinking = enable_thinking

    def read(self, rows: Iterable[Mapping[str, Any]], limit: int | None = None) -> SampleDataset:
        """The first `limit` usable rows (all of them without a limit). Raises ValueError when none is usable."""
        samples, report = [], DataReport()
        for row in rows:
            if limit is not None and len(samples) == limit:
                break
            try:
                samples.append(self._sample(row, len(samples), report))
            except UnusableRowError as reason:
                report.dropped[str(reason)] += 1
        if not samples:
            raise ValueError(f"No row of the data set can be trained on: {report}.")
        if limit is not None and len(samples) < limit:
            raise ValueError(f"{limit} samples were asked for, but only {report}. Lower max_samples.")
        return SampleDataset(samples, report)

    def _sample(self, row: Mapping[str, Any], number: int, report: DataReport) -> Sample:
        tokens, answer = self._tokenised(row) if "input_ids" in row else self._templated(row)
        if not answer.any():
            raise UnusableRowError("no assistant token")
        is_long = tokens.shape[0] > self.max_length
        tokens, answer = tokens[: self.max_length], answer[: self.max_length]
        # An anchor is an answer token with another after it.
        if not (answer[:-1] & answer[1:]).any():
            raise UnusableRowError(
                f"no anchor within max_length {self.max_length}" if is_long else "answer of a single token"
            )
        report.kept += 1
        report.shortened += is_long
        report.tokens += tokens.shape[0]
        report.answer_tokens += int(answer.sum())
        return Sample(tokens, answer, number)

    def _tokenised(self, row: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        mask = row.get("assistant_mask", row.get("loss_mask"))
        if mask is None or len(mask) != len(row["input_ids"]):
            raise UnusableRowError("input_ids without an assistant_mask of the same length")
        tokens = torch.tensor(row["input_ids"], dtype=torch.int64)
        return tokens, torch.tensor(mask, dtype=torch.bool)

    def _templated(self, row: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        if self.chat_template is None or "generation" not in self.chat_template:
            raise ValueError(
                "The chat template marks nothing as generated, so which tokens the target wrote is unknown. Pass "
                "chat_template: qwen_thinking, or a template with {% generation %} blocks."
            )
        encoded = self.tokenizer.apply_chat_template(
            read_conversation(row),
            chat_template=self.chat_template,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            enable_thinking=self.enable_thinking,
        )
        tokens = torch.tensor(encoded["input_ids"], dtype=torch.int64)
        return tokens, torch.tensor(encoded["assistant_masks"], dtype=torch.bool)


def read_template(name: str | None) -> str | None:
    """The text of a shipped template (`qwen_thinking`) or of a file; None stays None. Raises ValueError."""
    if name is None:
        return None
    for path in (TEMPLATES / f"{name}.jinja", Path(name)):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    shipped = ", ".join(sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
    raise ValueError(f"chat_template {name!r} is no file and not one of the shipped templates ({shipped}).")
