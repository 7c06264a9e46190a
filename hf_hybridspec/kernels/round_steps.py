"""What a round does between the models: it assembles the block, fixes lengths, accepts and emits, all on the device.

One small launch each, nothing read on the host: the same calls serve the eager round on any device and the captured
one. The arithmetic is in `round_steps_reference.py`.
"""

from dataclasses import dataclass

import torch

from .dispatch import implementation

MAX_ROWS = 16
# Of a branch: none runs.
NO_BRANCH = -1
# Words of a record: lengths, then the tokens of the longest round.
RECORD_WORDS = 1 + MAX_ROWS


@dataclass(frozen=True)
class RoundState:
    """One sequence between and within rounds, all on one device, changed in place; see `RoundState.new`.

    A record is `[17]` int64. The upper half of every word is the number of its round, counted from 1, so that a copy
    of it taken at any moment shows whether it is whole. The lower half of word 0 is
    w + 2^8 u + 2^16 (emitted tokens) + 2^24 (whether the sequence has ended), of word 1 + i the emitted token i, or 0.

    Attributes:
        anchor: `[1]` int64, the newest emitted token.
        remaining: `[1]` int32, tokens that may still be emitted, at least 1 while the sequence goes on.
        stop_tokens: `[S]` int64, tokens that end the sequence; unused places hold -1.
        round_index: `[1]` int64, rounds so far.
        draft_branch: `[1]` int32, 0 while the sequence goes on, else NO_BRANCH.
        stage0_branch, stage1_branch: `[1]` int32, u - 1 and w - 1 of the round, or NO_BRANCH.
        block_tokens: `[16]` int64, the anchor, then the draft tokens.
        num_accepted: `[1]` int32, A of the round.
        next_token: `[1]` int64, the target's own token after the accepted drafts.
        commit_length: `[1]` int32, rows that the round makes permanent.
        records: `[R, 17]` int64, of the newest R rounds: round number r is in row (r - 1) % R.
    """

    anchor: torch.Tensor
    remaining: torch.Tensor
    stop_tokens: torch.Tensor
    round_index: torch.Tensor
    draft_branch: torch.Tensor
    stage0_branch: torch.Tensor
    stage1_branch: torch.Tensor
    block_tokens: torch.Tensor
    num_accepted: torch.Tensor
    next_token: torch.Tensor
    commit_length: torch.Tensor
    records: torch.Tensor

    @classmethod
    def new(cls, num_records: int, max_stop_tokens: int, device: torch.device | str) -> "RoundState":
        """The state of an ended sequence, in which no branch runs."""

        def zeros(*shape, dtype=torch.int32):
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            anchor=zeros(1, dtype=torch.int64),
            remaining=zeros(1),
            stop_tokens=zeros(max_stop_tokens, dtype=torch.int64) - 1,
            round_index=zeros(1, dtype=torch.int64),
            draft_branch=zeros(1) + NO_BRANCH,
            stage0_branch=zeros(1) + NO_BRANCH,
            stage1_branch=zeros(1) + NO_BRANCH,
            block_tokens=zeros(MAX_ROWS, dtype=torch.int64),
            num_accepted=zeros(1),
            next_token=zeros(1, dtype=torch.int64),
            commit_length=zeros(1),
            records=zeros(num_records, RECORD_WORDS, dtype=torch.int64),
        )


def open_block(
    draft_tokens: torch.Tensor,
    nominal_length: torch.Tensor,
    committed: torch.Tensor,
    capacity: int,
    lookahead: int,
    state: RoundState,
) -> None:
    """Writes the block's tokens and u = min(w0 + lookahead, D + 1, w_rem); w is u until it is corrected.

    w_rem, the largest length that is of use, is at least 2 unless the cache is full: the tokens that remain and the
    rows that the cache has left bound it.

    Args:
        draft_tokens: `[D]` int64, D <= 15.
        nominal_length: `[1]` int32, w0 <= D + 1.
        committed: `[1]` int32, rows in the cache, fewer than `capacity`.
        state: `block_tokens`, `stage0_branch` and `stage1_branch` are written.

    Raises:
        ValueError: a shape or dtype differs from the above.
    """
    if draft_tokens.dim() != 1 or draft_tokens.dtype != torch.int64 or draft_tokens.shape[0] >= MAX_ROWS:
        raise ValueError(
            f"draft_tokens must be [D] int64 with D < {MAX_ROWS}, got {draft_tokens.dtype} "
            f"{tuple(draft_tokens.shape)}. Lower the drafter's block_size."
        )
    _check_scalar("nominal_length", nominal_length)
    _check_scalar("committed", committed)
    kernels = implementation("round_steps", draft_tokens.device)
    kernels.open_block(draft_tokens, nominal_length, committed, capacity, lookahead, state)


def correct_block(nominal_length: torch.Tensor, corrected_length: torch.Tensor, state: RoundState) -> None:
    """Writes w of a round whose Stage 0 may have run rows beyond w0: `corrected_length`, never more than u.

    Args:
        nominal_length: `[1]` int32, w0. A round with u <= w0 keeps w = u.
        corrected_length: `[1]` int32.
        state: `stage1_branch` is written.

    Raises:
        ValueError: a shape or dtype differs from the above.
    """
    _check_scalar("nominal_length", nominal_length)
    _check_scalar("corrected_length", corrected_length)
    kernels = implementation("round_steps", nominal_length.device)
    kernels.correct_block(nominal_length, corrected_length, state)


def accept_greedily(target_tokens: torch.Tensor, state: RoundState) -> None:
    """Writes A and the target's own token: the longest prefix of the drafts equal to the target's argmax.

    Args:
        target_tokens: `[w]` int64, the target's argmax after each row of the block, w <= 16.
        state: `num_accepted` and `next_token` are written.

    Raises:
        ValueError: a shape or dtype differs from the above.
    """
    if target_tokens.dim() != 1 or target_tokens.dtype != torch.int64 or not 1 <= target_tokens.shape[0] <= MAX_ROWS:
        raise ValueError(
            f"target_tokens must be [w] int64 with 1 <= w <= {MAX_ROWS}, got {target_tokens.dtype} "
            f"{tuple(target_tokens.shape)}."
        )
    implementation("round_steps", target_tokens.device).accept_greedily(target_tokens, state)


def emit_round(state: RoundState) -> None:
    """Ends a round: its tokens, cut after the first stop token and at the limit, go to a record.

    Writes `commit_length`, `anchor`, `remaining`, `round_index` and the record. With the sequence's last token every
    branch becomes NO_BRANCH, so that rounds launched afterwards change nothing.

    Args:
        state: `num_accepted` and `next_token` are the round's.
    """
    implementation("round_steps", state.anchor.device).emit_round(state)


def _check_scalar(name: str, scalar: torch.Tensor) -> None:
    if scalar.numel() != 1 or scalar.dtype != torch.int32:
        raise ValueError(f"{name} must be one int32, got {scalar.dtype} {tuple(scalar.shape)}.")
