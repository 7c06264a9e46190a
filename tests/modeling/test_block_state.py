"""A cache driven from the device: it shares the cache's tensors, commits by a length on the device, and hands back."""

import copy

import pytest
import torch

from hf_hybridspec import HybridCache
from hf_hybridspec.modeling.block_state import BlockState, GatedDeltaState, state_obstacle
from hf_hybridspec.modeling.verification_backends import use_verification
from tests.support import random_prompt

from .cache_helpers import NEXT, ROWS, assert_same_content, held_tensors, prefilled, run, run_block

PROMPT = random_prompt(9, seed=5)


def length_of(count: int) -> torch.Tensor:
    return torch.tensor([count], dtype=torch.int32)


def test_it_shares_the_tensors_of_the_cache(pair):
    cache = prefilled(pair.attached, PROMPT, is_static=True)
    state = BlockState(cache)
    assert int(state.committed) == 9 and state.committed.dtype == torch.int32 and state.capacity == 96
    for layer_idx, layer in enumerate(cache.layers):
        part = state.layers[layer_idx]
        if isinstance(part, GatedDeltaState):
            shared = ((part.conv_state, layer.conv_states[0]), (part.recurrent_state, layer.recurrent_states[0]))
        else:
            shared = ((part.keys, layer.keys), (part.values, layer.values))
        for mine, own in shared:
            assert mine.data_ptr() == own.data_ptr() and mine.numel() == own.numel()


@pytest.mark.parametrize("commit_length", [0, 1, 3, 5])
def test_a_commit_on_the_device_is_a_commit_of_the_cache(pair, commit_length):
    """The eager forward fills the block; then one cache commits on the host and its copy on the device."""
    cache = prefilled(pair.attached, PROMPT, is_static=True)
    state = BlockState(cache)
    run_block(pair.attached, cache, ROWS[:, :5])
    expected = copy.deepcopy(cache)
    expected.commit(commit_length)
    state.commit(length_of(commit_length))
    assert int(state.committed) == 9 + commit_length
    # The host's record of the block is of no use any more.
    cache.block_length = 0
    for buffers in cache._buffers.values():
        buffers.discard()
    state.release()
    assert_same_content(cache, expected, tolerance=0)
    assert torch.equal(run(pair.attached, cache, NEXT), run(pair.attached, expected, NEXT))


def test_selected_states_are_the_committed_ones_and_gathered_in_the_order_asked_for(pair):
    state = BlockState(prefilled(pair.attached, PROMPT, is_static=True))
    gated_delta = [idx for idx, part in state.layers.items() if isinstance(part, GatedDeltaState)]
    layer_ids = (gated_delta[-1], gated_delta[0])
    selected = state.select_states(layer_ids)
    parts = [state.layers[idx].recurrent_state for idx in layer_ids]
    assert tuple(selected) == layer_ids and len(selected) == 2
    assert all(selected[idx].data_ptr() == part.data_ptr() for idx, part in zip(layer_ids, parts, strict=True))
    for change in (0.0, 1.0):
        parts[0].add_(change)
        assert torch.equal(selected.gather(), torch.cat(parts, dim=1))
    assert selected.gather().data_ptr() == selected.gather().data_ptr()
    assert dict(state.select_states(())) == {}


def test_without_a_release_the_cache_is_stale(pair):
    """The negative control: what release() does is needed."""
    cache = prefilled(pair.attached, PROMPT, is_static=True)
    state = BlockState(cache)
    state.committed.add_(2)
    assert cache.committed_length == 9
    state.release()
    assert cache.committed_length == 11


def test_a_second_state_finds_what_the_first_left(pair):
    cache = prefilled(pair.attached, PROMPT, is_static=True)
    first = BlockState(cache)
    pointers = [tensor.data_ptr() for tensor in held_tensors(cache)]
    run_block(pair.attached, cache, ROWS[:, :3])
    second = BlockState(cache)
    assert int(second.committed) == 9 and not cache.block_length
    assert [tensor.data_ptr() for tensor in held_tensors(cache)] == pointers
    for layer_idx, part in first.layers.items():
        if isinstance(part, GatedDeltaState):
            assert part.factors.z.data_ptr() == second.layers[layer_idx].factors.z.data_ptr()


def test_obstacles_are_named(target_pairs):
    target = target_pairs["qwen3_5_moe"].attached
    with pytest.raises(ValueError, match="not static"):
        BlockState(prefilled(target, PROMPT))
    with pytest.raises(ValueError, match="no prompt has been run"):
        BlockState(HybridCache(target.config, 96))
    two = HybridCache(target.config, 96)
    run(target, two, PROMPT.repeat(2, 1))
    assert state_obstacle(two) == "it holds 2 sequences"
    cache = prefilled(target, PROMPT, is_static=True)
    with use_verification("stored"):
        assert "verification backend" in state_obstacle(cache)
    assert state_obstacle(cache) is None
