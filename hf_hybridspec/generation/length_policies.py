"""How many rows the target verifies in a round. A length is fixed before any verification draw is made."""

from collections.abc import Hashable

from transformers import PreTrainedModel
from transformers.utils import logging

from ..calibration.profile import CalibrationProfile
from ..kernels.length_selection import Selection
from ..modeling.drafter import Draft, Drafter
from .adaptive_policies import CALIBRATED_POLICIES, ConfidenceScheduler, DCut, Evict, HybridSpec, NominalOnly
from .policy_base import MIN_LENGTH, DeviceLengthPolicy, LengthPolicy

__all__ = [
    "DEFAULT_STATIC_LENGTH",
    "MIN_LENGTH",
    "POLICY_NAMES",
    "ConfidenceScheduler",
    "DCut",
    "Evict",
    "Full",
    "HybridSpec",
    "LengthPolicy",
    "NominalOnly",
    "Static",
    "check_policy",
    "default_policy",
    "parse_policy",
]

logger = logging.get_logger(__name__)

# Verified rows of the default policy on an MoE target, where every further row may bring new experts.
DEFAULT_STATIC_LENGTH = 6
# As `parse_policy` takes them; those that need a profile come first.
POLICY_NAMES = (*CALIBRATED_POLICIES, "static:W", "full")


class ConstantLength(DeviceLengthPolicy):
    """A length that depends on the size of the block alone."""

    @property
    def key(self) -> Hashable:
        return self.name

    def select(self, draft: Draft) -> int:
        return self.longest(draft.tokens.shape[0])

    def select_on_device(self, draft: Draft, selection: Selection) -> None:
        selection.nominal_length.fill_(self.longest(draft.tokens.shape[0]))


class Full(ConstantLength):
    """Verifies every draft token, as vanilla DFlash does."""

    name = "full"


class Static(ConstantLength):
    """Verifies `length` rows in every round, or all where the drafter proposes fewer.

    Raises:
        ValueError: `length` is under 2.
    """

    def __init__(self, length: int):
        if length < MIN_LENGTH:
            raise ValueError(
                f"The length of a static policy must be at least {MIN_LENGTH} (anchor and one draft), got {length}."
            )
        self.length = length
        self.name = f"static:{length}"

    def longest(self, num_drafts: int) -> int:
        return min(self.length, num_drafts + 1)

    def check(self, target: PreTrainedModel, drafter: Drafter) -> None:
        check_policy(self, drafter.num_draft_tokens)


def parse_policy(name: str, profile: CalibrationProfile | None = None) -> LengthPolicy:
    """A policy by its name (POLICY_NAMES). `profile` serves the calibrated ones; the others do without.

    Raises:
        ValueError: the name is unknown, W is no length, or a calibrated policy is named without a profile.
    """
    kind, _, argument = name.partition(":")
    if kind == "full" and not argument:
        return Full()
    if kind == "static" and argument.isdecimal():
        return Static(int(argument))
    if name in CALIBRATED_POLICIES:
        if profile is None:
            raise ValueError(
                f"The length policy {name!r} needs a calibration profile. Run `hf-hybridspec calibrate` and give its "
                "file, or leave the policy out to verify the default length."
            )
        return CALIBRATED_POLICIES[name](profile)
    raise ValueError(
        f"Unknown length policy {name!r}. Use 'full', or 'static:W' with W from 2 to the drafter's "
        f"block, such as 'static:6', or with a profile one of {', '.join(CALIBRATED_POLICIES)}."
    )


def check_policy(policy: LengthPolicy, num_draft_tokens: int) -> None:
    """Raises ValueError if a static length cannot be reached with `num_draft_tokens` drafts."""
    if isinstance(policy, Static) and policy.length > num_draft_tokens + 1:
        raise ValueError(
            f"verification_length must be in [{MIN_LENGTH}, {num_draft_tokens + 1}] with a drafter of "
            f"{num_draft_tokens} draft "
            f"tokens, got {policy.length}."
        )


def default_policy(is_sparse: bool, num_draft_tokens: int) -> LengthPolicy:
    """The stated default without a profile: full blocks on a dense target, static 6 (or the block) on an MoE target.

    The choice is logged once.
    """
    policy = Static(min(DEFAULT_STATIC_LENGTH, num_draft_tokens + 1)) if is_sparse else Full()
    logger.warning_once(
        f"No length policy and no calibration profile: every round verifies {policy.name}, the default of "
        f"{'an MoE' if is_sparse else 'a dense'} target. `hf-hybridspec calibrate` measures a profile for "
        "'hybridspec'."
    )
    # Nobody asked for this length: on a GPU it must not cost speed.
    policy.is_guarded = None
    return policy
