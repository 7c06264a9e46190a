"""Samples as one padded batch, each with anchors of its own.

Anchors are drawn from (seed, epoch, sample), never from the process's generator: the same sample has the same anchors
in whatever batch, on whatever rank, and after a resumption.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from training.anchors import sample_anchors


@dataclass(frozen=True)
class AnchorCollator:
    """num_anchors: at most, for each sequence. pad_token_id: fills on the right; its rows are never supervised."""

    num_anchors: int
    pad_token_id: int
    seed: int = 0

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Items of a `SampleDataset` -> the tensors of a `TrainingBatch`, by name."""
        samples = [item["sample"] for item in items]
        drawn = [self.anchors(sample, item["epoch"]) for sample, item in zip(samples, items, strict=True)]
        tokens = pad_sequence([sample.tokens for sample in samples], True, self.pad_token_id)
        answer_mask = pad_sequence([sample.answer_mask for sample in samples], True, False)
        width = max(len(anchors) for anchors in drawn)
        anchors = torch.full((len(samples), width), tokens.shape[1] - 1)
        valid = torch.zeros_like(anchors, dtype=torch.bool)
        for row, positions in enumerate(drawn):
            anchors[row, : len(positions)] = positions
            valid[row, : len(positions)] = True
        return {"tokens": tokens, "answer_mask": answer_mask, "anchors": anchors, "valid": valid}

    def anchors(self, sample, epoch: int) -> Tensor:
        """[n] int64 anchors of one sample, rising, n <= num_anchors."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) * 1_000_003 + sample.number)
        anchors, valid = sample_anchors(sample.answer_mask.unsqueeze(0), self.num_anchors, generator)
        return anchors[0, valid[0]]
