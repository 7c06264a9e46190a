"""What a block costs in memory, and how its records become permanent."""

import copy

import pytest
import torch

from hf_hybridspec.modeling import block_buffers
from hf_hybridspec.modeling.block_buffers import BlockBuffers

from .cache_helpers import ROWS, assert_same_content, run_block

# A GDN layer of Qwen3.5-35B-A3B.
LAYERS, K_HEADS, V_HEADS, K_DIM, V_DIM, KERNEL = 30, 16, 32, 128, 128, 4
CHANNELS = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM


def published_buffers(num_rows: int) -> BlockBuffers:
    conv_state = torch.empty(1, CHANNELS, KERNEL, dtype=torch.bfloat16, device="meta")
    recurrent_state = torch.empty(1, V_HEADS, K_DIM, V_DIM, device="meta")
    return BlockBuffers([conv_state] * LAYERS, [recurrent_state] * LAYERS, K_HEADS, num_rows)


def test_a_block_costs_its_compact_factors():
    """16 rows of (z, k, g) in fp32 and of convolution inputs in bf16: a third of ONE state, not sixteen."""
    buffers = published_buffers(16)
    factors = 4 * (V_HEADS * V_DIM + K_HEADS * K_DIM + V_HEADS)
    assert buffers.num_bytes == LAYERS * 16 * (factors + 2 * CHANNELS) == 19_722_240
    one_state_per_row = LAYERS * 16 * 4 * V_HEADS * K_DIM * V_DIM
    assert one_state_per_row == 1_006_632_960
    assert buffers.num_bytes * 50 < one_state_per_row


def test_rows_are_allocated_in_segments():
    assert [published_buffers(rows).num_rows for rows in (1, 16, 17, 40)] == [16, 16, 32, 48]


def tensors_of(buffers: BlockBuffers) -> list[torch.Tensor]:
    return [buffers.rows, buffers.factors.z, buffers.factors.k, buffers.factors.g]


def test_rounds_allocate_nothing(pair, decoded):
    """Bytes and addresses of states and records stay over rounds: graphs may hold them."""
    cache = copy.deepcopy(decoded(pair, True)[0])
    cache.begin_block(16)
    bytes_before = cache.block_bytes
    (buffers,) = cache._buffers.values()
    addresses = [tensor.data_ptr() for tensor in (*tensors_of(buffers), buffers.recurrent_states, buffers.conv_states)]
    for length, commit_length in [(16, 3), (2, 2), (9, 0), (16, 16)]:
        run_block(pair.attached, cache, ROWS[:, :length])
        cache.commit(commit_length)
    tensors = (*tensors_of(buffers), buffers.recurrent_states, buffers.conv_states)
    assert [tensor.data_ptr() for tensor in tensors] == addresses
    assert cache.block_bytes == bytes_before
    for layer, state in zip(cache.layers, buffers.recurrent_states, strict=False):
        assert layer.recurrent_states[0].data_ptr() == state.data_ptr()


def test_growing_keeps_what_is_recorded(pair, decoded):
    start, steps = decoded(pair, False)
    cache = copy.deepcopy(start)
    run_block(pair.attached, cache, ROWS[:, :5])
    (buffers,) = cache._buffers.values()
    kept = [tensor[:, :, :5].clone() for tensor in tensors_of(buffers)]
    buffers.grow(33)
    assert buffers.num_rows == 48
    for tensor, expected in zip(tensors_of(buffers), kept, strict=True):
        assert torch.equal(tensor[:, :, :5], expected)
    cache.commit(4)
    assert_same_content(cache, steps[4].cache)
    grown = buffers.rows
    buffers.grow(48)
    assert buffers.rows is grown


def test_one_launch_commits_all_layers(pair, decoded, monkeypatch):
    calls = []

    def record(name):
        original = getattr(block_buffers, name)

        def call(states, *arguments):
            calls.append((name, states.shape[0]))
            return original(states, *arguments)

        return call

    for name in ("commit_causal_conv", "commit_gated_delta_rule"):
        monkeypatch.setattr(block_buffers, name, record(name))
    cache = copy.deepcopy(decoded(pair, False)[0])
    run_block(pair.attached, cache, ROWS[:, :7])
    assert calls == []
    cache.commit(3)
    assert sorted(calls) == [("commit_causal_conv", 3), ("commit_gated_delta_rule", 3)]
    run_block(pair.attached, cache, ROWS[:, :7])
    cache.commit(0)
    assert len(calls) == 2


@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_uninitialised_and_rejected_rows_are_never_read(pair, garbage, decoded):
    """Buffers are `torch.empty`: what they hold beyond a block's rows may be anything."""
    start, steps = decoded(pair, False)
    cache = copy.deepcopy(start)
    cache.begin_block(16)
    (buffers,) = cache._buffers.values()
    for tensor in tensors_of(buffers):
        tensor.fill_(garbage)
    run_block(pair.attached, cache, ROWS[:, :6])
    for tensor in tensors_of(buffers):
        tensor[:, :, 4:] = garbage
    cache.commit(4)
    assert_same_content(cache, steps[4].cache)
