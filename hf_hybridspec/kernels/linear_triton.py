"""Projections of at most 16 rows in Triton: one program per tile of weight rows, split over K where tiles are few.

Rows are padded to 16, the smallest tile of the tensor cores. A norm of whole rows was prepared by their writer, and
scales the sums at the end. Split sums go through a buffer; the program that finishes last adds them up in the order of
the splits, so a row's result does not depend on timing or on the other rows.
"""

import torch
import triton
import triton.language as tl

from .common_triton import (
    hold_until_here,
    launch_device,
    launch_options,
    let_next_start,
    prefetch_rows,
    wait_for_previous,
)
from .residual_rows import ResidualRows
from .residual_rows_triton import inverse_rms, load_squares, squares_options, store_residual
from .tiles import tile_of

PADDED_ROWS = 16
# Weight rows from which a projection is wide.
WIDE_ROWS = 65536

PLAIN, GATED_NORM, GATED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def load_tile(p_rows, o_n, o_k, stride_n, stride_k, m_n, m_k):
    """`[rows, columns]` of a strided matrix, zero outside the masks."""
    p_tile = p_rows + o_n[:, None].to(tl.int64) * stride_n + o_k[None, :] * stride_k
    return tl.load(p_tile, mask=m_n[:, None] & m_k[None, :], other=0.0)


@triton.jit
def multiply_add(b_rows, b_weight, b_sum, PRECISION: tl.constexpr):
    """`b_sum + b_rows @ b_weight^T` in fp32."""
    return tl.dot(b_rows, tl.trans(b_weight), acc=b_sum, input_precision=PRECISION)


# One compiled kernel serves every number of rows.
@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    rows, squares, weight, output, eps, num_rows, stride_xn, stride_xk, stride_wn, stride_wk,
    N: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr,
    SMALL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr, OVERLAPS: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    o_r, o_n = tl.arange(0, SMALL), tl.program_id(0) * BN + tl.arange(0, BN)
    m_r, m_n = o_r < num_rows, o_n < N
    prefetch_rows(weight, o_n, 0, stride_wn, stride_wk, N, K, PREFETCH, OVERLAPS)
    wait_for_previous(OVERLAPS)
    let_next_start(OVERLAPS and EARLY)
    b_squares = load_squares(squares, o_r, m_r, PARTS, PADDED, SMALL)
    b_sum = tl.zeros([SMALL, BN], tl.float32)
    for i_k in range(tl.cdiv(K, BK)):
        o_k = i_k * BK + tl.arange(0, BK)
        m_k = o_k < K
        b_weight = load_tile(weight, o_n, o_k, stride_wn, stride_wk, m_n, m_k)
        b_rows = load_tile(rows, o_r, o_k, stride_xn, stride_xk, m_r, m_k)
        b_sum = multiply_add(b_rows, b_weight, b_sum, PRECISION)
    let_next_start(OVERLAPS and not EARLY)
    b_sum *= inverse_rms(b_squares, eps, K)[:, None]
    tl.store(
        output + o_r[:, None] * N + o_n[None, :], b_sum.to(output.dtype.element_ty), mask=m_r[:, None] & m_n[None, :]
    )


