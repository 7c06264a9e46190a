"""The compiled kernels against an fp32 recurrence, within the project's limits, and inside captured graphs."""

import pytest
import torch

from hf_hybridspec.kernels.dispatch import use_kernels
from hf_hybridspec.kernels.gated_delta_rule import CompactFactors, commit_gated_delta_rule, verify_gated_delta_rule

from .gated_delta_rule_cases import random_block, recurrence, relative_error, with_nearly_equal_keys

pytestmark = pytest.mark.gpu

# Relative Frobenius error of (outputs, committed state). The bf16 rounding of an output alone is 1.7e-3.
LIMITS = {torch.bfloat16: (4.3e-3, 1.7e-3), torch.float16: (4.3e-3, 1.7e-3), torch.float32: (1e-4, 1e-6)}
# State of 16-bit rows whose keys are nearly alike: 3.9e-6 when emulated on a CPU. From nine rows on products of the
# solve are "tf32": measured 1.6e-4.
NEARLY_EQUAL_KEYS = {4: 1e-5, 8: 1e-5, 16: 5e-4}
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


def test_reading_settled_states_early_changes_nothing():
    """Rounds of several layers in one graph: kernels that start early and read states before they wait, or do not."""
    layers, rows, rounds = 8, 4, 6
    blocks = [random_block(rows, dtype=torch.bfloat16, device="cuda", seed=i, **SHAPE) for i in range(layers)]
    factors = [block.factors(rows) for block in blocks]
    stacked = CompactFactors(*(torch.stack(x) for x in zip(*((f.z, f.k, f.g) for f in factors), strict=True)))
    length = torch.tensor([3], dtype=torch.int32, device="cuda")
    results = []
    for settled in (False, True):
        states = torch.stack([block.recurrent_state for block in blocks])
        before = states.clone()
        rounds_of_layers(blocks, states, stacked, length, 1, settled)
        states.copy_(before)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = rounds_of_layers(blocks, states, stacked, length, rounds, settled)
        for _ in range(3):
            states.copy_(before)
            graph.replay()
            results.append((states.clone(), outputs.clone()))
    for states, outputs in results[1:]:
        assert torch.equal(states, results[0][0]) and torch.equal(outputs, results[0][1])


def rounds_of_layers(blocks, states, factors, length, rounds, settled) -> torch.Tensor:
    """Outputs of all rounds; every layer's state is read by its verification and written by the round's commit."""
    outputs = []
    for _ in range(rounds):
        for i, block in enumerate(blocks):
            inputs = block.inputs[:5]
            early = settled and i > 0
            outputs.append(verify_gated_delta_rule(*inputs, states[i], factors[i], state_is_settled=early))
        commit_gated_delta_rule(states, factors, length, states_are_settled=settled)
    return torch.stack(outputs)


@pytest.mark.parametrize("rows", NEARLY_EQUAL_KEYS)
def test_nearly_equal_keys_stay_exact(rows):
    """Repeated tokens: powers of the system's matrix grow to binomial coefficients, which must not appear."""
    block = with_nearly_equal_keys(random_block(rows, dtype=torch.bfloat16, device="cuda", **SHAPE))
    factors, state = block.factors(), block.recurrent_state.clone()
    output = verify_gated_delta_rule(*block.inputs, factors)
    commit_gated_delta_rule(state[None], factors[None], rows)
    expected, states = recurrence(block)
    assert relative_error(output, expected) < LIMITS[torch.bfloat16][0]
    assert relative_error(state, states[rows]) < NEARLY_EQUAL_KEYS[rows]


def test_the_reference_runs_on_the_device_as_well():
    block = random_block(6, dtype=torch.bfloat16, device="cuda", **SHAPE)
    with use_kernels("reference"):
        output = verify_gated_delta_rule(*block.inputs, block.factors())
    assert relative_error(output, recurrence(block)[0]) < LIMITS[torch.bfloat16][0]
