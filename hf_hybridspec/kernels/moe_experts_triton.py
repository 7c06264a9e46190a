"""The MoE block of at most 16 rows in Triton: three launches.

Router: programs over (tile of experts, part of H), then a program of one warp for every row, which adds up the parts
and picks its top-k. Experts, both halves in one launch: one program per (place, tile of rows of a weight). Place 0 is
the shared expert, the others are the rows' choices, row by row; a program whose choice an earlier row has made returns
after two small loads. So every distinct expert is read once, nothing has to be gathered from all rows before, and the
grid never depends on the routing.

Programs of the first half come first in the grid and wait for nothing but the kernel before. Those of the second half
wait until all programs of their own expert have written its activations: while the last ones do, the memory is busy. A
device starts programs in the order of the grid, so that whoever waits, waits for programs that run. Down projections
go to a buffer by row and top-k position; the program that finishes a tile last adds them up in that order, so a row's
result depends neither on timing nor on the other rows.
"""

import torch
import triton
import triton.language as tl

from .common_triton import (
    hold_until_here,
    launch_device,
    launch_options,
    let_next_start,
    prefetch_rows,
    prefetch_share,
    wait_for_previous,
)
from .dense_mlp_triton import swiglu
from .linear_triton import PADDED_ROWS, load_tile, multiply_add, precision_of
from .moe_experts import ExpertWeights, RoutedRows, most_tiles, num_counters
from .residual_rows import ResidualRows
from .residual_rows_triton import inverse_rms, load_squares, squares_options, store_residual
from .tiles import tile_of

