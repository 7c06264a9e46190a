"""The dense MLP in Triton: programs over columns of the inner size, then over columns of the output and parts of K.

As in `linear_triton.py`, the norm scales the sums at the end, and of the programs that share a column tile the one
that finishes last adds up their sums in a fixed order.
"""

import torch
import triton
import triton.language as tl

from .common_triton import launch_device, launch_options, let_next_start, prefetch_rows, wait_for_previous
from .linear_triton import NORM, PADDED_ROWS, load_tile, multiply_add, prepare_rows
from .tiles import tile_of

# Fewer programs than this leave multiprocessors of a large GPU with half their share.
WANTED_PROGRAMS = 256


@triton.jit(do_not_specialize=["num_rows"])
def _gate_up_kernel(
    rows, scale, weight, output, eps, num_rows, stride_xn, stride_xk, stride_wn, stride_wk,
    SIZE: tl.constexpr, K: tl.constexpr, SMALL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAPS: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    o_r, o_n = tl.arange(0, SMALL), tl.program_id(0) * BN + tl.arange(0, BN)
    m_r, m_n = o_r < num_rows, o_n < SIZE
    b_gate, b_up = tl.zeros([SMALL, BN], tl.float32), tl.zeros([SMALL, BN], tl.float32)
    b_squares = tl.zeros([SMALL], tl.float32)
    prefetch_rows(weight, o_n, 0, stride_wn, stride_wk, SIZE, K, PREFETCH, OVERLAPS)
    prefetch_rows(weight, SIZE + o_n, 0, stride_wn, stride_wk, 2 * SIZE, K, PREFETCH, OVERLAPS)
    wait_for_previous(OVERLAPS)
    for i_k in range(tl.cdiv(K, BK)):
        o_k = i_k * BK + tl.arange(0, BK)
        m_k = o_k < K
        b_gate_weight = load_tile(weight, o_n, o_k, stride_wn, stride_wk, m_n, m_k)
        b_up_weight = load_tile(weight, SIZE + o_n, o_k, stride_wn, stride_wk, m_n, m_k)
        b_rows = load_tile(rows, o_r, o_k, stride_xn, stride_xk, m_r, m_k)
        b_scale = tl.load(scale + o_k, mask=m_k, other=0.0)
        b_rows, b_squares = prepare_rows(b_rows, b_rows, b_scale, b_squares, eps, NORM, BK)
        b_gate = multiply_add(b_rows, b_gate_weight, b_gate, PRECISION)
        b_up = multiply_add(b_rows, b_up_weight, b_up, PRECISION)
    let_next_start(OVERLAPS)
    b_rstd = tl.rsqrt(b_squares / K + eps)[:, None]
    b_gate = (b_gate * b_rstd).to(rows.dtype.element_ty).to(tl.float32)
    b_up = (b_up * b_rstd).to(rows.dtype.element_ty)
    b_out = (b_gate * tl.sigmoid(b_gate)).to(rows.dtype.element_ty) * b_up
    tl.store(output + o_r[:, None] * SIZE + o_n[None, :], b_out, mask=m_r[:, None] & m_n[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _down_kernel(
    rows, weight, residual, partial, counters, output, num_rows,
    stride_xn, stride_xk, stride_wn, stride_wk, stride_rn, stride_rk,
    N: tl.constexpr, K: tl.constexpr, SMALL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr, OVERLAPS: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    i_n, i_s = tl.program_id(0), tl.program_id(1)
    o_r, o_n = tl.arange(0, SMALL), i_n * BN + tl.arange(0, BN)
    m_r, m_n = o_r < num_rows, o_n < N
    b_sum = tl.zeros([SMALL, BN], tl.float32)
    PER_SPLIT: tl.constexpr = (K + BK * SPLITS - 1) // (BK * SPLITS)
    prefetch_rows(weight, o_n, i_s * PER_SPLIT * BK, stride_wn, stride_wk, N, K, PREFETCH, OVERLAPS)
    wait_for_previous(OVERLAPS)
    for step in range(PER_SPLIT):
        o_k = (i_s * PER_SPLIT + step) * BK + tl.arange(0, BK)
        m_k = o_k < K
        b_weight = load_tile(weight, o_n, o_k, stride_wn, stride_wk, m_n, m_k)
        b_rows = load_tile(rows, o_r, o_k, stride_xn, stride_xk, m_r, m_k)
        b_sum = multiply_add(b_rows, b_weight, b_sum, PRECISION)
    let_next_start(OVERLAPS)
    p_tile = o_r[:, None] * N + o_n[None, :]
    m_tile = m_r[:, None] & m_n[None, :]
    tl.store(partial + i_s * SMALL * N + p_tile, b_sum, mask=m_tile)
    tl.debug_barrier()
    if tl.atomic_add(counters + i_n, 1, sem="acq_rel") == SPLITS - 1:
        tl.store(counters + i_n, 0)
        b_sum = load_tile(residual, o_r, o_n, stride_rn, stride_rk, m_r, m_n).to(tl.float32)
        for i_other in range(SPLITS):
            b_sum += tl.load(partial + i_other * SMALL * N + p_tile, mask=m_tile, other=0.0, cache_modifier=".cg")
        tl.store(output + p_tile, b_sum.to(output.dtype.element_ty), mask=m_tile)


def dense_gate_up(rows, norm_scale, gate_up_weight, eps) -> torch.Tensor:
    """As `dense_mlp.dense_gate_up`."""
    tile, (num_rows, size), inner = tile_of("dense_gate_up"), rows.shape, gate_up_weight.shape[0] // 2
    block_n = tile.block_n if triton.cdiv(inner, tile.block_n) >= WANTED_PROGRAMS else max(16, tile.block_n // 2)
    output = rows.new_empty(num_rows, inner)
    with launch_device(rows):
        _gate_up_kernel[(triton.cdiv(inner, block_n),)](
            rows, norm_scale, gate_up_weight, output, eps, num_rows, *rows.stride(), *gate_up_weight.stride(),
            SIZE=inner, K=size, SMALL=PADDED_ROWS, BN=block_n, BK=tile.block_k,
            PRECISION=_precision(rows), **launch_options(tile, rows),
        )  # fmt: skip
    return output


def dense_down(activated, down_weight, residual, counters=None) -> torch.Tensor:
    """As `dense_mlp.dense_down`."""
    tile, (num_rows, inner), size = tile_of("dense_down"), activated.shape, down_weight.shape[0]
    num_tiles = triton.cdiv(size, tile.block_n)
    output = activated.new_empty(num_rows, size)
    partial = activated.new_empty(tile.splits, PADDED_ROWS, size, dtype=torch.float32)
    if counters is None:
        counters = torch.zeros(num_tiles, dtype=torch.int32, device=activated.device)
    with launch_device(activated):
        _down_kernel[(num_tiles, tile.splits)](
            activated, down_weight, residual, partial, counters, output, num_rows,
            *activated.stride(), *down_weight.stride(), *residual.stride(),
            N=size, K=inner, SMALL=PADDED_ROWS, BN=tile.block_n, BK=tile.block_k, SPLITS=tile.splits,
            PRECISION=_precision(activated), **launch_options(tile, activated),
        )  # fmt: skip
    return output


def _precision(rows: torch.Tensor) -> str:
    return "ieee" if rows.dtype == torch.float32 else "tf32"
