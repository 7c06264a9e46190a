"""Sampling distributions: equal to transformers' warpers, ties and extreme settings included."""

import itertools

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_hybridspec.kernels.sampling import SamplingSettings, sampling_probs

VOCABULARY = 50


def logits_of(kind: str) -> torch.Tensor:
    logits = 3 * torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(0))
    # Rounded logits tie, as those of bf16 heads do.
    return {"distinct": logits, "ties": logits.round(), "bf16": logits.bfloat16(), "flat": torch.zeros_like(logits)}[
        kind
    ]


def host_probs(logits, temperature, top_k, top_p, min_p) -> torch.Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k < VOCABULARY:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    return warpers(None, logits.float()).softmax(-1)


def test_a_temperature_alone():
    settings = SamplingSettings.new("cpu")
    logits = logits_of("bf16")
    for temperature in (0.3, 1.0, 2.5):
        settings.set(temperature, VOCABULARY, 1.0, 0.0)
        expected = host_probs(logits, temperature, VOCABULARY, 1.0, 0.0)
        for is_filtered in (False, True):
            assert torch.equal(sampling_probs(logits, settings, is_filtered), expected)


@pytest.mark.parametrize("kind", ["distinct", "ties", "bf16", "flat"])
def test_equals_the_hosts_warpers(kind):
    """The same record serves all settings, one after the other. Which of equal tokens the host drops first is open."""
    logits, settings = logits_of(kind), SamplingSettings.new("cpu")
    kept = set()
    # No product of a number of ties and 1 - top_p is whole: there, rounding decides.
    for values in itertools.product((0.7, 1.3), (1, 7, VOCABULARY, 1000), (0.01, 0.57, 0.95, 1.0), (0.0, 0.1, 1.0)):
        settings.set(*values)
        probs = sampling_probs(logits, settings, is_filtered=True)
        expected = host_probs(logits, *values)
        if kind == "distinct":
            assert torch.equal(probs, expected), values
        # Other ties may be kept, so that sums are of another order.
        torch.testing.assert_close(probs.sort().values, expected.sort().values, atol=0.0, rtol=1e-6)
        kept.update((probs > 0).sum(-1).tolist())
    assert len(kept) > 2 or kind == "flat"


def test_of_equal_tokens_top_p_keeps_the_last():
    settings = SamplingSettings.new("cpu")
    settings.set(1.0, 1000, 0.57, 0.0)
    logits = torch.tensor([[0.0, -50.0, 0.0, 0.0, 0.0]])
    assert sampling_probs(logits, settings, is_filtered=True).nonzero()[:, 1].tolist() == [2, 3, 4]


def test_tokens_that_cannot_be_drawn_stay_so():
    """Scores of minus infinity, and fewer finite ones than top-k asks for."""
    logits = torch.full((2, 80), -torch.inf)
    logits[0, :3], logits[1, 5:7] = torch.tensor([1.0, 2.0, -300.0]), torch.tensor([0.0, 0.0])
    settings = SamplingSettings.new("cpu")
    for top_k, top_p in itertools.product((1, 2, 3, 60), (0.4, 1.0)):
        settings.set(1.0, top_k, top_p, 0.0)
        probs = sampling_probs(logits, settings, is_filtered=True)
        assert bool((probs[logits == -torch.inf] == 0.0).all()), (top_k, top_p)
        torch.testing.assert_close(probs.sum(-1), torch.ones(2))
