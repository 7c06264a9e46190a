"""Gated delta rule over a block in Triton: one compiled kernel per number of rows, one launch per commit.

Verify: one program per (value-head tile, value head, sequence). It loads its `[K, BV]` tile of the state first and
splits it into the operands of its products before it waits for the rows. Rows are padded to a tile of 16, the least
that tensor cores take: up to 8 rows, keys and queries share one (keys in rows 0..7, queries in rows 8..15), so that
one product reads the state and one gives K K^T and Q K^T; from 9 rows on each has its own. Products take the rows as
they came and are scaled by the inverse norms afterwards: a bf16 row stays exact on the tensor cores, where the fp32
state is the difference of two bf16 tiles (16 bits of mantissa).

A warp owns 8 columns of the tile and solves for them by itself: what follows the first products is held as
`[BV / 8, 16, 8]`, and matrices of rows as `[BV / 8, 16, 16]`, one copy a warp, so that no product, sum or change of
layout crosses warps. Shared memory and barriers are left for rows, K K^T and Q K^T, values, and stores.

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
    """Columns of the state that one program holds, and the warps that hold them.

    Attributes:
        max_registers: of a thread. Given where a compiler left to itself spills or loads late to use fewer.
    """

    block_v: int
    num_warps: int
    max_registers: int | None = None


# Measured on sm_90 at K = V = 128 beside tiles of 16 and 64 columns: benchmarks/NOTES.md.
VERIFY_TILE = Tile(block_v=32, num_warps=4, max_registers=224)
COMMIT_TILE = Tile(block_v=32, num_warps=4)
# Columns of a warp: the width of the tensor cores' results.
WARP_COLUMNS = 8
# Of the solve and of what it feeds, with 16-bit activations; fp32 activations take "ieee". Three bf16 products of the
# halves of both factors, as "bf16x3", but high halves are cut off instead of rounded, which takes fewer instructions.
HALF_PRECISION = "split"
# The same from 9 rows on, where the solve takes longest: states are then within 4e-5 of fp32 products (2e-4 where keys
# are nearly equal), still far from what bf16 rows leave of them.
LONG_PRECISION = "tf32"
# Of the rank-m update, for all activations: within 4e-7 of fp32 products and twice as fast.
COMMIT_PRECISION = "tf32x3"


@triton.jit
def _split(b_tile):
    """An fp32 tile as the difference of two bf16 tiles, within 2^-16 of it."""
    b_high = (b_tile.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return b_high.to(tl.bfloat16), (b_high - b_tile).to(tl.bfloat16)


@triton.jit
def _product(b_left, b_right, b_sum, PRECISION: tl.constexpr):
    """b_sum + b_left b_right for fp32 tiles."""
    if PRECISION == "split":
        b_left_high, b_left_low = _split(b_left)
        b_right_high, b_right_low = _split(b_right)
        b_small = tl.dot(b_left_high, b_right_low, tl.dot(b_left_low, b_right_high))
        # Subtracted, so that the two sums do not wait for each other.
        b_sum = tl.dot(b_left_high, b_right_high, b_sum) - b_small
    else:
        b_sum = tl.dot(b_left, b_right, b_sum, input_precision=PRECISION)
    return b_sum


@triton.jit
def _solve(b_x, b_right, N: tl.constexpr, SMALL: tl.constexpr, PRECISION: tl.constexpr):
    """(I - X)^-1 times `[C, 16, 8]` rows, for strictly lower triangular `[C, 16, 16]` X, zero in rows from N on."""
    o_n = tl.arange(0, SMALL)
    m_block = ((o_n[:, None] // 4) == (o_n[None, :] // 4))[None]
    if N > 1:
        b_rest = tl.where(m_block, 0.0, b_x)
        if N > 4:
            b_x = tl.where(m_block, b_x, 0.0)
            b_update = _product(b_x, b_rest, b_rest, PRECISION)
        if N > 2:
            b_square = _product(b_x, b_x, tl.zeros_like(b_x), PRECISION)
        b_right = _product(b_x, b_right, b_right, PRECISION)
        if N > 4:
            b_update = _product(b_square, b_update, b_update, PRECISION)
        if N > 2:
            b_right = _product(b_square, b_right, b_right, PRECISION)
        if N > 4:
            m_half = ((o_n[:, None] // 8) == (o_n[None, :] // 8))[None]
            b_near = tl.where(m_half, b_update, 0.0)
            if N > 8:
                b_far = tl.where(m_half, 0.0, b_update)
                b_far = _product(b_near, b_far, b_far, PRECISION)
            b_right = _product(b_near, b_right, b_right, PRECISION)
            if N > 8:
                b_right = _product(b_far, b_right, b_right, PRECISION)
    return b_right


@triton.jit
def _split_state(b_state, m_state, dtype: tl.constexpr):
    """The tile of the state as the operands of its products with rows of `dtype`; one is not used but for bf16."""
    # Masked here and not by the load, which keeps the split in front of the copy to shared memory.
    b_state = tl.where(m_state, b_state, 0.0)
    b_high, b_low = b_state, b_state
    if dtype == tl.bfloat16:
        b_high, b_low = _split(b_state)
    return b_high, b_low


@triton.jit
def _read_state(b_rows, b_high, b_low, COLUMNS: tl.constexpr):
    """`[C, 16, 8]` fp32 product of rows and state, by the columns of each warp."""
    if b_rows.dtype == tl.bfloat16:
        b_read = tl.dot(b_rows, b_high) - tl.dot(b_rows, b_low)
    elif b_rows.dtype == tl.float16:
        # Exact in tf32, unlike the state, which fp16 could not hold.
        b_read = tl.dot(b_rows.to(tl.float32), b_high, input_precision="tf32")
    else:
        b_read = tl.dot(b_rows, b_high, input_precision="ieee")
    return tl.permute(tl.reshape(b_read, (b_read.shape[0], b_read.shape[1] // COLUMNS, COLUMNS)), (1, 0, 2))


@triton.jit
def _copies(b_matrix, COPIES: tl.constexpr):
    """`[C, 16, 16]` copies of a `[1, 16, 16]` matrix."""
    return tl.broadcast_to(b_matrix, (COPIES, b_matrix.shape[1], b_matrix.shape[2]))


@triton.jit
def _copy_for_each_warp(b_matrix, COPIES: tl.constexpr):
    """`[C, 16, 16]` copies of a `[1, 16, 16]` fp32 matrix, held as the products of the solve hold their results.

    A compiler takes the layout of what is computed from them from here: this adds a product of zeros.
    """
    b_zero = tl.zeros([COPIES, b_matrix.shape[1], b_matrix.shape[2]], tl.bfloat16)
    return tl.dot(b_zero, b_zero, _copies(b_matrix, COPIES))


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
    SMALL: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAPS: tl.constexpr, SETTLED: tl.constexpr,
):  # fmt: skip
    i_v, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_k = i_h // GROUP
    # Row of the block and whether it is a query's, for each row of the tile.
    PACKED: tl.constexpr = N <= SMALL // 2
    HALF: tl.constexpr = SMALL // 2 if PACKED else SMALL
    COPIES: tl.constexpr = BV // COLUMNS
    o_n, o_r, o_copy = tl.arange(0, SMALL), tl.arange(0, SMALL) % HALF, tl.arange(0, COPIES)
    m_query = o_n >= HALF
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_n, m_r = o_n < N, o_r < N
    # Rows to load: those that do not exist are the last one, which costs no predicate, and are masked in the end.
    o_first, o_last = tl.minimum(o_r, N - 1), tl.minimum(o_n, N - 1)
    # The tile's columns by warp and column, and the keys' elements that this program stores.
    o_row = o_n[None, :, None]
    o_column = i_v * BV + o_copy[:, None, None] * COLUMNS + tl.arange(0, COLUMNS)[None, None, :]
    o_part = (i_v * GROUP + i_h % GROUP) * COPIES + o_copy[:, None, None]
    o_part = o_part * PART + tl.arange(0, PART)[None, None, :]
    m_value = m_n[None, :, None] & (o_column < V)
    m_part = m_n[None, :, None] & (o_part < K)
    m_same = (o_n[:, None] == o_n[None, :])[None]

    # 1. The state tile first. All that does not need rows is done while the kernel before this one ends.
    if not SETTLED:
        wait_for_previous(OVERLAPS)
    p_state = state + i_b * stride_sb + i_h.to(tl.int64) * stride_sh
    p_state += o_k[:, None] * stride_sk + o_v[None, :] * stride_sv
    m_state = m_k[:, None] & m_v[None, :]
    b_high, b_low = _split_state(tl.load(p_state, mask=m_state), m_state, query.dtype.element_ty)

    p_key = key + i_b * stride_kb + i_k * stride_kh + o_first[:, None] * stride_kn + o_k[None, :] * stride_kd
    p_query = query + i_b * stride_qb + i_k * stride_qh + o_first[:, None] * stride_qn + o_k[None, :] * stride_qd
    p_part = key + i_b * stride_kb + i_k * stride_kh + o_last[None, :, None] * stride_kn + o_part * stride_kd
    p_value = value + i_b * stride_vb + i_h * stride_vh + o_last[None, :, None] * stride_vn + o_column * stride_vd
    p_step = log_decay + i_b * stride_gb + i_h * stride_gh + o_first[None, :] * stride_gn
    p_beta = beta + i_b * stride_bb + i_h * stride_bh + o_last[None, :] * stride_bn
    p_output = output + ((i_b * N + o_r[None, :, None]) * HV + i_h) * V + o_column
    p_z = factor_z + i_b * stride_zb + i_h * stride_zh + o_row * stride_zn + o_column * stride_zd
    p_k = factor_k + i_b * stride_fb + i_k * stride_fh + o_row * stride_fn + o_part * stride_fd
    p_g = factor_g + i_b * stride_cb + i_h * stride_ch + o_copy[:, None] * 0 + o_n[None, :] * stride_cn
    m_output = ((m_query & m_r) if PACKED else m_n)[None, :, None] & (o_column < V)
    if SETTLED:
        wait_for_previous(OVERLAPS)
    let_next_start(OVERLAPS)

    # All loads before the first use. Rows are masked after the load and not by it: the copy to shared memory follows
    # the mask, and so all loads.
    if PACKED:
        b_key = tl.load(tl.where(m_query[:, None], p_query, p_key), mask=m_k[None, :])
    else:
        b_key = tl.load(p_key, mask=m_k[None, :])
        b_query = tl.load(p_query, mask=m_k[None, :])
    b_value = tl.load(p_value, mask=o_column < V, other=0.0)
    b_step = tl.load(p_step)
    b_beta = tl.load(p_beta).to(tl.float32)
    b_part = tl.load(p_part, mask=o_part < K)
    if not PACKED:
        b_query = tl.where(m_k[None, :], b_query, 0.0).to(query.dtype.element_ty)
    b_key = tl.where(m_k[None, :], b_key, 0.0).to(key.dtype.element_ty)

    # 2. K K^T, Q K^T, and K and Q by the state.
    b_keys = tl.trans(b_key)
    b_overlap = tl.dot(b_key, b_keys, input_precision="ieee")
    if not PACKED:
        b_attend = tl.dot(b_query, b_keys, input_precision="ieee")
    b_overlap = _copy_for_each_warp(b_overlap[None], COPIES)
    b_read = _read_state(b_key, b_high, b_low, COLUMNS)
    b_squares = tl.sum(tl.where(m_same, b_overlap, 0.0), axis=2) + 1e-6
    if PACKED:
        b_attend, b_output, b_query_squares = b_overlap, b_read, b_squares
    else:
        b_attend = _copies(b_attend[None], COPIES)
        b_output = _read_state(b_query, b_high, b_low, COLUMNS)
        if K == BK:
            b_query_squares = (tl.sum(b_query.to(tl.float32) * b_query.to(tl.float32), axis=1) + 1e-6)[None]
        else:
            # All lanes of a warp would hold copies of such sums, and would write them to one address.
            b_square = _copies(tl.dot(b_query, tl.trans(b_query), input_precision="ieee")[None], COPIES)
            b_query_squares = tl.sum(tl.where(m_same, b_square, 0.0), axis=2) + 1e-6
    b_key_scale, b_query_scale = tl.rsqrt(b_squares), tl.rsqrt(b_query_squares) * scale

    # 3. Gamma, with the exponents of later rows masked before they can overflow. A row's sum of decays is the same
    # number wherever it is used.
    m_until = ((o_r[:, None] >= o_n[None, :]) & m_n[None, :])[None]
    b_g = tl.sum(_copy_for_each_warp(tl.where(m_until, b_step[:, None, :], 0.0), COPIES), axis=2)
    tl.store(p_k, b_part * b_key_scale[:, :, None], mask=m_part)
    tl.store(p_g, b_g, mask=(o_copy[:, None] + i_v == 0) & m_n[None, :])
    b_g_column = tl.sum(tl.where(m_same, b_g[:, :, None], 0.0), axis=1)
    b_gamma = tl.exp(tl.where(m_until, b_g[:, :, None] - b_g_column[:, None, :], float("-inf")))

    # 4. Equations 3 and 10, for the rows of Z times their keys' inverse norms.
    m_before = ((o_n[:, None] > o_n[None, :]) & m_n[:, None])[None]
    b_strength = b_beta * b_key_scale
    b_system = tl.where(m_before, -(b_strength * b_key_scale)[:, :, None] * (b_gamma * b_overlap), 0.0)
    b_decay = tl.exp(b_g)[:, :, None]
    b_right = b_value.to(tl.float32) - b_key_scale[:, :, None] * (b_decay * b_read)
    b_right = tl.where(m_n[None, :, None], b_strength[:, :, None] * b_right, 0.0)
    b_z = _solve(b_system, b_right, N, SMALL, PRECISION)
    b_output = _product(b_gamma * b_attend, b_z, b_decay * b_output, PRECISION) * b_query_scale[:, :, None]
    tl.store(p_output, b_output.to(output.dtype.element_ty), mask=m_output)
    tl.store(p_z, b_z * tl.sqrt(b_squares)[:, :, None], mask=m_value)


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
    # Every program of a key head stores a part of its keys, one warp next to the other.
    sharers = triton.cdiv(v_dim, block_v) * (num_v_heads // num_k_heads) * (block_v // WARP_COLUMNS)
    part = triton.next_power_of_2(triton.cdiv(k_dim, sharers))
    with launch_device(value):
        _verify_kernel[(triton.cdiv(v_dim, block_v), num_v_heads, batch)](
            query, key, value, log_decay, beta, recurrent_state, factors.z, factors.k, factors.g, output,
            *query.stride(), *key.stride(), *value.stride(), *log_decay.stride(), *beta.stride(),
            *recurrent_state.stride(), *factors.z.stride(), *factors.k.stride(), *factors.g.stride(),
            k_dim**-0.5,
            HV=num_v_heads, GROUP=num_v_heads // num_k_heads, N=rows, K=k_dim, V=v_dim,
            SMALL=PADDED_ROWS, BK=_padded(k_dim), BV=block_v, COLUMNS=WARP_COLUMNS, PART=part,
            PRECISION=_precision(value.dtype, rows),
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
        options |= {"OVERLAPS": True, "SETTLED": settled, "launch_pdl": True, "maxnreg": tile.max_registers}
    return options


def _precision(dtype: torch.dtype, rows: int) -> str:
    if dtype == torch.float32:
        return "ieee"
    return HALF_PRECISION if rows <= PADDED_ROWS // 2 else LONG_PRECISION


def _block_v(tile: Tile, v_dim: int) -> int:
    return min(tile.block_v, _padded(v_dim))


def _padded(size: int) -> int:
    """The power of two that holds `size`, at least the 16 that `tl.dot` needs."""
    return max(16, triton.next_power_of_2(size))
