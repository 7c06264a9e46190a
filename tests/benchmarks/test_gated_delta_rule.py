"""The GDN benchmark: its results' fields, its gate, and which peer it compares with. Peers here are stand-ins."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks import gated_delta_comparison, gated_delta_rule
from benchmarks.gated_delta_comparison import TUNED, peer_errors, peer_work, verdict
from benchmarks.gated_delta_layers import Shape, recurrence, relative_error, verify_layers
from benchmarks.peer_kernels import PeerKernels
from hf_hybridspec.kernels.dispatch import use_kernels
from hf_hybridspec.kernels.gated_delta_rule import commit_gated_delta_rule

SHAPE = Shape(layers=2, num_k_heads=1, num_v_heads=2, k_dim=16, v_dim=16)
KERNELS = PeerKernels(*[None] * 6, versions={"sglang": "1.0", "fla-core": "2.0"})


class ExactPeer:
    """Our reference behind the interface of a peer, in the layout of one, with a ring of two rounds."""

    value_first, beta_is_unrounded, rounds_in_cycle = True, True, 2

    def __init__(self, kernels, shape, rows, dtype, launch=None):
        self.shape, self.rows, self.launch, self.rounds = shape, rows, launch, 0

    def bind(self, states):
        def run(rows):
            self.rounds += 1
            with use_kernels("reference"):
                factors, rows = self.shape.factors(self.rows), rows.with_unrounded_beta()
                outputs = verify_layers(rows, states.mT, factors)
                self.commit(states.mT, factors)
            return outputs

        return run

    def commit(self, states, factors):
        commit_gated_delta_rule(states, factors, self.rows)


class ForgetfulPeer(ExactPeer):
    """Fast, since it never commits."""

    def commit(self, states, factors):
        pass


@pytest.fixture
def stand_ins(monkeypatch):
    monkeypatch.setattr(gated_delta_comparison, "PEERS", {"exact": ExactPeer, "forgetful": ForgetfulPeer})
    monkeypatch.setattr(gated_delta_comparison, "Replay", ExactPeer)
    monkeypatch.setattr(gated_delta_rule, "find_peers", lambda folder: KERNELS)


def run(monkeypatch, output, *options: str) -> dict:
    command = ["command", "--tiny", "--replays", "2", "--lengths", "2", "3", *options, "--output", str(output)]
    monkeypatch.setattr(sys, "argv", command)
    # The interpreter takes a tenth of a second for every launch and head.
    monkeypatch.setattr(gated_delta_rule, "TINY", Shape(layers=1, num_k_heads=1, num_v_heads=1, k_dim=16, v_dim=16))
    monkeypatch.setattr(gated_delta_rule, "SETS", 1)
    gated_delta_rule.main()
    return json.loads(output.read_text())


def test_results_without_peers(monkeypatch, tmp_path, capsys):
    report = run(monkeypatch, tmp_path / "results.json")
    assert "no folder of peers was given" in capsys.readouterr().err
    assert "no folder" in report["peers_skipped"] and "peers" not in report
    assert [record["rows"] for record in report["results"]] == [2, 3]
    for record in report["results"]:
        assert record["committed"] == record["rows"]
        assert all(record[f"{part}_ms"] > 0 for part in ("round", "verify", "commit"))
        assert "peers_ms" not in record and "fraction_of_floor" in record
    errors = report["relative_errors"]["float32"]
    assert set(errors) == {str(rows) for rows in range(1, 17)}
    assert all(0 < error["output"] < 1e-6 and 0 < error["state"] < 1e-6 for error in errors.values())
    assert report["environment"]["torch"] == torch.__version__


def test_results_beside_peers(monkeypatch, tmp_path, stand_ins):
    report = run(monkeypatch, tmp_path / "results.json", "--commit", "abc")
    assert report["environment"]["commit"] == "abc"
    peers = report["peers"]
    assert peers["versions"] == KERNELS.versions
    assert set(peers["launches_tuned"]) == {"2", "3"} and "block_v" in peers["launches_tuned"]["2"]
    assert peers["relative_errors"]["exact"]["2"]["state"] < 1e-6 < peers["relative_errors"]["forgetful"]["2"]["state"]
    for record in report["results"]:
        assert set(record["peers_ms"]) == {"exact", "forgetful", TUNED}
        assert record["best_peer"] in ("exact", TUNED)
        ratio = record["peers_ms"][record["best_peer"]] / record["round_ms"]
        assert record["speedup_over_best_peer"] == pytest.approx(ratio, abs=1e-3)


def test_a_wrong_result_ends_the_run(monkeypatch):
    monkeypatch.setattr(gated_delta_rule, "commit_gated_delta_rule", lambda *arguments: None)
    with use_kernels("triton"), pytest.raises(SystemExit, match=r"state of 3 rows in torch\.float32: relative error"):
        gated_delta_rule.measure_errors(SHAPE, 3, torch.float32)


def test_the_best_peer_is_the_fastest_that_is_right():
    errors = {
        "slow": {"output": 1e-7, "state": 1e-7},
        "fast": {"output": 2e-3, "state": 2e-3},
        "wrong": {"output": 2e-3, "state": 2e-2},
        "broken": {"output": float("nan"), "state": 1e-7},
    }
    times = {"slow": 0.3, "fast": 0.2, "wrong": 0.1, "broken": 0.1}
    assert verdict(0.1, times, errors) == {"peers_ms": times, "best_peer": "fast", "speedup_over_best_peer": 2.0}
    alone = verdict(0.1, {"wrong": 0.1}, errors)
    assert alone["best_peer"] is None and alone["speedup_over_best_peer"] is None


def test_a_peer_is_checked_and_timed_over_whole_cycles():
    peer = ExactPeer(KERNELS, SHAPE, 3, torch.float32)
    assert max(peer_errors(peer, SHAPE, 3, torch.float32).values()) < 1e-6
    assert peer.rounds == peer.rounds_in_cycle
    work = peer_work(peer, SHAPE.rows(3, torch.float32), [SHAPE.states() for _ in range(3)])
    assert work.num_rounds == 6


def test_the_gates_are_the_same_both_ways():
    rows = SHAPE.rows(4, torch.bfloat16)
    expected = -rows.A_log.exp()[:, None, None] * torch.log1p((rows.a.float() + rows.dt_bias[:, None, None]).exp())
    assert relative_error(rows.log_decay, expected) < 1e-6
    assert torch.equal(rows.beta, rows.b.sigmoid()) and rows.beta.dtype == torch.bfloat16
    assert 0 < relative_error(rows.beta, rows.with_unrounded_beta().beta) < 2**-8


def test_the_recurrence_advances_the_states_row_by_row():
    rows, states = SHAPE.rows(4, torch.float32), SHAPE.states()
    at_once, halves = states.clone(), states.clone()
    outputs = recurrence(SHAPE, rows, at_once)
    fields = ("query", "key", "value", "log_decay", "beta")
    parts = [replace(rows, **{name: getattr(rows, name)[:, :, i : i + 2] for name in fields}) for i in (0, 2)]
    assert torch.equal(torch.cat([recurrence(SHAPE, part, halves) for part in parts], dim=2), outputs)
    assert torch.equal(halves, at_once) and not torch.equal(states, at_once)
