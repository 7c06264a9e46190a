"""Products and triangular systems of at most 16 rows on tensor cores, as parts of other kernels."""

import triton
import triton.language as tl


@triton.jit
def split_halves(b_tile):
    """An fp32 tile as the difference of two bf16 tiles, within 2^-16 of it."""
    b_high = (b_tile.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return b_high.to(tl.bfloat16), (b_high - b_tile).to(tl.bfloat16)


@triton.jit
def small_product(b_left, b_right, b_sum, PRECISION: tl.constexpr):
    """b_sum + b_left b_right for fp32 tiles."""
    if PRECISION == "split":
        b_left_high, b_left_low = split_halves(b_left)
        b_right_high, b_right_low = split_halves(b_right)
        b_small = tl.dot(b_left_high, b_right_low, tl.dot(b_left_low, b_right_high))
        # Subtracted, so that the two sums do not wait for each other.
        b_sum = tl.dot(b_left_high, b_right_high, b_sum) - b_small
    else:
        b_sum = tl.dot(b_left, b_right, b_sum, input_precision=PRECISION)
    return b_sum


@triton.jit
def solve_small(b_x, b_right, N: tl.constexpr, SMALL: tl.constexpr, PRECISION: tl.constexpr):
    """(I - X)^-1 times `[C, 16, 8]` rows, for strictly lower triangular `[C, 16, 16]` X, zero in rows from N on."""
    o_n = tl.arange(0, SMALL)
    m_block = ((o_n[:, None] // 4) == (o_n[None, :] // 4))[None]
    if N > 1:
        b_rest = tl.where(m_block, 0.0, b_x)
        if N > 4:
            b_x = tl.where(m_block, b_x, 0.0)
            b_update = small_product(b_x, b_rest, b_rest, PRECISION)
        if N > 2:
            b_square = small_product(b_x, b_x, tl.zeros_like(b_x), PRECISION)
        b_right = small_product(b_x, b_right, b_right, PRECISION)
        if N > 4:
            b_update = small_product(b_square, b_update, b_update, PRECISION)
        if N > 2:
            b_right = small_product(b_square, b_right, b_right, PRECISION)
        if N > 4:
            m_half = ((o_n[:, None] // 8) == (o_n[None, :] // 8))[None]
            b_near = tl.where(m_half, b_update, 0.0)
            if N > 8:
                b_far = tl.where(m_half, 0.0, b_update)
                b_far = small_product(b_near, b_far, b_far, PRECISION)
            b_right = small_product(b_near, b_right, b_right, PRECISION)
            if N > 8:
                b_right = small_product(b_far, b_right, b_right, PRECISION)
    return b_right
