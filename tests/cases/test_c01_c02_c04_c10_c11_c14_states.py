"""C1, C2, C4, C10, C11, C14: after a block is cut, every state is that of the last accepted row, again and again.

C10 and C14 run eagerly here; their graph variants belong to the captured round.
"""

import itertools

import pytest
import torch

from hf_hybridspec import HybridCache
from hf_hybridspec.generation.length_policies import LengthPolicy, Static
from hf_hybridspec.modeling.block_buffers import BlockBuffers
from hf_hybridspec.modeling.hybrid_cache import GatedDeltaLayer
from tests.scenarios import LOOPS, assisted, plain, scripted
from tests.support import random_prompt

# fp32: a block's states are sums over its rows, plain decoding's a recurrence; four layers of hidden size 32.
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
COMMITS = ((5, 2), (16, 16), (3, 1), (8, 7), (2, 1), (16, 3))


class CyclingLengths(LengthPolicy):
    """Another verification length in every round."""

    name = "cycling"

    def __init__(self, lengths):
        self._lengths = itertools.cycle(lengths)

    def select(self, draft):
        return next(self._lengths)


def states(cache) -> dict[str, list[torch.Tensor]]:
    """Convolution and recurrent states of the GDN layers, in layer order."""
    layers = [layer for layer in cache.layers if isinstance(layer, GatedDeltaLayer)]
    return {
        "conv": [layer.conv_states[0].clone() for layer in layers],
        "recurrent": [layer.recurrent_states[0].clone() for layer in layers],
    }


def commit_blocks(model, tokens: torch.Tensor, commits) -> list[dict]:
    """Runs a prompt of 6 and then blocks whose rows after the committed ones are wrong. States after every commit."""
    cache, history, start = HybridCache(model.config), [], 6
    model(tokens[:, :start], cache=cache)
    for length, commit_length in commits:
        block = tokens[:, start : start + length].clone()
        block[:, commit_length:] = (block[:, commit_length:] + 1) % 97
        cache.begin_block(length)
        model(block, cache=cache)
        cache.commit(commit_length)
        start += commit_length
        history.append({"length": start, **states(cache)})
    return history


def decode_one_by_one(model, tokens: torch.Tensor, length: int) -> dict:
    """States after the first `length` tokens, one forward each after the prompt of 6."""
    cache = HybridCache(model.config)
    model(tokens[:, :6], cache=cache)
    for position in range(6, length):
        model(tokens[:, position : position + 1], cache=cache)
    return states(cache)


@torch.no_grad()
def assert_states_follow_the_accepted_rows(model):
    tokens = random_prompt(60, seed=2)
    for found in commit_blocks(model, tokens, COMMITS):
        expected = decode_one_by_one(model, tokens, found["length"])
        # C11: the convolution history as well, and not within a tolerance of its own.
        for name in ("conv", "recurrent"):
            for ours, theirs in zip(found[name], expected[name], strict=True):
                torch.testing.assert_close(ours, theirs, **TOLERANCE)


def test_c01_c11_states_after_every_partial_commit(pair):
    assert_states_follow_the_accepted_rows(pair.attached)


def test_c01_fails_if_rejected_rows_are_committed(target_pairs, monkeypatch):
    commit = BlockBuffers.commit
    monkeypatch.setattr(BlockBuffers, "commit", lambda self, length: commit(self, max(self.num_recorded)))
    with pytest.raises(AssertionError):
        assert_states_follow_the_accepted_rows(target_pairs["qwen3_5_moe"].attached)


@pytest.mark.parametrize("keeps", ["conv", "recurrent"])
def test_c11_fails_if_one_of_the_two_states_is_left_behind(target_pairs, monkeypatch, keeps):
    name = {"conv": "commit_causal_conv", "recurrent": "commit_gated_delta_rule"}[keeps]
    monkeypatch.setattr(f"hf_hybridspec.modeling.block_buffers.{name}", lambda *arguments: None)
    with pytest.raises(AssertionError):
        assert_states_follow_the_accepted_rows(target_pairs["qwen3_5_moe"].attached)


@pytest.mark.parametrize("loop", LOOPS)
def test_c02_two_reject_patterns_give_equal_logits(pair, loop):
    options = {"max_new_tokens": 64, "return_dict_in_generate": True, "output_logits": True}
    logits = []
    for pattern in ([1, 0, 4, 2], [15, 3, 9]):
        drafter = scripted(pair.reference, pattern)
        output = assisted(pair.attached, pair.prompt, drafter, loop, **options)
        logits.append(torch.cat(output.logits))
    reference = torch.cat(plain(pair.stock, pair.prompt, **options).logits)
    for found in logits:
        torch.testing.assert_close(found, reference, **TOLERANCE)
        assert torch.equal(found.argmax(-1), reference.argmax(-1))


@pytest.mark.parametrize("split", [1, 3, 20])
@pytest.mark.parametrize("is_block", [False, True])
@torch.no_grad()
def test_c04_a_second_forward_continues_the_first(pair, is_block, split):
    tokens = random_prompt(split + 5, seed=6)
    cache = HybridCache(pair.attached.config)
    pair.attached(tokens[:, :split], cache=cache)
    if is_block:
        cache.begin_block(5)
    found = pair.attached(tokens[:, split:], cache=cache).logits
    # The model has no state to start from other than the cache's: from zero the logits are far off.
    expected = pair.stock(tokens).logits[:, split:]
    from_zero = pair.stock(tokens[:, split:]).logits
    torch.testing.assert_close(found, expected, **TOLERANCE)
    assert (found - from_zero).abs().max() > 0.05


@pytest.mark.parametrize("loop", LOOPS)
def test_c10_rejections_in_a_row_under_changing_lengths(pair, loop):
    generator = torch.Generator().manual_seed(7)
    num_right = torch.randint(0, 5, (200,), generator=generator).tolist()
    lengths = torch.randint(2, 17, (200,), generator=generator).tolist()
    output = assisted(
        pair.attached,
        pair.prompt,
        scripted(pair.reference, num_right),
        loop,
        max_new_tokens=96,
        length_policy=CyclingLengths(lengths),
    )
    assert torch.equal(output, pair.reference[:, :105])
    statistics = pair.attached.generation_statistics
    assert len(set(statistics.verification_lengths)) > 10
    rejecting = [
        kept < length for kept, length in zip(statistics.emitted, statistics.verification_lengths, strict=True)
    ]
    assert max(len(list(run)) for is_cut, run in itertools.groupby(rejecting) if is_cut) >= 5


@pytest.mark.parametrize("length", range(2, 17))
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("loop", LOOPS)
def test_c14_every_verification_length(target_pairs, loop, kind, length):
    pair = target_pairs[kind]
    output = assisted(
        pair.attached,
        pair.prompt,
        scripted(pair.reference, [length - 1, 0, length // 2]),
        loop,
        max_new_tokens=3 * length,
        length_policy=Static(length),
    )
    assert torch.equal(output, pair.reference[:, : 9 + 3 * length])
    assert pair.attached.generation_statistics.verification_lengths[0] == length
    assert pair.attached.generation_statistics.emitted[0] == length
