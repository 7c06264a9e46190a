"""Gated delta rule over a block in Triton: one compiled kernel per number of rows, one launch per commit.

Verify: one program per (value-head tile, value head, sequence). It loads its `[K, BV]` tile of the state once, and
while that is on its way builds the n x n system and its inverse from the keys. Rows are padded to 16, the smallest
tile of the tensor cores, so that the two products that read the state sum every row in the same order at every n.
Products take the rows as they came and are scaled by the inverse norms afterwards: a bf16 row stays exact on the
tensor cores, where the fp32 state is the sum of two bf16 tiles (16 bits of mantissa). With X = I - H strictly lower
triangular (HybridSpec, section on GDN kernels), H^-1 is

    n = 2, 3, 5, 7   row by row
    n = 4, 6, 8      inverses of the 4 x 4 diagonal blocks, X^4 = 0, joined by one correction for n > 4
    n = 9..16        (I + X + X^2 + X^3)(I + X^4 + X^8 + X^12), since X^16 = 0

Commit: one program per (value tile, value head, sequence, layer), which reads the length on the device, loads its tile
and the committed rows, and writes the tile back. Accumulation is fp32 everywhere.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .common_triton import launch_device

if TYPE_CHECKING:
    from .gated_delta_rule import CompactFactors

PADDED_ROWS = 16


@dataclass(frozen=True)
class Tile:
    """Columns of the state that one program holds, and the warps that hold them."""

    block_v: int
    num_warps: int


# No register spills at K = V = 128 on sm_90, one program per multiprocessor; not tuned: benchmarks/NOTES.md.
VERIFY_TILE = Tile(block_v=32, num_warps=4)
COMMIT_TILE = Tile(block_v=32, num_warps=4)
# Of the products with 16-bit activations; fp32 activations take "ieee".
HALF_PRECISION = "tf32x3"
# Of the rank-m update, for all activations.
COMMIT_PRECISION = "ieee"


@triton.jit
def _block_diagonal_inverse(b_x, SMALL: tl.constexpr, PRECISION: tl.constexpr):
    """Inverse of I - X for a block-diagonal X whose 4 x 4 blocks are strictly lower triangular."""
    o_n = tl.arange(0, SMALL)
    b_eye = (o_n[:, None] == o_n[None, :]).to(tl.float32)
    b_square = tl.dot(b_x, b_x, input_precision=PRECISION)
    return b_eye + b_x + tl.dot(b_square, b_eye + b_x, input_precision=PRECISION)


@triton.jit
def _unit_lower_inverse(b_x, N: tl.constexpr, SMALL: tl.constexpr, PRECISION: tl.constexpr):
    """Inverse of H = I - X for strictly lower triangular `[16, 16]` X whose rows from N on are zero."""
    o_n = tl.arange(0, SMALL)
    b_eye = (o_n[:, None] == o_n[None, :]).to(tl.float32)
    if N == 1:
        b_inverse = b_eye
    elif N == 2 or N == 3 or N == 5 or N == 7:
        # Row i of the inverse is e_i + X_i (rows before i, already final). Row 1 reads e_0 alone, so it is done.
        b_inverse = b_eye + tl.where(o_n[:, None] == 1, b_x, 0.0)
        for i in tl.static_range(2, N):
            b_row = tl.sum(tl.where(o_n[:, None] == i, b_x, 0.0), axis=0)
            b_row = tl.sum(b_row[:, None] * b_inverse, axis=0)
            b_inverse += tl.where(o_n[:, None] == i, b_row[None, :], 0.0)
    elif N == 4:
        b_inverse = _block_diagonal_inverse(b_x, SMALL, PRECISION)
    elif N == 6 or N == 8:
        m_same_block = (o_n[:, None] // 4) == (o_n[None, :] // 4)
        b_blocks = _block_diagonal_inverse(tl.where(m_same_block, b_x, 0.0), SMALL, PRECISION)
        b_corner = tl.dot(tl.where(m_same_block, 0.0, b_x), b_blocks, input_precision=PRECISION)
        b_inverse = b_blocks + tl.dot(b_blocks, b_corner, input_precision=PRECISION)
    else:
        b_x2 = tl.dot(b_x, b_x, input_precision=PRECISION)
        b_x4 = tl.dot(b_x2, b_x2, input_precision=PRECISION)
        b_x8 = tl.dot(b_x4, b_x4, input_precision=PRECISION)
        b_low = b_eye + b_x + b_x2 + tl.dot(b_x, b_x2, input_precision=PRECISION)
        b_high = b_eye + b_x4 + b_x8 + tl.dot(b_x4, b_x8, input_precision=PRECISION)
        b_inverse = tl.dot(b_low, b_high, input_precision=PRECISION)
    return b_inverse


@triton.jit
def _load_rows(p_rows, stride_n, stride_d, N: tl.constexpr, K: tl.constexpr, SMALL: tl.constexpr, BK: tl.constexpr):
    """`[16, BK]` rows as stored, zero from row N on, and the inverse of each row's L2 norm."""
    o_n = tl.arange(0, SMALL)
    o_k = tl.arange(0, BK)
    m_rows = (o_n[:, None] < N) & (o_k[None, :] < K)
    b_rows = tl.load(p_rows + o_n[:, None] * stride_n + o_k[None, :] * stride_d, mask=m_rows, other=0.0)
    b_wide = b_rows.to(tl.float32)
    return b_rows, tl.rsqrt(tl.sum(b_wide * b_wide, axis=1) + 1e-6)


