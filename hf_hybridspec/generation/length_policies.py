"""How many rows the target verifies in a round. A length is fixed before any verification draw is made."""

from abc import ABC, abstractmethod

from ..modeling.drafter import Draft

# Verified rows of the default policy on an MoE target, where every further row may bring new experts.
DEFAULT_STATIC_LENGTH = 6
MIN_LENGTH = 2


class LengthPolicy(ABC):
    """Chooses verification lengths (HybridSpec, section 3.3); one object may serve many calls.

    Attributes:
        name: as `parse_policy` and the statistics spell it.
        lookahead: rows beyond the nominal length that Stage 0 processes, for `correct` to decide on.
    """

    name: str
    lookahead = 0

    @abstractmethod
    def select(self, draft: Draft) -> int:
        """Nominal verification length w0 in [2, D + 1], anchor included, from the drafter's signals alone."""

    def correct(self, nominal_length: int, new_experts: int) -> int:
        """Length after the routing correction: `nominal_length` or up to `lookahead` more.

        `new_experts` is the number of Layer-0 experts that only the lookahead rows select.
        """
        return nominal_length


class Full(LengthPolicy):
    """Verifies every draft token, as vanilla DFlash does."""

    name = "full"

    def select(self, draft: Draft) -> int:
        return draft.tokens.shape[0] + 1


class Static(LengthPolicy):
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

    def select(self, draft: Draft) -> int:
        return min(self.length, draft.tokens.shape[0] + 1)


def parse_policy(name: str) -> LengthPolicy:
    """A policy by its name: `full` or `static:W`.

    Raises:
        ValueError: the name is unknown, or W is no length.
    """
    kind, _, argument = name.partition(":")
    if kind == "full" and not argument:
        return Full()
    if kind == "static" and argument.isdecimal():
        return Static(int(argument))
    raise ValueError(
        f"Unknown length policy {name!r}. Use 'full', or 'static:W' with W from 2 to the drafter's "
        "block, such as 'static:6'."
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
    """The stated default: full blocks on a dense target, static 6 (or the drafter's block) on an MoE target."""
    return Static(min(DEFAULT_STATIC_LENGTH, num_draft_tokens + 1)) if is_sparse else Full()
