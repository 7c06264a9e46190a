"""Length policies that read the drafter's signals and a calibration profile."""

import os
import weakref
from abc import abstractmethod

import torch
from transformers import PreTrainedModel

from ..calibration.profile import CalibrationProfile
from ..kernels.length_selection import LengthTables, Selection, correct_length, select_length
from ..modeling.drafter import Draft, Drafter
from .pair_identity import pair_identity
from .policy_base import MIN_LENGTH, DeviceLengthPolicy, LengthPolicy
from .policy_tables import length_tables


class CalibratedPolicy(LengthPolicy):
    """A policy that reads a profile.

    Args:
        profile: of the pair and device it will serve, or its file; another pair's is refused when a call begins.
        is_guarded: as `LengthPolicy.is_guarded`.
    """

    def __init__(self, profile: CalibrationProfile | str | os.PathLike, is_guarded: bool | None = None):
        self.profile = profile if isinstance(profile, CalibrationProfile) else CalibrationProfile.load(profile)
        self.is_guarded = is_guarded
        self._checked: tuple[weakref.ref, weakref.ref, int] | None = None

    def check(self, target: PreTrainedModel, drafter: Drafter) -> None:
        pair = (weakref.ref(target), weakref.ref(drafter), drafter.num_draft_tokens)
        # Sampling weights takes time that a call need not spend twice.
        if self._checked != pair:
            self.profile.check_pair(pair_identity(target, drafter))
            self._checked = pair

    def select(self, draft: Draft) -> int:
        # A paused drafter proposes nothing.
        return self.choose(draft) if draft.tokens.shape[0] else 1

    @abstractmethod
    def choose(self, draft: Draft) -> int:
        """`select` for a proposal block of at least one draft."""


class HybridSpec(CalibratedPolicy, DeviceLengthPolicy):
    """The length with the best Dinkelbach score, and one more row if its experts turn out cheap (equations 5 and 6).

    `select_on_device` and `correct_on_device` write and read device tensors only; `select` and `correct` are the same
    two steps with the result read on the CPU. What `select` computes is kept for the `correct` of the same round.
    """

    name = "hybridspec"
    lookahead = 1

    def __init__(self, profile: CalibrationProfile | str | os.PathLike, is_guarded: bool | None = None):
        super().__init__(profile, is_guarded)
        self._tables: dict[torch.device, LengthTables] = {}
        self._selection: Selection | None = None

    def tables(self, device: torch.device) -> LengthTables:
        """The profile's tables on a device, made once."""
        if device not in self._tables:
            self._tables[device] = length_tables(self.profile, device)
        return self._tables[device]

    def select_on_device(self, draft: Draft, selection: Selection) -> None:
        """Writes prefix-acceptance probabilities and nominal length into `selection`, of the draft's size."""
        select_length(draft.confidence, draft.entropy, self.tables(draft.confidence.device), selection)

    def correct_on_device(self, new_experts: torch.Tensor, selection: Selection) -> None:
        """Writes the corrected length, given `[1]` new Layer-0 experts of the lookahead row."""
        correct_length(new_experts, self.tables(new_experts.device), selection)

    def choose(self, draft: Draft) -> int:
        self._selection = Selection.empty(draft.confidence.shape[0], draft.confidence.device)
        self.select_on_device(draft, self._selection)
        return int(self._selection.nominal_length)

    def correct(self, nominal_length: int, new_experts: int) -> int:
        device = self._selection.length.device
        self.correct_on_device(torch.tensor([new_experts], device=device), self._selection)
        return int(self._selection.length)


class NominalOnly(HybridSpec):
    """HybridSpec without the routing correction: Stage 0 runs the nominal length alone."""

    name = "nominal"
    lookahead = 0


class RatioPolicy(CalibratedPolicy, DeviceLengthPolicy):
    """The candidate with the most expected tokens per second of its own round, from the drafter's raw confidence."""

    def __init__(self, profile: CalibrationProfile | str | os.PathLike, is_guarded: bool | None = None):
        super().__init__(profile, is_guarded)
        self._tables: dict[tuple[torch.device, int], torch.Tensor] = {}

    @abstractmethod
    def candidates(self, num_drafts: int) -> list[int]:
        """Verification lengths to choose from, ascending."""

    def choose(self, draft: Draft) -> int:
        selection = Selection.empty(draft.confidence.shape[0], draft.confidence.device)
        self.select_on_device(draft, selection)
        return int(selection.nominal_length)

    def select_on_device(self, draft: Draft, selection: Selection) -> None:
        ratios = self.ratios(draft.confidence)
        # Of equal maxima, argmax takes the first.
        selection.nominal_length.copy_(ratios.argmax() + MIN_LENGTH)

    def ratios(self, conditional: torch.Tensor) -> torch.Tensor:
        """`[D]` fp64 expected tokens per second of lengths 2..D + 1, 0 where the length is no candidate.

        `conditional` `[D]` is P(accepted | the prefix was accepted).
        """
        tokens = 1 + conditional.double().cumprod(0).cumsum(0)
        return tokens * self._rates(conditional.device, conditional.shape[0])

    def _rates(self, device: torch.device, num_drafts: int) -> torch.Tensor:
        """`[D]` fp64 rounds per second, made once; 0 where the length is no candidate."""
        if (device, num_drafts) not in self._tables:
            rates = torch.zeros(num_drafts, dtype=torch.float64)
            for length in self.candidates(num_drafts):
                rates[length - MIN_LENGTH] = 1 / self.profile.costs.round_seconds(length)
            self._tables[device, num_drafts] = rates.to(device)
        return self._tables[device, num_drafts]


class DCut(RatioPolicy):
    """D-Cut at batch one: a quarter, a half, three quarters or all of the block (4, 8, 12 or 16 rows of 16)."""

    name = "dcut"

    def candidates(self, num_drafts: int) -> list[int]:
        block = num_drafts + 1
        return sorted({max(MIN_LENGTH, round(block * quarter / 4)) for quarter in range(1, 5)})


class Evict(RatioPolicy):
    """EVICT on a chain: any length from 2 to the block."""

    name = "evict"

    def candidates(self, num_drafts: int) -> list[int]:
        return list(range(MIN_LENGTH, num_drafts + 2))


class ConfidenceScheduler(Evict):
    """DSpark's scheduler for one request: drafts are added while expected tokens per second rise.

    The confidence head's estimates are scaled by the profile's temperatures (sequential temperature scaling).
    """

    name = "confidence"

    def check(self, target: PreTrainedModel, drafter: Drafter) -> None:
        super().check(target, drafter)
        if getattr(drafter, "confidence_head", None) is None:
            raise ValueError(
                "The policy 'confidence' needs a drafter with a confidence head, this "
                f"{drafter.config.family} drafter has none. Use 'hybridspec' with the same profile."
            )

    def choose(self, draft: Draft) -> int:
        logits = torch.logit(draft.acceptance.double(), eps=1e-9)
        temperatures = self.profile.acceptance.temperatures
        if temperatures is not None:
            logits = logits / logits.new_tensor(temperatures)[: logits.shape[0]]
        ratios = self.ratios(torch.sigmoid(logits)).tolist()
        losses = (index for index in range(1, len(ratios)) if ratios[index] <= ratios[index - 1])
        return next(losses, len(ratios)) - 1 + MIN_LENGTH


CALIBRATED_POLICIES: dict[str, type[CalibratedPolicy]] = {
    policy.name: policy for policy in (HybridSpec, NominalOnly, DCut, Evict, ConfidenceScheduler)
}
