"""Gated delta rule over a block in Triton: one compiled kernel per number of rows, one launch per commit.

Verify: one program per (value-head tile, value head, sequence). It loads its `[K, BV]` tile of the state first, and
while that is on its way builds the n x n system from the keys. Rows are padded to a tile of 16, the smallest of the
tensor cores: up to 8 rows, keys and queries share one (keys in rows 0..7, queries in rows 8..15), so that one product
reads the state and one gives K K^T and Q K^T; from 9 rows on each has its own. Products take the rows as they came
and are scaled by the inverse norms afterwards: a bf16 row stays exact on the tensor cores, where the fp32 state is
the sum of two bf16 tiles (16 bits of mantissa).

H Z = R (HybridSpec, section on GDN kernels) is solved by products alone. With X = I - H strictly lower triangular,
B its 4 x 4 diagonal blocks and C, F the rest of its 8 x 8 diagonal blocks and what lies outside them:

    D = (I - B)^-1 = (I + B^2)(I + B)     since B^4 = 0
    Y = D R,   Y <- Y + (D C) Y           the first 8 rows, and the last 8 by themselves
    Z = Y + (D F + (D C)(D F)) Y          the last 8 rows, given the first

at most four products one after another. Powers of X beyond the third never appear: for rows with nearly equal keys
they would grow to binomial coefficients that cancel in the sum. What n rows do not need is left out: it is zero.

Commit: one program per (value tile, value head, sequence, layer), which reads the length on the device, loads its tile
and the committed rows, and writes the tile back. Accumulation is fp32 everywhere.

On devices that can, a kernel starts while the one before it ends (programmatic dependent launch). It reads the states
before it waits for that kernel, if the caller says that they are settled, and all else after. It lets the next kernel
start only after its own wait: so at every start, all but the kernel just before have ended.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .common_triton import _can_overlap, launch_device, let_next_start, wait_for_previous

if TYPE_CHECKING:
    from .gated_delta_rule import CompactFactors

PADDED_ROWS = 16


@dataclass(frozen=True)
class Tile:
    """Columns of the state that one program holds, and the warps that hold them."""

    block_v: int
    num_warps: int


# Measured on sm_90 at K = V = 128 beside tiles of 16 and 64 columns: benchmarks/NOTES.md.
VERIFY_TILE = Tile(block_v=32, num_warps=4)
COMMIT_TILE = Tile(block_v=32, num_warps=4)
# Of the solve and of what it feeds, with 16-bit activations: states within 2e-6 of fp32 products even for keys nearly
# alike, and up to a tenth faster than "tf32x3". fp32 activations take "ieee".
HALF_PRECISION = "bf16x3"
# Of the rank-m update, for all activations: within 4e-7 of fp32 products and twice as fast.
COMMIT_PRECISION = "tf32x3"


@triton.jit
def _solve(b_x, b_right, N: tl.constexpr, SMALL: tl.constexpr, PRECISION: tl.constexpr):
    """(I - X)^-1 times `[16, BV]` rows, for strictly lower triangular `[16, 16]` X whose rows from N on are zero."""
    o_n = tl.arange(0, SMALL)
    m_block = (o_n[:, None] // 4) == (o_n[None, :] // 4)
    if N > 1:
        b_rest = tl.where(m_block, 0.0, b_x)
        if N > 4:
            b_x = tl.where(m_block, b_x, 0.0)
            b_update = b_rest + tl.dot(b_x, b_rest, input_precision=PRECISION)
        if N > 2:
            b_square = tl.dot(b_x, b_x, input_precision=PRECISION)
        b_right += tl.dot(b_x, b_right, input_precision=PRECISION)
        if N > 4:
            b_update += tl.dot(b_square, b_update, input_precision=PRECISION)
        if N > 2:
            b_right += tl.dot(b_square, b_right, input_precision=PRECISION)
        if N > 4:
            m_half = (o_n[:, None] // 8) == (o_n[None, :] // 8)
            b_near = tl.where(m_half, b_update, 0.0)
            if N > 8:
                b_far = tl.where(m_half, 0.0, b_update)
                b_far += tl.dot(b_near, b_far, input_precision=PRECISION)
            b_right += tl.dot(b_near, b_right, input_precision=PRECISION)
            if N > 8:
                b_right += tl.dot(b_far, b_right, input_precision=PRECISION)
    return b_right


@triton.jit
def _masked_rows(b_rows, m_rows):
    """`[16, BK]` rows, zero where masked, and each row's squared L2 norm, with the host's epsilon."""
    # Masked here and not by the load: the copy to shared memory follows the mask, and so all loads of the kernel.
    b_rows = tl.where(m_rows, b_rows, 0.0).to(b_rows.dtype)
    b_wide = b_rows.to(tl.float32)
    return b_rows, tl.sum(b_wide * b_wide, axis=1) + 1e-6


@triton.jit
def _read_state(b_rows, b_state):
    """`[16, BV]` fp32 product of rows and state."""
    if b_rows.dtype == tl.bfloat16:
        b_high = b_state.to(tl.bfloat16)
        b_low = (b_state - b_high.to(tl.float32)).to(tl.bfloat16)
        b_read = tl.dot(b_rows, b_high) + tl.dot(b_rows, b_low)
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
    OVERLAPS: tl.constexpr, SETTLED: tl.constexpr,
):  # fmt: skip
    i_v, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_k = i_h // GROUP
    # Row of the block and whether it is a query's, for each row of the tile.
    PACKED: tl.constexpr = N <= SMALL // 2
    HALF: tl.constexpr = SMALL // 2 if PACKED else SMALL
    o_n, o_r = tl.arange(0, SMALL), tl.arange(0, SMALL) % HALF
    m_query = o_n >= HALF
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_n, m_r = o_n < N, o_r < N
    m_nv = m_n[:, None] & m_v[None, :]

    # 1. The state tile first: everything up to its use runs while it is on its way.
    if not SETTLED:
        wait_for_previous(OVERLAPS)
    p_state = state + i_b * stride_sb + i_h.to(tl.int64) * stride_sh
    p_state += o_k[:, None] * stride_sk + o_v[None, :] * stride_sv
    b_state = tl.load(p_state, mask=m_k[:, None] & m_v[None, :], other=0.0)
    if SETTLED:
        wait_for_previous(OVERLAPS)
    let_next_start(OVERLAPS)

    p_key = key + i_b * stride_kb + i_k * stride_kh + o_r[:, None] * stride_kn + o_k[None, :] * stride_kd
    p_query = query + i_b * stride_qb + i_k * stride_qh + o_r[:, None] * stride_qn + o_k[None, :] * stride_qd
    m_rows = m_r[:, None] & m_k[None, :]
    if PACKED:
        b_query = tl.load(tl.where(m_query[:, None], p_query, p_key), mask=m_rows)
    else:
        b_key = tl.load(p_key, mask=m_rows)
        b_query = tl.load(p_query, mask=m_rows)
    p_gate = log_decay + i_b * stride_gb + i_h * stride_gh
    # One number at a time: the sums then need no exchange between threads, in whatever layout they are used.
    b_g = tl.zeros([SMALL], tl.float32)
    for i in tl.static_range(N):
        b_g += tl.where(o_r >= i, tl.load(p_gate + i * stride_gn), 0.0)
    b_beta = tl.load(beta + i_b * stride_bb + o_n * stride_bn + i_h * stride_bh, mask=m_n, other=0.0).to(tl.float32)
    p_value = value + i_b * stride_vb + o_n[:, None] * stride_vn + i_h * stride_vh + o_v[None, :] * stride_vd
    b_value = tl.load(p_value, mask=m_nv, other=0.0).to(tl.float32)
    b_query, b_query_squares = _masked_rows(b_query, m_rows)
    if PACKED:
        b_key, b_key_squares = b_query, b_query_squares
    else:
        b_key, b_key_squares = _masked_rows(b_key, m_rows)
    b_key_scale, b_query_scale = tl.rsqrt(b_key_squares), tl.rsqrt(b_query_squares) * scale

    # 2. Gamma o K K^T and Gamma o Q K^T, with the exponents of later rows masked before they can overflow.
    m_seen = (o_r[:, None] >= o_n[None, :]) & m_n[None, :]
    b_gamma = tl.exp(tl.where(m_seen, b_g[:, None] - b_g[None, :], float("-inf")))
    b_keys = tl.trans(b_key)
    b_attend = b_gamma * tl.dot(b_query, b_keys, input_precision="ieee")
    b_overlap = b_attend
    if not PACKED:
        b_overlap = b_gamma * tl.dot(b_key, b_keys, input_precision="ieee")
    m_before = (o_n[:, None] > o_n[None, :]) & m_n[:, None]
    b_strength = b_beta * b_key_scale
    b_system = tl.where(m_before, -(b_strength * b_key_scale)[:, None] * b_overlap, 0.0)

    # 3. Equations 3 and 10, for the rows of Z times their keys' inverse norms.
    b_decay = tl.exp(b_g)
    b_output = b_decay[:, None] * _read_state(b_query, b_state)
    b_read = b_output
    if not PACKED:
        b_read = b_decay[:, None] * _read_state(b_key, b_state)
    b_right = tl.where(m_n[:, None], b_strength[:, None] * (b_value - b_key_scale[:, None] * b_read), 0.0)
    b_z = _solve(b_system, b_right, N, SMALL, PRECISION)
    b_output = (b_output + tl.dot(b_attend, b_z, input_precision=PRECISION)) * b_query_scale[:, None]
    b_z *= tl.sqrt(b_key_squares)[:, None]

    m_output = ((m_query & m_r) if PACKED else m_n)[:, None] & m_v[None, :]
    p_output = output + ((i_b * N + o_r[:, None]) * HV + i_h) * V + o_v[None, :]
    tl.store(p_output, b_output.to(output.dtype.element_ty), mask=m_output)
    p_z = factor_z + i_b * stride_zb + o_n[:, None] * stride_zn + i_h * stride_zh + o_v[None, :] * stride_zd
    tl.store(p_z, b_z, mask=m_nv)
    if i_v == 0:
        tl.store(factor_g + i_b * stride_cb + o_n * stride_cn + i_h * stride_ch, b_g, mask=m_n)
        if i_h % GROUP == 0:
            p_k = factor_k + i_b * stride_fb + o_n[:, None] * stride_fn + i_k * stride_fh + o_k[None, :] * stride_fd
            tl.store(p_k, b_key.to(tl.float32) * b_key_scale[:, None], mask=m_n[:, None] & m_k[None, :])


@triton.jit(do_not_specialize=["commit_length"])
def _commit_kernel(
    states, factor_z, factor_k, factor_g, commit_length,
    stride_sl, stride_sb, stride_sh, stride_sk, stride_sv,
    stride_zl, stride_zb, stride_zn, stride_zh, stride_zd,
    stride_fl, stride_fb, stride_fn, stride_fh, stride_fd,
    stride_cl, stride_cb, stride_cn, stride_ch,
    HV: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    SMALL: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr, ON_DEVICE: tl.constexpr,
    OVERLAPS: tl.constexpr, SETTLED: tl.constexpr,
):  # fmt: skip
    i_v, i_h, i_b = tl.program_id(0), tl.program_id(1) % HV, (tl.program_id(1) // HV).to(tl.int64)
    i_l, i_k = tl.program_id(2).to(tl.int64), i_h // GROUP
    o_n, o_k, o_v = tl.arange(0, SMALL), tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_state = m_k[:, None] & m_v[None, :]
    p_state = states + i_l * stride_sl + i_b * stride_sb + i_h.to(tl.int64) * stride_sh
    p_state += o_k[:, None] * stride_sk + o_v[None, :] * stride_sv
    if not SETTLED:
        wait_for_previous(OVERLAPS)
    b_state = tl.load(p_state, mask=m_state, other=0.0)
    if SETTLED:
        wait_for_previous(OVERLAPS)
    let_next_start(OVERLAPS)

    num_rows = tl.load(commit_length).to(tl.int32) if ON_DEVICE else commit_length
    if num_rows > 0:
        m_n = o_n < num_rows
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
    state_is_settled: bool = False,
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
            PRECISION="ieee" if value.dtype == torch.float32 else HALF_PRECISION,
            **_launch_options(VERIFY_TILE, value, state_is_settled),
        )  # fmt: skip
    return output


def commit_gated_delta_rule(
    recurrent_states: torch.Tensor,
    factors: "CompactFactors",
    commit_length: int | torch.Tensor,
    states_are_settled: bool = False,
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
            **_launch_options(COMMIT_TILE, recurrent_states, states_are_settled),
        )  # fmt: skip


def _launch_options(tile: Tile, tensor: torch.Tensor, settled: bool) -> dict:
    """Warps, and whether the kernel starts while the one before it ends and reads states before it has ended."""
    options = {"num_warps": tile.num_warps, "OVERLAPS": False, "SETTLED": False}
    if tensor.is_cuda and _can_overlap(tensor.device):
        options |= {"OVERLAPS": True, "SETTLED": settled, "launch_pdl": True}
    return options


def _block_v(tile: Tile, v_dim: int) -> int:
    return min(tile.block_v, _padded(v_dim))


def _padded(size: int) -> int:
    """The power of two that holds `size`, at least the 16 that `tl.dot` needs."""
    return max(16, triton.next_power_of_2(size))
