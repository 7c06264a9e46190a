"""What a decode clock counts: the call from the prefill's token on, and a round without the call's start."""

import pytest
import torch

from hf_hybridspec.calibration import timed_decode
from hf_hybridspec.calibration.timed_decode import DecodeClock


@pytest.fixture
def tick(monkeypatch):
    """Sets what the clock reads next."""
    now = [0.0]
    monkeypatch.setattr(timed_decode.time, "perf_counter", lambda: now[0])

    def set_time(seconds: float) -> None:
        now[0] = seconds

    return set_time


def run(tick, times: list[float], end: float) -> DecodeClock:
    clock = DecodeClock()
    for seconds in times:
        tick(seconds)
        clock.put(torch.zeros(1, 1))
    tick(end)
    clock.end()
    return clock


def test_a_round_does_not_pay_for_the_start_and_the_end_of_its_call(tick):
    """Prompt, prefill, then rounds of 1 s; the first takes 5 s more, and so does leaving the call."""
    clock = run(tick, [0.0, 10.0, 16.0, 17.0, 18.0, 19.0], 24.0)
    assert clock.seconds == 14.0
    assert clock.round_seconds == 1.0


@pytest.mark.parametrize("times", [[0.0], [0.0, 1.0], [0.0, 1.0, 2.0]])
def test_fewer_than_two_rounds_have_no_time_of_a_round(tick, times):
    assert run(tick, times, 3.0).round_seconds is None