# What a launch adds to the counter of a place that it serves: more than tiles of both halves.
ARRIVALS = tl.constexpr(2**16)
# Programs that ask for the shared expert ahead; more run at once.
SHARES = tl.constexpr(256)
ROUNDED = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit(do_not_specialize=["num_rows"])
def _router_kernel(
    rows, weight, partial, num_rows, stride_xn, stride_xk, stride_wn, stride_wk,
    N: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, SMALL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAPS: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    i_n, i_s = tl.program_id(0), tl.program_id(1)
    o_r, o_n = tl.arange(0, SMALL), i_n * BN + tl.arange(0, BN)
    m_r, m_n = o_r < num_rows, o_n < N
    o_k = i_s * BK + tl.arange(0, BK)
    m_k = o_k < H
    # All weights of a program are few enough to be asked for before it waits.
    b_weight = load_tile(weight, o_n, o_k, stride_wn, stride_wk, m_n, m_k)
    wait_for_previous(OVERLAPS)
    let_next_start(OVERLAPS)
    b_rows = load_tile(rows, o_r, o_k, stride_xn, stride_xk, m_r, m_k)
    b_sum = tl.zeros([SMALL, BN], tl.float32)
    b_sum = multiply_add(b_rows, hold_until_here(b_weight, OVERLAPS), b_sum, PRECISION)
    p_partial = partial + (i_s * SMALL + o_r[:, None]) * WIDTH + o_n[None, :]
    tl.store(p_partial, b_sum, mask=m_r[:, None] & m_n[None, :])


@triton.jit
def _choose_kernel(
    partial, squares, top_k_index, top_k_weights, shared_gate, slots, eps, stride_sr, stride_se,
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
    tl.store(slots + i_r * stride_sr + o_e * stride_se, b_slots.to(tl.int8), mask=m_e)


@triton.jit
def _load_slots(slots, i_e, o_r, m_r, stride_sr, stride_se):
    """`[rows]`, an expert's position in each row's top-k, -1 where the row did not select it.

    The routing comes from the L2 cache, since a kernel that overlaps may read it before it waits.
    """
    p_slots = slots + i_e * stride_se + o_r * stride_sr
    return tl.load(p_slots, mask=m_r, other=-1, cache_modifier=".cg").to(tl.int32)


@triton.jit
def _expert_at(top_k_index, i_p, TOP_K: tl.constexpr, CHOICES: tl.constexpr):
    """The expert of a place from 1 on, and whether no earlier row selected it: all is loaded at once."""
    i_e = tl.load(top_k_index + i_p - 1, cache_modifier=".cg")
    o_choice = tl.arange(0, CHOICES)
    m_earlier = o_choice < (i_p - 1) // TOP_K * TOP_K
    b_earlier = tl.load(top_k_index + o_choice, mask=m_earlier, other=-1, cache_modifier=".cg")
    return i_e.to(tl.int64), tl.max((b_earlier == i_e).to(tl.int32), axis=0) == 0


@triton.jit
def _weight_tile(p_weight, o_n, o_k, stride_n, stride_k, m_n, m_k):
    """As `load_tile`, of one expert, whose entries are fewer than 2^31."""
    p_tile = p_weight + (o_n[:, None] * stride_n + o_k[None, :] * stride_k)
    return tl.load(p_tile, mask=m_n[:, None] & m_k[None, :], other=0.0)


@triton.jit
def _first_half(
    i_n, i_p, arrived, rows, squares, top_k_index, slots, gate_up, shared_gate_up, routed_out, shared_out, eps,
    num_rows, stride_xn, stride_xk, stride_sr, stride_se, stride_we, stride_wn, stride_wk, stride_vn, stride_vk,
    H: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, SMALL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Activations of tile `i_n` of the expert at place `i_p`; `arrived[i_p]` counts the tiles that are written."""
    o_r, o_n = tl.arange(0, SMALL), i_n * BN + tl.arange(0, BN)
    m_r = o_r < num_rows
    wait_for_previous(OVERLAPS)
    p_weight, i_e, is_wanted = shared_gate_up, tl.full([], 0, tl.int64), i_p == 0
    if i_p > 0:
        i_e, is_wanted = _expert_at(top_k_index, i_p, TOP_K, CHOICES)
        p_weight = gate_up + i_e * stride_we
    if is_wanted:
        let_next_start(OVERLAPS and EARLY)
        size = tl.where(i_p == 0, SHARED, INNER)
        stride_n, stride_k = tl.where(i_p == 0, stride_vn, stride_wn), tl.where(i_p == 0, stride_vk, stride_wk)
        b_squares = load_squares(squares, o_r, m_r, PARTS, PADDED, SMALL)
        b_slots = _load_slots(slots, i_e, o_r, m_r, stride_sr, stride_se)
        m_n = o_n < size
        b_gate, b_up = tl.zeros([SMALL, BN], tl.float32), tl.zeros([SMALL, BN], tl.float32)
        for i_k in range(tl.cdiv(H, BK)):
            o_k = i_k * BK + tl.arange(0, BK)
            m_k = o_k < H
            b_gate_weight = _weight_tile(p_weight, o_n, o_k, stride_n, stride_k, m_n, m_k)
            # Up rows follow the gate rows.
            b_up_weight = _weight_tile(p_weight, size + o_n, o_k, stride_n, stride_k, m_n, m_k)
            b_rows = load_tile(rows, o_r, o_k, stride_xn, stride_xk, m_r, m_k)
            b_gate = multiply_add(b_rows, b_gate_weight, b_gate, PRECISION)
            b_up = multiply_add(b_rows, b_up_weight, b_up, PRECISION)
        let_next_start(OVERLAPS and not EARLY)
        b_rstd = inverse_rms(b_squares, eps, H)[:, None]
        b_out = swiglu(b_gate * b_rstd, b_up * b_rstd, rows.dtype.element_ty)
        p_out, o_out, m_out = shared_out, o_r, m_r
        if i_p > 0:
            p_out, o_out, m_out = routed_out, o_r * TOP_K + b_slots, b_slots >= 0
        tl.store(p_out + o_out[:, None] * size + o_n[None, :], b_out, mask=m_out[:, None] & m_n[None, :])
        tl.debug_barrier()
        tl.atomic_add(arrived + i_p, 1, sem="acq_rel")


@triton.jit
def _second_half(
    i_n, i_p, arrived, routed_in, shared_in, top_k_index, slots, top_k_weights, shared_gate, down,
    shared_down, residual, partial, counters, next_scale, values, scaled, squares, num_rows,
    stride_sr, stride_se, stride_we, stride_wn, stride_wk, stride_vn, stride_vk, stride_rn, stride_rk,
    H: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr,
    SMALL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, WRITERS: tl.constexpr,
    EARLY: tl.constexpr, OVERLAPS: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Tile `i_n` of the down projection of the expert at place `i_p`; whoever ends a tile adds up its parts."""
    o_r, o_n = tl.arange(0, SMALL), i_n * BN + tl.arange(0, BN)
    m_r, m_n = o_r < num_rows, o_n < H
    # What whoever ends the tile needs is asked for here and below, where nobody waits for it.
    b_next_scale = tl.load(next_scale + o_n, mask=m_n, other=0.0)
    wait_for_previous(OVERLAPS)
    p_weight, i_e, is_wanted = shared_down, tl.full([], 0, tl.int64), i_p == 0
    if i_p > 0:
        i_e, is_wanted = _expert_at(top_k_index, i_p, TOP_K, CHOICES)
        p_weight = down + i_e * stride_we
    if is_wanted:
        size = tl.where(i_p == 0, SHARED, INNER)
        stride_n, stride_k = tl.where(i_p == 0, stride_vn, stride_wn), tl.where(i_p == 0, stride_vk, stride_wk)
        STEPS: tl.constexpr = (max(INNER, SHARED) + BK - 1) // BK
        prefetch_rows(p_weight, o_n, 0, stride_n, stride_k, H, min(INNER, SHARED), PREFETCH, OVERLAPS)

        # The shared expert's position in every row is that after the top-k.
        p_rows, p_factor, o_source, b_slots = shared_in, shared_gate, o_r, tl.where(m_r, TOP_K, -1)
        if i_p > 0:
            b_slots = _load_slots(slots, i_e, o_r, m_r, stride_sr, stride_se)
            p_rows, p_factor, o_source = routed_in, top_k_weights, o_r * TOP_K + b_slots
        m_member = b_slots >= 0
        b_factor = tl.load(p_factor + o_source, mask=m_member, other=0.0, cache_modifier=".cg")
        b_residual = load_tile(residual, o_r, o_n, stride_rn, stride_rk, m_r, m_n)

        b_sum = tl.zeros([SMALL, BN], tl.float32)
        while tl.atomic_add(arrived + i_p, 0, sem="acquire") & (ARRIVALS - 1) < WRITERS:
            pass
        # Who has passed is counted as well, tile 0 as all who lack to ARRIVALS: nobody has to wait to set zeros.
        tl.atomic_add(arrived + i_p, tl.where(i_n == 0, ARRIVALS - WRITERS - tl.cdiv(H, BN) + 1, 1), sem="relaxed")
        let_next_start(OVERLAPS and EARLY)
        for i_k in range(STEPS):
            o_k = i_k * BK + tl.arange(0, BK)
            m_k = o_k < size
            b_weight = _weight_tile(p_weight, o_n, o_k, stride_n, stride_k, m_n, m_k)
            # From the L2 cache, where they are right although this launch wrote them.
            p_tile = p_rows + o_source[:, None] * size + o_k[None, :]
            b_rows = tl.load(p_tile, mask=m_member[:, None] & m_k[None, :], other=0.0, cache_modifier=".cg")
            b_sum = multiply_add(b_rows, b_weight, b_sum, PRECISION)
        let_next_start(OVERLAPS and not EARLY)
        o_first = o_r * (TOP_K + 1)
        p_out = partial + (o_first + b_slots)[:, None] * H + o_n[None, :]
        tl.store(p_out, b_sum * b_factor[:, None], mask=m_member[:, None] & m_n[None, :])
        # Positions are counted, not programs: how many there are is known without looking at the routing.
        written = tl.sum(m_member.to(tl.int32), axis=0)
        tl.debug_barrier()
        if tl.atomic_add(counters + i_n, written, sem="acq_rel") + written == num_rows * (TOP_K + 1):
            tl.store(counters + i_n, 0)
            b_total = b_residual.to(tl.float32)
            p_parts = partial + o_first[:, None] * H + o_n[None, :]
            # Unrolled, so that all positions are asked for at once.
            for slot in tl.static_range(TOP_K + 1):
                m_part = m_r[:, None] & m_n[None, :]
                b_total += tl.load(p_parts + slot * H, mask=m_part, other=0.0, cache_modifier=".cg")
            store_residual(b_total, values, b_next_scale, scaled, squares, i_n, o_r, o_n, m_r, m_n, H, SMALL)


@triton.jit(do_not_specialize=["num_rows"])
def _experts_kernel(
    rows, squares, top_k_index, slots, top_k_weights, shared_gate, gate_up, shared_gate_up, down, shared_down,
    routed_rows, shared_rows, residual, partial, counters, next_scale, values, scaled, out_squares, eps, num_rows,
    stride_xn, stride_xk, stride_sr, stride_se, stride_ue, stride_un, stride_uk, stride_vn, stride_vk,
    stride_de, stride_dn, stride_dk, stride_cn, stride_ck, stride_rn, stride_rk,
    H: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, SMALL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BN_DOWN: tl.constexpr, BK_DOWN: tl.constexpr, UP_TILES: tl.constexpr, DOWN_TILES: tl.constexpr,
    MOST_TILES: tl.constexpr, PRECISION: tl.constexpr,
    EARLY: tl.constexpr, OVERLAPS: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    i_program = tl.program_id(0)
    num_first = (num_rows * TOP_K + 1) * UP_TILES
    # Counters: one a tile of the output, as many as there may be, then one a place.
    arrived = counters + MOST_TILES
    if PREFETCH > 0:
        # The router leaves the memory idle: time to ask for the shared expert, which does not depend on it.
        prefetch_share(shared_gate_up, i_program, stride_vn, stride_vk, 2 * SHARED, H, SHARES, OVERLAPS)
        prefetch_share(shared_down, i_program, stride_cn, stride_ck, H, SHARED, SHARES, OVERLAPS)
    if i_program < num_first:
        _first_half(
            i_program % UP_TILES, i_program // UP_TILES, arrived, rows, squares, top_k_index, slots, gate_up,
            shared_gate_up, routed_rows, shared_rows, eps, num_rows, stride_xn, stride_xk, stride_sr, stride_se,
            stride_ue, stride_un, stride_uk, stride_vn, stride_vk, H, INNER, SHARED, PARTS, PADDED, TOP_K, CHOICES,
            SMALL, BN, BK, PRECISION, EARLY, OVERLAPS,
        )  # fmt: skip
    else:
        i_second = i_program - num_first
        _second_half(
            i_second % DOWN_TILES, i_second // DOWN_TILES, arrived, routed_rows, shared_rows, top_k_index,
            slots, top_k_weights, shared_gate, down, shared_down, residual, partial, counters, next_scale, values,
            scaled, out_squares, num_rows, stride_sr, stride_se, stride_de, stride_dn, stride_dk, stride_cn,
            stride_ck, stride_rn, stride_rk, H, INNER, SHARED, TOP_K, CHOICES, SMALL, BN_DOWN, BK_DOWN, PRECISION,
            UP_TILES, EARLY, OVERLAPS, PREFETCH,
        )  # fmt: skip


def route_rows(rows: ResidualRows, weight, eps, routed: RoutedRows) -> None:
    """As `moe_experts.route_rows`, into `routed`."""
    tile, choice = tile_of("router"), tile_of("choose_experts")
    (num_rows, hidden), size_n, num_experts = rows.shape, weight.shape[0], routed.slots.shape[1]
    # Rows of sums begin at multiples of 64 bytes.
    width = 16 * triton.cdiv(size_n, 16)
    partial = weight.new_empty(tile.splits, PADDED_ROWS, width, dtype=torch.float32)
    with launch_device(weight):
        _router_kernel[(triton.cdiv(size_n, tile.block_n), tile.splits)](
            rows.scaled, weight, partial, num_rows, *rows.scaled.stride(), *weight.stride(),
            N=size_n, H=hidden, WIDTH=width, SMALL=PADDED_ROWS, BN=tile.block_n,
            BK=max(16, triton.next_power_of_2(triton.cdiv(hidden, tile.splits))), PRECISION=precision_of(weight),
            **launch_options(tile, weight),
        )  # fmt: skip
        _choose_kernel[(num_rows,)](
            partial, rows.squares, routed.top_k_index, routed.top_k_weights, routed.shared_gate, routed.slots, eps,
            *routed.slots.stride(), E=num_experts, BE=max(16, triton.next_power_of_2(num_experts)),
            H=hidden, WIDTH=width, TOP_K=routed.top_k_index.shape[1], SMALL=PADDED_ROWS, SPLITS=tile.splits,
            ROUNDED=ROUNDED[weight.dtype], **squares_options(rows), **launch_options(choice, weight),
        )  # fmt: skip


def add_experts(
    rows: ResidualRows, routed: RoutedRows, weights: ExpertWeights, output: ResidualRows, eps, counters=None
) -> ResidualRows:
    """As `moe_experts.add_experts`."""
    tile, second, (num_rows, top_k) = tile_of("expert_gate_up"), tile_of("expert_down"), routed.top_k_index.shape
    scaled, (_, hidden) = rows.scaled, rows.shape
    inner, shared = weights.down.shape[2], weights.shared_down.shape[1]
    up_tiles, down_tiles = triton.cdiv(max(inner, shared), tile.block_n), triton.cdiv(hidden, second.block_n)
    places = num_rows * top_k + 1
    activated = scaled.new_empty(num_rows, top_k, inner), scaled.new_empty(num_rows, shared)
    partial = scaled.new_empty(num_rows, top_k + 1, hidden, dtype=torch.float32)
    if counters is None:
        counters = torch.zeros(num_counters(hidden, places - 1), dtype=torch.int32, device=scaled.device)
    with launch_device(scaled):
        _experts_kernel[(places * (up_tiles + down_tiles),)](
            scaled, rows.squares, routed.top_k_index, routed.slots, routed.top_k_weights, routed.shared_gate,
            weights.gate_up, weights.shared_gate_up, weights.down, weights.shared_down, *activated, rows.values,
            partial, counters, output.norm_scale, output.values, output.scaled, output.squares, eps, num_rows,
            *scaled.stride(), *routed.slots.stride(), *weights.gate_up.stride(), *weights.shared_gate_up.stride(),
            *weights.down.stride(), *weights.shared_down.stride(), *rows.values.stride(),
            H=hidden, INNER=inner, SHARED=shared, TOP_K=top_k, CHOICES=_choices(top_k), SMALL=PADDED_ROWS,
            BN=tile.block_n, BK=tile.block_k, BN_DOWN=second.block_n,
            BK_DOWN=max(16, min(second.block_k, triton.next_power_of_2(max(inner, shared)))),
            UP_TILES=up_tiles, DOWN_TILES=down_tiles, MOST_TILES=most_tiles(hidden), PRECISION=precision_of(scaled),
            EARLY=tile.next_starts_early, **squares_options(rows), **launch_options(tile, scaled),
        )  # fmt: skip
    return output.of_parts(down_tiles)


def _choices(top_k: int) -> int:
    return triton.next_power_of_2(PADDED_ROWS * top_k)