@triton.jit
def prepare_rows(b_rows, b_gate, b_scale, eps, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """The rows as they enter the product."""
    if KIND == GATED_NORM:
        b_wide, b_wide_gate = b_rows.to(tl.float32), b_gate.to(tl.float32)
        b_rstd = tl.rsqrt(tl.sum(b_wide * b_wide, axis=1) / WIDTH + eps)
        b_normed = (b_wide * b_rstd[:, None]).to(b_rows.dtype) * b_scale.to(b_rows.dtype)[None, :]
        b_rows = (b_normed.to(tl.float32) * b_wide_gate * tl.sigmoid(b_wide_gate)).to(b_rows.dtype)
    elif KIND == GATED:
        b_rows = b_rows * tl.sigmoid(b_gate.to(tl.float32)).to(b_rows.dtype)
    return b_rows


@triton.jit(do_not_specialize=["num_rows"])
def _residual_kernel(
    rows, gate, scale, weight, residual, partial, counters, next_scale, values, scaled, squares, eps, num_rows,
    stride_xn, stride_xh, stride_xk, stride_gn, stride_gh, stride_gk, stride_wn, stride_wk, stride_rn, stride_rk,
    N: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
    SMALL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr, OVERLAPS: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    i_n, i_s = tl.program_id(0), tl.program_id(1)
    o_r, o_n = tl.arange(0, SMALL), i_n * BN + tl.arange(0, BN)
    m_r, m_n = o_r < num_rows, o_n < N
    b_sum = tl.zeros([SMALL, BN], tl.float32)
    K: tl.constexpr = HEADS * WIDTH
    PARTS: tl.constexpr = (WIDTH + BK - 1) // BK
    PER_SPLIT: tl.constexpr = (HEADS * PARTS + SPLITS - 1) // SPLITS
    prefetch_rows(weight, o_n, i_s * PER_SPLIT * BK, stride_wn, stride_wk, N, K, PREFETCH, OVERLAPS)
    # What whoever ends a tile needs is asked for here, where nobody waits for it.
    b_next_scale = tl.load(next_scale + o_n, mask=m_n, other=0.0)
    wait_for_previous(OVERLAPS)
    let_next_start(OVERLAPS and EARLY)
    b_residual = load_tile(residual, o_r, o_n, stride_rn, stride_rk, m_r, m_n)
    for step in range(PER_SPLIT):
        i_step = i_s * PER_SPLIT + step
        i_h = i_step // PARTS
        o_w = (i_step % PARTS) * BK + tl.arange(0, BK)
        o_k = i_h * WIDTH + o_w
        m_k = (o_w < WIDTH) & (o_k < K)
        b_weight = load_tile(weight, o_n, o_k, stride_wn, stride_wk, m_n, m_k)
        b_rows = load_tile(rows + i_h * stride_xh, o_r, o_w, stride_xn, stride_xk, m_r, m_k)
        b_gate, b_scale = b_rows, tl.zeros([BK], tl.float32)
        if KIND != PLAIN:
            b_gate = load_tile(gate + i_h * stride_gh, o_r, o_w, stride_gn, stride_gk, m_r, m_k)
        if KIND == GATED_NORM:
            b_scale = tl.load(scale + o_w, mask=m_k, other=0.0).to(tl.float32)
        b_rows = prepare_rows(b_rows, b_gate, b_scale, eps, KIND, WIDTH)
        if KIND == GATED:
            # Otherwise every warp would compute the gates of all rows, as its operand of the product.
            b_rows = hold_until_here(b_rows, OVERLAPS)
        b_sum = multiply_add(b_rows, b_weight, b_sum, PRECISION)
    let_next_start(OVERLAPS and not EARLY)
    is_last = True
    if SPLITS > 1:
        p_tile = partial + o_r[:, None] * N + o_n[None, :]
        m_tile = m_r[:, None] & m_n[None, :]
        tl.store(p_tile + i_s * SMALL * N, b_sum, mask=m_tile)
        tl.debug_barrier()
        is_last = tl.atomic_add(counters + i_n, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            tl.store(counters + i_n, 0)
            b_sum = tl.zeros([SMALL, BN], tl.float32)
            # Unrolled, so that all splits are asked for at once.
            for i_other in tl.static_range(SPLITS):
                b_sum += tl.load(p_tile + i_other * SMALL * N, mask=m_tile, other=0.0, cache_modifier=".cg")
    if is_last:
        b_sum += b_residual.to(tl.float32)
        store_residual(b_sum, values, b_next_scale, scaled, squares, i_n, o_r, o_n, m_r, m_n, N, SMALL)


def norm_linear(rows: ResidualRows, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `linear.norm_linear`."""
    (num_rows, size_k), size_n = rows.shape, weight.shape[0]
    tile = tile_of("wide_norm_linear" if size_n >= WIDE_ROWS else "norm_linear")
    output = weight.new_empty(num_rows, size_n)
    with launch_device(weight):
        _norm_kernel[(triton.cdiv(size_n, tile.block_n),)](
            rows.scaled, rows.squares, weight, output, eps, num_rows, *rows.scaled.stride(), *weight.stride(),
            N=size_n, K=size_k, SMALL=PADDED_ROWS, BN=tile.block_n, BK=tile.block_k, PRECISION=precision_of(weight),
            EARLY=tile.next_starts_early, **squares_options(rows), **launch_options(tile, weight),
        )  # fmt: skip
    return output


def gated_norm_linear(rows, gate, norm_weight, weight, residual, output, eps, counters=None) -> ResidualRows:
    """As `linear.gated_norm_linear`."""
    tensors = (rows, gate, norm_weight, weight, residual)
    return add_projection("gated_norm_linear", GATED_NORM, *tensors, output, eps, counters)


def gated_linear(rows, gate, weight, residual, output, counters=None) -> ResidualRows:
    """As `linear.gated_linear`."""
    return add_projection("gated_linear", GATED, rows, gate, rows, weight, residual, output, 0.0, counters)


def add_projection(kernel, kind, rows, gate, scale, weight, residual, output, eps, counters) -> ResidualRows:
    """Projects rows `[n, heads, width]` of a kind with the tile of `kernel`, adds the residual, fills `output`."""
    tile = tile_of(kernel)
    (_, heads, width), size_n = rows.shape, weight.shape[0]
    # A head is normalised within its step; elsewhere a step is a part of a head, and heads may lie anywhere.
    widest = max(16, triton.next_power_of_2(width))
    block_k = widest if kind == GATED_NORM else min(tile.block_k, widest)
    num_tiles = triton.cdiv(size_n, tile.block_n)
    partial = rows.new_empty((tile.splits, PADDED_ROWS, size_n) if tile.splits > 1 else (0,), dtype=torch.float32)
    if counters is None and tile.splits > 1:
        counters = torch.zeros(num_tiles, dtype=torch.int32, device=rows.device)
    with launch_device(rows):
        _residual_kernel[(num_tiles, tile.splits)](
            rows, gate, scale, weight, residual, partial, counters, output.norm_scale, output.values, output.scaled,
            output.squares, eps, rows.shape[0],
            *rows.stride(), *gate.stride(), *weight.stride(), *residual.stride(),
            N=size_n, HEADS=heads, WIDTH=width, KIND=kind,
            SMALL=PADDED_ROWS, BN=tile.block_n, BK=block_k, SPLITS=tile.splits, PRECISION=precision_of(rows),
            EARLY=tile.next_starts_early, **launch_options(tile, rows),
        )  # fmt: skip
    return output.of_parts(num_tiles)


def precision_of(tensor: torch.Tensor) -> str:
    """How products of a dtype are formed: 16-bit entries are exact in either way."""
    return "ieee" if tensor.dtype == torch.float32 else "tf32"
