"""Forwards of the decode benchmark count their distinct experts, whether a router or a script has chosen them."""

import pytest
import torch

from benchmarks.full_target import noisy_cache, random_target, target_config
from benchmarks.scripted_forward import ExpertScript, ScriptedForward
from hf_hybridspec.kernels.moe_experts import RoutedRows
from hf_hybridspec.modeling.block_state import BlockState
from hf_hybridspec.modeling.target import text_config

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target():
    return random_target(target_config(is_tiny=True, num_layers=None), CPU, torch.float32)


def run(forward: ScriptedForward, state: BlockState, length: int) -> None:
    tokens = torch.arange(length) + 7 * length
    boundary = forward.stage0(tokens, torch.zeros(1, dtype=torch.int64), state)
    forward.stage1(boundary, length, state)


def selected(forward: ScriptedForward, monkeypatch) -> list[torch.Tensor]:
    """The experts that every later call of the router chooses."""
    chosen, route = [], super(ScriptedForward, forward)._route

    def watched(block, hidden, room=None):
        routed = route(block, hidden, room)
        chosen.append(routed.top_k_index.clone())
        return routed

    monkeypatch.setattr("benchmarks.scripted_forward.FusedForward._route", lambda self, *given: watched(*given))
    return chosen


def test_counts_are_those_of_the_newest_forward_of_each_length(target, monkeypatch):
    forward, state = ScriptedForward(target), BlockState(noisy_cache(target, 20, 40))
    chosen, expected = selected(forward, monkeypatch), {}
    for length in (5, 2, 5, 11):
        chosen.clear()
        run(forward, state, length)
        later = chosen[1:]
        expected[length] = sum(index.unique().numel() for index in later) / len(later)
    assert len(set(expected.values())) == 3
    assert {length: forward.distinct_experts(length) for length in expected} == pytest.approx(expected)


def test_what_is_counted_is_not_allocated_by_a_forward(target, monkeypatch):
    # Captured, such an allocation would lie in memory that other graphs of the pool write over.
    forward, state = ScriptedForward(target), BlockState(noisy_cache(target, 20, 40))

    def refuse(*sizes):
        raise AssertionError("a forward has allocated its routing")

    monkeypatch.setattr(RoutedRows, "empty", refuse)
    for length in (1, 6, 16):
        run(forward, state, length)
        assert 2 <= forward.distinct_experts(length) <= min(16, 2 * length)


def test_a_script_counts_over_all_of_its_variants(target):
    forward, state = ScriptedForward(target), BlockState(noisy_cache(target, 20, 40))
    forward.script = ExpertScript(text_config(target), num_variants=16, device=CPU)
    run(forward, state, 4)
    assert forward.distinct_experts(1) == 2
    # k w^0.66, of few draws.
    assert forward.distinct_experts(4) == pytest.approx(2 * 4**0.66, abs=0.7)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_counts_after_captured_rounds_of_several_lengths():
    """Graphs of one pool, replayed in another order than captured: as counted after each alone."""
    target = random_target(target_config(is_tiny=True, num_layers=None), torch.device("cuda"), torch.bfloat16)
    forward, state = ScriptedForward(target), BlockState(noisy_cache(target, 20, 40))
    offset, pool, graphs, alone = torch.zeros(1, dtype=torch.int64, device="cuda"), None, {}, {}
    stream = torch.cuda.Stream()
    for length in (2, 6, 3, 12):
        tokens = torch.arange(length, device="cuda")
        with torch.cuda.stream(stream):
            forward.stage1(forward.stage0(tokens, offset, state), length, state)
        torch.cuda.synchronize()
        graphs[length] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[length], pool=pool):
            forward.stage1(forward.stage0(tokens, offset, state), length, state)
        pool = graphs[length].pool()
        graphs[length].replay()
        torch.cuda.synchronize()
        alone[length] = forward.distinct_experts(length)
    for length in (12, 3, 6, 2):
        graphs[length].replay()
    torch.cuda.synchronize()
    assert {length: forward.distinct_experts(length) for length in graphs} == alone
