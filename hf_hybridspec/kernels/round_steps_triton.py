"""A round's own steps in Triton: one program of one warp each, bound by their launches."""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .common_triton import launch_device

if TYPE_CHECKING:
    from .round_steps import RoundState

MIN_LENGTH = tl.constexpr(2)


@triton.jit
def _open_kernel(
    draft_tokens, nominal_length, committed, anchor, remaining, block_tokens, stage0_branch, stage1_branch,
    drafts, capacity, lookahead,
    ROWS: tl.constexpr,
):  # fmt: skip
    o_row = tl.arange(0, ROWS)
    m_draft = (o_row > 0) & (o_row <= drafts)
    b_token = tl.load(draft_tokens + o_row - 1, mask=m_draft, other=0)
    tl.store(block_tokens + o_row, tl.where(o_row == 0, tl.load(anchor), b_token), mask=o_row <= drafts)
    longest = tl.minimum(tl.maximum(tl.load(remaining), MIN_LENGTH), capacity - tl.load(committed))
    wanted = tl.minimum(tl.load(nominal_length) + lookahead, drafts + 1)
    branch = tl.minimum(wanted, longest) - 1
    tl.store(stage0_branch, branch)
    tl.store(stage1_branch, branch)


@triton.jit
def _correct_kernel(nominal_length, corrected_length, stage0_branch, stage1_branch):
    branch = tl.load(stage0_branch)
    corrected = tl.minimum(tl.load(corrected_length) - 1, branch)
    tl.store(stage1_branch, tl.where(branch >= tl.load(nominal_length), corrected, branch))


@triton.jit
def _accept_kernel(target_tokens, block_tokens, num_accepted, next_token, length, stride, ROWS: tl.constexpr):
    o_row = tl.arange(0, ROWS)
    m_draft = o_row < length - 1
    b_target = tl.load(target_tokens + o_row * stride, mask=o_row < length, other=-1)
    b_draft = tl.load(block_tokens + o_row + 1, mask=m_draft, other=-1)
    # The first row whose draft differs, or that has none.
    accepted = tl.min(tl.where(m_draft & (b_draft == b_target), ROWS, o_row), axis=0)
    tl.store(num_accepted, accepted)
    tl.store(next_token, tl.sum(tl.where(o_row == accepted, b_target, 0), axis=0))


@triton.jit
def _emit_kernel(
    block_tokens, num_accepted, next_token, stop_tokens, anchor, remaining, round_index,
    draft_branch, stage0_branch, stage1_branch, commit_length, records,
    num_stops, num_records,
    ROWS: tl.constexpr, STOPS: tl.constexpr,
):  # fmt: skip
    o_row, o_stop = tl.arange(0, ROWS), tl.arange(0, STOPS)
    accepted, left, own = tl.load(num_accepted), tl.load(remaining), tl.load(next_token)
    u_branch, w_branch = tl.load(stage0_branch), tl.load(stage1_branch)
    b_draft = tl.load(block_tokens + o_row + 1, mask=o_row < ROWS - 1, other=0)
    b_token = tl.where(o_row < accepted, b_draft, own)
    count = tl.minimum(accepted + 1, left)
    b_stop = tl.load(stop_tokens + o_stop, mask=o_stop < num_stops, other=-1)
    b_hits = tl.sum((b_token[:, None] == b_stop[None, :]).to(tl.int32), axis=1)
    m_stop = (b_hits > 0) & (o_row < count)
    first_stop = tl.min(tl.where(m_stop, o_row, ROWS), axis=0)
    has_ended = (first_stop < ROWS) | (count == left)
    count = tl.minimum(count, first_stop + 1)

    number = tl.load(round_index) + 1
    header = (w_branch + 1) + ((u_branch + 1) << 8) + (count << 16) + (has_ended.to(tl.int32) << 24)
    p_record = records + ((number - 1) % num_records) * (ROWS + 1)
    tag = number << 32
    tl.store(p_record, tag + header)
    tl.store(p_record + 1 + o_row, tag + tl.where(o_row < count, b_token, 0))
    tl.store(round_index, number)
    tl.store(commit_length, count)
    tl.store(anchor, tl.sum(tl.where(o_row == count - 1, b_token, 0), axis=0))
    tl.store(remaining, left - count)
    tl.store(draft_branch, -1, mask=has_ended)
    tl.store(stage0_branch, -1, mask=has_ended)
    tl.store(stage1_branch, -1, mask=has_ended)


def open_block(
    draft_tokens: torch.Tensor,
    nominal_length: torch.Tensor,
    committed: torch.Tensor,
    capacity: int,
    lookahead: int,
    state: "RoundState",
) -> None:
    """As `round_steps.open_block`."""
    with launch_device(draft_tokens):
        _open_kernel[(1,)](
            draft_tokens.contiguous(), nominal_length, committed, state.anchor, state.remaining, state.block_tokens,
            state.stage0_branch, state.stage1_branch, draft_tokens.shape[0], capacity, lookahead,
            ROWS=state.block_tokens.shape[0], num_warps=1,
        )  # fmt: skip


def correct_block(nominal_length: torch.Tensor, corrected_length: torch.Tensor, state: "RoundState") -> None:
    """As `round_steps.correct_block`."""
    with launch_device(nominal_length):
        _correct_kernel[(1,)](nominal_length, corrected_length, state.stage0_branch, state.stage1_branch, num_warps=1)


def accept_greedily(target_tokens: torch.Tensor, state: "RoundState") -> None:
    """As `round_steps.accept_greedily`."""
    with launch_device(target_tokens):
        _accept_kernel[(1,)](
            target_tokens, state.block_tokens, state.num_accepted, state.next_token,
            target_tokens.shape[0], target_tokens.stride(0), ROWS=state.block_tokens.shape[0], num_warps=1,
        )  # fmt: skip


def emit_round(state: "RoundState") -> None:
    """As `round_steps.emit_round`."""
    num_stops = state.stop_tokens.shape[0]
    with launch_device(state.anchor):
        _emit_kernel[(1,)](
            state.block_tokens, state.num_accepted, state.next_token, state.stop_tokens, state.anchor,
            state.remaining, state.round_index, state.draft_branch, state.stage0_branch, state.stage1_branch,
            state.commit_length, state.records, num_stops, state.records.shape[0],
            ROWS=state.block_tokens.shape[0], STOPS=triton.next_power_of_2(num_stops), num_warps=1,
        )  # fmt: skip
