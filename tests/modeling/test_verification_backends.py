"""Verification backends: outputs and states of one-row decoding, whatever is accepted, and where they differ."""

import pytest
import torch

import hf_hybridspec
from hf_hybridspec.generation.length_policies import Full
from hf_hybridspec.modeling.block_buffers import BlockBuffers
from hf_hybridspec.modeling.hybrid_cache import HybridCache
from hf_hybridspec.modeling.verification_backends import (
    BACKENDS,
    ReplayedUpdates,
    StoredStates,
    use_verification,
)
from tests.support import random_prompt, random_target, scripted_drafter

# fp32 sums in another order, through 4 layers and 70 rows. Logits are of order ten; a wrong state changes them by one.
TOLERANCE = 2e-3
BASELINES = ("stored", "replay")


@pytest.fixture(scope="module")
def target():
    return hf_hybridspec.attach(random_target("qwen3_5_moe"))


@pytest.fixture(scope="module")
def reference(target):
    return target.generate(random_prompt(9, seed=1), max_new_tokens=90, do_sample=False)


def prefilled(target, length=7) -> HybridCache:
    cache = HybridCache(target.config)
    target(random_prompt(length, seed=2), cache=cache, logits_to_keep=1)
    return cache


def states(cache):
    return [layer.recurrent_states[0].clone() for layer in cache.layers if hasattr(layer, "recurrent_states")]


def feed(target, cache, blocks, tokens):
    """Runs blocks of `(length, commit_length)`; returns the logits of the committed rows."""
    logits, start = [], 0
    for length, commit_length in blocks:
        cache.begin_block(length)
        output = target(tokens[:, start : start + length], cache=cache).logits[0]
        cache.commit(commit_length)
        logits.append(output[:commit_length])
        start += commit_length
    return torch.cat(logits)


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize(
    "blocks",
    [[(16, 16)] * 4, [(16, 5), (3, 3), (2, 0), (7, 1), (16, 14), (1, 1), (9, 9)], [(20, 18), (4, 2), (33, 33)]],
    ids=["all", "mixed", "longer than a kernel call"],
)
@torch.no_grad()
def test_rows_and_states_equal_one_row_decoding(target, name, blocks):
    tokens = random_prompt(120, seed=3)
    plain = prefilled(target)
    num_rows = sum(commit_length for _, commit_length in blocks)
    expected = feed(target, plain, [(1, 1)] * num_rows, tokens)
    with use_verification(name):
        cache = prefilled(target)
        logits = feed(target, cache, blocks, tokens)
        assert isinstance(cache.buffers_of(0)[0], BACKENDS[name])
    cache.settle()
    torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)
    for state, right in zip(states(cache), states(plain), strict=True):
        torch.testing.assert_close(state, right, rtol=0, atol=TOLERANCE)
    assert cache.committed_length == plain.committed_length


@torch.no_grad()
def test_replay_leaves_the_state_behind_until_the_ring_is_full(target):
    tokens = random_prompt(60, seed=4)
    with use_verification("replay"):
        cache = prefilled(target)
        before = states(cache)
        feed(target, cache, [(8, 8), (8, 8)], tokens)
        buffers = cache.buffers_of(0)[0]
        assert buffers.num_pending == 16 and all(map(torch.equal, states(cache), before))
        feed(target, cache, [(2, 1)], tokens[:, 16:])
        assert buffers.num_pending == 0 and not any(map(torch.equal, states(cache), before))


@torch.no_grad()
def test_stored_keeps_a_state_for_every_row_and_more_bytes(target):
    tokens = random_prompt(30, seed=5)
    with use_verification("stored"):
        stored = prefilled(target)
        stored.begin_block(4)
        target(tokens[:, :4], cache=stored)
        kept = stored.buffers_of(0)[0].states[0, :, :4].clone()
        stored.commit(4)
    one_by_one = prefilled(target)
    for row in range(4):
        one_by_one.begin_block(1)
        target(tokens[:, row : row + 1], cache=one_by_one)
        one_by_one.commit(1)
        torch.testing.assert_close(kept[:, row], states(one_by_one)[0], rtol=0, atol=TOLERANCE)
    assert stored.block_bytes > one_by_one.block_bytes
    assert type(stored.buffers_of(0)[0]) is StoredStates and type(one_by_one.buffers_of(0)[0]) is BlockBuffers


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("path", ["round", "host"])
def test_greedy_decoding_gives_the_same_tokens(target, reference, name, path):
    drafter = scripted_drafter().script(reference[0], [15, 3, 0, 7, 1, 15, 15, 4, 2, 9])
    with use_verification(name):
        output = target.generate(
            reference[:, :9],
            max_new_tokens=90,
            do_sample=False,
            assistant_model=drafter,
            length_policy=Full(),
            decoding_path=path,
        )
    assert torch.equal(output, reference)
    assert max(target.generation_statistics.emitted) > 8


def test_a_cache_changes_backends_between_turns(target, reference):
    cache, sequence = HybridCache(target.config), reference[:, :9]
    drafter = scripted_drafter()
    for turn, name in enumerate(("replay", "compact", "stored", "replay")):
        drafter.script(reference[0], [5, 0, 11])
        with use_verification(name):
            sequence = target.generate(
                sequence,
                max_new_tokens=20,
                do_sample=False,
                assistant_model=drafter,
                cache=cache,
                length_policy=Full(),
            )
        assert torch.equal(sequence, reference[:, : 9 + 20 * (turn + 1)])
    assert isinstance(cache.buffers_of(0)[0], ReplayedUpdates)
    # Plain decoding goes on from the settled states.
    assert torch.equal(target.generate(sequence, max_new_tokens=1, do_sample=False, cache=cache), reference[:, :90])


def test_unknown_backends_are_refused():
    with (
        pytest.raises(ValueError, match=r"must be one of compact, stored, replay, got 'fold'"),
        use_verification("fold"),
    ):
        pass
