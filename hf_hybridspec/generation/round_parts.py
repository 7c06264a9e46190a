"""What a round on fixed buffers works with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch


class DeviceTarget(Protocol):
    """The target's two stages on fixed buffers (`FusedForward`)."""

    def stage0(self, token_ids: torch.Tensor, position_offset: torch.Tensor, state):
        """Runs `[u]` tokens to the router boundary, whose rows stay in place until the next Stage 0."""

    def stage1(self, boundary, length: int, state):
        """Runs the boundary's first rows to `logits` `[w, vocabulary]` and `features` `[w, taps * hidden]`."""


class DeviceBlock(Protocol):
    """The target's cache on fixed buffers (`BlockState`); `committed` is `[1]` int32."""

    committed: torch.Tensor

    def commit(self, commit_length: torch.Tensor) -> None:
        """Makes the first rows of the block permanent; `commit_length` is `[1]` int32."""

    def of_kept_rows(self) -> "DeviceBlock":
        """The same for rounds of one row, which is always kept, so that a target may commit what it can by itself."""


@dataclass(frozen=True)
class RoundParts:
    """What a round works with; everything that a step reads or writes stays in place.

    Attributes:
        capacity: rows that the target's cache holds.
        drafter: a FusedDrafter, or None for plain decoding, in which a round has one row.
        recurrent_states: target layer -> committed state, of the layers that the drafter reads.
    """

    target: DeviceTarget
    block: DeviceBlock
    capacity: int
    drafter: object | None
    recurrent_states: Mapping[int, torch.Tensor]