@triton.jit
def _read_state(b_rows, b_state):
    """`[16, BV]` fp32 product of rows and state."""
    if b_rows.dtype == tl.bfloat16:
        b_high = b_state.to(tl.bfloat16)
        b_low = (b_state - b_high.to(tl.float32)).to(tl.bfloat16)
        b_read = tl.dot(b_rows, b_high, acc=tl.dot(b_rows, b_low))
    elif b_rows.dtype == tl.float16:
        # Exact in tf32, unlike the state, which fp16 could not hold.
        b_read = tl.dot(b_rows.to(tl.float32), b_state, input_precision="tf32")
    else:
        b_read = tl.dot(b_rows, b_state, input_precision="ieee")
    return b_read


@triton.jit
def _verify_kernel(
    query, key, value, log_decay, beta, state, factor_z, factor_k, factor_g, output,
    stride_qb, stride_qn, stride_qh, stride_qd,
    stride_kb, stride_kn, stride_kh, stride_kd,
    stride_vb, stride_vn, stride_vh, stride_vd,
    stride_gb, stride_gn, stride_gh,
    stride_bb, stride_bn, stride_bh,
    stride_sb, stride_sh, stride_sk, stride_sv,
    stride_zb, stride_zn, stride_zh, stride_zd,
    stride_fb, stride_fn, stride_fh, stride_fd,
    stride_cb, stride_cn, stride_ch,
    scale,
    HV: tl.constexpr, GROUP: tl.constexpr, N: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    SMALL: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i_v, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_k = i_h // GROUP
    o_n = tl.arange(0, SMALL)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_n, m_v = o_n < N, o_v < V
    m_nv = m_n[:, None] & m_v[None, :]

    # 1. The state tile first: everything up to its use runs while it is on its way.
    p_state = state + i_b * stride_sb + i_h.to(tl.int64) * stride_sh
    p_state += o_k[:, None] * stride_sk + o_v[None, :] * stride_sv
    b_state = tl.load(p_state, mask=(o_k[:, None] < K) & m_v[None, :], other=0.0)

    p_gate = log_decay + i_b * stride_gb + i_h * stride_gh
    b_decay = tl.load(p_gate + o_n * stride_gn, mask=m_n, other=0.0)
    b_beta = tl.load(beta + i_b * stride_bb + o_n * stride_bn + i_h * stride_bh, mask=m_n, other=0.0).to(tl.float32)
    p_value = value + i_b * stride_vb + o_n[:, None] * stride_vn + i_h * stride_vh + o_v[None, :] * stride_vd
    b_value = tl.load(p_value, mask=m_nv, other=0.0).to(tl.float32)
    p_key, p_query = key + i_b * stride_kb + i_k * stride_kh, query + i_b * stride_qb + i_k * stride_qh
    b_key, b_key_scale = _load_rows(p_key, stride_kn, stride_kd, N, K, SMALL, BK)
    b_query, b_query_scale = _load_rows(p_query, stride_qn, stride_qd, N, K, SMALL, BK)

    # 2. Gamma, with the exponents of later rows masked before they can overflow, and H^-1.
    b_g = tl.cumsum(b_decay, axis=0)
    m_seen = (o_n[:, None] >= o_n[None, :]) & m_n[:, None]
    b_gamma = tl.exp(tl.where(m_seen, b_g[:, None] - b_g[None, :], float("-inf"))) * b_key_scale[None, :]
    b_keys = tl.trans(b_key)
    b_system = b_gamma * tl.dot(b_key, b_keys, input_precision="ieee") * (b_beta * b_key_scale)[:, None]
    b_inverse = _unit_lower_inverse(tl.where(o_n[:, None] > o_n[None, :], -b_system, 0.0), N, SMALL, PRECISION)
    b_attend = b_gamma * tl.dot(b_query, b_keys, input_precision="ieee") * (b_query_scale * scale)[:, None]

    # 3. Equations 3 and 10.
    b_decay = tl.exp(b_g)
    b_right = b_value - (b_decay * b_key_scale)[:, None] * _read_state(b_key, b_state)
    b_z = tl.dot(b_inverse, b_beta[:, None] * b_right, input_precision=PRECISION)
    b_output = (b_decay * b_query_scale * scale)[:, None] * _read_state(b_query, b_state)
    b_output += tl.dot(b_attend, b_z, input_precision=PRECISION)

    p_output = output + ((i_b * N + o_n[:, None]) * HV + i_h) * V + o_v[None, :]
    tl.store(p_output, b_output.to(output.dtype.element_ty), mask=m_nv)
    p_z = factor_z + i_b * stride_zb + o_n[:, None] * stride_zn + i_h * stride_zh + o_v[None, :] * stride_zd
    tl.store(p_z, b_z, mask=m_nv)
    if i_v == 0:
        tl.store(factor_g + i_b * stride_cb + o_n * stride_cn + i_h * stride_ch, b_g, mask=m_n)
        if i_h % GROUP == 0:
            p_k = factor_k + i_b * stride_fb + o_n[:, None] * stride_fn + i_k * stride_fh + o_k[None, :] * stride_fd
            tl.store(p_k, b_key.to(tl.float32) * b_key_scale[:, None], mask=m_n[:, None] & (o_k[None, :] < K))


@triton.jit(do_not_specialize=["commit_length"])
def _commit_kernel(
    states, factor_z, factor_k, factor_g, commit_length,
    stride_sl, stride_sb, stride_sh, stride_sk, stride_sv,
    stride_zl, stride_zb, stride_zn, stride_zh, stride_zd,
    stride_fl, stride_fb, stride_fn, stride_fh, stride_fd,
    stride_cl, stride_cb, stride_cn, stride_ch,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    SMALL: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr, ON_DEVICE: tl.constexpr,
):  # fmt: skip
    i_v, i_h, i_b = tl.program_id(0), tl.program_id(1) % HV, (tl.program_id(1) // HV).to(tl.int64)
    i_l, i_k = tl.program_id(2).to(tl.int64), i_h // GROUP
    num_rows = tl.load(commit_length).to(tl.int32) if ON_DEVICE else commit_length
    if num_rows > 0:
        o_n = tl.arange(0, SMALL)
        o_k = tl.arange(0, BK)
        o_v = i_v * BV + tl.arange(0, BV)
        m_n, m_k, m_v = o_n < num_rows, o_k < K, o_v < V

        p_state = states + i_l * stride_sl + i_b * stride_sb + i_h.to(tl.int64) * stride_sh
        p_state += o_k[:, None] * stride_sk + o_v[None, :] * stride_sv
        m_state = m_k[:, None] & m_v[None, :]
        b_state = tl.load(p_state, mask=m_state, other=0.0)

        p_g = factor_g + i_l * stride_cl + i_b * stride_cb + i_h * stride_ch
        b_g = tl.load(p_g + o_n * stride_cn, mask=m_n, other=0.0)
        b_last = tl.load(p_g + (num_rows - 1) * stride_cn)
        b_weight = tl.exp(tl.where(m_n, b_last - b_g, float("-inf")))
        p_z = factor_z + i_l * stride_zl + i_b * stride_zb + i_h * stride_zh
        p_z += o_n[:, None] * stride_zn + o_v[None, :] * stride_zd
        b_z = tl.load(p_z, mask=m_n[:, None] & m_v[None, :], other=0.0) * b_weight[:, None]
        p_k = factor_k + i_l * stride_fl + i_b * stride_fb + i_k * stride_fh
        p_k += o_k[:, None] * stride_fd + o_n[None, :] * stride_fn
        b_key = tl.load(p_k, mask=m_k[:, None] & m_n[None, :], other=0.0)

        b_state = tl.exp(b_last) * b_state + tl.dot(b_key, b_z, input_precision=PRECISION)
        tl.store(p_state, b_state, mask=m_state)


def verify_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    recurrent_state: torch.Tensor,
    factors: "CompactFactors",
) -> torch.Tensor:
    """As `gated_delta_rule.verify_gated_delta_rule`."""
    batch, rows, num_k_heads, k_dim = key.shape
    num_v_heads, v_dim = value.shape[2:]
    output = value.new_empty(batch, rows, num_v_heads, v_dim)
    block_v = _block_v(VERIFY_TILE, v_dim)
    with launch_device(value):
        _verify_kernel[(triton.cdiv(v_dim, block_v), num_v_heads, batch)](
            query, key, value, log_decay, beta, recurrent_state, factors.z, factors.k, factors.g, output,
            *query.stride(), *key.stride(), *value.stride(), *log_decay.stride(), *beta.stride(),
            *recurrent_state.stride(), *factors.z.stride(), *factors.k.stride(), *factors.g.stride(),
            k_dim**-0.5,
            HV=num_v_heads, GROUP=num_v_heads // num_k_heads, N=rows, K=k_dim, V=v_dim,
            SMALL=PADDED_ROWS, BK=_padded(k_dim), BV=block_v,
            PRECISION="ieee" if value.dtype == torch.float32 else HALF_PRECISION, num_warps=VERIFY_TILE.num_warps,
        )  # fmt: skip
    return output


def commit_gated_delta_rule(
    recurrent_states: torch.Tensor, factors: "CompactFactors", commit_length: int | torch.Tensor
) -> None:
    """As `gated_delta_rule.commit_gated_delta_rule`."""
    layers, batch, num_v_heads, k_dim, v_dim = recurrent_states.shape
    block_v = _block_v(COMMIT_TILE, v_dim)
    with launch_device(recurrent_states):
        _commit_kernel[(triton.cdiv(v_dim, block_v), batch * num_v_heads, layers)](
            recurrent_states, factors.z, factors.k, factors.g, commit_length,
            *recurrent_states.stride(), *factors.z.stride(), *factors.k.stride(), *factors.g.stride(),
            HV=num_v_heads, GROUP=num_v_heads // factors.k.shape[3], K=k_dim, V=v_dim,
            SMALL=PADDED_ROWS, BK=_padded(k_dim), BV=block_v,
            PRECISION=COMMIT_PRECISION, ON_DEVICE=isinstance(commit_length, torch.Tensor),
            num_warps=COMMIT_TILE.num_warps,
        )  # fmt: skip


def _block_v(tile: Tile, v_dim: int) -> int:
    return min(tile.block_v, _padded(v_dim))


def _padded(size: int) -> int:
    """The power of two that holds `size`, at least the 16 that `tl.dot` needs."""
    return max(16, triton.next_power_of_2(size))
