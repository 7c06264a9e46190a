"""Configuration of DSpark drafters (DeepSpec's flat layout, SpecForge's nested one, speculators)."""

from typing import Any

from ..drafter_config import DrafterConfig

MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")


class DSparkConfig(DrafterConfig):
    """DSpark: row k of the block predicts the next position, so all B rows are draft tokens; a Markov head corrects
    each row's logits by the token before it, and a confidence head estimates its acceptance.

    markov_rank: width of the Markov head's token embedding; 0 means no Markov head.
    markov_head_type: "vanilla", "gated" or "rnn".
    enable_confidence_head, confidence_head_with_markov, confidence_head_bias: whether there is a confidence head,
        whether it also reads the previous token's Markov embedding, whether it has a bias. When a checkpoint is loaded
        its tensors decide these and markov_rank.
    """

    model_type = "hybridspec_dspark"
    published_architecture = "DSparkDraftModel"
    family = "dspark"

    sample_from_anchor: bool = True
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = True
    confidence_head_bias: bool = True

    def _check_family(self) -> list[str]:
        problems = []
        if self.markov_rank < 0:
            problems.append(f"markov_rank must not be negative, got {self.markov_rank}")
        if self.markov_head_type not in MARKOV_HEAD_TYPES:
            problems.append(f"markov_head_type must be one of {MARKOV_HEAD_TYPES}, got {self.markov_head_type!r}")
        return problems

    @property
    def confidence_width(self) -> int:
        """Inputs of the confidence head."""
        return self.hidden_size + (self.markov_rank if self.confidence_head_with_markov else 0)

    def _published_block(self) -> dict[str, Any]:
        block = super()._published_block() | {
            "projector_type": "dspark",
            "attention_mode": "gqa",
            "markov_rank": self.markov_rank,
            "markov_head_type": self.markov_head_type,
            "enable_confidence_head": self.enable_confidence_head,
            "confidence_head_with_markov": self.confidence_head_with_markov,
        }
        if not self.sample_from_anchor:
            # The published block_size counts draft tokens; without one in the anchor's row there is one row more.
            block["block_size"] -= 1
        return block
