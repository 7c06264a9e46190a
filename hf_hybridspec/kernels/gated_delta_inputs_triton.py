"""The joint producer in Triton: one program per tile of projection rows, which serve one purpose or border two.

A tile of the convolution shifts its rows by products with 0/1 matrices, exact in every dtype, and takes what lies
before the block from the committed history. The norm scales the sums at the end, as in `linear_triton.py`.
"""

import torch
import triton
import triton.language as tl

from .common_triton import launch_device, launch_options, let_next_start, prefetch_rows, wait_for_previous
from .gated_delta_inputs import Produced, ProducerWeights
from .linear_triton import PADDED_ROWS, load_tile, multiply_add, precision_of
from .residual_rows import ResidualRows
from .residual_rows_triton import inverse_rms, load_squares, squares_options
from .tiles import tile_of

SOFTPLUS_THRESHOLD = tl.constexpr(20.0)
# A cache line of 16-bit entries, wider than any history.
HISTORY_COLUMNS = tl.constexpr(64)


@triton.jit
def _convolve_history(p_history, p_weight, o_r, o_n, m_n, KERNEL: tl.constexpr):
    """What the rows before the block add to a causal convolution over its rows, `[16, BN]` fp32."""
    b_sum = tl.zeros([o_r.shape[0], o_n.shape[0]], tl.float32)
    for tap in tl.static_range(KERNEL - 1):
        o_source = o_r - (KERNEL - 1) + tap
        # Row -i of the block is column KERNEL - i of the history.
        p_seen = p_history + o_n[None, :] * KERNEL + (o_source + KERNEL)[:, None]
        b_seen = tl.load(p_seen, mask=m_n[None, :] & (o_source < 0)[:, None], other=0.0).to(tl.float32)
        b_weight = tl.load(p_weight + o_n * KERNEL + tap, mask=m_n, other=0.0).to(tl.float32)
        b_sum += b_weight[None, :] * b_seen
    return b_sum


@triton.jit
def _convolve(b_rows, b_sum, p_weight, o_r, o_n, m_n, KERNEL: tl.constexpr, PRECISION: tl.constexpr):
    """`b_sum`, to which the history's taps were added, and the other taps over the block's rows `[16, BN]`; fp32."""
    for tap in tl.static_range(KERNEL):
        b_seen = b_rows.to(tl.float32)
        if tap < KERNEL - 1:
            b_shift = ((o_r - (KERNEL - 1) + tap)[:, None] == o_r[None, :]).to(b_rows.dtype)
            b_seen = tl.dot(b_shift, b_rows, input_precision=PRECISION)
        b_weight = tl.load(p_weight + o_n * KERNEL + tap, mask=m_n, other=0.0).to(tl.float32)
        b_sum += b_weight[None, :] * b_seen
    return b_sum


