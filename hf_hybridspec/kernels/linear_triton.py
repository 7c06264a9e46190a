"""Projections of at most 16 rows in Triton: one program per tile of weight rows, split over K where tiles are few.

Rows are padded to 16, the smallest tile of the tensor cores. The RMSNorm of whole rows scales the sums at the end,
since its factor is known only when all of K was read. Split sums go through a buffer; the program that finishes last
adds them up in the order of the splits, so a row's result does not depend on timing or on the other rows.
"""

import torch
import triton
import triton.language as tl

from .common_triton import launch_device, launch_options, let_next_start, prefetch_rows, wait_for_previous
from .tiles import tile_of

PADDED_ROWS = 16
# Weight rows from which a projection is wide.
WIDE_ROWS = 65536

PLAIN, NORM, GATED_NORM, GATED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def load_tile(p_rows, o_n, o_k, stride_n, stride_k, m_n, m_k):
    """`[rows, columns]` of a strided matrix, zero outside the masks."""
    p_tile = p_rows + o_n[:, None].to(tl.int64) * stride_n + o_k[None, :] * stride_k
    return tl.load(p_tile, mask=m_n[:, None] & m_k[None, :], other=0.0)


@triton.jit
def multiply_add(b_rows, b_weight, b_sum, PRECISION: tl.constexpr):
    """`b_sum + b_rows @ b_weight^T` in fp32."""
    return tl.dot(b_rows, tl.trans(b_weight), acc=b_sum, input_precision=PRECISION)


