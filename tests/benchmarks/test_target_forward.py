"""The benchmarks of the target's forward: dry runs find what they look for, and their gates notice wrong results."""

import json
import sys

import pytest
import torch

from benchmarks import forward_gate, target_forward, tune_tiles
from benchmarks.forward_gate import check_layers
from benchmarks.full_target import noisy_cache, random_target, target_config
from benchmarks.tile_pieces import PIECES, TINY, Maker, count_distinct, scripted_rows
from hf_hybridspec.kernels.tiles import TILES, Tile
from hf_hybridspec.modeling import fused_forward
from hf_hybridspec.modeling.target import text_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target():
    return random_target(target_config(is_tiny=True, num_layers=None), CPU, torch.float32)


def run(module, monkeypatch, *options: str) -> dict:
    output = options[-1]
    monkeypatch.setattr(sys, "argv", ["command", *options[:-1], "--output", str(output)])
    module.main()
    return json.loads(output.read_text())


def test_a_dry_run_measures_every_length_and_routing(monkeypatch, tmp_path):
    lengths = ["--lengths", "1", "4"]
    (tmp_path / "v").write_text(json.dumps({"narrow": {"router": {"block_n": 16}}}))
    variants = ["--variants", str(tmp_path / "v"), "--overlaps"]
    sizes = ["--tiny", "--replays", "3", "--contexts", "32", *lengths]
    report = run(target_forward, monkeypatch, *sizes, *variants, tmp_path / "f")
    rows = {(row["routing"], row["length"]): row for row in report["forward_context_32"]}
    assert set(rows) == {(routing, length) for routing in ("uniform", "scripted") for length in (1, 4)}
    assert all(row["ms"] > 0 for row in rows.values())
    # One row selects two experts in every layer; more rows select more, and more bytes are read.
    for routing in ("uniform", "scripted"):
        assert rows[routing, 1]["distinct_experts_a_layer"] == 2
        assert rows[routing, 4]["distinct_experts_a_layer"] > 3
        assert rows[routing, 4]["floor_ms"] > rows[routing, 1]["floor_ms"]
    assert report["ar_context_32"]["ar_ms"] > 0 and report["skipped_phases"] == 0
    assert report["pieces_length_1"]["router"]["launches"] == 4
    assert set(report["variants"]) == {"1", "4", "other_bits"} and not report["variants"]["other_bits"]
    assert {"as given", "none", "narrow"} <= set(report["variants"]["4"])
    assert report["rows_against_16_rows"]["15"]["same_argmax"] == 1


def test_a_phase_for_which_no_time_is_left_is_skipped(monkeypatch, tmp_path):
    report = run(target_forward, monkeypatch, "--tiny", "--seconds", "0", tmp_path / "f")
    assert report["skipped_phases"] > 0 and "errors" in report and "variants" not in report


def test_the_gate_passes_a_right_forward_and_stops_a_wrong_one(target, monkeypatch):
    errors = check_layers(target, 4, CPU)
    assert {error.layer for error in errors} == {0, 1, 2, 3} and {error.length for error in errors} == {1, 5, 16}
    monkeypatch.setattr(fused_forward.BlockState, "commit", lambda self, length: self.committed.add_(length))
    with pytest.raises(SystemExit, match="Layer 0 at 1 rows: relative error"):
        check_layers(target, 4, CPU)


def test_the_gate_takes_nan_for_wrong(target, monkeypatch):
    monkeypatch.setattr(forward_gate, "BLOCKS", {1: 1})
    broken = random_target(target_config(is_tiny=True, num_layers=None), CPU, torch.float32)
    with torch.no_grad():
        text_model(broken).layers[2].mlp.experts.down_proj.fill_(float("nan"))
    with pytest.raises(SystemExit, match="Layer 2"):
        check_layers(broken, 4, CPU)


def test_a_noisy_cache_holds_its_context(target):
    cache = noisy_cache(target, 30, 5)
    assert cache.committed_length == 30 and cache.get_max_length() == 35
    assert all(layer.keys.std() > 0.05 for layer in cache.layers if hasattr(layer, "keys") and layer.keys is not None)


def test_scripted_rows_are_a_routing():
    index = torch.tensor([[4, 1], [1, 7]])
    routed = scripted_rows(index, num_experts=16)
    assert count_distinct(routed) == 3
    assert routed.slots[:, [1, 4, 7]].tolist() == [[1, 0, -1], [0, -1, 1]]


@pytest.mark.parametrize("name", PIECES)
def test_every_piece_runs_its_kernel_on_cold_weights(name):
    assert name in TILES
    piece = Maker(TINY, "cpu", torch.float32, only_once=True).piece(name, 3)
    assert piece.calls[0]().isfinite().all() and piece.num_bytes > 0


def test_the_search_keeps_right_tiles_and_chooses_the_fastest(monkeypatch, tmp_path):
    good, wrong = Tile(16, 16, splits=2), Tile(32, 16)
    monkeypatch.setattr(tune_tiles, "cuts", lambda kernel: [TILES[kernel], good, wrong])
    monkeypatch.setattr(tune_tiles, "pipelines", lambda kernel, tile: [])
    monkeypatch.setattr(tune_tiles, "overlaps", lambda kernel, tile: [])
    monkeypatch.setattr(tune_tiles, "timed", lambda piece, tile, replays: 1.0 if tile == good else 2.0)
    is_right = tune_tiles.is_right
    monkeypatch.setattr(
        tune_tiles, "is_right", lambda piece, tile, dtype: tile != wrong and is_right(piece, tile, dtype)
    )
    options = ("--tiny", "--kernels", "gated_linear")
    report = run(tune_tiles, monkeypatch, *options, tmp_path / "tiles.json")
    assert Tile(**report["chosen"]["gated_linear"]) == good
    assert report["compared"]["gated_linear w=1"][0]["us"] == 1000.0
    assert len(report["failed"]) == 1 and "wrong result" in report["failed"][0]
    # The forward's benchmark reads what was chosen.
    assert target_forward._read_tiles(tmp_path / "tiles.json") == {"gated_linear": good}
