"""The MoE block of at most 16 rows: reference against transformers' own block, Triton against the reference."""

from dataclasses import replace

import pytest
import torch
from transformers import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeRMSNorm, Qwen3_5MoeSparseMoeBlock

from hf_hybridspec.kernels.dispatch import use_kernels
from hf_hybridspec.kernels.moe_experts import (
    ExpertWeights,
    RoutedRows,
    add_experts,
    most_tiles,
    num_counters,
    route_rows,
)
from hf_hybridspec.kernels.residual_rows import ResidualRows, residual_rows
from hf_hybridspec.kernels.tiles import TILES, Tile, use_tiles

EPS = 1e-6
# fp32 sums of about a hundred products in another order.
TOLERANCE = 1e-4
# rows, experts, top-k, hidden, inner, shared inner
SHAPES = [(1, 8, 2, 48, 20, 40), (5, 12, 3, 64, 32, 16), (16, 32, 4, 64, 48, 80), (7, 32, 8, 130, 16, 16)]


def _block(num_rows, num_experts, top_k, hidden, inner, shared, device="cpu"):
    generator = torch.Generator().manual_seed(0)

    def random(*shape, scale=0.2):
        return (torch.randn(*shape, generator=generator) * scale).to(device)

    weights = ExpertWeights(
        gate_up=random(num_experts, 2 * inner, hidden),
        down=random(num_experts, hidden, inner),
        shared_gate_up=random(2 * shared, hidden),
        shared_down=random(hidden, shared),
    )
    return random(num_rows, hidden, scale=1.0), 1 + random(hidden), random(num_experts + 1, hidden, scale=1.0), weights


def _moved(inputs, device):
    """A dataclass of tensors, on another device."""
    return type(inputs)(**{name: tensor.to(device) for name, tensor in vars(inputs).items()})


def _run(kind, block, top_k, counters=None):
    rows, scale, router, weights = block
    room = ResidualRows.empty(rows.shape[0], scale, rows.dtype)
    with use_kernels(kind):
        residual = residual_rows(rows, scale)
        routed = route_rows(residual, router, top_k, EPS)
        return routed, add_experts(residual, routed, weights, room, EPS, counters)


