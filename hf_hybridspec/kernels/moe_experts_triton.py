"""The MoE block of at most 16 rows in Triton: three launches.

Router: programs over (tile of experts, part of H); the one that finishes last turns the sums into top-k and into the
list of distinct experts. Experts: one program per (place in that list, tile of rows of a weight); place 0 is the
shared expert, places past the list's end return at once, so the grid never depends on the routing. Down projections go
to a buffer by row and top-k position; the program that finishes a tile last adds them up in that order, so a row's
result depends neither on timing nor on the other rows.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .common_triton import launch_device
from .linear_triton import NORM, PADDED_ROWS, load_tile, multiply_add, prepare_rows
from .moe_experts import ActivatedRows, ExpertWeights, RoutedRows


@dataclass(frozen=True)
class Tile:
    """Weight rows and columns of one program's step, programs that share H, warps and pipeline stages."""

    block_n: int
    block_k: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 4


# Measured on an H200 at hidden 2048 and inner 512, benchmarks/NOTES.md.
ROUTER_TILE = Tile(block_n=32, block_k=128, splits=8)
GATE_UP_TILE = Tile(block_n=32, block_k=128, num_stages=3)
DOWN_TILE = Tile(block_n=64, block_k=128, num_stages=3)


@triton.jit
def _router_kernel(
    rows, scale, weight, partial, squares, counters,
    top_k_index, top_k_weights, shared_gate, expert_ids, slots, num_distinct, eps,
    stride_xn, stride_xk, stride_wn, stride_wk,
    ROWS: tl.constexpr, E: tl.constexpr, H: tl.constexpr, TOP_K: tl.constexpr, BE: tl.constexpr,
    SMALL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i_n, i_s = tl.program_id(0), tl.program_id(1)
    o_r, o_n = tl.arange(0, SMALL), i_n * BN + tl.arange(0, BN)
    m_r, m_n = o_r < ROWS, o_n < E + 1
    b_sum = tl.zeros([SMALL, BN], tl.float32)
    b_squares = tl.zeros([SMALL], tl.float32)
    STEPS: tl.constexpr = (H + BK * SPLITS - 1) // (BK * SPLITS)
    for step in range(STEPS):
        o_k = (i_s * STEPS + step) * BK + tl.arange(0, BK)
        m_k = o_k < H
        b_weight = load_tile(weight, o_n, o_k, stride_wn, stride_wk, m_n, m_k)
        b_rows = load_tile(rows, o_r, o_k, stride_xn, stride_xk, m_r, m_k)
        b_scale = tl.load(scale + o_k, mask=m_k, other=0.0)
        b_rows, b_squares = prepare_rows(b_rows, b_rows, b_scale, b_squares, eps, NORM, BK)
        b_sum = multiply_add(b_rows, b_weight, b_sum, PRECISION)
    tl.store(partial + (i_s * SMALL + o_r[:, None]) * BE + o_n[None, :], b_sum, mask=m_n[None, :])
    if i_n == 0:
        tl.store(squares + i_s * SMALL + o_r, b_squares)
    tl.debug_barrier()
    num_programs = tl.num_programs(0) * SPLITS
    if tl.atomic_add(counters, 1, sem="acq_rel") == num_programs - 1:
        tl.store(counters, 0)
        o_e = tl.arange(0, BE)
        b_logits = tl.zeros([SMALL, BE], tl.float32)
        b_squares = tl.zeros([SMALL], tl.float32)
        for i_other in range(SPLITS):
            p_logits = partial + (i_other * SMALL + o_r[:, None]) * BE + o_e[None, :]
            b_logits += tl.load(p_logits, mask=o_e[None, :] <= E, other=0.0, cache_modifier=".cg")
            b_squares += tl.load(squares + i_other * SMALL + o_r, cache_modifier=".cg")
        b_logits *= tl.rsqrt(b_squares / H + eps)[:, None]
        b_logits = b_logits.to(rows.dtype.element_ty).to(tl.float32)
        b_gate = tl.sum(tl.where(o_e[None, :] == E, b_logits, 0.0), axis=1)
        tl.store(shared_gate + o_r, tl.sigmoid(b_gate).to(rows.dtype.element_ty).to(tl.float32), mask=m_r)

        # Exponentials of the experts; the softmax's denominator cancels in the weights.
        b_logits = tl.where(o_e[None, :] < E, b_logits, float("-inf"))
        b_probs = tl.exp(b_logits - tl.max(b_logits, axis=1)[:, None])
        b_left = b_probs
        b_total = tl.zeros([SMALL], tl.float32)
        b_slots = tl.full([SMALL, BE], -1, tl.int32)
        for slot in tl.static_range(TOP_K):
            b_best = tl.argmax(b_left, axis=1)
            b_total += tl.max(b_left, axis=1)
            m_best = o_e[None, :] == b_best[:, None]
            b_left = tl.where(m_best, -1.0, b_left)
            b_slots = tl.where(m_best & m_r[:, None], slot, b_slots)
            tl.store(top_k_index + o_r * TOP_K + slot, b_best.to(tl.int32), mask=m_r)
        for slot in tl.static_range(TOP_K):
            b_weight = tl.sum(tl.where(b_slots == slot, b_probs, 0.0), axis=1) / b_total
            b_weight = b_weight.to(rows.dtype.element_ty).to(tl.float32)
            tl.store(top_k_weights + o_r * TOP_K + slot, b_weight, mask=m_r)

        b_hit = (tl.max(b_slots, axis=0) >= 0).to(tl.int32)
        b_place = tl.cumsum(b_hit, axis=0) - 1
        tl.store(expert_ids + b_place, o_e, mask=b_hit > 0)
        tl.store(slots + b_place[None, :] * SMALL + o_r[:, None], b_slots, mask=b_hit[None, :] > 0)
        tl.store(num_distinct, tl.sum(b_hit, axis=0))


@triton.jit
def _swiglu_tile(
    rows, scale, p_gate, p_out, o_out, m_r, o_n, eps, stride_xn, stride_xk, stride_wn, stride_wk,
    H: tl.constexpr, SIZE: tl.constexpr, SMALL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Columns `o_n` of SwiGLU of one expert, whose up rows follow its SIZE gate rows, to the rows `o_out`."""
    o_r = tl.arange(0, SMALL)
    m_n = o_n < SIZE
    b_gate, b_up = tl.zeros([SMALL, BN], tl.float32), tl.zeros([SMALL, BN], tl.float32)
    b_squares = tl.zeros([SMALL], tl.float32)
    for i_k in range(tl.cdiv(H, BK)):
        o_k = i_k * BK + tl.arange(0, BK)
        m_k = o_k < H
        b_gate_weight = load_tile(p_gate, o_n, o_k, stride_wn, stride_wk, m_n, m_k)
        b_up_weight = load_tile(p_gate, SIZE + o_n, o_k, stride_wn, stride_wk, m_n, m_k)
        b_rows = load_tile(rows, o_r, o_k, stride_xn, stride_xk, m_r, m_k)
        b_scale = tl.load(scale + o_k, mask=m_k, other=0.0)
        b_rows, b_squares = prepare_rows(b_rows, b_rows, b_scale, b_squares, eps, NORM, BK)
        b_gate = multiply_add(b_rows, b_gate_weight, b_gate, PRECISION)
        b_up = multiply_add(b_rows, b_up_weight, b_up, PRECISION)
    b_rstd = tl.rsqrt(b_squares / H + eps)[:, None]
    b_gate = (b_gate * b_rstd).to(rows.dtype.element_ty).to(tl.float32)
    b_up = (b_up * b_rstd).to(rows.dtype.element_ty)
    b_out = (b_gate * tl.sigmoid(b_gate)).to(rows.dtype.element_ty) * b_up
    tl.store(p_out + o_out[:, None] * SIZE + o_n[None, :], b_out, mask=m_r[:, None] & m_n[None, :])


@triton.jit
def _gate_up_kernel(
    rows, scale, expert_ids, slots, num_distinct, gate_up, shared_gate_up, routed_out, shared_out, eps,
    stride_xn, stride_xk, stride_we, stride_wn, stride_wk, stride_sn, stride_sk,
    ROWS: tl.constexpr, H: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, TOP_K: tl.constexpr,
    SMALL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i_n, i_p = tl.program_id(0), tl.program_id(1)
    o_r, o_n = tl.arange(0, SMALL), i_n * BN + tl.arange(0, BN)
    m_r = o_r < ROWS
    if i_p == 0:
        _swiglu_tile(
            rows, scale, shared_gate_up, shared_out, o_r, m_r, o_n, eps, stride_xn, stride_xk, stride_sn, stride_sk,
            H, SHARED, SMALL, BN, BK, PRECISION,
        )  # fmt: skip
    elif i_p <= tl.load(num_distinct):
        i_e = tl.load(expert_ids + i_p - 1).to(tl.int64)
        b_slots = tl.load(slots + (i_p - 1) * SMALL + o_r)
        _swiglu_tile(
            rows, scale, gate_up + i_e * stride_we, routed_out, o_r * TOP_K + b_slots, m_r & (b_slots >= 0), o_n, eps,
            stride_xn, stride_xk, stride_wn, stride_wk, H, INNER, SMALL, BN, BK, PRECISION,
        )  # fmt: skip


@triton.jit
def _down_tile(
    p_rows, o_source, m_r, b_factor, p_weight, p_out, o_out, o_n, stride_wn, stride_wk,
    H: tl.constexpr, SIZE: tl.constexpr, SMALL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Columns `o_n` of one expert's weighted down projection of the rows `o_source`, to the rows `o_out`."""
    m_n = o_n < H
    b_sum = tl.zeros([SMALL, BN], tl.float32)
    for i_k in range(tl.cdiv(SIZE, BK)):
        o_k = i_k * BK + tl.arange(0, BK)
        m_k = o_k < SIZE
        b_weight = load_tile(p_weight, o_n, o_k, stride_wn, stride_wk, m_n, m_k)
        b_rows = load_tile(p_rows, o_source, o_k, SIZE, 1, m_r, m_k)
        b_sum = multiply_add(b_rows, b_weight, b_sum, PRECISION)
    tl.store(p_out + o_out[:, None] * H + o_n[None, :], b_sum * b_factor[:, None], mask=m_r[:, None] & m_n[None, :])


@triton.jit
def _down_kernel(
    routed_in, shared_in, expert_ids, slots, num_distinct, top_k_weights, shared_gate, down, shared_down, residual,
    partial, counters, output,
    stride_we, stride_wn, stride_wk, stride_sn, stride_sk, stride_rn, stride_rk,
    ROWS: tl.constexpr, H: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, TOP_K: tl.constexpr,
    SMALL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i_n, i_p = tl.program_id(0), tl.program_id(1)
    o_r, o_n = tl.arange(0, SMALL), i_n * BN + tl.arange(0, BN)
    m_r, o_first = o_r < ROWS, o_r * (TOP_K + 1)
    num_places = tl.load(num_distinct)
    if i_p <= num_places:
        if i_p == 0:
            b_factor = tl.load(shared_gate + o_r, mask=m_r, other=0.0)
            _down_tile(
                shared_in, o_r, m_r, b_factor, shared_down, partial, o_first + TOP_K, o_n, stride_sn, stride_sk,
                H, SHARED, SMALL, BN, BK, PRECISION,
            )  # fmt: skip
        else:
            i_e = tl.load(expert_ids + i_p - 1).to(tl.int64)
            b_slots = tl.load(slots + (i_p - 1) * SMALL + o_r)
            m_member = m_r & (b_slots >= 0)
            o_source = o_r * TOP_K + b_slots
            b_factor = tl.load(top_k_weights + o_source, mask=m_member, other=0.0)
            _down_tile(
                routed_in, o_source, m_member, b_factor, down + i_e * stride_we, partial, o_first + b_slots, o_n,
                stride_wn, stride_wk, H, INNER, SMALL, BN, BK, PRECISION,
            )  # fmt: skip
        tl.debug_barrier()
        if tl.atomic_add(counters + i_n, 1, sem="acq_rel") == num_places:
            tl.store(counters + i_n, 0)
            m_n = o_n < H
            b_total = load_tile(residual, o_r, o_n, stride_rn, stride_rk, m_r, m_n).to(tl.float32)
            for slot in tl.static_range(TOP_K + 1):
                b_total += load_tile(partial + slot * H, o_first, o_n, H, 1, m_r, m_n)
            p_total = output + o_r[:, None] * H + o_n[None, :]
            tl.store(p_total, b_total.to(output.dtype.element_ty), mask=m_r[:, None] & m_n[None, :])


def route_rows(rows, norm_scale, weight, top_k, eps, counters=None) -> RoutedRows:
    """As `moe_experts.route_rows`."""
    (num_rows, hidden), num_experts = rows.shape, weight.shape[0] - 1
    tile = ROUTER_TILE
    block_e = triton.next_power_of_2(num_experts + 1)
    places = min(num_rows * top_k, num_experts)
    integers = {"dtype": torch.int32, "device": rows.device}
    routed = RoutedRows(
        top_k_index=torch.empty(num_rows, top_k, **integers),
        top_k_weights=rows.new_empty(num_rows, top_k, dtype=torch.float32),
        shared_gate=rows.new_empty(num_rows, dtype=torch.float32),
        expert_ids=torch.empty(places, **integers),
        slots=torch.empty(places, PADDED_ROWS, **integers),
        num_distinct=torch.empty(1, **integers),
    )
    partial = rows.new_empty(tile.splits, PADDED_ROWS, block_e, dtype=torch.float32)
    squares = rows.new_empty(tile.splits, PADDED_ROWS, dtype=torch.float32)
    counters = torch.zeros(1, **integers) if counters is None else counters
    with launch_device(rows):
        _router_kernel[(triton.cdiv(num_experts + 1, tile.block_n), tile.splits)](
            rows, norm_scale, weight, partial, squares, counters,
            routed.top_k_index, routed.top_k_weights, routed.shared_gate, routed.expert_ids, routed.slots,
            routed.num_distinct, eps, *rows.stride(), *weight.stride(),
            ROWS=num_rows, E=num_experts, H=hidden, TOP_K=top_k, BE=block_e, SMALL=PADDED_ROWS,
            BN=tile.block_n, BK=tile.block_k, SPLITS=tile.splits, PRECISION=_precision(rows),
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return routed


def expert_gate_up(rows, norm_scale, routed: RoutedRows, weights: ExpertWeights, eps) -> ActivatedRows:
    """As `moe_experts.expert_gate_up`."""
    tile, (num_rows, top_k) = GATE_UP_TILE, routed.top_k_index.shape
    inner, shared = weights.down.shape[2], weights.shared_down.shape[1]
    activated = ActivatedRows(rows.new_empty(num_rows, top_k, inner), rows.new_empty(num_rows, shared))
    with launch_device(rows):
        _gate_up_kernel[(triton.cdiv(max(inner, shared), tile.block_n), routed.expert_ids.shape[0] + 1)](
            rows, norm_scale, routed.expert_ids, routed.slots, routed.num_distinct,
            weights.gate_up, weights.shared_gate_up, activated.routed, activated.shared, eps,
            *rows.stride(), *weights.gate_up.stride(), *weights.shared_gate_up.stride(),
            ROWS=num_rows, H=rows.shape[1], INNER=inner, SHARED=shared, TOP_K=top_k, SMALL=PADDED_ROWS,
            BN=tile.block_n, BK=tile.block_k, PRECISION=_precision(rows),
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return activated


def expert_down(activated: ActivatedRows, routed: RoutedRows, weights: ExpertWeights, residual, counters=None):
    """As `moe_experts.expert_down`."""
    tile, (num_rows, top_k) = DOWN_TILE, routed.top_k_index.shape
    hidden, inner, shared = residual.shape[1], weights.down.shape[2], weights.shared_down.shape[1]
    num_tiles = triton.cdiv(hidden, tile.block_n)
    partial = residual.new_empty(num_rows, top_k + 1, hidden, dtype=torch.float32)
    output = torch.empty_like(residual, memory_format=torch.contiguous_format)
    if counters is None:
        counters = torch.zeros(num_tiles, dtype=torch.int32, device=residual.device)
    with launch_device(residual):
        _down_kernel[(num_tiles, routed.expert_ids.shape[0] + 1)](
            activated.routed, activated.shared, routed.expert_ids, routed.slots, routed.num_distinct,
            routed.top_k_weights, routed.shared_gate, weights.down, weights.shared_down, residual,
            partial, counters, output,
            *weights.down.stride(), *weights.shared_down.stride(), *residual.stride(),
            ROWS=num_rows, H=hidden, INNER=inner, SHARED=shared, TOP_K=top_k, SMALL=PADDED_ROWS,
            BN=tile.block_n, BK=tile.block_k, PRECISION=_precision(residual),
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return output


def _precision(rows: torch.Tensor) -> str:
    return "ieee" if rows.dtype == torch.float32 else "tf32"
