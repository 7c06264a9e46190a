"""Order of the samples: shuffled anew for each epoch, in batches of similar length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

# Batches sorted by length together: enough for little padding, few enough for batches to stay mixed.
BATCHES_PER_BUCKET = 50


class LengthBucketSampler(Sampler[int]):
    """Indices of an epoch, determined by (seed, epoch) alone, so that a resumed run sees the same order.

    Args:
        lengths: of every sample.
        batch_size: samples of one optimizer step over all processes; stays together, and only whole such batches are
            moved, so that the samples of a step do not depend on how the step is split.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int, by_length: bool):
        self.lengths = torch.tensor(lengths)
        self.batch_size = batch_size
        self.seed = seed
        self.by_length = by_length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator)
        if not self.by_length:
            return iter(order.tolist())
        buckets = order.split(self.batch_size * BATCHES_PER_BUCKET)
        ordered = torch.cat([bucket[self.lengths[bucket].argsort(descending=True, stable=True)] for bucket in buckets])
        batches = list(ordered.split(self.batch_size))
        # The last batch may be smaller and stays last.
        whole = len(self.lengths) // self.batch_size
        moved = torch.randperm(whole, generator=generator).tolist()
        return iter(torch.cat([batches[index] for index in moved] + batches[whole:]).tolist())
