"""Context inputs in Triton: one program per layer and head of keys or values, so that it holds whole heads.

A head's two halves are two sums, which the rotation pairs entry by entry.
"""

import triton
import triton.language as tl

from .common_triton import launch_device, launch_options, let_next_start, prefetch_rows, wait_for_previous
from .linear_triton import PADDED_ROWS, load_tile, multiply_add, precision_of
from .residual_rows import ResidualRows
from .residual_rows_triton import inverse_rms, load_squares, squares_options
from .tiles import tile_of


@triton.jit(do_not_specialize=["num_rows"])
def _context_kernel(
    rows, squares, weights, key_scales, cos, sin, key_caches, value_caches, committed, eps, num_rows, length,
    stride_xn, stride_xk, stride_wl, stride_wn, stride_wk, stride_al, stride_cn, stride_sn,
    stride_kl, stride_kh, stride_ks, stride_vl, stride_vh, stride_vs,
    HEADS: tl.constexpr, HALF: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr,
    SMALL: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    i_h, i_l = tl.program_id(0), tl.program_id(1).to(tl.int64)
    DTYPE: tl.constexpr = rows.dtype.element_ty
    o_r, o_h = tl.arange(0, SMALL), tl.arange(0, BH)
    m_r, m_h = o_r < num_rows, o_h < HALF
    p_weight = weights + i_l * stride_wl + i_h * 2 * HALF * stride_wn
    b_first, b_second = tl.zeros([SMALL, BH], tl.float32), tl.zeros([SMALL, BH], tl.float32)
    prefetch_rows(p_weight, o_h, 0, stride_wn, stride_wk, HALF, K, PREFETCH, OVERLAPS)
    prefetch_rows(p_weight, HALF + o_h, 0, stride_wn, stride_wk, 2 * HALF, K, PREFETCH, OVERLAPS)
    wait_for_previous(OVERLAPS)
    b_squares = load_squares(squares, o_r, m_r, PARTS, PADDED, SMALL)
    for i_k in range(tl.cdiv(K, BK)):
        o_k = i_k * BK + tl.arange(0, BK)
        m_k = o_k < K
        b_first_weight = load_tile(p_weight, o_h, o_k, stride_wn, stride_wk, m_h, m_k)
        b_second_weight = load_tile(p_weight, HALF + o_h, o_k, stride_wn, stride_wk, m_h, m_k)
        b_rows = load_tile(rows, o_r, o_k, stride_xn, stride_xk, m_r, m_k)
        b_first = multiply_add(b_rows, b_first_weight, b_first, PRECISION)
        b_second = multiply_add(b_rows, b_second_weight, b_second, PRECISION)
    let_next_start(OVERLAPS)
    b_rstd = inverse_rms(b_squares, eps, K)[:, None]
    b_first, b_second = (b_first * b_rstd).to(DTYPE), (b_second * b_rstd).to(DTYPE)
    o_s = (tl.load(committed) + o_r).to(tl.int64)
    # A caller that left no room loses rows, not memory of others.
    m_out = (m_r & (o_s < length))[:, None] & m_h[None, :]
    if i_h < HEADS:
        b_wide_first, b_wide_second = b_first.to(tl.float32), b_second.to(tl.float32)
        b_square = tl.sum(b_wide_first * b_wide_first, axis=1) + tl.sum(b_wide_second * b_wide_second, axis=1)
        b_key_rstd = tl.rsqrt(b_square / (2 * HALF) + eps)[:, None]
        p_scale = key_scales + i_l * stride_al + o_h
        b_scale_first = tl.load(p_scale, mask=m_h, other=0.0)[None, :]
        b_scale_second = tl.load(p_scale + HALF, mask=m_h, other=0.0)[None, :]
        b_first = (b_wide_first * b_key_rstd * b_scale_first).to(DTYPE)
        b_second = (b_wide_second * b_key_rstd * b_scale_second).to(DTYPE)
        # cos and sin are given for both halves, and need not be equal there.
        b_cos = load_tile(cos, o_r, o_h, stride_cn, 1, m_r, m_h)
        b_sin = load_tile(sin, o_r, o_h, stride_sn, 1, m_r, m_h)
        b_cos_second = load_tile(cos + HALF, o_r, o_h, stride_cn, 1, m_r, m_h)
        b_sin_second = load_tile(sin + HALF, o_r, o_h, stride_sn, 1, m_r, m_h)
        b_turned = (b_first * b_cos).to(tl.float32) - (b_second * b_sin).to(tl.float32)
        b_turned_second = (b_second * b_cos_second).to(tl.float32) + (b_first * b_sin_second).to(tl.float32)
        p_out = key_caches + i_l * stride_kl + i_h.to(tl.int64) * stride_kh
        p_out = p_out + o_s[:, None] * stride_ks + o_h[None, :]
        tl.store(p_out, b_turned.to(DTYPE), mask=m_out)
        tl.store(p_out + HALF, b_turned_second.to(DTYPE), mask=m_out)
    else:
        p_value = value_caches + i_l * stride_vl + (i_h - HEADS).to(tl.int64) * stride_vh
        p_value = p_value + o_s[:, None] * stride_vs + o_h[None, :]
        tl.store(p_value, b_first, mask=m_out)
        tl.store(p_value + HALF, b_second, mask=m_out)


def context_inputs(
    rows: ResidualRows, weights, key_scales, cos, sin, key_caches, value_caches, committed, eps
) -> None:
    """As `context_inputs.context_inputs`."""
    tile, (num_rows, hidden), (layers, heads, length, size) = tile_of("context_inputs"), rows.shape, key_caches.shape
    cos, sin = (tensor if tensor.stride(1) == 1 else tensor.contiguous() for tensor in (cos, sin))
    with launch_device(weights):
        _context_kernel[(2 * heads, layers)](
            rows.scaled, rows.squares, weights, key_scales, cos, sin, key_caches, value_caches, committed, eps,
            num_rows, length, *rows.scaled.stride(), *weights.stride(), key_scales.stride(0), cos.stride(0),
            sin.stride(0), *key_caches.stride()[:3], *value_caches.stride()[:3],
            HEADS=heads, HALF=size // 2, K=hidden, SMALL=PADDED_ROWS, BH=max(16, triton.next_power_of_2(size // 2)),
            BK=tile.block_k, PRECISION=precision_of(weights), **squares_options(rows), **launch_options(tile, weights),
        )  # fmt: skip