def test_reference_is_the_host_block():
    config = Qwen3_5MoeTextConfig(
        hidden_size=32,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
        experts_implementation="eager",
    )
    torch.manual_seed(0)
    block, norm = Qwen3_5MoeSparseMoeBlock(config), Qwen3_5MoeRMSNorm(32, eps=EPS)
    for parameter in (*block.parameters(), *norm.parameters()):
        torch.nn.init.normal_(parameter, std=0.3)
    rows = torch.randn(6, 32)
    weights = ExpertWeights(
        gate_up=block.experts.gate_up_proj,
        down=block.experts.down_proj,
        shared_gate_up=torch.cat([block.shared_expert.gate_proj.weight, block.shared_expert.up_proj.weight]),
        shared_down=block.shared_expert.down_proj.weight,
    )
    router = torch.cat([block.gate.weight, block.shared_expert_gate.weight])
    with torch.no_grad():
        expected = rows + block(norm(rows)[None])[0]
        routed, output = _run("reference", (rows, 1 + norm.weight, router, weights), top_k=3)
        _, _, top_k_index = block.gate(norm(rows))
    torch.testing.assert_close(output.values, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(routed.top_k_index, top_k_index.int())


@pytest.mark.parametrize("kind", ["reference", "triton"])
@pytest.mark.parametrize("shape", SHAPES)
def test_slots_say_what_the_top_k_says(kind, shape, triton_device):
    routed, _ = _run(kind, _block(*shape, device=triton_device), shape[2])
    places = [(row, int(routed.slots[row, expert]), expert) for row, expert in (routed.slots >= 0).nonzero().tolist()]
    expected = [(row, slot, int(routed.top_k_index[row, slot])) for row in range(shape[0]) for slot in range(shape[2])]
    assert sorted(places) == expected


def test_of_equally_probable_experts_the_first_are_chosen(triton_device):
    rows, scale, router, weights = _block(3, 12, 3, 64, 32, 16, device=triton_device)
    equal = [2, 5, 6, 9, 11]
    router[equal] = 0
    routed, _ = _run("triton", (rows, scale, router, weights), 12)
    for order in routed.top_k_index.tolist():
        assert [expert for expert in order if expert in equal] == equal


@pytest.mark.parametrize("shape", SHAPES)
def test_triton_equals_reference(shape, triton_device):
    block = _block(*shape, device=triton_device)
    expected, expected_output = _run("reference", block, shape[2])
    routed, output = _run("triton", block, shape[2])
    assert torch.equal(routed.top_k_index, expected.top_k_index)
    assert torch.equal(routed.slots, expected.slots)
    for given, wanted in (
        (routed.top_k_weights, expected.top_k_weights),
        (routed.shared_gate, expected.shared_gate),
        (output.values, expected_output.values),
        (output.scaled, expected_output.scaled),
        (output.squares[:, : shape[0]].sum(0), expected_output.squares[:, : shape[0]].sum(0)),
    ):
        torch.testing.assert_close(given, wanted, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("num_rows", range(1, 17))
def test_every_number_of_rows_reads_each_expert_for_all_its_rows(num_rows, triton_device):
    """Few experts, so that most choices were made by an earlier row; counters are used again from call to call."""
    block = _block(num_rows, 6, 3, 32, 16, 32, device=triton_device)
    counters = torch.zeros(num_counters(32, 3 * num_rows), dtype=torch.int32, device=triton_device)
    _, expected = _run("reference", block, 3)
    for _ in range(2):
        _, actual = _run("triton", block, 3, counters)
        torch.testing.assert_close(actual.values, expected.values, atol=TOLERANCE, rtol=TOLERANCE)
    assert not counters[: most_tiles(32)].any()


@pytest.mark.parametrize(
    "tile",
    [Tile(16, 16, num_stages=1), Tile(16, 32, num_warps=2), Tile(128, 64, num_warps=8), Tile(32, 512)],
    ids=["many steps", "two steps", "wide", "one step"],
)
def test_tiles_change_no_result(tile, triton_device):
    """Inner sizes of 20 and 40: several steps of which the routed experts need fewer, and one that holds all."""
    block = _block(3, 8, 2, 48, 20, 40, device=triton_device)
    _, expected = _run("reference", block, 2)
    tile = replace(tile, overlaps=True, next_starts_early=True)
    with use_tiles({"expert_gate_up": tile, "expert_down": tile}):
        _, actual = _run("triton", block, 2)
    torch.testing.assert_close(actual.values, expected.values, atol=TOLERANCE, rtol=TOLERANCE)


def test_slots_may_lie_in_memory_as_they_like(triton_device):
    """The rows of an expert side by side, as the router leaves them, or the experts of a row, as a copy might."""
    rows, scale, router, weights = _block(*SHAPES[1], device=triton_device)
    with use_kernels("triton"):
        residual = residual_rows(rows, scale)
        routed = route_rows(residual, router, SHAPES[1][2], EPS)
        assert routed.slots.stride(0) == 1
        found = []
        for slots in (routed.slots, routed.slots.contiguous()):
            given, room = replace(routed, slots=slots), ResidualRows.empty(rows.shape[0], scale, rows.dtype)
            found.append(add_experts(residual, given, weights, room, EPS).values)
    assert torch.equal(*found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter's products are numpy's, whose sums vary")
def test_triton_rows_do_not_depend_on_the_other_rows(triton_device):
    rows, scale, router, weights = _block(16, 32, 4, 64, 48, 80, device=triton_device)
    _, many = _run("triton", (rows, scale, router, weights), 4)
    for row in (0, 9, 15):
        _, one = _run("triton", (rows[row : row + 1], scale, router, weights), 4)
        assert torch.equal(many.values[row : row + 1], one.values)


@pytest.mark.parametrize("kind", ["reference", "triton"])
def test_given_room_is_written_and_first_rows_run_alone(kind, triton_device):
    """Five rows are routed, three of them run: the experts of the others do not matter, nor what they hold."""
    rows, scale, router, weights = _block(*SHAPES[1], device=triton_device)
    room = RoutedRows.empty(16, 3, 12, triton_device)
    room.slots.fill_(7)
    with use_kernels(kind):
        residual = residual_rows(rows, scale)
        routed = route_rows(residual, router, 3, EPS, routed=room)
        assert routed.top_k_index.data_ptr() == room.top_k_index.data_ptr()
        _, expected = _run(kind, (rows[:3], scale, router, weights), 3)
        assert not (room.slots[5:] != 7).any()
        routed.slots[3:], routed.top_k_index[3:], routed.top_k_weights[3:] = 100, -5, float("nan")
        routed = routed.first(3)
        room = ResidualRows.empty(3, scale, rows.dtype)
        actual = add_experts(residual.between(0, 3), routed, weights, room, EPS)
    torch.testing.assert_close(actual.values, expected.values, atol=TOLERANCE, rtol=TOLERANCE)
    with pytest.raises(
        ValueError, match=r"routed must hold 5 rows or more of 3 choices of 12 experts, got \(3, 3, 12\)"
    ):
        route_rows(residual, router, 3, EPS, routed=routed)


@pytest.mark.parametrize("before", [0, 2**31 - 2**16])
def test_counters_serve_the_next_call(before, triton_device):
    """Tiles of two widths, so that a tile of one half is not one of the other; arrivals also where they wrap."""
    block = _block(5, 12, 3, 64, 32, 16, device=triton_device)
    counters = torch.zeros(num_counters(64, 15), dtype=torch.int32, device=triton_device)
    counters[most_tiles(64) :] = before
    up = replace(TILES["expert_gate_up"], block_n=16, block_k=16)
    with use_tiles({"expert_gate_up": up, "expert_down": replace(up, block_n=32)}):
        first = _run("triton", block, 3, counters)[1]
        assert not counters[: most_tiles(64)].any()
        # Every place of a selected expert has moved on by one launch.
        moved = (counters[most_tiles(64) :].long() - before) % 2**32
        assert set(moved.tolist()) == {0, 2**16} and moved[0] == 2**16
        assert torch.equal(_run("triton", block, 3, counters)[1].values, first.values)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter asks for nothing ahead")
@pytest.mark.parametrize("block_k", [16, 32, 64])
def test_steps_of_less_than_a_cache_line_are_asked_for_ahead(block_k, triton_device):
    block = _block(3, 12, 3, 64, 32, 32, device=triton_device)
    tile = replace(TILES["expert_gate_up"], block_n=16, block_k=block_k, overlaps=True, prefetch=1)
    expected = _run("triton", block, 3)[1]
    with use_tiles({"expert_gate_up": tile}):
        actual = _run("triton", block, 3)[1]
    torch.testing.assert_close(actual.values, expected.values, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="programs wait for one another on a device alone")
@pytest.mark.parametrize("num_rows", [1, 6, 16])
def test_many_programs_wait_for_one_another(num_rows, triton_device, watches_races):
    """More programs than run at once, launch after launch: nothing hangs, and every launch gives the same bits."""
    hidden = 256 if watches_races else 2048
    rows, scale, router, weights = _block(num_rows, 256, 8, hidden, 512, 512)
    weights = ExpertWeights(**{name: tensor.bfloat16() for name, tensor in vars(weights).items()})
    residual = residual_rows(rows.bfloat16(), scale)
    # One routing for both: a near-tie would give a row another expert.
    routed = route_rows(residual, router.bfloat16(), 8, EPS)
    counters = torch.zeros(num_counters(hidden, 8 * num_rows), dtype=torch.int32, device=triton_device)

    def run(kind, residual, routed, weights):
        with use_kernels(kind):
            room = ResidualRows.empty(num_rows, residual.norm_scale, torch.bfloat16)
            return add_experts(residual, routed, weights, room, EPS, counters).values

    # On the CPU: racecheck is stopped by the products of cuBLAS that the reference would take.
    expected = run("reference", residual, routed, weights).float()
    on_device = [_moved(inputs, triton_device) for inputs in (residual, routed, weights)]
    first = run("triton", *on_device)
    # Of rows that are a hundred times as long as their residual: roundings of the activations.
    assert (first.float().cpu() - expected).norm() / expected.norm() < 1e-2
    for _ in range(1 if watches_races else 50):
        assert torch.equal(run("triton", *on_device), first)
    assert not counters[: most_tiles(hidden)].any() and not (counters % 2**16).any()


def test_errors_name_what_is_given_and_allowed():
    rows, scale, router, weights = _block(2, 8, 2, 48, 20, 40)
    residual = residual_rows(rows, scale)
    with pytest.raises(ValueError, match=r"top_k must be in \[1, 8\] with 8 experts, got 9"):
        route_rows(residual, router, 9, EPS)
    with pytest.raises(ValueError, match="weight must be"):
        route_rows(residual, router[:, :40], 2, EPS)
    routed = route_rows(residual, router, 2, EPS)
    wrong = ExpertWeights(weights.gate_up[:, :30], weights.down, weights.shared_gate_up, weights.shared_down)
    with pytest.raises(ValueError, match="gate_up must be"):
        add_experts(residual, routed, wrong, ResidualRows.empty(2, scale, torch.float32), EPS)
    with pytest.raises(ValueError, match=r"output must be contiguous torch.float32 \(2, 48\)"):
        add_experts(residual, routed, weights, ResidualRows.empty(3, scale, torch.float32), EPS)
    with pytest.raises(ValueError, match="counters must be at least 8 int32, got 4"):
        room, counters = ResidualRows.empty(2, scale, torch.float32), torch.zeros(4, dtype=torch.int32)
        add_experts(residual, routed, weights, room, EPS, counters)
