"""The compiled kernels against an fp32 recurrence, within the project's limits, and inside captured graphs."""

import pytest
import torch

from hf_hybridspec.kernels.dispatch import use_kernels
from hf_hybridspec.kernels.gated_delta_rule import commit_gated_delta_rule, verify_gated_delta_rule

from .gated_delta_rule_cases import random_block, recurrence, relative_error

pytestmark = pytest.mark.gpu

# Relative Frobenius error of (outputs, committed state). The bf16 rounding of an output alone is 1.7e-3.
LIMITS = {torch.bfloat16: (4.3e-3, 1.7e-3), torch.float16: (4.3e-3, 1.7e-3), torch.float32: (1e-4, 1e-6)}
SHAPE = {"num_k_heads": 16, "num_v_heads": 32, "k_dim": 128, "v_dim": 128, "batch": 1}


@pytest.fixture(autouse=True)
def _cuda_kernels():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with use_kernels("triton"):
        yield


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("rows", range(1, 17))
@pytest.mark.parametrize("order", ["all_then_half", "half_then_all"])
def test_two_rounds_stay_within_the_limits(rows, order, dtype):
    half = max(1, rows // 2)
    commits = (rows, half) if order == "all_then_half" else (half, rows)
    total = random_block(sum(commits) + rows, dtype=dtype, device="cuda", **SHAPE)
    expected, states = recurrence(total, torch.float32)
    factors, state, position = total.factors(), total.recurrent_state.clone(), 0
    output_limit, state_limit = LIMITS[dtype]
    for length in commits:
        block = total.rows(position, position + rows, state)
        output = verify_gated_delta_rule(*block.inputs, factors)
        assert output.dtype == dtype
        assert relative_error(output, expected[:, position : position + rows]) < output_limit
        commit_gated_delta_rule(state[None], factors[None], torch.tensor([length], dtype=torch.int32, device="cuda"))
        position += length
        assert relative_error(state, states[position]) < state_limit


def test_graphs_replay_with_lengths_from_device_memory_and_no_synchronisation():
    """C10, C14: one graph per number of rows, replayed with varying commit lengths, equals the eager calls."""
    state = random_block(1, device="cuda", dtype=torch.bfloat16, **SHAPE).recurrent_state
    eager_state = state.clone()
    length = torch.zeros(1, dtype=torch.int32, device="cuda")
    graphs = {}
    for rows in (2, 3, 6, 16):
        block = random_block(rows, dtype=torch.bfloat16, device="cuda", **SHAPE)
        block = block.rows(0, rows, state)
        factors = block.factors(rows)
        verify_gated_delta_rule(*block.inputs, factors)
        commit_gated_delta_rule(state[None], factors[None], length)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = verify_gated_delta_rule(*block.inputs, factors)
            commit_gated_delta_rule(state[None], factors[None], length)
        # A graph does not keep alive what it reads: the block and its factors must outlive it.
        graphs[rows] = (graph, block, factors, output)
    assert torch.equal(state, eager_state)

    for rows, committed in ((2, 1), (16, 5), (6, 6), (3, 0), (16, 16), (2, 2), (6, 1)):
        graph, block, _, output = graphs[rows]
        length.fill_(committed)
        torch.cuda.set_sync_debug_mode("error")
        try:
            graph.replay()
            eager = block.rows(0, rows, eager_state)
            factors = block.factors(rows)
            eager_output = verify_gated_delta_rule(*eager.inputs, factors)
            commit_gated_delta_rule(eager_state[None], factors[None], length)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(output, eager_output)
        assert torch.equal(state, eager_state)


def test_the_reference_runs_on_the_device_as_well():
    block = random_block(6, dtype=torch.bfloat16, device="cuda", **SHAPE)
    with use_kernels("reference"):
        output = verify_gated_delta_rule(*block.inputs, block.factors())
    assert relative_error(output, recurrence(block)[0]) < LIMITS[torch.bfloat16][0]
