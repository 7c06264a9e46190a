"""The run of all measurements on a GPU: parts end in time, failures end the run, the summary hides nothing."""

import json
import subprocess
from copy import deepcopy

import pytest

from benchmarks import h200
from benchmarks.environment import REPOSITORY
from benchmarks.h200_summary import FILES, RESULTS, SUMMARY, read_records, summarise
from benchmarks.readme import performance_table

KEYS = {
    "gdn_speedup_over_best_peer", "gdn_ms", "ar_ms", "ar_fraction_of_floor", "forward_fraction_of_floor",
    "decode_tokens_per_second_simulated", "decode_over_own_ar", "decode_over_transformers_eager",
    "decode_over_transformers_static", "gpu_idle_fraction", "capture_seconds", "gpu", "torch", "triton",
    "transformers", "commit",
}  # fmt: skip


@pytest.fixture
def records() -> dict[str, dict]:
    """Made-up results, as the benchmarks write them."""
    environment = {"gpu": "G", "torch": "2", "triton": "3", "transformers": "5", "commit": "abc"}
    gated = [{"rows": rows, "round_ms": rows / 10, "speedup_over_best_peer": 1 + rows} for rows in (2, 3, 4, 8, 16)]
    forwards = [
        {"routing": routing, "length": length, "ms": length + extra, "fraction_of_floor": extra + length / 100}
        for length in (1, 4, 6, 8, 12, 16)
        for routing, extra in (("uniform", 7), ("scripted", 0))
    ]
    scripted = {
        "label": "simulated acceptance, scripted routing", "tokens_per_second": 800.0, "acceptance_length": 4.5,
        "mean_length": 6.0, "over_own_ar": 2.5,
    }  # fmt: skip
    contents = {
        "gated_delta_rule": {"results": gated},
        "target_forward": {"ar_context_2048": {"ar_ms": 2.5}, "forward_context_2048": forwards},
        "decode": {
            "decode": {"ar": {"ms_per_round": 2.75, "fraction_of_floor": 0.5}, "scripted": scripted},
            "gpu_idle_fraction": {"ar": 0.1, "scripted": 0.001},
            "capture_seconds": {"first": 3.5, "each": {}},
            "transformers_eager": {"scripted_over_this": 40.0},
        },
    }
    return {name: content | {"environment": dict(environment)} for name, content in contents.items()}


def test_a_summary_has_one_number_for_every_question(records):
    found = summarise(records)
    assert found.keys() >= KEYS
    assert found["gdn_speedup_over_best_peer"] == {"2": 3, "4": 5, "8": 9, "16": 17}
    assert found["gdn_ms"]["16"] == 1.6 and found["ar_ms"] == 2.75 and found["ar_fraction_of_floor"] == 0.5
    # Of the scripted routing, which the record says.
    assert found["forward_fraction_of_floor"] == {"4": 0.04, "6": 0.06, "8": 0.08, "12": 0.12, "16": 0.16}
    assert "scripted" in found["forward_routing"] and "simulated" in found["decode_label"]
    assert found["decode_tokens_per_second_simulated"] == 800.0 and found["decode_over_own_ar"] == 2.5
    assert found["gpu_idle_fraction"] == 0.001 and found["capture_seconds"] == 3.5
    assert found["gpu"] == "G" and found["commit"] == "abc"


def test_what_was_not_measured_is_null_and_said(records):
    found = summarise(records)
    assert found["decode_over_transformers_eager"] == 40.0 and found["decode_over_transformers_static"] is None
    assert set(found["missing"]) == {"decode_over_transformers_static"}
    del records["decode"], records["gated_delta_rule"]["results"][-1]
    found = summarise(records)
    assert found.keys() >= KEYS
    assert found["ar_ms"] is None and "run benchmarks.decode" in found["missing"]["ar_ms"]
    assert found["gdn_ms"]["16"] is None and "at 16 rows" in found["missing"]["gdn_ms"]


@pytest.mark.parametrize("name", ["gpu", "torch", "triton", "transformers"])
def test_results_of_different_machines_are_refused(records, name):
    records["decode"]["environment"][name] = "other"
    with pytest.raises(ValueError, match=f"one {name} only .* other in decode_h200.json"):
        summarise(records)
    with pytest.raises(ValueError, match="Run"):
        summarise({})


def test_different_commits_are_listed(records):
    records["decode"]["environment"]["commit"] = "def"
    found = summarise(records)
    assert found["commit"] == "abc, def" and found["commits"]["decode_h200.json"] == "def"
    assert "`abc`, `def`" in performance_table(found)


