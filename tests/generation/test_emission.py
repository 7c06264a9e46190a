"""Emission: where a round is cut, and that scores, tokens and stream agree."""

from types import SimpleNamespace

import pytest
import torch
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from hf_hybridspec.generation.emission import Emission
from hf_hybridspec.generation.verification import VerifiedTokens

PROMPT = torch.tensor([[1, 2, 3]])


class StopAt(StoppingCriteria):
    """Stops at a token; notes the sequences and scores it was asked about."""

    def __init__(self, token: int):
        self.token, self.asked = token, []

    def __call__(self, input_ids, scores, **kwargs):
        self.asked.append((input_ids[0].tolist(), None if scores is None else len(scores)))
        return input_ids[:, -1] == self.token


def verified(*tokens: int) -> VerifiedTokens:
    rows = torch.arange(len(tokens) * 6.0).view(len(tokens), 6)
    return VerifiedTokens(torch.tensor(tokens), rows, rows + 100)


def emission(*criteria, max_length=20, eos=None, streamer=None, **flags) -> Emission:
    config = SimpleNamespace(
        max_length=max_length,
        return_dict_in_generate=bool(flags),
        output_scores=flags.get("output_scores"),
        output_logits=flags.get("output_logits"),
    )
    if eos is not None:
        config._eos_token_tensor = torch.tensor(eos)
    return Emission(PROMPT, StoppingCriteriaList(criteria), config, streamer)


@pytest.mark.parametrize(
    ("options", "count", "is_last"),
    [
        ({}, 4, False),
        ({"eos": [5]}, 2, True),
        ({"eos": [9, 6]}, 3, True),
        ({"eos": [9]}, 4, False),
        ({"max_length": 5}, 2, True),
        ({"max_length": 7}, 4, True),
        ({"max_length": 8}, 4, False),
        ({"max_length": 4, "eos": [5]}, 1, True),
    ],
)
def test_eos_and_limit(options, count, is_last):
    growing = emission(EosTokenCriteria(5), MaxLengthCriteria(20), **options)
    admission = growing.admit(verified(4, 5, 6, 7))
    assert (admission.count, admission.is_last) == (count, is_last)
    # Nothing is emitted yet.
    assert growing.input_ids.tolist() == PROMPT.tolist() and not growing.is_finished
    growing.append(verified(4, 5, 6, 7), admission)
    assert growing.input_ids[0].tolist() == [1, 2, 3, 4, 5, 6, 7][: 3 + count]
    assert growing.is_finished == is_last
    assert growing.remaining == options.get("max_length", 20) - 3 - count
    assert int(growing.anchor) == (4, 5, 6, 7)[count - 1]


def test_a_criterion_is_asked_after_each_token_and_no_further():
    criterion = StopAt(6)
    growing = emission(criterion, output_scores=True)
    admission = growing.admit(verified(4, 5, 6, 7))
    assert (admission.count, admission.is_last) == (3, True)
    assert criterion.asked == [([1, 2, 3, 4], 1), ([1, 2, 3, 4, 5], 2), ([1, 2, 3, 4, 5, 6], 3)]


def test_the_time_is_looked_up_once_a_round():
    growing = emission(MaxTimeCriteria(max_time=-1.0))
    admission = growing.admit(verified(4, 5, 6))
    assert (admission.count, admission.is_last) == (3, True)


def test_scores_logits_and_stream_have_one_entry_a_token():
    streamed = []
    streamer = SimpleNamespace(
        put=lambda tokens: streamed.append(tokens[0].tolist()), end=lambda: streamed.append("end")
    )
    growing = emission(output_scores=True, output_logits=True, streamer=streamer)
    for tokens in ((4,), (5, 6, 7), (8, 9)):
        growing.append(verified(*tokens), growing.admit(verified(*tokens)))
    growing.end()
    assert streamed == [[4], [5, 6, 7], [8, 9], "end"]
    assert len(growing.scores) == len(growing.logits) == 6
    assert all(row.shape == (1, 6) for row in (*growing.scores, *growing.logits))
    assert torch.equal(growing.scores[2], verified(5, 6, 7).scores[1:2])
    assert torch.equal(growing.logits[5], verified(8, 9).logits[1:2])


def test_scores_are_not_kept_unless_asked_for():
    growing = emission()
    growing.append(verified(4), growing.admit(verified(4)))
    assert growing.scores is None and growing.logits is None
