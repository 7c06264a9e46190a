"""The Triton implementation in fp32: on CPU through the interpreter, on a GPU compiled."""

import pytest
import torch

from hf_hybridspec.kernels.dispatch import use_kernels
from hf_hybridspec.kernels.gated_delta_rule import CompactFactors, commit_gated_delta_rule, verify_gated_delta_rule

from .gated_delta_rule_cases import Block, random_block, recurrence, relative_error, with_nearly_equal_keys

# Exact fp32 products ("ieee"), so only the order of summation differs from the reference; measured up to 4e-7.
TOLERANCE = 1e-6


@pytest.fixture(autouse=True)
def _triton_kernels(triton_device):
    with use_kernels("triton"):
        yield


@pytest.mark.parametrize("rows", range(1, 17))
def test_every_length_equals_the_recurrence_and_the_reference(rows, triton_device):
    """C14. K and V are no powers of two, so every mask is at work."""
    block = random_block(rows, 1, 2, k_dim=24, v_dim=40, device=triton_device)
    factors, reference_factors = block.factors(), block.factors()
    before = block.recurrent_state.clone()
    output = verify_gated_delta_rule(*block.inputs, factors)
    with use_kernels("reference"):
        reference = verify_gated_delta_rule(*block.inputs, reference_factors)
    expected, states = recurrence(block)

    assert relative_error(output, expected) < TOLERANCE
    assert relative_error(output, reference) < TOLERANCE
    assert torch.equal(block.recurrent_state, before)
    for name in ("z", "k", "g"):
        actual = getattr(factors, name)
        assert relative_error(actual[:, :rows], getattr(reference_factors, name)[:, :rows]) < TOLERANCE
        assert actual[:, rows:].isnan().all()
    for length in sorted({0, 1, rows // 2, rows}):
        state = before[None].clone()
        commit_gated_delta_rule(state, factors[None], torch.tensor([length], device=triton_device, dtype=torch.int32))
        assert relative_error(state[0], states[length]) < TOLERANCE
        assert length > 0 or torch.equal(state[0], before)


@pytest.mark.parametrize("heads", [(2, 2), (2, 4), (1, 4)])
@pytest.mark.parametrize("sizes", [(16, 16), (64, 16), (16, 48)])
def test_head_ratios_and_sizes(heads, sizes, triton_device):
    block = random_block(5, *heads, *sizes, batch=1, device=triton_device)
    factors = block.factors(rows=5)
    output = verify_gated_delta_rule(*block.inputs, factors)
    expected, states = recurrence(block)
    assert relative_error(output, expected) < TOLERANCE
    state = block.recurrent_state[None].clone()
    commit_gated_delta_rule(state, factors[None], 3)
    assert relative_error(state[0], states[3]) < TOLERANCE


def test_strided_inputs_states_and_factors(triton_device):
    """Views of one projection, a state with swapped dimensions, and factors that are every other row of a buffer."""
    block = random_block(3, k_dim=16, v_dim=24, device=triton_device)
    mixed = torch.cat([x.flatten(2) for x in block.inputs[:3]], dim=-1)
    query, key, value = mixed.split([32, 32, 96], dim=-1)
    inputs = (query.unflatten(2, (2, 16)), key.unflatten(2, (2, 16)), value.unflatten(2, (4, 24)), *block.inputs[3:5])
    wide = block.factors(rows=16)
    factors = CompactFactors(wide.z[:, ::2], wide.k[:, ::2], wide.g[:, ::2])
    state = block.recurrent_state.mT.contiguous().mT
    output = verify_gated_delta_rule(*inputs, state, factors)
    expected, states = recurrence(block)
    assert relative_error(output, expected) < TOLERANCE
    assert wide.z[:, 1::2].isnan().all()
    commit_gated_delta_rule(state[None], factors[None], 2)
    assert relative_error(state, states[2]) < TOLERANCE


def test_repeated_partial_commits_of_two_layers(triton_device):
    """C10: each layer's rows are consumed once, in one call for both layers."""
    lengths = [(5, 2), (4, 4), (2, 1), (9, 6), (3, 0), (6, 5)]
    accepted = sum(m for _, m in lengths)
    layers = [random_block(accepted + 16, 1, 2, 16, 16, batch=1, device=triton_device, seed=i) for i in range(2)]
    factors = [layer.factors() for layer in layers]
    stacked = CompactFactors(*(torch.stack(x) for x in zip(*((f.z, f.k, f.g) for f in factors), strict=True)))
    states = torch.stack([layer.recurrent_state for layer in layers])
    position = 0
    for rows, length in lengths:
        for i, layer in enumerate(layers):
            block = layer.rows(position, position + rows, states[i])
            output = verify_gated_delta_rule(*block.inputs, stacked[i])
            expected = recurrence(layer.rows(0, position + rows))[0][:, position:]
            assert relative_error(output, expected) < TOLERANCE
        commit_gated_delta_rule(states, stacked, torch.tensor(length, device=triton_device))
        position += length
    for state, layer in zip(states, layers, strict=True):
        assert relative_error(state, recurrence(layer.rows(0, position))[1][-1]) < TOLERANCE


@pytest.mark.parametrize("rows", [2, 8, 13])
def test_extreme_and_vanishing_decays_in_one_block_stay_exact(rows, triton_device):
    """C13. Sums of logs near 350 leave 3e-5 of each exponent's precision."""
    block = random_block(rows, 1, 2, device=triton_device)
    block.log_decay[:, ::2] = -50.0
    block.log_decay[:, 1::2] = -1e-6
    block.log_decay[:, :, 0] = 0.0
    factors = block.factors()
    output = verify_gated_delta_rule(*block.inputs, factors)
    expected, states = recurrence(block)
    assert relative_error(output, expected) < 3e-5
    state = block.recurrent_state[None].clone()
    commit_gated_delta_rule(state, factors[None], rows)
    assert relative_error(state[0], states[rows]) < 3e-5


@pytest.mark.parametrize("rows", [4, 8, 16])
def test_nearly_equal_keys_stay_exact(rows, triton_device):
    """Powers of the system's matrix would grow to binomial coefficients (6435 at 16 rows) that cancel in the sum."""
    block = with_nearly_equal_keys(random_block(rows, 1, 2, device=triton_device))
    factors, state = block.factors(), block.recurrent_state[None].clone()
    output = verify_gated_delta_rule(*block.inputs, factors)
    commit_gated_delta_rule(state, factors[None], rows)
    expected, states = recurrence(block)
    assert relative_error(output, expected) < TOLERANCE
    assert relative_error(state[0], states[rows]) < TOLERANCE


def test_settled_states_give_the_same(triton_device):
    block = random_block(3, device=triton_device)
    factors = [block.factors(rows=3) for _ in range(2)]
    outputs = [verify_gated_delta_rule(*block.inputs, f, state_is_settled=i == 1) for i, f in enumerate(factors)]
    assert torch.equal(*outputs)
    states = [block.recurrent_state[None].clone() for _ in range(2)]
    for i, state in enumerate(states):
        commit_gated_delta_rule(state, factors[0][None], 2, states_are_settled=i == 1)
    assert torch.equal(*states)


def test_a_row_does_not_depend_on_later_rows(triton_device):
    """Poisoned later rows of the block change no bit of the earlier ones' outputs and factors at the same length."""
    block = random_block(8, 1, 2, device=triton_device)
    factors, poisoned_factors = block.factors(), block.factors()
    output = verify_gated_delta_rule(*block.inputs, factors)
    poisoned = Block(*(x.clone() for x in block.inputs))
    for tensor in poisoned.inputs[:3]:
        tensor[:, 5:] *= 100.0
    poisoned_output = verify_gated_delta_rule(*poisoned.inputs, poisoned_factors)
    assert torch.equal(output[:, :5], poisoned_output[:, :5])
    assert torch.equal(factors.z[:, :5], poisoned_factors.z[:, :5])
    assert not torch.equal(output[:, 5:], poisoned_output[:, 5:])
