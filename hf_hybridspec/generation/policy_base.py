"""What a length policy is."""

from abc import ABC, abstractmethod

from transformers import PreTrainedModel

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
