"""Both halves of the experts in one launch.

Programs of the first half come first in the grid and wait for nothing but the kernel before. Those of the second half
ask for their weights, then wait until all programs of their own expert have written its activations: while the last
ones do, the memory is busy. A device starts programs in the order of the grid, so that whoever waits, waits for
programs that run. What a program computes is in `moe_experts_triton.py`.
"""

import torch
import triton
import triton.language as tl

from .common_triton import launch_device, launch_options
from .linear_triton import PADDED_ROWS, precision_of
from .moe_experts import ExpertWeights, RoutedRows
from .moe_experts_triton import down_tile, gate_up_tile, padded_choices
from .residual_rows import ResidualRows
from .residual_rows_triton import squares_options
from .tiles import tile_of


@triton.jit(do_not_specialize=["num_rows"])
def _joined_kernel(
    rows, squares, top_k_index, slots, top_k_weights, shared_gate, gate_up, shared_gate_up, down, shared_down,
    routed_rows, shared_rows, residual, partial, counters, ready, next_scale, values, scaled, out_squares, eps,
    num_rows, stride_xn, stride_xk, stride_sr, stride_se, stride_ue, stride_un, stride_uk, stride_vn, stride_vk,
    stride_de, stride_dn, stride_dk, stride_cn, stride_ck, stride_rn, stride_rk,
    H: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr,
    TOP_K: tl.constexpr, CHOICES: tl.constexpr, SMALL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BK_DOWN: tl.constexpr, UP_TILES: tl.constexpr, DOWN_TILES: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    i_program = tl.program_id(0)
    num_first = (num_rows * TOP_K + 1) * UP_TILES
    if i_program < num_first:
        i_p = i_program // UP_TILES
        is_wanted = gate_up_tile(
            i_program % UP_TILES, i_p, rows, squares, top_k_index, slots, gate_up, shared_gate_up, routed_rows,
            shared_rows, eps, num_rows, stride_xn, stride_xk, stride_sr, stride_se, stride_ue, stride_un, stride_uk,
            stride_vn, stride_vk, H, INNER, SHARED, PARTS, PADDED, TOP_K, CHOICES, SMALL, BN, BK, PRECISION,
            False, OVERLAPS, PREFETCH,
        )  # fmt: skip
        if is_wanted:
            tl.debug_barrier()
            tl.atomic_add(ready + 1 + i_p, 1, sem="acq_rel")
    else:
        i_second = i_program - num_first
        down_tile(
            i_second % DOWN_TILES, i_second // DOWN_TILES, ready, routed_rows, shared_rows, top_k_index, slots,
            top_k_weights, shared_gate, down, shared_down, residual, partial, counters, next_scale, values, scaled,
            out_squares, num_rows, stride_sr, stride_se, stride_de, stride_dn, stride_dk, stride_cn, stride_ck,
            stride_rn, stride_rk, H, INNER, SHARED, TOP_K, CHOICES, SMALL, 2 * BN, BK_DOWN, PRECISION, UP_TILES,
            False, OVERLAPS, PREFETCH,
        )  # fmt: skip


def joined_experts(
    rows: ResidualRows, routed: RoutedRows, weights: ExpertWeights, output: ResidualRows, eps, counters=None
) -> ResidualRows:
    """As `joined_experts.joined_experts`."""
    tile, (num_rows, top_k) = tile_of("joined_experts"), routed.top_k_index.shape
    scaled, (_, hidden) = rows.scaled, rows.shape
    inner, shared = weights.down.shape[2], weights.shared_down.shape[1]
    # A step of either half reads as many rows of weights.
    up_tiles, down_tiles = triton.cdiv(max(inner, shared), tile.block_n), triton.cdiv(hidden, 2 * tile.block_n)
    places = num_rows * top_k + 1
    activated = scaled.new_empty(num_rows, top_k, inner), scaled.new_empty(num_rows, shared)
    partial = scaled.new_empty(num_rows, top_k + 1, hidden, dtype=torch.float32)
    if counters is None:
        counters = torch.zeros(down_tiles + places + 1, dtype=torch.int32, device=scaled.device)
    with launch_device(scaled):
        _joined_kernel[(places * (up_tiles + down_tiles),)](
            scaled, rows.squares, routed.top_k_index, routed.slots, routed.top_k_weights, routed.shared_gate,
            weights.gate_up, weights.shared_gate_up, weights.down, weights.shared_down, *activated, rows.values,
            partial, counters, counters[down_tiles:], output.norm_scale, output.values, output.scaled, output.squares,
            eps, num_rows, *scaled.stride(), *routed.slots.stride(), *weights.gate_up.stride(),
            *weights.shared_gate_up.stride(), *weights.down.stride(), *weights.shared_down.stride(),
            *rows.values.stride(), H=hidden, INNER=inner, SHARED=shared, TOP_K=top_k, CHOICES=padded_choices(top_k),
            SMALL=PADDED_ROWS, BN=tile.block_n, BK=tile.block_k,
            BK_DOWN=max(16, min(tile.block_k, triton.next_power_of_2(max(inner, shared)))),
            UP_TILES=up_tiles, DOWN_TILES=down_tiles, PRECISION=precision_of(scaled),
            **squares_options(rows), **launch_options(tile, scaled),
        )  # fmt: skip
    return output.of_parts(down_tiles)
