"""What a length policy is."""

from abc import ABC, abstractmethod
from collections.abc import Hashable

import torch
from transformers import PreTrainedModel

from ..kernels.length_selection import Selection
from ..modeling.drafter import Draft, Drafter

MIN_LENGTH = 2


class LengthPolicy(ABC):
    """Chooses verification lengths (HybridSpec, section 3.3). One object serves calls one after the other.

    Attributes:
        name: as `parse_policy` and the statistics spell it.
        lookahead: rows beyond the nominal length that Stage 0 processes, for `correct` to decide on.
        is_guarded: whether drafting pauses while it is measured to be slower than plain decoding; None: on a GPU.
    """

    name: str
    lookahead = 0
    is_guarded: bool | None = False

    @abstractmethod
    def select(self, draft: Draft) -> int:
        """Nominal verification length w0 in [2, D + 1], anchor included, from the drafter's signals alone.

        A draft without tokens, of a paused drafter, gives 1.
        """

    def correct(self, nominal_length: int, new_experts: int) -> int:
        """Length after the routing correction: `nominal_length` or up to `lookahead` more.

        `new_experts` is the number of Layer-0 experts that only the lookahead rows select.
        """
        return nominal_length

    def check(self, target: PreTrainedModel, drafter: Drafter) -> None:
        """Raises ValueError if the policy cannot serve this pair; a policy that reads no profile serves any."""
        return None


class DeviceLengthPolicy(LengthPolicy):
    """A policy that can decide in device memory as well, and then decides the same. Its lookahead is 0 or 1.

    A subclass that changes a decision changes it in both forms, or counts as a policy for the host alone.
    """

    @property
    def key(self) -> Hashable:
        """Policies of one key decide the same."""
        return (self.name, id(self))

    @property
    def decides_on_device(self) -> bool:
        """Whether no subclass has changed the host's form of a decision without the device's."""
        for owner in type(self).__mro__:
            if "select_on_device" in vars(owner):
                return True
            if {"select", "choose", "correct"} & set(vars(owner)):
                return False
        return False

    def longest(self, num_drafts: int) -> int:
        """The largest length that can come out."""
        return num_drafts + 1

    @abstractmethod
    def select_on_device(self, draft: Draft, selection: Selection) -> None:
        """Writes `selection.nominal_length`; `selection` is of the draft's size and on its device."""

    def correct_on_device(self, new_experts: torch.Tensor, selection: Selection) -> None:
        """Writes `selection.length` from `[1]` new Layer-0 experts of the lookahead row. Lookahead 1 asks for it."""
        selection.length.copy_(selection.nominal_length)
