"""Tiles: an override reaches the launch, every tile gives the same sums, and unknown names are refused."""

from dataclasses import replace

import pytest
import torch

from hf_hybridspec.kernels import linear
from hf_hybridspec.kernels.common_triton import launch_options
from hf_hybridspec.kernels.dispatch import use_kernels
from hf_hybridspec.kernels.residual_rows import ResidualRows
from hf_hybridspec.kernels.tiles import TILES, Tile, tile_of, use_tiles

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def test_the_innermost_override_of_a_kernel_wins_and_ends():
    outer, inner = Tile(16, 64), Tile(64, 64)
    with use_tiles({"router": outer, "expert_down": outer}):
        with use_tiles({"router": inner}):
            assert tile_of("router") == inner and tile_of("expert_down") == outer
        assert tile_of("router") == outer
    assert tile_of("router") == TILES["router"]


def test_an_unknown_kernel_is_refused():
    with pytest.raises(ValueError, match="got rooter"), use_tiles({"rooter": Tile(16, 64)}):
        pass


def test_stages_are_those_of_16_bit_entries():
    """Shared memory holds half as many of fp32; one stage stays one."""
    for stages, halved in ((6, 3), (3, 2), (1, 1)):
        tile = Tile(128, 128, num_stages=stages)
        found = [launch_options(tile, torch.empty(1, dtype=dtype))["num_stages"] for dtype in DTYPES]
        assert found == [halved, stages, stages]


@pytest.mark.parametrize("tile", [Tile(16, 32, splits=3), Tile(64, 64, splits=2, num_warps=2), Tile(32, 16)])
def test_parts_of_heads_and_splits_change_no_result(tile, triton_device):
    """A step of part of a head, of a whole one, and splits that do not divide the steps."""
    generator = torch.Generator().manual_seed(0)
    rows, gate = torch.randn(2, 5, 3, 48, generator=generator).to(triton_device)
    weight = torch.randn(50, 144, generator=generator).to(triton_device)
    residual, scale = torch.randn(5, 50, generator=generator).to(triton_device), torch.ones(50, device=triton_device)
    rooms = [ResidualRows.empty(5, scale, torch.float32) for _ in range(2)]
    with use_kernels("reference"):
        expected = linear.gated_linear(rows, gate, weight, residual, rooms[0])
    with use_kernels("triton"), use_tiles({"gated_linear": tile}):
        actual = linear.gated_linear(rows, gate, weight, residual, rooms[1])
    torch.testing.assert_close(actual.values, expected.values, atol=1e-4, rtol=1e-4)
    totals = [result.squares[:, :5].sum(0) for result in (actual, expected)]
    torch.testing.assert_close(*totals, atol=1e-3, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels overlap on a device alone")
def test_kernels_that_overlap_give_the_same_bits(triton_device):
    """A chain in which every kernel reads what the one before it wrote."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(3, 4, 64, generator=generator).to(triton_device)
    weight = (torch.randn(256, 256, generator=generator) / 16).to(triton_device)
    counters = torch.zeros(16, dtype=torch.int32, device=triton_device)

    scale = torch.ones(256, device=triton_device)

    def chain() -> torch.Tensor:
        hidden = rows.flatten(1)
        for _ in range(50):
            room = ResidualRows.empty(3, scale, torch.float32)
            hidden = linear.gated_linear(hidden.view_as(rows), rows, weight, hidden, room, counters).values
        return hidden

    tile = TILES["gated_linear"]
    with use_kernels("triton"):
        expected = chain()
        for prefetch in (0, 1):
            with use_tiles({"gated_linear": replace(tile, overlaps=True, prefetch=prefetch)}):
                assert torch.equal(chain(), expected)
