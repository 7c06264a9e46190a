"""The record a drafter hands to the loop."""

from dataclasses import dataclass

import torch
from torch import Tensor

# Logit of an id that must never be proposed: finite, so that its (zero) share of the entropy is not 0 * inf.
FORBIDDEN = -1e30


@dataclass(frozen=True)
class Draft:
    """One proposal block, the anchor excluded; D = `Drafter.num_draft_tokens`.

    tokens: [D] int64, the drafter's top-1 tokens. confidence: [D] fp32, the probability that the drafter gives each.
    entropy: [D] fp32, of the distribution the token was taken from, in nats. acceptance: [D] fp32 or None, a
    confidence head's estimate of P(accepted | the prefix was accepted).
    """

    tokens: Tensor
    confidence: Tensor
    entropy: Tensor
    acceptance: Tensor | None = None

    @classmethod
    def of(cls, tokens: Tensor, columns: Tensor, logits: Tensor) -> "Draft":
        """The draft of tokens [D], which stand in columns [D] of fp32 logits [D, C] (`FORBIDDEN` where excluded)."""
        log_probabilities = logits.log_softmax(-1)
        confidence = log_probabilities.gather(-1, columns.unsqueeze(-1)).squeeze(-1).exp()
        return cls(tokens, confidence, -(log_probabilities.exp() * log_probabilities).sum(-1))

    def to(self, device: torch.device) -> "Draft":
        """The same draft on another device."""
        acceptance = None if self.acceptance is None else self.acceptance.to(device)
        return Draft(self.tokens.to(device), self.confidence.to(device), self.entropy.to(device), acceptance)
