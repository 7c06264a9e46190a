"""Length policies over computed rounds, dry: records decide, halves are disjoint, the gate notices a wrong rule."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks import policies_h200, policy_cells
from benchmarks.policy_cells import POLICIES, STATIC_LENGTHS, cell_of, pooled, ratios
from benchmarks.recorded_rounds import CALIBRATION, OrderedRounds
from benchmarks.round_session import CountedRounds
from benchmarks.simulated_parts import Trace
from benchmarks.trace_policies import split
from hf_hybridspec.bench.trace import TraceResult
from hf_hybridspec.calibration.profile import PairIdentity
from hf_hybridspec.calibration.rounds import (
    CapturedRound,
    CaptureSettings,
    PromptRounds,
    RoundArrays,
    RoundFile,
    read_rounds,
)
from hf_hybridspec.generation import adaptive_policies
from tests.calibration.made_rounds import made_rounds

PAIR = PairIdentity("t", "0" * 16, "d", "1" * 16, 15, "cpu", "float32", "eager")
NAMES = ["ar", *(f"static:{length}" for length in STATIC_LENGTHS), *POLICIES]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A file of made-up rounds of eight prompts of two kinds."""
    rounds = made_rounds(num_rounds=240, num_drafts=15, num_prompts=8)
    path = tmp_path_factory.mktemp("rounds") / "rounds.jsonl"
    file = RoundFile(path, CaptureSettings(PAIR, 60))
    for prompt in range(8):
        members = np.flatnonzero(rounds.prompt == prompt)
        captured = [
            CapturedRound(
                tuple(rounds.confidence[index]), tuple(rounds.entropy[index]), None, int(rounds.num_accepted[index]),
                tuple(map(int, rounds.new_layer0[index])), tuple(map(int, rounds.new_pairs[index])),
            )
            for index in members
        ]  # fmt: skip
        file.append(PromptRounds(f"p{prompt}", str(rounds.kind[members[0]]), 0, tuple(captured)))
    return path


def run(recorded, folder, *options: str) -> dict:
    output = folder / "policies.json"
    common = ["--tiny", "--count", "2", "--context", "30", "--repeats", "2", "--rounds", str(recorded)]
    policies_h200.main([*common, "--output", str(output), *options])
    return json.loads(output.read_text())


def test_no_turn_begins_that_would_end_too_late(recorded, tmp_path, monkeypatch):
    """A clock that turns move by 40 s each: a second one ends in time, a third would not."""
    clock, turn = [0.0], policies_h200.Bench.turn

    def slow_turn(self, names, kinds, number):
        clock[0] += 40 if kinds == self.kinds else 0
        return turn(self, names, kinds, number)

    monkeypatch.setattr(policies_h200.Bench, "elapsed", property(lambda self: clock[0]))
    monkeypatch.setattr(policies_h200.Bench, "turn", slow_turn)
    report = run(recorded, tmp_path, "--repeats", "5", "--seconds", "100")
    assert report["turns"] == 2 and "summary" in report


def test_a_dry_run_measures_every_policy_on_the_same_rounds(recorded, tmp_path):
    report = run(recorded, tmp_path, "--summary", str(tmp_path / "summary.json"))
    assert report["gate"] == {name: {"rounds": 2, "differ": 0} for name in ("nominal", "hybridspec")}
    assert report["turns"] == 2 and report["skipped_phases"] == []
    assert report["rounds"]["recorded"] == {"calibration": 120, "a": 60, "b": 60}
    results, ordered = report["results"], OrderedRounds.of(*split(read_rounds(recorded)[1], 0), seed=0)
    assert set(results) == {"a", "b", "all"}
    for kind in ("a", "b"):
        assert list(results[kind]) == NAMES
        assert results[kind]["ar"]["lengths"] == {"1": 2} and results[kind]["ar"]["tokens"] == 2
        assert results[kind]["static:6"]["lengths"] == {"6": 2}
        # All drafts are verified: what was recorded is what is emitted. Shorter blocks cut it.
        start, _ = ordered.windows[kind]
        accepted = ordered.rounds.num_accepted[start : start + 2]
        for name, length in (("full", 16), ("static:12", 12), ("static:4", 4), ("static:2", 2)):
            assert results[kind][name]["tokens"] == (np.minimum(accepted, length - 1) + 1).sum()
        assert 2 <= results[kind]["hybridspec"]["tokens"] <= results[kind]["full"]["tokens"]
    assert results["all"]["full"]["tokens"] == results["a"]["full"]["tokens"] + results["b"]["full"]["tokens"]
    costs = report["costs"]
    assert len(costs["measured"]) == 15 and min(costs["measured"]) > 0 and 2 <= costs["static_length"] <= 16
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == report["summary"] and summary["selector_us"] > 0 and 0 <= summary["calibration_error"] < 0.5
    for other in ("best_static", "full", "nominal", "best_other"):
        assert summary[f"hybridspec_over_{other}"] > 0
    assert {"gpu", "commit"} <= set(summary)
    page = (tmp_path / "policies.md").read_text()
    assert "| hybridspec |" in page and "Recorded" in page and "Scripted" in page


