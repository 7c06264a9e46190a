"""Prefix survival and acceptance length: censored rounds are no rejections."""

import pytest

from hf_hybridspec.generation.prefix_survival import Round, prefix_survival, rounds_of, summarise_acceptance
from hf_hybridspec.generation.statistics import GenerationStatistics


def call(*rounds):
    statistics = GenerationStatistics("round", "full")
    for length, emitted in rounds:
        statistics.add_round(length, emitted)
    return statistics


def test_the_last_round_is_cut_only_where_the_sequence_ended_inside_it():
    assert [round.is_cut for round in rounds_of(call((4, 2), (4, 4), (4, 2)))] == [False, False, True]
    assert [round.is_cut for round in rounds_of(call((4, 2), (4, 4)))] == [False, False]


def test_survival_counts_fully_observable_rounds():
    rounds = [Round(3, 3, False), Round(1, 3, False), Round(0, 3, False), Round(1, 3, True), Round(2, 2, False)]
    assert prefix_survival(rounds, 3) == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert prefix_survival(rounds[3:], 3) == []


def test_a_run_is_summarised_pooled_and_by_request():
    calls = [call((4, 4), (4, 2)), call((4, 1), (4, 1), (4, 1)), call()]
    summary = summarise_acceptance(calls, 3)
    assert summary.pooled == pytest.approx(9 / 5)
    assert summary.mean_of_requests == pytest.approx((3 + 1) / 2)
    assert summary.survival == pytest.approx([1 / 3, 1 / 3, 1 / 3]) and summary.requests == 2
    with pytest.raises(ValueError, match="No request had a verification round"):
        summarise_acceptance([call()], 3)
