"""The dense MLP in Triton: programs over columns of the inner size, then over columns of the output and parts of K.

The second launch is the projection of `linear_triton.py` without a gate.
"""

import torch
import triton
import triton.language as tl

from .common_triton import launch_device, launch_options, let_next_start, prefetch_rows, wait_for_previous
from .linear_triton import PADDED_ROWS, PLAIN, add_projection, load_tile, multiply_add, precision_of
from .residual_rows import ResidualRows
from .residual_rows_triton import inverse_rms, load_squares, squares_options
from .tiles import tile_of

# Fewer programs than this leave multiprocessors of a large GPU with half their share.
WANTED_PROGRAMS = 256


@triton.jit
def swiglu(b_gate, b_up, DTYPE: tl.constexpr):
    """SiLU of the gate times up, rounded where the host rounds them."""
    b_gate = b_gate.to(DTYPE).to(tl.float32)
    return (b_gate * tl.sigmoid(b_gate)).to(DTYPE) * b_up.to(DTYPE)


@triton.jit(do_not_specialize=["num_rows"])
def _gate_up_kernel(
    rows, squares, weight, output, eps, num_rows, stride_xn, stride_xk, stride_wn, stride_wk,
    SIZE: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr,
    SMALL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAPS: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    o_r, o_n = tl.arange(0, SMALL), tl.program_id(0) * BN + tl.arange(0, BN)
    m_r, m_n = o_r < num_rows, o_n < SIZE
    b_gate, b_up = tl.zeros([SMALL, BN], tl.float32), tl.zeros([SMALL, BN], tl.float32)
    prefetch_rows(weight, o_n, 0, stride_wn, stride_wk, SIZE, K, PREFETCH, OVERLAPS)
    prefetch_rows(weight, SIZE + o_n, 0, stride_wn, stride_wk, 2 * SIZE, K, PREFETCH, OVERLAPS)
    wait_for_previous(OVERLAPS)
    b_squares = load_squares(squares, o_r, m_r, PARTS, PADDED, SMALL)
    for i_k in range(tl.cdiv(K, BK)):
        o_k = i_k * BK + tl.arange(0, BK)
        m_k = o_k < K
        b_gate_weight = load_tile(weight, o_n, o_k, stride_wn, stride_wk, m_n, m_k)
        b_up_weight = load_tile(weight, SIZE + o_n, o_k, stride_wn, stride_wk, m_n, m_k)
        b_rows = load_tile(rows, o_r, o_k, stride_xn, stride_xk, m_r, m_k)
        b_gate = multiply_add(b_rows, b_gate_weight, b_gate, PRECISION)
        b_up = multiply_add(b_rows, b_up_weight, b_up, PRECISION)
    let_next_start(OVERLAPS)
    b_rstd = inverse_rms(b_squares, eps, K)[:, None]
    b_out = swiglu(b_gate * b_rstd, b_up * b_rstd, rows.dtype.element_ty)
    tl.store(output + o_r[:, None] * SIZE + o_n[None, :], b_out, mask=m_r[:, None] & m_n[None, :])


def dense_gate_up(rows: ResidualRows, gate_up_weight, eps) -> torch.Tensor:
    """As `dense_mlp.dense_gate_up`."""
    tile, (num_rows, size), inner = tile_of("dense_gate_up"), rows.shape, gate_up_weight.shape[0] // 2
    block_n = tile.block_n if triton.cdiv(inner, tile.block_n) >= WANTED_PROGRAMS else max(16, tile.block_n // 2)
    output = gate_up_weight.new_empty(num_rows, inner)
    with launch_device(output):
        _gate_up_kernel[(triton.cdiv(inner, block_n),)](
            rows.scaled, rows.squares, gate_up_weight, output, eps, num_rows,
            *rows.scaled.stride(), *gate_up_weight.stride(),
            SIZE=inner, K=size, SMALL=PADDED_ROWS, BN=block_n, BK=tile.block_k, PRECISION=precision_of(output),
            **squares_options(rows), **launch_options(tile, output),
        )  # fmt: skip
    return output


def dense_down(activated, down_weight, residual, output: ResidualRows, counters=None) -> ResidualRows:
    """As `dense_mlp.dense_down`."""
    rows = activated[:, None]
    return add_projection("dense_down", PLAIN, rows, rows, rows, down_weight, residual, output, 0.0, counters)
