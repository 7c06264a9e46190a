"""The reference implementation against a float64 recurrence."""

import pytest
import torch

from hf_hybridspec.kernels.dispatch import use_kernels
from hf_hybridspec.kernels.gated_delta_rule import CompactFactors, commit_gated_delta_rule, verify_gated_delta_rule

from .gated_delta_rule_cases import Block, random_block, recurrence, relative_error

# fp32 arithmetic over at most 16 rows; measured up to 3e-7.
TOLERANCE = 1e-6
HEADS = [(2, 2), (2, 4), (1, 4)]


@pytest.fixture(autouse=True)
def _reference_kernels():
    with use_kernels("reference"):
        yield


def committed(block: Block, factors: CompactFactors, length: int) -> torch.Tensor:
    """The state after `length` rows; what lies behind them is NaN and must not be read."""
    factors = CompactFactors(*(x.clone() for x in (factors.z, factors.k, factors.g)))
    for tensor in (factors.z, factors.k, factors.g):
        tensor[:, length:] = torch.nan
    states = block.recurrent_state[None].clone()
    commit_gated_delta_rule(states, factors[None], length)
    return states[0]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("rows", range(1, 17))
def test_outputs_factors_and_every_prefix_state_equal_the_recurrence(rows, heads):
    block = random_block(rows, *heads, k_dim=24, v_dim=40)
    factors, before = block.factors(), block.recurrent_state.clone()
    output = verify_gated_delta_rule(*block.inputs, factors)
    expected, states = recurrence(block)

    assert relative_error(output, expected) < TOLERANCE
    assert torch.equal(block.recurrent_state, before)
    for tensor in (factors.z, factors.k, factors.g):
        assert tensor[:, :rows].isfinite().all() and tensor[:, rows:].isnan().all()
    torch.testing.assert_close(factors.k[:, :rows].norm(dim=-1), torch.ones(2, rows, heads[0]), rtol=1e-4, atol=0)
    torch.testing.assert_close(factors.g[:, :rows], block.log_decay.cumsum(1))
    for length in range(rows + 1):
        assert relative_error(committed(block, factors, length), states[length]) < TOLERANCE