@triton.jit
def prepare_rows(b_rows, b_gate, b_scale, b_squares, eps, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """The rows as they enter the product, and the running sum of their squares (NORM only)."""
    b_wide = b_rows.to(tl.float32)
    if KIND == NORM:
        b_squares += tl.sum(b_wide * b_wide, axis=1)
        b_rows = (b_wide * b_scale[None, :]).to(b_rows.dtype)
    elif KIND == GATED_NORM:
        b_rstd = tl.rsqrt(tl.sum(b_wide * b_wide, axis=1) / WIDTH + eps)
        b_normed = (b_wide * b_rstd[:, None]).to(b_rows.dtype) * b_scale.to(b_rows.dtype)[None, :]
        b_wide_gate = b_gate.to(tl.float32)
        b_rows = (b_normed.to(tl.float32) * b_wide_gate * tl.sigmoid(b_wide_gate)).to(b_rows.dtype)
    elif KIND == GATED:
        b_rows = b_rows * tl.sigmoid(b_gate.to(tl.float32)).to(b_rows.dtype)
    return b_rows, b_squares


# One compiled kernel serves every number of rows.
@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    rows, gate, scale, weight, residual, partial, counters, output, eps, num_rows,
    stride_xn, stride_xh, stride_xk, stride_gn, stride_gh, stride_gk, stride_wn, stride_wk, stride_rn, stride_rk,
    N: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
    SMALL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    i_n, i_s = tl.program_id(0), tl.program_id(1)
    o_r, o_n = tl.arange(0, SMALL), i_n * BN + tl.arange(0, BN)
    m_r, m_n = o_r < num_rows, o_n < N
    b_sum = tl.zeros([SMALL, BN], tl.float32)
    b_squares = tl.zeros([SMALL], tl.float32)
    K: tl.constexpr = HEADS * WIDTH
    PARTS: tl.constexpr = (WIDTH + BK - 1) // BK
    PER_SPLIT: tl.constexpr = (HEADS * PARTS + SPLITS - 1) // SPLITS
    prefetch_rows(weight, o_n, i_s * PER_SPLIT * BK, stride_wn, stride_wk, N, K, PREFETCH, OVERLAPS)
    wait_for_previous(OVERLAPS)
    for step in range(PER_SPLIT):
        i_step = i_s * PER_SPLIT + step
        i_h = i_step // PARTS
        o_w = (i_step % PARTS) * BK + tl.arange(0, BK)
        o_k = i_h * WIDTH + o_w
        m_k = (o_w < WIDTH) & (o_k < K)
        b_weight = load_tile(weight, o_n, o_k, stride_wn, stride_wk, m_n, m_k)
        b_rows = load_tile(rows + i_h * stride_xh, o_r, o_w, stride_xn, stride_xk, m_r, m_k)
        b_gate, b_scale = b_rows, tl.zeros([BK], tl.float32)
        if KIND != NORM:
            b_gate = load_tile(gate + i_h * stride_gh, o_r, o_w, stride_gn, stride_gk, m_r, m_k)
        if KIND == NORM:
            b_scale = tl.load(scale + o_k, mask=m_k, other=0.0).to(tl.float32)
        elif KIND == GATED_NORM:
            b_scale = tl.load(scale + o_w, mask=m_k, other=0.0).to(tl.float32)
        b_rows, b_squares = prepare_rows(b_rows, b_gate, b_scale, b_squares, eps, KIND, WIDTH)
        b_sum = multiply_add(b_rows, b_weight, b_sum, PRECISION)
    let_next_start(OVERLAPS)
    if KIND == NORM:
        b_sum *= tl.rsqrt(b_squares / K + eps)[:, None]
    p_tile = o_r[:, None] * N + o_n[None, :]
    m_tile = m_r[:, None] & m_n[None, :]
    is_last = True
    if SPLITS > 1:
        tl.store(partial + i_s * SMALL * N + p_tile, b_sum, mask=m_tile)
        tl.debug_barrier()
        is_last = tl.atomic_add(counters + i_n, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            b_sum = tl.zeros([SMALL, BN], tl.float32)
            for i_other in range(SPLITS):
                b_sum += tl.load(partial + i_other * SMALL * N + p_tile, mask=m_tile, other=0.0, cache_modifier=".cg")
            tl.store(counters + i_n, 0)
    if is_last:
        if KIND != NORM:
            b_sum += load_tile(residual, o_r, o_n, stride_rn, stride_rk, m_r, m_n).to(tl.float32)
        tl.store(output + p_tile, b_sum.to(output.dtype.element_ty), mask=m_tile)


def norm_linear(rows: torch.Tensor, norm_scale: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `linear.norm_linear`."""
    kernel = "wide_norm_linear" if weight.shape[0] >= WIDE_ROWS else "norm_linear"
    return _launch(kernel, NORM, rows[:, None], rows[:, None], norm_scale, weight, None, eps, None)


def gated_norm_linear(rows, gate, norm_weight, weight, residual, eps, counters=None, output=None) -> torch.Tensor:
    """As `linear.gated_norm_linear`."""
    return _launch("gated_norm_linear", GATED_NORM, rows, gate, norm_weight, weight, residual, eps, counters, output)


def gated_linear(rows, gate, weight, residual, counters=None) -> torch.Tensor:
    """As `linear.gated_linear`."""
    return _launch("gated_linear", GATED, rows, gate, rows, weight, residual, 0.0, counters)


def _launch(kernel, kind, rows, gate, scale, weight, residual, eps, counters, output=None) -> torch.Tensor:
    tile = tile_of(kernel)
    (num_rows, heads, width), size_n = rows.shape, weight.shape[0]
    # A head is normalised within its step; elsewhere a step is a part of a head, and heads may lie anywhere.
    widest = max(16, triton.next_power_of_2(width))
    block_k = widest if kind == GATED_NORM else min(tile.block_k, widest)
    num_tiles = triton.cdiv(size_n, tile.block_n)
    output = rows.new_empty(num_rows, size_n) if output is None else output
    residual = output if residual is None else residual
    partial = rows.new_empty((tile.splits, PADDED_ROWS, size_n) if tile.splits > 1 else (0,), dtype=torch.float32)
    if counters is None and tile.splits > 1:
        counters = torch.zeros(num_tiles, dtype=torch.int32, device=rows.device)
    with launch_device(rows):
        _linear_kernel[(num_tiles, tile.splits)](
            rows, gate, scale, weight, residual, partial, counters, output, eps, num_rows,
            *rows.stride(), *gate.stride(), *weight.stride(), *residual.stride(),
            N=size_n, HEADS=heads, WIDTH=width, KIND=kind,
            SMALL=PADDED_ROWS, BN=tile.block_n, BK=block_k, SPLITS=tile.splits,
            PRECISION="ieee" if rows.dtype == torch.float32 else "tf32", **launch_options(tile, rows),
        )  # fmt: skip
    return output
