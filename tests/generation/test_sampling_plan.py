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


@pytest.mark.parametrize(
    ("processors", "kind"),
    [
        ([], "sampled"),
        ([TemperatureLogitsWarper(0.7)], "sampled"),
        ([TemperatureLogitsWarper(0.7), TopKLogitsWarper(20), TopPLogitsWarper(0.8)], "filtered"),
        ([TopKLogitsWarper(50)], "filtered"),
        ([TopPLogitsWarper(0.8)], "filtered"),
        ([MinPLogitsWarper(0.1)], "filtered"),
    ],
)
def test_a_plan_knows_whether_tokens_may_be_left_out(processors, kind):
    plan = SamplingPlan.of(LogitsProcessorList(processors), do_sample=True)
    assert SampledAcceptance(torch.device("cpu"), plan.is_filtered).kind == kind


def test_what_cannot_be_taken_over_is_named():
    top_k, top_p = TopKLogitsWarper(5), TopPLogitsWarper(0.8)
    refused = "RepetitionPenaltyLogitsProcessor works on the host's scores"
    assert SamplingPlan.of(LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.2)]), True) == refused
    # Another order is another distribution.
    assert SamplingPlan.of(LogitsProcessorList([top_p, top_k]), True) == "TopKLogitsWarper works on the host's scores"
    kept = LogitsProcessorList([TopKLogitsWarper(5, min_tokens_to_keep=3)])
    assert "min_tokens_to_keep of its own" in SamplingPlan.of(kept, True)
