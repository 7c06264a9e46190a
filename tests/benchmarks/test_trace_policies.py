"""The trace of length policies: simulated costs, and costs that another benchmark measured."""

import json
import sys

import pytest

from benchmarks import trace_policies
from benchmarks.trace_policies import Costs
from hf_hybridspec.bench.scripted_routing import RoutingScript

from .test_policies_h200 import recorded  # noqa: F401

DRAFTS = 15


def costs_file(folder, num_lengths: int = DRAFTS, expert: float = 0.0):
    """As `policies_h200` writes it: rounds that cost three times as much with 16 rows as with 2."""
    seconds = [2e-3 + 4e-3 * place / (num_lengths - 1) for place in range(num_lengths)]
    costs = {"measured": seconds, "fitted": seconds, "fixed": 1e-3, "stage0_row": 0.0, "expert": expert}
    path = folder / "costs.json"
    environment = {"gpu": "made up", "commit": "abc"}
    path.write_text(json.dumps({"environment": environment, "costs": costs | {"autoregressive": 2e-3, "r2": 1.0}}))
    return path


def run(monkeypatch, rounds, folder, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", ["command", "--rounds", str(rounds), "--output", str(folder), *options])
    trace_policies.main()


def test_measured_costs_take_the_place_of_simulated_ones(recorded, tmp_path, monkeypatch):  # noqa: F811
    run(monkeypatch, recorded, tmp_path)
    run(monkeypatch, recorded, tmp_path, "--costs", str(costs_file(tmp_path)))
    simulated, measured = (
        json.loads((tmp_path / f"policies_trace_{name}.json").read_text()) for name in ("simulated", "measured_costs")
    )
    assert "memory bandwidth" in simulated["times"]
    assert measured["times"] == "simulated: rounds of every length as measured on made up, commit abc"
    for kind, cells in measured["results"].items():
        # The same rounds; no experts cost anything, so a fixed length takes what the file says.
        static, rounds = cells["static:2"], simulated["results"][kind]["static:2"]["rounds"]
        assert static["rounds"] == rounds and static["seconds"] == pytest.approx(2e-3 * rounds)
        assert cells["static:16"]["seconds"] == pytest.approx(6e-3 * rounds)


def test_knowing_all_experts_is_worth_what_they_cost(recorded, tmp_path, monkeypatch):  # noqa: F811
    gains = []
    for expert in (0.0, 2e-5):
        run(monkeypatch, recorded, tmp_path, "--costs", str(costs_file(tmp_path, expert=expert)))
        report = json.loads((tmp_path / "policies_trace_measured_costs.json").read_text())
        gains.append(report["all_experts_known_over_nominal"])
    assert set(gains[0]) == set(report["results"])
    for kind, without in gains[0].items():
        assert without == pytest.approx(1.0, abs=0.03) and gains[1][kind] > 1.05
    assert (
        f"{min(gains[1])} {gains[1][min(gains[1])]:.3f}" in (tmp_path / "policies_trace_measured_costs.md").read_text()
    )


def test_costs_of_other_rounds_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must hold costs of 15 lengths, .* got 4"):
        Costs.measured(costs_file(tmp_path, 4), DRAFTS)
    (tmp_path / "none.json").write_text("{}")
    with pytest.raises(ValueError, match="got 0"):
        Costs.measured(tmp_path / "none.json", DRAFTS)
    assert "simulated" in Costs.of_bytes(DRAFTS, RoutingScript()).note
