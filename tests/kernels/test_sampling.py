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
        assert torch.equal(sampling_probs(logits, settings, is_filtered=False), expected)
        assert torch.equal(sampling_probs(logits, settings, is_filtered=True), expected)


@pytest.mark.parametrize("kind", ["distinct", "ties", "bf16", "flat"])
def test_equals_the_hosts_warpers(kind):
    """The same record serves all settings, one after the other. Which of equal tokens top-p drops first is open."""
    logits, settings = logits_of(kind), SamplingSettings.new("cpu")
    kept = set()
    for values in itertools.product((0.7, 1.3), (1, 7, VOCABULARY, 1000), (0.01, 0.6, 0.95, 1.0), (0.0, 0.1, 1.0)):
        settings.set(*values)
        probs = sampling_probs(logits, settings, is_filtered=True)
        expected = host_probs(logits, *values)
        if kind == "distinct":
            assert torch.equal(probs, expected), values
        assert torch.equal(probs.sort().values, expected.sort().values), values
        kept.update((probs > 0).sum(-1).tolist())
    assert len(kept) > 2 or kind == "flat"
