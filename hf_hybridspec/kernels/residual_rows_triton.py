"""Rows of the residual stream in Triton: how a kernel writes them, and how the next one reads their norm."""

import triton
import triton.language as tl

from .common_triton import launch_device
from .residual_rows import ResidualRows


@triton.jit
def store_residual(
    b_values, values, b_scale, scaled, squares, i_part, o_r, o_n, m_r, m_n, N: tl.constexpr, SMALL: tl.constexpr
):
    """Writes columns `o_n` of rows, the part `i_part` of each; `b_values` is fp32, and zero where `m_n` is not.

    The next norm's scale is in registers by then: loaded here, it would be one more trip to memory at the end.
    """
    o_tile = o_r[:, None] * N + o_n[None, :]
    m_tile = m_r[:, None] & m_n[None, :]
    b_rounded = b_values.to(values.dtype.element_ty)
    tl.store(values + o_tile, b_rounded, mask=m_tile)
    b_wide = b_rounded.to(tl.float32)
    tl.store(scaled + o_tile, (b_wide * b_scale[None, :]).to(scaled.dtype.element_ty), mask=m_tile)
    tl.store(squares + i_part * SMALL + o_r, tl.sum(b_wide * b_wide, axis=1), mask=m_r)


@triton.jit
def load_squares(squares, o_r, m_r, PARTS: tl.constexpr, PADDED: tl.constexpr, SMALL: tl.constexpr):
    """`[PADDED, rows]`: asked for before the sums begin, needed after they end (`inverse_rms`)."""
    o_p = tl.arange(0, PADDED)
    return tl.load(
        squares + o_p[:, None] * SMALL + o_r[None, :], mask=(o_p < PARTS)[:, None] & m_r[None, :], other=0.0
    )


@triton.jit
def inverse_rms(b_squares, eps, K: tl.constexpr):
    """`[rows]`, what sums of scaled rows of K columns are multiplied by."""
    return tl.rsqrt(tl.sum(b_squares, axis=0) / K + eps)


@triton.jit
def _rows_kernel(
    table, row_ids, scale, values, scaled, squares, stride_n, stride_k,
    N: tl.constexpr, BN: tl.constexpr, GATHERED: tl.constexpr,
):  # fmt: skip
    i_r = tl.program_id(0)
    i_source = i_r.to(tl.int64)
    if GATHERED:
        i_source = tl.load(row_ids + i_r)
    o_n = tl.arange(0, BN)
    m_n = o_n < N
    b_row = tl.load(table + i_source * stride_n + o_n * stride_k, mask=m_n, other=0.0)
    b_wide = b_row.to(tl.float32)
    b_scale = tl.load(scale + o_n, mask=m_n, other=0.0)
    tl.store(values + i_r * N + o_n, b_row, mask=m_n)
    tl.store(scaled + i_r * N + o_n, (b_wide * b_scale).to(scaled.dtype.element_ty), mask=m_n)
    tl.store(squares + i_r, tl.sum(b_wide * b_wide, axis=0))


def residual_rows(table, row_ids, output: ResidualRows) -> ResidualRows:
    """As `residual_rows.residual_rows`, into `output`."""
    num_rows, size = output.shape
    with launch_device(table):
        _rows_kernel[(num_rows,)](
            table, table if row_ids is None else row_ids, output.norm_scale, output.values, output.scaled,
            output.squares, *table.stride(),
            N=size, BN=triton.next_power_of_2(size), GATHERED=row_ids is not None, num_warps=8,
        )  # fmt: skip
    return output.of_parts(1)


def squares_options(rows: ResidualRows) -> dict:
    """Keyword arguments of a kernel that reads the squares: PARTS of a row, and PADDED to a power of two."""
    parts = rows.squares.shape[0]
    return {"PARTS": parts, "PADDED": triton.next_power_of_2(parts)}