def test_commit_of_no_rows_leaves_the_state_bit_identical():
    block = random_block(4)
    block.recurrent_state[0, 0, 0] = -0.0
    before = block.recurrent_state.clone()
    assert torch.equal(committed(block, block.factors(), 0).view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("rows", range(1, 17))
def test_block_then_commit_then_continue_equals_one_row_at_a_time(rows):
    """Verify n, commit m, continue, against single-row blocks committed one by one (C1, C14)."""
    total = random_block(rows + 3)
    states, outputs = [total.recurrent_state], []
    for i in range(rows + 3):
        row = total.rows(i, i + 1, states[-1])
        factors = row.factors(rows=1)
        outputs.append(verify_gated_delta_rule(*row.inputs, factors))
        states.append(committed(row, factors, 1))

    block = total.rows(0, rows)
    factors = block.factors()
    output = verify_gated_delta_rule(*block.inputs, factors)
    assert relative_error(output, torch.cat(outputs[:rows], dim=1)) < TOLERANCE
    for length in range(rows + 1):
        state = committed(block, factors, length)
        assert relative_error(state, states[length]) < TOLERANCE
        following = total.rows(length, length + 3, state)
        output = verify_gated_delta_rule(*following.inputs, following.factors())
        assert relative_error(output, torch.cat(outputs[length : length + 3], dim=1)) < TOLERANCE


def test_repeated_partial_commits_consume_each_row_once():
    """C10: rounds of varying length, most of them cut short, buffers reused."""
    lengths = [(5, 2), (16, 1), (2, 2), (7, 6), (3, 1), (16, 16), (1, 1), (4, 3), (9, 5), (6, 2)]
    accepted = sum(m for _, m in lengths)
    total = random_block(accepted + 16, batch=1)
    expected, states = recurrence(total.rows(0, accepted))
    factors, state, position = total.factors(), total.recurrent_state.clone(), 0
    for rows, length in lengths:
        block = total.rows(position, position + rows, state)
        output = verify_gated_delta_rule(*block.inputs, factors)
        assert relative_error(output[:, :length], expected[:, position : position + length]) < TOLERANCE
        commit_gated_delta_rule(state[None], factors[None], torch.tensor([length], dtype=torch.int32))
        position += length
        assert relative_error(state, states[position]) < TOLERANCE


def test_all_layers_are_committed_by_one_call():
    layers, rows, length = 3, 6, 4
    blocks = [random_block(rows, seed=layer) for layer in range(layers)]
    stacked = CompactFactors.empty(layers, 2, rows, num_k_heads=2, num_v_heads=4, k_dim=32, v_dim=32, device="cpu")
    for layer, block in enumerate(blocks):
        verify_gated_delta_rule(*block.inputs, stacked[layer])
    states = torch.stack([block.recurrent_state for block in blocks])
    commit_gated_delta_rule(states, stacked, length)
    for state, block in zip(states, blocks, strict=True):
        assert relative_error(state, recurrence(block)[1][length]) < TOLERANCE


def test_one_bf16_row_is_bitwise_the_hosts_decode_step():
    """C12: b = -0.5 in bf16, K = V = 128; beta rounded as the host rounds it, operations in the host's order."""
    modeling = pytest.importorskip("transformers.models.qwen3_5_moe.modeling_qwen3_5_moe")
    block = random_block(1, 2, 4, 128, 128, batch=1, dtype=torch.bfloat16)
    beta = torch.full_like(block.beta, -0.5).sigmoid()
    assert beta.dtype == torch.bfloat16
    block = Block(*block.inputs[:4], beta, block.recurrent_state)
    factors = block.factors(rows=1)
    output = verify_gated_delta_rule(*block.inputs, factors)
    expected, state = modeling.torch_recurrent_gated_delta_rule(
        *block.inputs[:5], initial_state=block.recurrent_state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    assert torch.equal(output, expected)
    assert torch.equal(committed(block, factors, 1), state)


@pytest.mark.parametrize("rows", [1, 2, 4, 7, 8, 16])
def test_extreme_and_vanishing_decays_in_one_block_stay_exact(rows):
    """C13. Sums of logs near 400 leave 3e-5 of each exponent's precision."""
    block = random_block(rows)
    block.log_decay[:, ::2] = -50.0
    block.log_decay[:, 1::2] = -1e-6
    block.log_decay[:, :, 0] = 0.0
    factors = block.factors()
    output = verify_gated_delta_rule(*block.inputs, factors)
    expected, states = recurrence(block)
    assert relative_error(output, expected) < 3e-5
    for length in range(rows + 1):
        assert relative_error(committed(block, factors, length), states[length]) < 3e-5


@pytest.mark.parametrize("rows", [1, 2, 5, 16])
def test_bf16_activations_meet_the_limits(rows):
    block = random_block(rows, k_dim=128, v_dim=128, batch=1, dtype=torch.bfloat16)
    factors = block.factors()
    output = verify_gated_delta_rule(*block.inputs, factors)
    expected, states = recurrence(block)
    assert output.dtype == torch.bfloat16
    assert relative_error(output, expected) < 4.3e-3
    assert relative_error(committed(block, factors, rows), states[rows]) < TOLERANCE


@pytest.mark.parametrize("rows", [1, 3])
def test_strided_inputs_and_state(rows):
    """Query, key and value as views of one projection, the state as a view with its last dimensions swapped."""
    block = random_block(rows, k_dim=16, v_dim=24)
    mixed = torch.cat([x.flatten(2) for x in block.inputs[:3]], dim=-1)
    query, key, value = mixed.split([32, 32, 96], dim=-1)
    state = block.recurrent_state.mT.contiguous().mT
    inputs = (query.unflatten(2, (2, 16)), key.unflatten(2, (2, 16)), value.unflatten(2, (4, 24)), *block.inputs[3:5])
    output = verify_gated_delta_rule(*inputs, state, block.factors())
    assert relative_error(output, recurrence(block)[0]) < TOLERANCE
