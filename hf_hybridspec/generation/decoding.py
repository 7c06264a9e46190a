"""The round loop: HybridSpec's Algorithm 1 (appendix A.1), one sequence, any device."""

from dataclasses import dataclass

import torch

from ..modeling.hybrid_cache import HybridCache
from ..modeling.split_forward import RouterBoundary, SplitForward
from .draft_session import DraftSession
from .emission import Emission
from .length_policies import MIN_LENGTH, LengthPolicy
from .statistics import GenerationStatistics
from .verification import TokenVerifier


@dataclass
class DecodingState:
    """One sequence after its prefill, the first token emitted.

    Attributes:
        next_position_ids: `[..., 1, 1]`, the anchor's position as the target counts it.
        attention_mask: `[1, n]` of the tokens in the cache, or None where nothing is padding.
    """

    target: SplitForward
    cache: HybridCache
    drafting: DraftSession
    policy: LengthPolicy
    verifier: TokenVerifier
    emission: Emission
    statistics: GenerationStatistics
    next_position_ids: torch.Tensor
    attention_mask: torch.Tensor | None


@torch.no_grad()
def decode(state: DecodingState) -> None:
    """Emits tokens round by round until the sequence ends; changes the state's cache, emission and statistics.

    If anything raises, the open block is discarded: cache and emitted tokens stay as the last whole round left them.
    """
    cache, emission, policy = state.cache, state.emission, state.policy
    try:
        while not emission.is_finished:
            # 1. Draft the proposal block, with confidence and entropy of each token.
            draft = state.drafting.propose(emission.anchor)

            # 2-3. The nominal verification length, from the drafter's signals.
            longest = longest_length(cache, emission.remaining)
            nominal_length = policy.select(draft)

            # 4-5. Stage 0: Layer 0 through its router, on the lookahead rows as well.
            tokens = torch.cat([emission.anchor, draft.tokens])[: min(nominal_length + policy.lookahead, longest)]
            cache.begin_block(tokens.shape[0])
            boundary = state.target.stage0(tokens[None], _positions(state, tokens.shape[0]), cache)

            # 6-11. Routing correction, from the experts that Layer 0 has assigned.
            length = _executed_length(policy, boundary, nominal_length, tokens.shape[0])

            # 12. Stage 1: from Layer 0's experts to the logits, on the executed length.
            verified = state.target.stage1(boundary, length, cache, _mask(state, length))

            # 13-14. Accept drafts; cut at EOS, a limit or a stopping criterion.
            accepted = state.verifier.verify(emission.input_ids, tokens[1:length], verified.logits)
            admission = emission.admit(accepted)

            # 15-16. Commit as many rows as tokens are emitted: caches, states, drafter context.
            cache.commit(admission.count)
            state.drafting.observe(verified.features[: admission.count])
            state.next_position_ids = state.next_position_ids + admission.count
            state.attention_mask = _mask(state, 0)
            state.statistics.add_round(length, admission.count)

            # 17. Emit; the target's own token is the next anchor.
            emission.append(accepted, admission)
    finally:
        cache.discard_block()


def longest_length(cache: HybridCache, remaining: int) -> int:
    """w_rem: rows that `remaining` tokens and a static cache have use for."""
    longest = max(MIN_LENGTH, remaining)
    max_length = cache.get_max_length()
    return longest if max_length < 0 else min(longest, max_length - cache.committed_length)


def _executed_length(policy: LengthPolicy, boundary: RouterBoundary, nominal_length: int, stage0_length: int) -> int:
    if stage0_length <= nominal_length:
        return stage0_length
    new_experts = 0
    if boundary.routing is not None:
        new_experts = int(boundary.routing.num_distinct(stage0_length) - boundary.routing.num_distinct(nominal_length))
    return min(policy.correct(nominal_length, new_experts), stage0_length)


def _positions(state: DecodingState, length: int) -> torch.Tensor:
    return state.next_position_ids + torch.arange(length, device=state.next_position_ids.device)


def _mask(state: DecodingState, num_rows: int) -> torch.Tensor | None:
    """The attention mask of the committed tokens and `num_rows` rows that follow."""
    if state.attention_mask is None:
        return None
    missing = state.cache.committed_length + num_rows - state.attention_mask.shape[1]
    return torch.nn.functional.pad(state.attention_mask, (0, missing), value=1)
