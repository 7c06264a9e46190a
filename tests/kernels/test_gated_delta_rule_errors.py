"""What the two entries refuse: the message names what was given, what is allowed, and where it helps the next step."""

from dataclasses import replace

import pytest
import torch

from hf_hybridspec.kernels.gated_delta_rule import CompactFactors, commit_gated_delta_rule, verify_gated_delta_rule

from .gated_delta_rule_cases import random_block


@pytest.mark.parametrize("rows", [0, 17])
def test_number_of_rows(rows):
    block = random_block(rows)
    with pytest.raises(ValueError, match=rf"1 to 16 rows, got {rows}\. Prefill"):
        verify_gated_delta_rule(*block.inputs, block.factors(rows=20))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": lambda x: x[:, :, :1]}, r"query and key must be \[B, n, H, K\]"),
        ({"value": lambda x: x[:, :2]}, r"value \[B, n, HV, V\]"),
        ({"value": lambda x: x[:, :, :3]}, "multiple of the 2 key heads, got 3"),
        ({"query": lambda x: x.bfloat16()}, "must share one dtype"),
        ({name: lambda x: x.double() for name in ("query", "key", "value")}, "must share one dtype of fp32"),
        ({"log_decay": lambda x: x.bfloat16()}, "log_decay must be torch.float32"),
        ({"beta": lambda x: x[:, :1]}, r"beta must be .* \(2, 3, 4\), got .* \(2, 1, 4\)"),
        ({"recurrent_state": lambda x: x.bfloat16()}, "recurrent_state must be torch.float32"),
        ({"recurrent_state": lambda x: x[..., :8]}, r"recurrent_state must be .* \(2, 4, 32, 32\)"),
    ],
)
def test_inputs_of_verify(change, message):
    block = random_block(3)
    changed = replace(block, **{name: function(getattr(block, name)) for name, function in change.items()})
    with pytest.raises(ValueError, match=message):
        verify_gated_delta_rule(*changed.inputs, block.factors())


def test_factors_with_too_few_rows_are_refused_and_stay_unwritten():
    block = random_block(3)
    factors = block.factors(rows=2)
    with pytest.raises(ValueError, match=r"factors.z must be torch.float32 \(2, 3, 4, 32\), got .* \(2, 2, 4, 32\)"):
        verify_gated_delta_rule(*block.inputs, factors)
    assert factors.z.isnan().all()


@pytest.mark.parametrize("length", [-1, 5])
def test_commit_length_out_of_range(length):
    block = random_block(4)
    with pytest.raises(ValueError, match=rf"commit_length must be in \[0, 4\], the rows of the block, got {length}"):
        commit_gated_delta_rule(block.recurrent_state[None], block.factors(rows=4)[None], length)


@pytest.mark.parametrize("length", [torch.tensor([1, 2]), torch.tensor(1.0)])
def test_commit_length_of_the_wrong_kind(length):
    block = random_block(4)
    with pytest.raises(ValueError, match="one int32 or int64 element"):
        commit_gated_delta_rule(block.recurrent_state[None], block.factors(rows=4)[None], length)


def test_states_and_factors_of_commit():
    block = random_block(4)
    factors = block.factors(rows=4)[None]
    with pytest.raises(ValueError, match=r"recurrent_states must be fp32 \[L, B, HV, K, V\].*Stack the layers"):
        commit_gated_delta_rule(block.recurrent_state, factors, 1)
    with pytest.raises(ValueError, match="recurrent_states must be fp32"):
        commit_gated_delta_rule(block.recurrent_state[None].double(), factors, 1)
    with pytest.raises(ValueError, match=r"factors.z must be"):
        commit_gated_delta_rule(block.recurrent_state[None], replace(factors, z=factors.z[..., :3]), 1)
    with pytest.raises(ValueError, match=r"4 a multiple of H"):
        commit_gated_delta_rule(block.recurrent_state[None], replace(factors, k=factors.k[:, :, :, [0, 0, 0]]), 1)
    long = CompactFactors(*(x.repeat_interleave(5, dim=2) for x in (factors.z, factors.k, factors.g)))
    with pytest.raises(ValueError, match="at most 16 rows, got factors of 20"):
        commit_gated_delta_rule(block.recurrent_state[None], long, 1)
