"""Draft choice in Triton: programs share the columns of a row and keep running maxima, sums and entropies per lane.

The program that finishes a row last combines them. Without a Markov head one launch serves all rows; with one each row
is a launch that reads the token which the launch before it chose.
"""

import torch
import triton
import triton.language as tl

from .common_triton import launch_device
from .draft_choice import DraftChoice, MarkovWeights, ProposalRules

# Programs of a row, columns of a step: all rows at once, or one row with the projection of its Markov head.
ROW_PROGRAMS, ROW_BLOCK = 64, 1024
CHAIN_PROGRAMS, CHAIN_ELEMENTS = 512, 8192

LOWEST = tl.constexpr(-1e30)


@triton.jit
def _merge(b_max, b_total, b_moment, b_column):
    """Maximum, sum of e^(x - max), sum of (x - max) e^(x - max) and column of the maximum, over all lanes."""
    best = tl.max(b_max, axis=0)
    b_shift = b_max - best
    b_factor = tl.exp(b_shift)
    total = tl.sum(b_total * b_factor, axis=0)
    # Lanes without a column hold LOWEST and no total.
    moment = tl.sum(b_factor * (b_moment + b_shift * b_total), axis=0)
    column = tl.min(tl.where(b_max == best, b_column, 2147483647), axis=0)
    return best, total, moment, column


@triton.jit(do_not_specialize=["first_row"])
def _choice_kernel(
    logits, forbidden, offsets, anchor, embedding, projection, partial, partial_column, counters,
    tokens, confidence, entropy, multiplier, softcap, first_row,
    stride_ln, stride_en, stride_pn,
    C: tl.constexpr, RANK: tl.constexpr, IS_CAPPED: tl.constexpr, IS_REDUCED: tl.constexpr,
    PROGRAMS: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    i_p, i_r = tl.program_id(0), first_row + tl.program_id(1)
    if RANK > 0:
        previous = tl.load(anchor)
        if i_r > 0:
            previous = tl.load(tokens + i_r - 1)
        o_r = tl.arange(0, BR)
        m_r = o_r < RANK
        b_code = tl.load(embedding + previous * stride_en + o_r, mask=m_r, other=0.0).to(tl.float32)
    b_max = tl.full([BN], LOWEST, tl.float32)
    b_total, b_moment = tl.zeros([BN], tl.float32), tl.zeros([BN], tl.float32)
    b_column = tl.zeros([BN], tl.int32)
    for i_n in range(i_p, (C + BN - 1) // BN, PROGRAMS):
        o_n = i_n * BN + tl.arange(0, BN)
        m_n = o_n < C
        b_x = tl.load(logits + i_r.to(tl.int64) * stride_ln + o_n, mask=m_n, other=0.0).to(tl.float32) * multiplier
        if IS_CAPPED:
            b_x = (2.0 * tl.sigmoid(2.0 * b_x / softcap) - 1.0) * softcap
        b_x = tl.where(tl.load(forbidden + o_n, mask=m_n, other=1) != 0, LOWEST, b_x)
        if RANK > 0:
            p_projection = projection + o_n[:, None].to(tl.int64) * stride_pn + o_r[None, :]
            b_projection = tl.load(p_projection, mask=m_n[:, None] & m_r[None, :], other=0.0)
            b_bias = tl.sum(b_projection.to(tl.float32) * b_code[None, :], axis=1)
            b_x += b_bias.to(projection.dtype.element_ty).to(tl.float32)
        b_x = tl.where(m_n, b_x, LOWEST)
        b_new = tl.maximum(b_max, b_x)
        b_kept, b_added = tl.exp(b_max - b_new), tl.exp(b_x - b_new)
        b_moment = b_kept * (b_moment + (b_max - b_new) * b_total) + (b_x - b_new) * b_added
        b_total = b_total * b_kept + tl.where(m_n, b_added, 0.0)
        b_column = tl.where(b_x > b_max, o_n, b_column)
        b_max = b_new
    best, total, moment, column = _merge(b_max, b_total, b_moment, b_column)
    p_partial = partial + (i_r * PROGRAMS + i_p) * 3
    tl.store(p_partial, best)
    tl.store(p_partial + 1, total)
    tl.store(p_partial + 2, moment)
    tl.store(partial_column + i_r * PROGRAMS + i_p, column)
    tl.debug_barrier()
    if tl.atomic_add(counters + i_r, 1, sem="acq_rel") == PROGRAMS - 1:
        tl.store(counters + i_r, 0)
        o_p = tl.arange(0, BP)
        m_p = o_p < PROGRAMS
        p_row = partial + (i_r * PROGRAMS + o_p) * 3
        b_bests = tl.load(p_row, mask=m_p, other=LOWEST, cache_modifier=".cg")
        b_totals = tl.load(p_row + 1, mask=m_p, other=0.0, cache_modifier=".cg")
        b_moments = tl.load(p_row + 2, mask=m_p, other=0.0, cache_modifier=".cg")
        b_columns = tl.load(partial_column + i_r * PROGRAMS + o_p, mask=m_p, other=0, cache_modifier=".cg")
        best, total, moment, column = _merge(b_bests, b_totals, b_moments, b_columns)
        token = column.to(tl.int64)
        if IS_REDUCED:
            token += tl.load(offsets + column)
        tl.store(tokens + i_r, token)
        tl.store(confidence + i_r, 1.0 / total)
        tl.store(entropy + i_r, tl.log(total) - moment / total)


def choose_tokens(
    logits, anchor, rules: ProposalRules, markov: MarkovWeights | None = None, counters=None
) -> DraftChoice:
    """As `draft_choice.choose_tokens`."""
    num_drafts, columns = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    programs, block, rank = ROW_PROGRAMS, ROW_BLOCK, 0
    embedding = projection = logits
    if markov is not None:
        embedding, projection, rank = markov.embedding, markov.projection, markov.embedding.shape[1]
        programs, block = CHAIN_PROGRAMS, max(16, CHAIN_ELEMENTS // triton.next_power_of_2(rank))
    programs = min(programs, triton.cdiv(columns, block))
    partial = logits.new_empty(num_drafts, programs, 3, dtype=torch.float32)
    partial_column = logits.new_empty(num_drafts, programs, dtype=torch.int32)
    if counters is None:
        counters = torch.zeros(num_drafts, dtype=torch.int32, device=logits.device)
    choice = DraftChoice(
        tokens=anchor.new_empty(num_drafts),
        confidence=logits.new_empty(num_drafts, dtype=torch.float32),
        entropy=logits.new_empty(num_drafts, dtype=torch.float32),
    )
    together = num_drafts if markov is None else 1
    with launch_device(logits):
        for first_row in range(0, num_drafts, together):
            _choice_kernel[(programs, together)](
                logits, rules.forbidden, anchor if rules.offsets is None else rules.offsets, anchor, embedding,
                projection, partial, partial_column, counters, choice.tokens, choice.confidence, choice.entropy,
                rules.multiplier, rules.softcap or 1.0, first_row,
                logits.stride(0), embedding.stride(0), projection.stride(0),
                C=columns, RANK=rank, IS_CAPPED=bool(rules.softcap), IS_REDUCED=rules.offsets is not None,
                PROGRAMS=programs, BP=triton.next_power_of_2(programs), BN=block,
                BR=triton.next_power_of_2(max(rank, 1)), num_warps=4,
            )  # fmt: skip
    return choice
