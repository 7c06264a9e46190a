"""The MoE block of at most 16 rows in Triton: four launches.

Router: programs over (tile of experts, part of H), then a program of one warp for every row, which adds up the parts
and picks its top-k. Experts: one program per (place among the distinct experts, tile of rows of a weight); place 0 is
the shared expert. Every program finds the expert of its place in the rows' slots, which is a small table, so that
nothing has to be gathered from all rows before; places past the last one return at once, so the grid never depends on
the routing. Down projections go to a buffer by row and top-k position; the program that finishes a tile last adds them
up in that order, so a row's result depends neither on timing nor on the other rows.
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

ROUNDED = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit(do_not_specialize=["num_rows"])
def _router_kernel(
    rows, weight, partial, num_rows, stride_xn, stride_xk, stride_wn, stride_wk,
    N: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, SMALL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr, OVERLAPS: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    i_n, i_s = tl.program_id(0), tl.program_id(1)
    o_r, o_n = tl.arange(0, SMALL), i_n * BN + tl.arange(0, BN)
    m_r, m_n = o_r < num_rows, o_n < N
    b_sum = tl.zeros([SMALL, BN], tl.float32)
    STEPS: tl.constexpr = (H + BK * SPLITS - 1) // (BK * SPLITS)
    prefetch_rows(weight, o_n, i_s * STEPS * BK, stride_wn, stride_wk, N, H, PREFETCH, OVERLAPS)
    wait_for_previous(OVERLAPS)
    for step in range(STEPS):
        o_k = (i_s * STEPS + step) * BK + tl.arange(0, BK)
        m_k = o_k < H
        b_weight = load_tile(weight, o_n, o_k, stride_wn, stride_wk, m_n, m_k)
        b_rows = load_tile(rows, o_r, o_k, stride_xn, stride_xk, m_r, m_k)
        b_sum = multiply_add(b_rows, b_weight, b_sum, PRECISION)
    let_next_start(OVERLAPS)
    p_partial = partial + (i_s * SMALL + o_r[:, None]) * WIDTH + o_n[None, :]
    tl.store(p_partial, b_sum, mask=m_r[:, None] & m_n[None, :])


@triton.jit
def _choose_kernel(
    partial, squares, top_k_index, top_k_weights, shared_gate, slots, eps,
    E: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr,
    TOP_K: tl.constexpr, BE: tl.constexpr, SMALL: tl.constexpr, SPLITS: tl.constexpr, ROUNDED: tl.constexpr,
    OVERLAPS: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    # Its few small programs leave room for those of the next kernel, which reads no routing before it waits.
    let_next_start(OVERLAPS)
    i_r = tl.program_id(0)
    o_e, o_p = tl.arange(0, BE), tl.arange(0, PADDED)
    m_e = o_e < E
    wait_for_previous(OVERLAPS)
    b_squares = tl.load(squares + o_p * SMALL + i_r, mask=o_p < PARTS, other=0.0)
    b_logits, gate = tl.zeros([BE], tl.float32), 0.0
    for i_s in tl.static_range(SPLITS):
        p_row = partial + (i_s * SMALL + i_r) * WIDTH
        b_logits += tl.load(p_row + o_e, mask=m_e, other=0.0)
        gate += tl.load(p_row + E)
    rstd = inverse_rms(b_squares, eps, H)
    gate = tl.sigmoid((gate * rstd).to(ROUNDED).to(tl.float32))
    tl.store(shared_gate + i_r, gate.to(ROUNDED).to(tl.float32))

    # Exponentials of the experts; the softmax's denominator cancels in the weights.
    b_logits = tl.where(m_e, (b_logits * rstd).to(ROUNDED).to(tl.float32), float("-inf"))
    b_probs = tl.exp(b_logits - tl.max(b_logits, axis=0))
    # Floats from 0 on are ordered as their bits, of which a warp finds the maximum in one instruction.
    b_left = tl.where(m_e, b_probs.to(tl.int32, bitcast=True), -1)
    b_slots = tl.full([BE], -1, tl.int32)
    total = 0.0
    for slot in tl.static_range(TOP_K):
        most = tl.max(b_left, axis=0)
        # Of equal ones the first.
        best = tl.min(tl.where(b_left == most, o_e, BE), axis=0)
        total += most.to(tl.float32, bitcast=True)
        b_left = tl.where(o_e == best, -1, b_left)
        b_slots = tl.where(o_e == best, slot, b_slots)
        tl.store(top_k_index + i_r * TOP_K + slot, best)
    b_weights = (b_probs / total).to(ROUNDED).to(tl.float32)
    tl.store(top_k_weights + i_r * TOP_K + b_slots, b_weights, mask=b_slots >= 0)
    tl.store(slots + i_r * E + o_e, b_slots.to(tl.int8), mask=m_e)


@triton.jit
def _expert_at(slots, place, num_rows, E: tl.constexpr, BE: tl.constexpr, SMALL: tl.constexpr):
    """The expert at a place (from 1) among the distinct ones, its position in each row's top-k, the number of places.

    Past the last place, and at place 0, the expert is 0.
    """
    o_r, o_e = tl.arange(0, SMALL), tl.arange(0, BE)
    m_slots = (o_r < num_rows)[:, None] & (o_e < E)[None, :]
    b_slots = tl.load(slots + o_r[:, None] * E + o_e[None, :], mask=m_slots, other=-1).to(tl.int32)
    b_hit = (tl.max(b_slots, axis=0) >= 0).to(tl.int32)
    b_place = tl.cumsum(b_hit, axis=0)
    i_e = tl.sum(tl.where((b_place == place) & (b_hit > 0), o_e, 0), axis=0)
    b_mine = tl.max(tl.where(o_e[None, :] == i_e, b_slots, -1), axis=1)
    return i_e.to(tl.int64), b_mine, tl.sum(b_hit, axis=0)


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
    rows, squares, slots, gate_up, shared_gate_up, routed_out, shared_out, eps,
    num_rows, stride_xn, stride_xk, stride_we, stride_wn, stride_wk, stride_sn, stride_sk,
    E: tl.constexpr, BE: tl.constexpr, H: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr,
    PARTS: tl.constexpr, PADDED: tl.constexpr, TOP_K: tl.constexpr, SMALL: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, PRECISION: tl.constexpr, OVERLAPS: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    i_n, i_p = tl.program_id(0), tl.program_id(1)
    o_r, o_n = tl.arange(0, SMALL), i_n * BN + tl.arange(0, BN)
    m_r = o_r < num_rows
    if i_p == 0:
        prefetch_rows(shared_gate_up, o_n, 0, stride_sn, stride_sk, SHARED, H, PREFETCH, OVERLAPS)
        prefetch_rows(shared_gate_up, SHARED + o_n, 0, stride_sn, stride_sk, 2 * SHARED, H, PREFETCH, OVERLAPS)
    wait_for_previous(OVERLAPS)
    b_squares = load_squares(squares, o_r, m_r, PARTS, PADDED, SMALL)
    if i_p == 0:
        _swiglu_tile(
            rows, b_squares, shared_gate_up, shared_out, o_r, m_r, o_n, eps, stride_xn, stride_xk,
            stride_sn, stride_sk, H, SHARED, SMALL, BN, BK, PRECISION, OVERLAPS,
        )  # fmt: skip
    else:
        i_e, b_slots, num_distinct = _expert_at(slots, i_p, num_rows, E, BE, SMALL)
        if i_p <= num_distinct:
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
    routed_in, shared_in, slots, top_k_weights, shared_gate, down, shared_down, residual,
    partial, counters, next_scale, values, scaled, squares, num_rows,
    stride_we, stride_wn, stride_wk, stride_sn, stride_sk, stride_rn, stride_rk,
    E: tl.constexpr, BE: tl.constexpr, H: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, TOP_K: tl.constexpr,
    SMALL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    i_n, i_p = tl.program_id(0), tl.program_id(1)
    o_r, o_n = tl.arange(0, SMALL), i_n * BN + tl.arange(0, BN)
    m_r, o_first = o_r < num_rows, o_r * (TOP_K + 1)
    # The routing is read before the wait: the kernel before this one has waited for it.
    i_e, b_slots, num_distinct = _expert_at(slots, i_p, num_rows, E, BE, SMALL)
    if i_p <= num_distinct:
        if i_p == 0:
            b_factor = tl.load(shared_gate + o_r, mask=m_r, other=0.0)
            _down_tile(
                shared_in, o_r, m_r, b_factor, shared_down, partial, o_first + TOP_K, o_n, stride_sn, stride_sk,
                H, SHARED, SMALL, BN, BK, PRECISION, OVERLAPS, PREFETCH,
            )  # fmt: skip
        else:
            m_member, o_source = b_slots >= 0, o_r * TOP_K + b_slots
            b_factor = tl.load(top_k_weights + o_source, mask=m_member, other=0.0)
            _down_tile(
                routed_in, o_source, m_member, b_factor, down + i_e * stride_we, partial, o_first + b_slots, o_n,
                stride_wn, stride_wk, H, INNER, SMALL, BN, BK, PRECISION, OVERLAPS, PREFETCH,
            )  # fmt: skip
        tl.debug_barrier()
        if tl.atomic_add(counters + i_n, 1, sem="acq_rel") == num_distinct:
            tl.store(counters + i_n, 0)
            m_n = o_n < H
            b_total = load_tile(residual, o_r, o_n, stride_rn, stride_rk, m_r, m_n).to(tl.float32)
            for slot in tl.static_range(TOP_K + 1):
                b_total += load_tile(partial + slot * H, o_first, o_n, H, 1, m_r, m_n)
            store_residual(b_total, values, next_scale, scaled, squares, i_n, o_r, o_n, m_r, m_n, H, SMALL)


def route_rows(rows: ResidualRows, weight, eps, routed: RoutedRows) -> None:
    """As `moe_experts.route_rows`, into `routed`."""
    (num_rows, hidden), size_n, tile, choice = (
        rows.shape,
        weight.shape[0],
        tile_of("router"),
        tile_of("choose_experts"),
    )
    # Rows of sums begin at multiples of 64 bytes.
    width = 16 * triton.cdiv(size_n, 16)
    partial = weight.new_empty(tile.splits, PADDED_ROWS, width, dtype=torch.float32)
    with launch_device(weight):
        _router_kernel[(triton.cdiv(size_n, tile.block_n), tile.splits)](
            rows.scaled, weight, partial, num_rows, *rows.scaled.stride(), *weight.stride(),
            N=size_n, H=hidden, WIDTH=width, SMALL=PADDED_ROWS, BN=tile.block_n, BK=tile.block_k, SPLITS=tile.splits,
            PRECISION=precision_of(weight), **launch_options(tile, weight),
        )  # fmt: skip
        _choose_kernel[(num_rows,)](
            partial, rows.squares, routed.top_k_index, routed.top_k_weights, routed.shared_gate, routed.slots, eps,
            H=hidden, WIDTH=width, TOP_K=routed.top_k_index.shape[1], SMALL=PADDED_ROWS, SPLITS=tile.splits,
            ROUNDED=ROUNDED[weight.dtype], **_experts_options(routed), **squares_options(rows),
            **launch_options(choice, weight),
        )  # fmt: skip


def _experts_options(routed: RoutedRows) -> dict:
    """Keyword arguments of a kernel that reads or writes the slots."""
    num_experts = routed.slots.shape[1]
    return {"E": num_experts, "BE": max(16, triton.next_power_of_2(num_experts))}


def expert_gate_up(rows: ResidualRows, routed: RoutedRows, weights: ExpertWeights, eps) -> ActivatedRows:
    """As `moe_experts.expert_gate_up`."""
    tile, (num_rows, top_k) = tile_of("expert_gate_up"), routed.top_k_index.shape
    inner, shared = weights.down.shape[2], weights.shared_down.shape[1]
    scaled = rows.scaled
    activated = ActivatedRows(scaled.new_empty(num_rows, top_k, inner), scaled.new_empty(num_rows, shared))
    with launch_device(scaled):
        _gate_up_kernel[(triton.cdiv(max(inner, shared), tile.block_n), routed.max_distinct + 1)](
            scaled, rows.squares, routed.slots,
            weights.gate_up, weights.shared_gate_up, activated.routed, activated.shared, eps,
            num_rows, *scaled.stride(), *weights.gate_up.stride(), *weights.shared_gate_up.stride(),
            H=scaled.shape[1], INNER=inner, SHARED=shared, TOP_K=top_k, SMALL=PADDED_ROWS,
            BN=tile.block_n, BK=tile.block_k, PRECISION=precision_of(scaled),
            **_experts_options(routed), **squares_options(rows), **launch_options(tile, scaled),
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
        _down_kernel[(num_tiles, routed.max_distinct + 1)](
            activated.routed, activated.shared, routed.slots,
            routed.top_k_weights, routed.shared_gate, weights.down, weights.shared_down, residual,
            partial, counters, output.norm_scale, output.values, output.scaled, output.squares, num_rows,
            *weights.down.stride(), *weights.shared_down.stride(), *residual.stride(),
            H=hidden, INNER=inner, SHARED=shared, TOP_K=top_k, SMALL=PADDED_ROWS,
            BN=tile.block_n, BK=tile.block_k, PRECISION=precision_of(residual), **_experts_options(routed),
            **launch_options(tile, residual),
        )  # fmt: skip
    return output.of_parts(num_tiles)
