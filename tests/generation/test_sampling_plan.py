"""What of a call's logits processors a device round takes over, and what may then leave tokens out."""

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hf_hybridspec.generation.device_round import SampledAcceptance
from hf_hybridspec.generation.sampling_plan import SamplingPlan
from hf_hybridspec.kernels.sampling import MOST_FEW, Filtering


@pytest.mark.parametrize(
    ("processors", "filtering"),
    [
        ([], Filtering.NONE),
        ([TemperatureLogitsWarper(0.7)], Filtering.NONE),
        ([TopKLogitsWarper(MOST_FEW)], Filtering.FEW),
        ([TemperatureLogitsWarper(0.7), TopKLogitsWarper(20), TopPLogitsWarper(0.8)], Filtering.FEW),
        ([TopKLogitsWarper(MOST_FEW + 1)], Filtering.ANY),
        ([TopPLogitsWarper(0.8)], Filtering.ANY),
        ([MinPLogitsWarper(0.1)], Filtering.ANY),
    ],
)
def test_the_fewest_scores_that_do_are_sorted(processors, filtering):
    plan = SamplingPlan.of(LogitsProcessorList(processors), do_sample=True)
    assert plan.filtering is filtering
    assert SampledAcceptance(torch.device("cpu"), plan.filtering).kind == filtering.value


def test_what_cannot_be_taken_over_is_named():
    top_k, top_p = TopKLogitsWarper(5), TopPLogitsWarper(0.8)
    refused = "RepetitionPenaltyLogitsProcessor works on the host's scores"
    assert SamplingPlan.of(LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.2)]), True) == refused
    # Another order is another distribution.
    assert SamplingPlan.of(LogitsProcessorList([top_p, top_k]), True) == "TopKLogitsWarper works on the host's scores"
    kept = LogitsProcessorList([TopKLogitsWarper(5, min_tokens_to_keep=3)])
    assert "min_tokens_to_keep of its own" in SamplingPlan.of(kept, True)