@triton.jit(do_not_specialize=["num_rows"])
def _producer_kernel(
    rows, squares, weight, row_order, conv_weight, conv_state, A_log, dt_bias, conv_rows, mixed, z, log_decay, beta,
    eps, num_rows, stride_xn, stride_xk, stride_wn, stride_wk, stride_cn,
    H: tl.constexpr, C: tl.constexpr, Z: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr,
    KERNEL: tl.constexpr, REORDERED: tl.constexpr,
    SMALL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr, OVERLAPS: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    i_n = tl.program_id(0)
    o_r, o_n = tl.arange(0, SMALL), i_n * BN + tl.arange(0, BN)
    m_r, m_n = o_r < num_rows, o_n < C + Z + 2 * HEADS
    o_source = o_n
    if REORDERED:
        o_source = tl.load(row_order + o_n, mask=m_n, other=0)
    prefetch_rows(weight, o_source, 0, stride_wn, stride_wk, C + Z + 2 * HEADS, H, PREFETCH, OVERLAPS)
    # What the convolution reads is small, and far from where the projection reads.
    prefetch_rows(conv_state, o_n, 0, KERNEL, 1, C, KERNEL, HISTORY_COLUMNS, OVERLAPS)
    prefetch_rows(conv_weight, o_n, 0, KERNEL, 1, C, KERNEL, HISTORY_COLUMNS, OVERLAPS)
    wait_for_previous(OVERLAPS)
    let_next_start(OVERLAPS and EARLY)
    b_squares = load_squares(squares, o_r, m_r, PARTS, PADDED, SMALL)
    # What the end of a tile needs is asked for here, where nobody waits for it. The end reads the weights of the
    # convolution once more, from a cache.
    m_c, o_a = o_n < C, o_n - C - Z - HEADS
    m_a = (o_a >= 0) & (o_a < HEADS)
    b_rate = tl.load(A_log + o_a, mask=m_a, other=0.0).to(tl.float32)
    b_bias = tl.load(dt_bias + o_a, mask=m_a, other=0.0).to(tl.float32)
    b_history = _convolve_history(conv_state, conv_weight, o_r, o_n, m_c, KERNEL)
    b_sum = tl.zeros([SMALL, BN], tl.float32)
    for i_k in range(tl.cdiv(H, BK)):
        o_k = i_k * BK + tl.arange(0, BK)
        m_k = o_k < H
        b_weight = load_tile(weight, o_source, o_k, stride_wn, stride_wk, m_n, m_k)
        b_rows = load_tile(rows, o_r, o_k, stride_xn, stride_xk, m_r, m_k)
        b_sum = multiply_add(b_rows, b_weight, b_sum, PRECISION)
    let_next_start(OVERLAPS and not EARLY)
    b_out = (b_sum * inverse_rms(b_squares, eps, H)[:, None]).to(rows.dtype.element_ty)
    if i_n * BN < C:
        m_tile = m_r[:, None] & m_c[None, :]
        tl.store(conv_rows + o_r[:, None] * stride_cn + o_n[None, :], b_out, mask=m_tile)
        b_mixed = _convolve(b_out, b_history, conv_weight, o_r, o_n, m_c, KERNEL, PRECISION)
        b_mixed = b_mixed.to(rows.dtype.element_ty).to(tl.float32)
        b_mixed = (b_mixed * tl.sigmoid(b_mixed)).to(rows.dtype.element_ty)
        tl.store(mixed + o_r[:, None] * C + o_n[None, :], b_mixed, mask=m_tile)
    if i_n * BN + BN > C:
        m_z = (o_n >= C) & (o_n < C + Z)
        tl.store(z + o_r[:, None] * Z + (o_n - C)[None, :], b_out, mask=m_r[:, None] & m_z[None, :])
    if i_n * BN + BN > C + Z:
        b_wide = b_out.to(tl.float32)
        o_b = o_n - C - Z
        m_b = (o_b >= 0) & (o_b < HEADS)
        b_beta = tl.sigmoid(b_wide).to(rows.dtype.element_ty)
        tl.store(beta + o_r[:, None] * HEADS + o_b[None, :], b_beta, mask=m_r[:, None] & m_b[None, :])
        b_step = b_wide + b_bias[None, :]
        b_soft = tl.where(b_step > SOFTPLUS_THRESHOLD, b_step, tl.log(1.0 + tl.exp(tl.minimum(b_step, 20.0))))
        p_decay = log_decay + o_r[:, None] * HEADS + o_a[None, :]
        tl.store(p_decay, -tl.exp(b_rate)[None, :] * b_soft, mask=m_r[:, None] & m_a[None, :])


def gated_delta_inputs(rows: ResidualRows, weights: ProducerWeights, conv_state, conv_rows, eps) -> Produced:
    """As `gated_delta_inputs.gated_delta_inputs`."""
    (num_rows, size), scaled = rows.shape, rows.scaled
    (channels, kernel), heads = weights.conv_weight.shape, weights.A_log.shape[0]
    gates = weights.projection.shape[0] - channels - 2 * heads
    produced = Produced(
        mixed=scaled.new_empty(num_rows, channels),
        z=scaled.new_empty(num_rows, gates),
        log_decay=scaled.new_empty(num_rows, heads, dtype=torch.float32),
        beta=scaled.new_empty(num_rows, heads),
    )
    tile = tile_of("gated_delta_inputs")
    with launch_device(scaled):
        _producer_kernel[(triton.cdiv(weights.projection.shape[0], tile.block_n),)](
            scaled, rows.squares, weights.projection, weights.row_order, weights.conv_weight,
            conv_state.contiguous(), weights.A_log, weights.dt_bias, conv_rows,
            produced.mixed, produced.z, produced.log_decay, produced.beta, eps, num_rows,
            *scaled.stride(), *weights.projection.stride(), conv_rows.stride(0),
            H=size, C=channels, Z=gates, HEADS=heads, KERNEL=kernel,
            REORDERED=weights.row_order is not None, SMALL=PADDED_ROWS, BN=tile.block_n, BK=tile.block_k,
            PRECISION=precision_of(scaled), EARLY=tile.next_starts_early,
            **squares_options(rows), **launch_options(tile, scaled),
        )  # fmt: skip
    return produced