def test_without_time_nothing_is_measured_and_it_is_said(recorded, tmp_path):
    report = run(recorded, tmp_path, "--seconds", "0")
    assert report["skipped_phases"] == ["build", "costs", "gate", "selector", "policies", "summarise"]


def test_the_gate_stops_a_rule_that_decides_otherwise_on_the_device(recorded, tmp_path, monkeypatch):
    monkeypatch.setattr(policies_h200, "MOST_NEAR_TIES", 0)
    select = adaptive_policies.HybridSpec.select_on_device
    choose = adaptive_policies.HybridSpec.choose

    def longer(self, draft, selection):
        select(self, draft, selection)
        selection.nominal_length.copy_((selection.nominal_length + 3).clamp(max=16))

    def unchanged(self, draft):
        with monkeypatch.context() as patched:
            patched.setattr(adaptive_policies.HybridSpec, "select_on_device", select)
            return choose(self, draft)

    monkeypatch.setattr(adaptive_policies.HybridSpec, "select_on_device", longer)
    monkeypatch.setattr(adaptive_policies.HybridSpec, "choose", unchanged)
    with pytest.raises(SystemExit, match="nominal: captured rounds differ"):
        run(recorded, tmp_path, "--repeats", "1")


def test_calibration_and_test_prompts_are_disjoint(recorded):
    halves = split(read_rounds(recorded)[1], 0)
    known, unseen = ({prompt.prompt for prompt in half} for half in halves)
    assert not known & unseen and len(known | unseen) == 8
    ordered = OrderedRounds.of(*halves, seed=0)
    assert ordered.kinds == ["a", "b"] and ordered.known.num_rounds == ordered.unseen.num_rounds == 120
    for name, (start, count) in ordered.windows.items():
        part = ordered.rounds[start : start + count]
        whole = RoundArrays.of(halves[0] if name == CALIBRATION else [p for p in halves[1] if p.kind == name])
        assert name == CALIBRATION or set(part.kind) == {name}
        # The same rounds in another order, each whole.
        rows = [np.column_stack([rounds.num_accepted, rounds.confidence, rounds.entropy]) for rounds in (part, whole)]
        assert not np.array_equal(*rows) and sorted(rows[0].tolist()) == sorted(rows[1].tolist())


def test_a_window_of_a_trace_repeats_itself():
    rounds = made_rounds(num_rounds=10, num_drafts=15)
    trace = Trace(rounds, 15, torch.device("cpu"))
    trace.take(4, 3)
    assert [int(trace.record(torch.tensor([index]))) for index in range(5)] == [4, 5, 6, 4, 5]


def cell(tokens: int, seconds: float) -> TraceResult:
    return TraceResult(tokens, seconds, 10, {4: 10})


def test_ratios_are_the_worst_of_all_kinds():
    others = {name: cell(40, 2.0) for name in NAMES}
    fast = others | {"hybridspec": cell(40, 1.0), "static:4": cell(40, 1.25)}
    slow = others | {"hybridspec": cell(40, 1.0), "dcut": cell(40, 0.8)}
    found = ratios({"a": fast, "b": slow})
    assert found["hybridspec_over_best_static"] == 1.25 and found["hybridspec_over_full"] == 2
    assert found["hybridspec_over_best_other"] == 0.8 and found["hybridspec_over_ar"] == 2
    assert found["pooled"]["hybridspec_over_best_static"] == pytest.approx((2 + 1.25) / 2)
    assert pooled({"a": fast, "b": slow})["dcut"].seconds == 2.8


def test_a_cell_takes_the_median_time_of_equal_turns():
    runs = [CountedRounds(seconds, [2, 3], [1, 3]) for seconds in (3.0, 1.0, 2.0)]
    assert cell_of(runs) == TraceResult(4, 2.0, 2, {2: 1, 3: 1})
    with pytest.raises(ValueError, match="other lengths"):
        policy_cells.cell_of([*runs, replace(runs[0], lengths=[2, 4])])
