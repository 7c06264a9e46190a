"""A round's own steps in plain torch: the CPU path and the oracle of the Triton kernels.

With w0 the nominal length and w_c the corrected one:

    w_rem = min(max(2, remaining), capacity - committed);   u = min(w0 + lookahead, D + 1, w_rem);   w = u
    w     = min(w_c, u) if u > w0                                                 (after the routing correction)
    A     = number of leading drafts equal to the target's argmax
    m     = min(A + 1, remaining), cut after the first stop token among d_1..d_A, x_new
"""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .round_steps import RoundState

NO_BRANCH = -1
MIN_LENGTH = 2


def open_block(
    draft_tokens: torch.Tensor,
    nominal_length: torch.Tensor,
    committed: torch.Tensor,
    capacity: int,
    lookahead: int,
    state: "RoundState",
) -> None:
    """As `round_steps.open_block`."""
    state.block_tokens[:1].copy_(state.anchor)
    state.block_tokens[1 : 1 + draft_tokens.shape[0]].copy_(draft_tokens)
    longest = torch.minimum(state.remaining.clamp(min=MIN_LENGTH), capacity - committed)
    wanted = (nominal_length + lookahead).clamp(max=draft_tokens.shape[0] + 1)
    state.stage0_branch.copy_(torch.minimum(wanted, longest) - 1)
    state.stage1_branch.copy_(state.stage0_branch)


def correct_block(nominal_length: torch.Tensor, corrected_length: torch.Tensor, state: "RoundState") -> None:
    """As `round_steps.correct_block`."""
    branch = state.stage0_branch
    corrected = torch.minimum(corrected_length - 1, branch)
    state.stage1_branch.copy_(torch.where(branch >= nominal_length, corrected, branch))


def accept_greedily(target_tokens: torch.Tensor, state: "RoundState") -> None:
    """As `round_steps.accept_greedily`."""
    drafts = state.block_tokens[1 : target_tokens.shape[0]]
    num_accepted = (drafts == target_tokens[:-1]).int().cumprod(dim=0).sum().view(1)
    state.num_accepted.copy_(num_accepted)
    state.next_token.copy_(target_tokens.gather(0, num_accepted))


def emit_round(state: "RoundState") -> None:
    """As `round_steps.emit_round`."""
    place = torch.arange(state.block_tokens.shape[0], device=state.anchor.device)
    accepted = state.num_accepted.long()
    drafts = state.block_tokens.roll(-1)
    tokens = torch.where(place < accepted, drafts, state.next_token)
    count = torch.minimum(accepted + 1, state.remaining)
    stops = (tokens[:, None] == state.stop_tokens).any(dim=1) & (place < count)
    first_stop = torch.where(stops, place, place.shape[0]).min()
    count = torch.minimum(count, first_stop + 1)
    has_ended = stops.any() | (count == state.remaining)

    state.round_index.add_(1)
    header = (state.stage1_branch + 1) + ((state.stage0_branch + 1) << 8) + (count << 16) + (has_ended.long() << 24)
    words = torch.cat([header, torch.where(place < count, tokens, 0)])
    row = (state.round_index - 1) % state.records.shape[0]
    state.records.index_copy_(0, row, (words + (state.round_index << 32))[None])

    state.commit_length.copy_(count)
    state.anchor.copy_(tokens.gather(0, count - 1))
    state.remaining.sub_(count.int())
    for branch in (state.draft_branch, state.stage0_branch, state.stage1_branch):
        branch.masked_fill_(has_ended, NO_BRANCH)
