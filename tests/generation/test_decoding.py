"""The round loop: what runs how often, and what a failure in the middle of a round leaves behind."""

from types import SimpleNamespace

import pytest
import torch

from hf_hybridspec import HybridCache, LengthPolicy
from hf_hybridspec.generation.decoding import longest_length
from hf_hybridspec.modeling.target import text_model
from tests.scenarios import assisted, scripted

EXPECTED = slice(0, 49)


class Lookahead(LengthPolicy):
    """Nominal length 5, and 6 where the lookahead row brings no new expert; notes (w0, new experts, w)."""

    name = "lookahead"
    lookahead = 1

    def __init__(self):
        self.rounds = []

    def select(self, draft):
        return 5

    def correct(self, nominal_length, new_experts):
        self.rounds.append((nominal_length, new_experts))
        return nominal_length + (new_experts == 0)


def test_stage0_runs_once_a_round(pair):
    """Algorithm 1, steps 4 to 12: Layer 0's mixer and router see u rows once, everything later w rows once."""
    model = text_model(pair.attached)
    layer = model.layers[0]
    rows = {"mixer": [], "router": [], "next mixer": []}
    watched = {"mixer": layer.linear_attn, "next mixer": model.layers[1].linear_attn}
    if hasattr(layer.mlp, "gate"):
        watched["router"] = layer.mlp.gate
    handles = [
        module.register_forward_pre_hook(
            lambda _, args, kwargs, name=name: rows[name].append((args or [kwargs["hidden_states"]])[0].shape[-2]),
            with_kwargs=True,
        )
        for name, module in watched.items()
    ]
    policy = Lookahead()
    expected = pair.reference[:, EXPECTED]
    try:
        output = assisted(
            pair.attached, pair.prompt, scripted(expected), "round", max_new_tokens=40, length_policy=policy
        )
    finally:
        for handle in handles:
            handle.remove()
    assert torch.equal(output, expected)
    lengths = pair.attached.generation_statistics.verification_lengths
    # The first entry is the prefill.
    assert rows["mixer"][1:] == [6] * len(policy.rounds) + lengths[len(policy.rounds) :]
    assert rows["next mixer"][1:] == lengths
    assert rows["router"] == (rows["mixer"] if "router" in watched else [])
    assert lengths[: len(policy.rounds)] == [nominal + (new == 0) for nominal, new in policy.rounds]


def test_new_experts_are_those_of_the_lookahead_row(target_pairs):
    """U0(w0 + 1) - U0(w0) of equation 6, recomputed from the router's own output."""
    pair = target_pairs["qwen3_5_moe"]
    gate = text_model(pair.attached).layers[0].mlp.gate
    counts = []

    def count(module, args, output):
        index = output[2]
        if index.shape[0] == 6:
            counts.append(len(set(index[5].tolist()) - set(index[:5].flatten().tolist())))

    handle = gate.register_forward_hook(count)
    policy = Lookahead()
    assisted(pair.attached, pair.prompt, scripted(pair.reference), "round", max_new_tokens=80, length_policy=policy)
    handle.remove()
    assert [new for _, new in policy.rounds] == counts
    assert len(set(counts)) > 1


@pytest.mark.parametrize(("remaining", "expected"), [(1, 2), (2, 2), (9, 9)])
def test_w_rem_is_at_least_two(remaining, expected):
    cache = SimpleNamespace(get_max_length=lambda: -1, committed_length=100)
    assert longest_length(cache, remaining) == expected


def test_w_rem_of_a_static_cache():
    cache = SimpleNamespace(get_max_length=lambda: 20, committed_length=17)
    assert longest_length(cache, 9) == 3
    assert longest_length(cache, 2) == 2


@pytest.mark.parametrize("failing", ["layers.0.post_attention_layernorm", "layers.2", "norm", "drafter"])
def test_a_failure_in_a_round_leaves_a_cache_that_goes_on(pair, failing):
    """Nothing half-committed: the next call on the same objects gives the plain output."""
    expected = pair.reference[:, EXPECTED]
    drafter, cache = scripted(expected), HybridCache(pair.attached.config)
    module = drafter if failing == "drafter" else text_model(pair.attached).get_submodule(failing)
    calls = []

    def fail_in_the_third_round(*_):
        calls.append(1)
        if len(calls) == 4:
            raise InterruptedError

    handle = module.register_forward_pre_hook(fail_in_the_third_round)
    try:
        with pytest.raises(InterruptedError):
            assisted(pair.attached, pair.prompt, drafter, "round", max_new_tokens=40, cache=cache)
    finally:
        handle.remove()
    assert cache.block_length == 0 and not cache.is_recording
    retry = scripted(expected)
    if cache.committed_length:
        cache.reset()
    assert torch.equal(assisted(pair.attached, pair.prompt, retry, "round", max_new_tokens=40, cache=cache), expected)
    assert torch.equal(assisted(pair.attached, pair.prompt, drafter, "host", max_new_tokens=40), expected)


def test_a_policy_that_leaves_its_range_is_stopped(target_pairs):
    """Too long is cut to what Stage 0 ran; below one row is an error, not a wrong commit."""
    pair = target_pairs["qwen3_5_moe"]
    expected = pair.reference[:, EXPECTED]
    policy = Lookahead()
    policy.correct = lambda nominal_length, new_experts: 99
    output = assisted(pair.attached, pair.prompt, scripted(expected), "round", max_new_tokens=40, length_policy=policy)
    assert torch.equal(output, expected)
    assert set(pair.attached.generation_statistics.verification_lengths[:-1]) == {6}
    policy.correct = lambda nominal_length, new_experts: 0
    with pytest.raises(ValueError, match=r"shortened to 1\.\.6, got 0"):
        assisted(pair.attached, pair.prompt, scripted(expected), "round", max_new_tokens=40, length_policy=policy)
