"""Both halves of the experts in one launch: against the two launches, whose rows it must equal bit by bit."""

from dataclasses import replace

import pytest
import torch

from hf_hybridspec.kernels.dispatch import use_kernels
from hf_hybridspec.kernels.joined_experts import joined_experts
from hf_hybridspec.kernels.moe_experts import expert_down, expert_gate_up, route_rows
from hf_hybridspec.kernels.residual_rows import ResidualRows, residual_rows
from hf_hybridspec.kernels.tiles import TILES, use_tiles

from .test_moe_experts import EPS, SHAPES, TOLERANCE, _block


def _both(kind, block, top_k, counters=None):
    """The rows after the joined experts, and after the two halves."""
    rows, scale, router, weights = block
    with use_kernels(kind):
        residual = residual_rows(rows, scale)
        routed = route_rows(residual, router, top_k, EPS)
        rooms = [ResidualRows.empty(rows.shape[0], scale, rows.dtype) for _ in range(2)]
        joined = joined_experts(residual, routed, weights, rooms[0], EPS, counters)
        activated = expert_gate_up(residual, routed, weights, EPS)
        return joined, expert_down(activated, routed, weights, rows, rooms[1])


@pytest.mark.parametrize("shape", SHAPES)
def test_triton_equals_reference(shape, triton_device):
    block = _block(*shape, device=triton_device)
    actual, _ = _both("triton", block, shape[2])
    expected, _ = _both("reference", block, shape[2])
    for name in ("values", "scaled"):
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name), atol=TOLERANCE, rtol=TOLERANCE)
    sums = [rows.squares[:, : shape[0]].sum(0) for rows in (actual, expected)]
    torch.testing.assert_close(*sums, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("num_rows", [1, 2, 5, 9, 16])
def test_rows_are_those_of_two_launches(num_rows, triton_device):
    """Few experts, so that most choices were made before; counters serve call after call and are zero in between."""
    block = _block(num_rows, 6, 3, 32, 16, 32, device=triton_device)
    counters = torch.zeros(2 + 3 * 16 + 2, dtype=torch.int32, device=triton_device)
    own, tile = TILES["joined_experts"], replace(TILES["expert_gate_up"], block_n=16, block_k=16)
    tiles = {"joined_experts": replace(own, block_n=16, block_k=16), "expert_gate_up": tile}
    with use_tiles(tiles | {"expert_down": replace(tile, block_n=32)}):
        for _ in range(2):
            joined, halves = _both("triton", block, 3, counters)
            assert torch.equal(joined.values, halves.values) and torch.equal(joined.scaled, halves.scaled)
            assert not counters.any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="programs wait for one another on a device alone")
def test_many_programs_wait_for_one_another(triton_device):
    """More programs than run at once, launch after launch: nothing hangs, and every launch gives the same bits."""
    block = _block(16, 256, 8, 2048, 512, 512, device=triton_device)
    block = (block[0].bfloat16(), block[1], block[2].bfloat16(), replace(block[3], **{
        name: getattr(block[3], name).bfloat16() for name in ("gate_up", "down", "shared_gate_up", "shared_down")
    }))  # fmt: skip
    counters = torch.zeros(2048, dtype=torch.int32, device=triton_device)
    first, halves = _both("triton", block, 8, counters)
    difference = (first.values - halves.values).float().norm() / halves.values.float().norm()
    assert difference < 5e-3
    for _ in range(20):
        assert torch.equal(_both("triton", block, 8, counters)[0].values, first.values)
    assert not counters.any()


def test_errors_name_what_is_given_and_allowed():
    rows, scale, router, weights = _block(2, 8, 2, 48, 20, 40)
    residual = residual_rows(rows, scale)
    routed, room = route_rows(residual, router, 2, EPS), ResidualRows.empty(2, scale, torch.float32)
    with pytest.raises(ValueError, match="counters must be at least 9 int32 zeros, got 4"):
        joined_experts(residual, routed, weights, room, EPS, torch.zeros(4, dtype=torch.int32))
    with pytest.raises(ValueError, match="down must be"):
        joined_experts(residual, routed, replace(weights, down=weights.down[:, :40]), room, EPS)
