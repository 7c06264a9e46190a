"""The MoE block of at most 16 rows in Triton: three launches.

Router: programs over (tile of experts, part of H); the one that finishes last turns the sums into top-k and into the
list of distinct experts. Experts: one program per (place in that list, tile of rows of a weight); place 0 is the
shared expert, places past the list's end return at once, so the grid never depends on the routing. Down projections go
to a buffer by row and top-k position; the program that finishes a tile last adds them up in that order, so a row's
result depends neither on timing nor on the other rows.
"""

import torch
import triton
import triton.language as tl

from .common_triton import launch_device, launch_options, let_next_start, prefetch_rows, wait_for_previous
from .dense_mlp_triton import swiglu
from .linear_triton import PADDED_ROWS, load_tile, multiply_add, precision_of
from .moe_experts import ActivatedRows, ExpertWeights, RoutedRows
from .residual_rows import ResidualRows
from .residual_rows_triton import inverse_rms, load_squares, squares_options, store_residual
from .tiles import tile_of


@triton.jit
def _choose_experts(
    partial, squares, top_k_index, top_k_weights, shared_gate, expert_ids, slots, num_distinct, eps, num_rows,
    E: tl.constexpr, H: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr, TOP_K: tl.constexpr,
    BE: tl.constexpr, ROWS: tl.constexpr, SMALL: tl.constexpr, SPLITS: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """From the partial sums of the first ROWS rows to their top-k and to the list of distinct experts."""
    o_t, o_e = tl.arange(0, ROWS), tl.arange(0, BE)
    m_t, m_e = o_t < num_rows, o_e < E
    b_squares = load_squares(squares, o_t, m_t, PARTS, PADDED, SMALL)
    b_logits, b_gate = tl.zeros([ROWS, BE], tl.float32), tl.zeros([ROWS], tl.float32)
    for i_other in range(SPLITS):
        p_logits = partial + (i_other * SMALL + o_t) * (E + 1)
        b_logits += tl.load(p_logits[:, None] + o_e[None, :], mask=m_e[None, :], other=0.0, cache_modifier=".cg")
        b_gate += tl.load(p_logits + E, cache_modifier=".cg")
    b_rstd = inverse_rms(b_squares, eps, H)
    b_gate = (b_gate * b_rstd).to(ROUNDED).to(tl.float32)
    tl.store(shared_gate + o_t, tl.sigmoid(b_gate).to(ROUNDED).to(tl.float32), mask=m_t)

    # Exponentials of the experts; the softmax's denominator cancels in the weights.
    b_logits = (b_logits * b_rstd[:, None]).to(ROUNDED).to(tl.float32)
    b_logits = tl.where(m_e[None, :], b_logits, float("-inf"))
    b_probs = tl.exp(b_logits - tl.max(b_logits, axis=1)[:, None])
    b_left = b_probs
    b_total = tl.zeros([ROWS], tl.float32)
    b_slots = tl.full([ROWS, BE], -1, tl.int32)
    for slot in tl.static_range(TOP_K):
        b_most, b_best = tl.max(b_left, axis=1, return_indices=True)
        b_total += b_most
        m_best = o_e[None, :] == b_best[:, None]
        b_left = tl.where(m_best, -1.0, b_left)
        b_slots = tl.where(m_best & m_t[:, None], slot, b_slots)
        tl.store(top_k_index + o_t * TOP_K + slot, b_best.to(tl.int32), mask=m_t)
    b_weights = (b_probs / b_total[:, None]).to(ROUNDED).to(tl.float32)
    tl.store(top_k_weights + o_t[:, None] * TOP_K + b_slots, b_weights, mask=b_slots >= 0)

    b_hit = (tl.max(b_slots, axis=0) >= 0).to(tl.int32)
    b_place = tl.cumsum(b_hit, axis=0) - 1
    tl.store(expert_ids + b_place, o_e, mask=b_hit > 0)
    tl.store(slots + b_place[None, :] * SMALL + o_t[:, None], b_slots, mask=b_hit[None, :] > 0)
    tl.store(num_distinct, tl.sum(b_hit, axis=0))


@triton.jit(do_not_specialize=["num_rows"])
def _router_kernel(
    rows, squares, weight, partial, counters,
    top_k_index, top_k_weights, shared_gate, expert_ids, slots, num_distinct, eps, num_rows,
    stride_xn, stride_xk, stride_wn, stride_wk,
    E: tl.constexpr, H: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr, TOP_K: tl.constexpr,
    BE: tl.constexpr, ROWS: tl.constexpr,
    SMALL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    i_n, i_s = tl.program_id(0), tl.program_id(1)
    o_r, o_n = tl.arange(0, SMALL), i_n * BN + tl.arange(0, BN)
    m_r, m_n = o_r < num_rows, o_n < E + 1
    b_sum = tl.zeros([SMALL, BN], tl.float32)
    STEPS: tl.constexpr = (H + BK * SPLITS - 1) // (BK * SPLITS)
    prefetch_rows(weight, o_n, i_s * STEPS * BK, stride_wn, stride_wk, E + 1, H, PREFETCH, OVERLAPS)
    wait_for_previous(OVERLAPS)
    for step in range(STEPS):
        o_k = (i_s * STEPS + step) * BK + tl.arange(0, BK)
        m_k = o_k < H
        b_weight = load_tile(weight, o_n, o_k, stride_wn, stride_wk, m_n, m_k)
        b_rows = load_tile(rows, o_r, o_k, stride_xn, stride_xk, m_r, m_k)
        b_sum = multiply_add(b_rows, b_weight, b_sum, PRECISION)
    let_next_start(OVERLAPS)
    tl.store(partial + (i_s * SMALL + o_r[:, None]) * (E + 1) + o_n[None, :], b_sum, mask=m_n[None, :])
    tl.debug_barrier()
    num_programs = tl.num_programs(0) * SPLITS
    if tl.atomic_add(counters, 1, sem="acq_rel") == num_programs - 1:
        tl.store(counters, 0)
        _choose_experts(
            partial, squares, top_k_index, top_k_weights, shared_gate, expert_ids, slots, num_distinct, eps, num_rows,
            E, H, PARTS, PADDED, TOP_K, BE, ROWS, SMALL, SPLITS, rows.dtype.element_ty,
        )  # fmt: skip


@triton.jit
def _swiglu_tile(
    rows, b_squares, p_gate, p_out, o_out, m_r, o_n, eps, stride_xn, stride_xk, stride_wn, stride_wk,
    H: tl.constexpr, SIZE: tl.constexpr, SMALL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Columns `o_n` of SwiGLU of one expert, whose up rows follow its SIZE gate rows, to the rows `o_out`."""
    o_r = tl.arange(0, SMALL)
    m_n = o_n < SIZE
    b_gate, b_up = tl.zeros([SMALL, BN], tl.float32), tl.zeros([SMALL, BN], tl.float32)
    for i_k in range(tl.cdiv(H, BK)):
        o_k = i_k * BK + tl.arange(0, BK)
        m_k = o_k < H
        b_gate_weight = load_tile(p_gate, o_n, o_k, stride_wn, stride_wk, m_n, m_k)
        b_up_weight = load_tile(p_gate, SIZE + o_n, o_k, stride_wn, stride_wk, m_n, m_k)
        b_rows = load_tile(rows, o_r, o_k, stride_xn, stride_xk, m_r, m_k)
        b_gate = multiply_add(b_rows, b_gate_weight, b_gate, PRECISION)
        b_up = multiply_add(b_rows, b_up_weight, b_up, PRECISION)
    let_next_start(OVERLAPS)
    b_rstd = inverse_rms(b_squares, eps, H)[:, None]
    b_out = swiglu(b_gate * b_rstd, b_up * b_rstd, rows.dtype.element_ty)
    tl.store(p_out + o_out[:, None] * SIZE + o_n[None, :], b_out, mask=m_r[:, None] & m_n[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _gate_up_kernel(
    rows, squares, expert_ids, slots, num_distinct, gate_up, shared_gate_up, routed_out, shared_out, eps,
    num_rows, stride_xn, stride_xk, stride_we, stride_wn, stride_wk, stride_sn, stride_sk,
    H: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr,
    TOP_K: tl.constexpr, SMALL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    i_n, i_p = tl.program_id(0), tl.program_id(1)
    o_r, o_n = tl.arange(0, SMALL), i_n * BN + tl.arange(0, BN)
    m_r = o_r < num_rows
    if i_p == 0:
        prefetch_rows(shared_gate_up, o_n, 0, stride_sn, stride_sk, 2 * SHARED, H, PREFETCH, OVERLAPS)
    wait_for_previous(OVERLAPS)
    b_squares = load_squares(squares, o_r, m_r, PARTS, PADDED, SMALL)
    if i_p == 0:
        _swiglu_tile(
            rows, b_squares, shared_gate_up, shared_out, o_r, m_r, o_n, eps, stride_xn, stride_xk,
            stride_sn, stride_sk, H, SHARED, SMALL, BN, BK, PRECISION, OVERLAPS,
        )  # fmt: skip
    elif i_p <= tl.load(num_distinct):
        i_e = tl.load(expert_ids + i_p - 1).to(tl.int64)
        b_slots = tl.load(slots + (i_p - 1) * SMALL + o_r, mask=m_r, other=-1)
        # The list may be of more rows than run here.
        if tl.max(b_slots, axis=0) >= 0:
            _swiglu_tile(
                rows, b_squares, gate_up + i_e * stride_we, routed_out, o_r * TOP_K + b_slots, b_slots >= 0, o_n, eps,
                stride_xn, stride_xk, stride_wn, stride_wk, H, INNER, SMALL, BN, BK, PRECISION, OVERLAPS,
            )  # fmt: skip


@triton.jit
def _down_tile(
    p_rows, o_source, m_r, b_factor, p_weight, p_out, o_out, o_n, stride_wn, stride_wk,
    H: tl.constexpr, SIZE: tl.constexpr, SMALL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAPS: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Columns `o_n` of one expert's weighted down projection of the rows `o_source`, to the rows `o_out`."""
    m_n = o_n < H
    b_sum = tl.zeros([SMALL, BN], tl.float32)
    prefetch_rows(p_weight, o_n, 0, stride_wn, stride_wk, H, SIZE, PREFETCH, OVERLAPS)
    wait_for_previous(OVERLAPS)
    for i_k in range(tl.cdiv(SIZE, BK)):
        o_k = i_k * BK + tl.arange(0, BK)
        m_k = o_k < SIZE
        b_weight = load_tile(p_weight, o_n, o_k, stride_wn, stride_wk, m_n, m_k)
        b_rows = load_tile(p_rows, o_source, o_k, SIZE, 1, m_r, m_k)
        b_sum = multiply_add(b_rows, b_weight, b_sum, PRECISION)
    let_next_start(OVERLAPS)
    tl.store(p_out + o_out[:, None] * H + o_n[None, :], b_sum * b_factor[:, None], mask=m_r[:, None] & m_n[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _down_kernel(
    routed_in, shared_in, expert_ids, slots, num_distinct, top_k_weights, shared_gate, down, shared_down, residual,
    partial, counters, next_scale, values, scaled, squares, num_rows,
    stride_we, stride_wn, stride_wk, stride_sn, stride_sk, stride_rn, stride_rk,
    H: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, TOP_K: tl.constexpr,
    SMALL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    i_n, i_p = tl.program_id(0), tl.program_id(1)
    o_r, o_n = tl.arange(0, SMALL), i_n * BN + tl.arange(0, BN)
    m_r, o_first = o_r < num_rows, o_r * (TOP_K + 1)
    # The routing is read before the wait: the kernel before this one began after it was complete.
    num_places = tl.load(num_distinct)
    if i_p <= num_places:
        if i_p == 0:
            b_factor = tl.load(shared_gate + o_r, mask=m_r, other=0.0)
            _down_tile(
                shared_in, o_r, m_r, b_factor, shared_down, partial, o_first + TOP_K, o_n, stride_sn, stride_sk,
                H, SHARED, SMALL, BN, BK, PRECISION, OVERLAPS, PREFETCH,
            )  # fmt: skip
        else:
            i_e = tl.load(expert_ids + i_p - 1).to(tl.int64)
            b_slots = tl.load(slots + (i_p - 1) * SMALL + o_r, mask=m_r, other=-1)
            m_member, o_source = b_slots >= 0, o_r * TOP_K + b_slots
            b_factor = tl.load(top_k_weights + o_source, mask=m_member, other=0.0)
            if tl.max(b_slots, axis=0) >= 0:
                _down_tile(
                    routed_in, o_source, m_member, b_factor, down + i_e * stride_we, partial, o_first + b_slots, o_n,
                    stride_wn, stride_wk, H, INNER, SMALL, BN, BK, PRECISION, OVERLAPS, PREFETCH,
                )  # fmt: skip
            else:
                wait_for_previous(OVERLAPS)
        tl.debug_barrier()
        if tl.atomic_add(counters + i_n, 1, sem="acq_rel") == num_places:
            tl.store(counters + i_n, 0)
            m_n = o_n < H
            b_total = load_tile(residual, o_r, o_n, stride_rn, stride_rk, m_r, m_n).to(tl.float32)
            for slot in tl.static_range(TOP_K + 1):
                b_total += load_tile(partial + slot * H, o_first, o_n, H, 1, m_r, m_n)
            store_residual(b_total, values, next_scale, scaled, squares, i_n, o_r, o_n, m_r, m_n, H, SMALL)


def route_rows(rows: ResidualRows, weight, top_k, eps, counters, routed: RoutedRows) -> None:
    """As `moe_experts.route_rows`, into `routed`."""
    (num_rows, hidden), num_experts, tile = rows.shape, weight.shape[0] - 1, tile_of("router")
    partial = weight.new_empty(tile.splits, PADDED_ROWS, num_experts + 1, dtype=torch.float32)
    if counters is None:
        counters = torch.zeros(1, dtype=torch.int32, device=weight.device)
    with launch_device(weight):
        _router_kernel[(triton.cdiv(num_experts + 1, tile.block_n), tile.splits)](
            rows.scaled, rows.squares, weight, partial, counters,
            routed.top_k_index, routed.top_k_weights, routed.shared_gate, routed.expert_ids, routed.slots,
            routed.num_distinct, eps, num_rows, *rows.scaled.stride(), *weight.stride(),
            E=num_experts, H=hidden, TOP_K=top_k, BE=triton.next_power_of_2(num_experts),
            ROWS=triton.next_power_of_2(num_rows), SMALL=PADDED_ROWS,
            BN=tile.block_n, BK=tile.block_k, SPLITS=tile.splits, PRECISION=precision_of(weight),
            **squares_options(rows), **launch_options(tile, weight),
        )  # fmt: skip


def expert_gate_up(rows: ResidualRows, routed: RoutedRows, weights: ExpertWeights, eps) -> ActivatedRows:
    """As `moe_experts.expert_gate_up`."""
    tile, (num_rows, top_k) = tile_of("expert_gate_up"), routed.top_k_index.shape
    inner, shared = weights.down.shape[2], weights.shared_down.shape[1]
    scaled = rows.scaled
    activated = ActivatedRows(scaled.new_empty(num_rows, top_k, inner), scaled.new_empty(num_rows, shared))
    with launch_device(scaled):
        _gate_up_kernel[(triton.cdiv(max(inner, shared), tile.block_n), routed.expert_ids.shape[0] + 1)](
            scaled, rows.squares, routed.expert_ids, routed.slots, routed.num_distinct,
            weights.gate_up, weights.shared_gate_up, activated.routed, activated.shared, eps,
            num_rows, *scaled.stride(), *weights.gate_up.stride(), *weights.shared_gate_up.stride(),
            H=scaled.shape[1], INNER=inner, SHARED=shared, TOP_K=top_k, SMALL=PADDED_ROWS,
            BN=tile.block_n, BK=tile.block_k, PRECISION=precision_of(scaled),
            **squares_options(rows), **launch_options(tile, scaled),
        )  # fmt: skip
    return activated


def expert_down(
    activated: ActivatedRows, routed: RoutedRows, weights: ExpertWeights, residual, output: ResidualRows, counters=None
) -> ResidualRows:
    """As `moe_experts.expert_down`."""
    tile, (num_rows, top_k) = tile_of("expert_down"), routed.top_k_index.shape
    hidden, inner, shared = residual.shape[1], weights.down.shape[2], weights.shared_down.shape[1]
    num_tiles = triton.cdiv(hidden, tile.block_n)
    partial = residual.new_empty(num_rows, top_k + 1, hidden, dtype=torch.float32)
    if counters is None:
        counters = torch.zeros(num_tiles, dtype=torch.int32, device=residual.device)
    with launch_device(residual):
        _down_kernel[(num_tiles, routed.expert_ids.shape[0] + 1)](
            activated.routed, activated.shared, routed.expert_ids, routed.slots, routed.num_distinct,
            routed.top_k_weights, routed.shared_gate, weights.down, weights.shared_down, residual,
            partial, counters, output.norm_scale, output.values, output.scaled, output.squares, num_rows,
            *weights.down.stride(), *weights.shared_down.stride(), *residual.stride(),
            H=hidden, INNER=inner, SHARED=shared, TOP_K=top_k, SMALL=PADDED_ROWS,
            BN=tile.block_n, BK=tile.block_k, PRECISION=precision_of(residual), **launch_options(tile, residual),
        )  # fmt: skip
    return output.of_parts(num_tiles)
