"""The drafter's tokens from its logits: top-1 token, its probability and the entropy of every draft row.

With a Markov head (DSpark) the rows are chosen one after the other, since each row's logits depend on the token before
it; without one they are independent. The arithmetic is in `draft_choice_reference.py`.
"""

from dataclasses import dataclass

import torch

from .dispatch import implementation


@dataclass(frozen=True)
class ProposalRules:
    """How logits become proposals.

    Attributes:
        forbidden: `[C]` bool, columns that must never be proposed.
        multiplier: factor of the logits.
        softcap: bound of their absolute value after the factor (by tanh), or None.
        offsets: `[C]` int64 if the drafter has a reduced vocabulary: column c stands for token c + offsets[c].
    """

    forbidden: torch.Tensor
    multiplier: float = 1.0
    softcap: float | None = None
    offsets: torch.Tensor | None = None


@dataclass(frozen=True)
class MarkovWeights:
    """The Markov head, in one dtype: `embedding` `[vocabulary, r]` by token, `projection` `[C, r]`."""

    embedding: torch.Tensor
    projection: torch.Tensor


@dataclass(frozen=True)
class DraftChoice:
    """`tokens` `[D]` int64, `confidence` `[D]` fp32 (probability of each), `entropy` `[D]` fp32 in nats."""

    tokens: torch.Tensor
    confidence: torch.Tensor
    entropy: torch.Tensor


def choose_tokens(
    logits: torch.Tensor,
    anchor: torch.Tensor,
    rules: ProposalRules,
    markov: MarkovWeights | None = None,
    counters: torch.Tensor | None = None,
) -> DraftChoice:
    """Top-1 token of every draft row; of equal logits the lowest column.

    Args:
        logits: `[D, C]` fp32, bf16 or fp16, of the head.
        anchor: `[1]` int64, the token before row 0.
        rules: see there.
        markov: adds its projection of the token before a row to that row's logits.
        counters: int32 zeros, at least D; they are zero again afterwards. None: made here, which a captured graph
            should not do.

    Raises:
        ValueError: a shape or dtype differs from the above.
    """
    if logits.dim() != 2 or not logits.shape[0]:
        raise ValueError(f"logits must be [D, C] with D of at least 1, got {tuple(logits.shape)}.")
    columns = logits.shape[1]
    if anchor.shape != (1,) or anchor.dtype != torch.int64:
        raise ValueError(f"anchor must be [1] of int64, got {anchor.dtype} {tuple(anchor.shape)}.")
    for name, tensor in (("forbidden", rules.forbidden), ("offsets", rules.offsets)):
        if tensor is not None and tuple(tensor.shape) != (columns,):
            raise ValueError(f"{name} must be {(columns,)}, one per column, got {tuple(tensor.shape)}.")
    if markov is not None and (
        tuple(markov.projection.shape) != (columns, markov.embedding.shape[1])
        or markov.projection.dtype != markov.embedding.dtype
    ):
        raise ValueError(
            f"markov.projection must be {(columns, markov.embedding.shape[1])} of {markov.embedding.dtype}, got "
            f"{markov.projection.dtype} {tuple(markov.projection.shape)}."
        )
    return implementation("draft_choice", logits.device).choose_tokens(logits, anchor, rules, markov, counters)
