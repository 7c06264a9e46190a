"""What the statistics of a call say."""

import json

import pytest

from hf_hybridspec.generation.statistics import GenerationStatistics
from tests.scenarios import LOOPS, assisted, scripted


def test_means_over_rounds():
    statistics = GenerationStatistics("round", "full")
    assert statistics.rounds == 0 and statistics.acceptance_length == statistics.mean_verification_length == 0.0
    for length, emitted in [(16, 5), (16, 1), (4, 3)]:
        statistics.add_round(length, emitted)
    assert statistics.rounds == 3
    assert statistics.acceptance_length == 3.0 and statistics.mean_verification_length == 12.0
    assert json.loads(json.dumps(statistics.to_dict()))["acceptance_length"] == 3.0


@pytest.mark.parametrize("loop", LOOPS)
def test_both_loops_count_the_same(target_pairs, loop):
    """The drafter is right 3, 0, 5 times and so on; the last round is cut by the limit."""
    pair = target_pairs["qwen3_5"]
    drafter = scripted(pair.reference, (3, 0, 5, 1))
    assisted(pair.attached, pair.prompt, drafter, loop, max_new_tokens=16, length_policy="static:8")
    statistics = pair.attached.generation_statistics
    assert statistics.emitted == [4, 1, 6, 2, 2]
    assert statistics.verification_lengths == [8, 8, 8, 4, 2]
    assert statistics.path == loop and statistics.policy == "static:8"
    assert bool(statistics.reason) == (loop == "host")
