"""Which draft tokens are accepted, and the token that follows them: greedy prefix and point-mass rule.

Torch operations on any device, with no read on the CPU. All randomness is given, so that one vector of uniforms
determines the outcome in eager code and in captured graphs alike.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Acceptance:
    """Outcome of one verification.

    Attributes:
        num_accepted: `[]` int64, accepted drafts A, 0 <= A <= M.
        next_token: `[]` int64, the target's own token after the accepted prefix: the next anchor.
    """

    num_accepted: torch.Tensor
    next_token: torch.Tensor


def greedy_acceptance(draft_tokens: torch.Tensor, target_tokens: torch.Tensor) -> Acceptance:
    """Longest prefix of the drafts equal to the target's argmax (HybridSpec, Proposition 1).

    Args:
        draft_tokens: `[M]` int64, retained drafts, M >= 0.
        target_tokens: `[M + 1]` int64, the target's argmax after the anchor and after each draft.

    Raises:
        ValueError: the shapes do not fit each other.
    """
    _check_rows("target_tokens", target_tokens, draft_tokens, dims=1)
    num_accepted = _prefix_length(draft_tokens == target_tokens[:-1])
    return Acceptance(num_accepted, target_tokens.gather(0, num_accepted.view(1)).view(()))


def point_mass_acceptance(
    draft_tokens: torch.Tensor, target_probs: torch.Tensor, uniforms: torch.Tensor
) -> Acceptance:
    """Point-mass rule: accept a draft with the target's probability of it, else draw from the rest (Proposition 2).

    Draft i is accepted if `uniforms[i] < target_probs[i, draft_tokens[i]]`. The next token is the inverse of the
    cumulative distribution at `uniforms[M]`, taken of the first rejected row without its draft, or of row M if all
    drafts are accepted. A token of probability zero is never emitted.

    Args:
        draft_tokens: `[M]` int64, the drafter's top-1 tokens, M >= 0, chosen without reading `uniforms`.
        target_probs: `[M + 1, vocabulary]` float, the target's distributions after every logits processor.
        uniforms: `[M + 1]` float in [0, 1), independent of everything else.

    Raises:
        ValueError: the shapes do not fit each other.
    """
    _check_rows("target_probs", target_probs, draft_tokens, dims=2)
    _check_rows("uniforms", uniforms, draft_tokens, dims=1)
    draft_probs = target_probs[:-1].gather(1, draft_tokens.unsqueeze(1)).squeeze(1)
    num_accepted = _prefix_length(uniforms[:-1] < draft_probs)
    probs = target_probs.index_select(0, num_accepted.view(1)).squeeze(0).double()
    if draft_tokens.numel() == 0:
        return Acceptance(num_accepted, _inverse_cdf(probs, uniforms[-1:]).view(()))

    # Past the last draft nothing was rejected: -1 is no token, so nothing is removed.
    rejected = torch.cat([draft_tokens, draft_tokens.new_full((1,), -1)]).gather(0, num_accepted.view(1))
    vocabulary = torch.arange(probs.shape[0], device=probs.device)
    rest = probs.masked_fill(vocabulary == rejected, 0.0)
    drawn = _inverse_cdf(rest, uniforms[-1:])
    # A probability just under one may leave no mass elsewhere; then the draft is all the target can say.
    next_token = torch.where(rest.sum() > 0, drawn, rejected)
    return Acceptance(num_accepted, next_token.view(()))


def _prefix_length(matches: torch.Tensor) -> torch.Tensor:
    return matches.long().cumprod(dim=0).sum()


def _inverse_cdf(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """`[1]` int64: the first token whose cumulative mass exceeds `uniform` times the total (double precision)."""
    mass = probs.cumsum(dim=0)
    total = mass[-1:]
    # Rounding must not lift the threshold to the total, which no entry exceeds.
    threshold = torch.minimum(uniform.double() * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(mass, threshold, right=True)


def _check_rows(name: str, tensor: torch.Tensor, draft_tokens: torch.Tensor, dims: int) -> None:
    if draft_tokens.dim() != 1 or tensor.dim() != dims or tensor.shape[0] != draft_tokens.shape[0] + 1:
        raise ValueError(
            f"{name} must have one row more than the [M] draft_tokens, got {tuple(tensor.shape)} and "
            f"{tuple(draft_tokens.shape)}. Give the target's row after every draft and after the anchor."
        )