def test_the_table_says_what_is_simulated_and_what_is_missing(records):
    complete = summarise(records)
    table = performance_table(complete)
    assert "| decoding, simulated acceptance, scripted routing | 800 tokens/s |" in table
    assert "40.0 / not measured yet" in table and "4% / 6% / 8% / 12% / 16%" in table
    assert "Simulated: how many drafts" in table and "random weights" in table
    changed = deepcopy(complete) | {"ar_ms": 3.5}
    assert performance_table(changed) != table


def test_the_readme_and_the_committed_summary_are_those_of_the_files():
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    committed = json.loads((RESULTS / SUMMARY).read_text(encoding="utf-8"))
    assert f"<!-- results:performance -->\n{performance_table(committed)}\n<!-- end" in readme
    assert summarise(read_records(RESULTS)) == committed


def test_a_dry_run_measures_and_summarises(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    h200.main(["--tiny", "--parts", "target_forward", "--output", str(tmp_path), "--commit", "abc"])
    (report,) = json.loads((tmp_path / h200.PARTS).read_text())
    assert report["name"] == "target_forward" and report["outcome"] == "done"
    found = json.loads((tmp_path / SUMMARY).read_text())
    assert found["ar_step_ms"] > 0 and found["forward_ms"]["4"] > 0 and found["commit"] == "abc"
    assert found["ar_ms"] is None and "decode_h200.json is missing" in found["missing"]["ar_ms"]


def test_policies_are_measured_where_their_rounds_are_given(monkeypatch, tmp_path, records):
    records = records | {"policies_h200": {}}
    commands = Commands(records)
    run(monkeypatch, commands, tmp_path, "--rounds", str(tmp_path / "rounds.jsonl"))
    name, words, _ = commands.seen[-1]
    assert name == "policies_h200" and words[words.index("--rounds") + 1] == str(tmp_path / "rounds.jsonl")
    assert words[words.index("--summary") + 1] == str(tmp_path / "policies_summary.json")


class Commands:
    """Stands in for subprocess.run; `outcomes` says by part what happens, else the part succeeds with its file."""

    def __init__(self, records, outcomes=None):
        self.records, self.outcomes, self.seen = records, outcomes or {}, []

    def __call__(self, command, timeout, **options):
        name = command[2].removeprefix("benchmarks.")
        self.seen.append((name, command[3:], timeout))
        outcome = self.outcomes.get(name, 0)
        if outcome is None:
            raise subprocess.TimeoutExpired(command, timeout)
        if outcome == 0:
            output = command[command.index("--output") + 1]
            with open(output, "w") as file:
                json.dump(self.records[name], file)
        return subprocess.CompletedProcess(command, outcome)


def run(monkeypatch, commands, output, *options):
    # Git and the driver are asked through the same function.
    monkeypatch.setattr(h200, "describe_environment", lambda commit=None: {"commit": "abc"})
    monkeypatch.setattr(h200.subprocess, "run", commands)
    h200.main(["--tiny", "--output", str(output), *options])
    return [report["outcome"] for report in json.loads((output / h200.PARTS).read_text())]


def test_a_part_that_fails_ends_the_run(monkeypatch, tmp_path, records):
    commands = Commands(records, {"target_forward": 1})
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, commands, tmp_path)
    assert ended.value.code == 1
    assert [name for name, _, _ in commands.seen] == ["gated_delta_rule", "target_forward"]
    assert json.loads((tmp_path / SUMMARY).read_text())["gdn_ms"]["2"] == 0.2


def test_a_part_that_runs_out_of_time_leaves_the_rest(monkeypatch, tmp_path, records):
    commands = Commands(records, {"target_forward": None})
    assert run(monkeypatch, commands, tmp_path, "--seconds", "50")[:3] == ["done", "out of time", "done"]
    assert all(timeout <= 50 for _, _, timeout in commands.seen)
    assert json.loads((tmp_path / SUMMARY).read_text())["ar_ms"] == 2.75


def test_without_time_nothing_is_started(monkeypatch, tmp_path, records):
    commands = Commands(records)
    assert set(run(monkeypatch, commands, tmp_path, "--seconds", "0")) == {"out of time"} and not commands.seen


def test_results_of_an_earlier_machine_do_not_end_the_run(monkeypatch, tmp_path, records, capsys):
    old = deepcopy(records["decode"])
    old["environment"]["gpu"] = "old"
    (tmp_path / FILES["decode"]).write_text(json.dumps(old))
    assert set(run(monkeypatch, Commands(records), tmp_path)) == {"done"}
    assert "one gpu only" in capsys.readouterr().err
    assert json.loads((tmp_path / SUMMARY).read_text())["gpu"] == "G"
