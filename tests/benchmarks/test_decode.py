"""The decode benchmark, dry: every phase runs at tiny sizes, and the simulated rounds meet the published profile."""

import json
import sys

import pytest

from benchmarks import decode
from benchmarks.simulated_rounds import ACCEPTANCE_LENGTH, MEAN_LENGTH, means
from hf_hybridspec.calibration.profile import CalibrationProfile
from hf_hybridspec.calibration.rounds import RoundArrays, read_rounds


def test_the_simulated_rounds_meet_the_profile():
    rounds = RoundArrays.of(read_rounds(decode.SIMULATED / "rounds.jsonl")[1])
    profile = CalibrationProfile.load(decode.SIMULATED / "profile.json")
    acceptance_length, mean_length = means(profile, rounds)
    assert acceptance_length == pytest.approx(ACCEPTANCE_LENGTH, abs=0.05)
    assert mean_length == pytest.approx(MEAN_LENGTH, abs=0.1)


def test_every_phase_at_tiny_sizes(tmp_path, monkeypatch):
    output = tmp_path / "decode.json"
    options = ["--tiny", "--tokens", "60", "--context", "40", "--repeats", "1", "--baselines", "eager"]
    monkeypatch.setattr(sys, "argv", ["decode", *options, "--output", str(output)])
    decode.main()
    report = json.loads(output.read_text())
    assert report["gate"]["equal_tokens"] == {"full": 24, "hybridspec": 24}
    # On the CPU a row's sums do not depend on the rows beside it.
    assert report["gate"]["plain_rounds_differ_at"] is None
    rows = report["decode"]
    assert rows["ar"]["rounds"] == 60 and rows["ar"]["mean_length"] == 1
    recorded = RoundArrays.of(read_rounds(decode.SIMULATED / "rounds.jsonl")[1]).num_accepted
    for name in ("scripted", "uniform"):
        assert "simulated acceptance" in rows[name]["label"] and name in rows[name]["label"]
        # No drafter of random weights comes near: the record decides.
        assert rows[name]["acceptance_length"] > 2 and rows[name]["rounds"] <= len(recorded)
        assert rows[name]["over_own_ar"] > 0 and rows[name]["floor_ms_per_round"] > 0
    assert rows["scripted"]["distinct_experts_a_layer"] != rows["uniform"]["distinct_experts_a_layer"]
    assert report["transformers_eager"]["tokens_per_second"] > 0
