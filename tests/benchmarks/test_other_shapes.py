"""The benchmark of other shapes, at tiny sizes: it gates first, and reports every shape."""

import json

import pytest
import torch

from benchmarks import other_shapes


def test_every_shape_is_gated_and_timed(tmp_path):
    path = tmp_path / "shapes.json"
    other_shapes.main(["--tiny", "--replays", "1", "--output", str(path)])
    report = json.loads(path.read_text())
    for shape in other_shapes.SHAPES:
        found = report[shape]
        assert found["worst_median_error"] < 1e-4 and found["plain"]["equal_tokens"] == other_shapes.GATE_TOKENS
        assert [row["length"] for row in found["forward"]] == list(other_shapes.LENGTHS)
    dense, sparse = (report[shape]["forward"] for shape in ("qwen3_5_27b", "qwen3_next_80b"))
    assert not any(row["distinct_experts_a_layer"] for row in dense)
    assert sparse[0]["distinct_experts_a_layer"] == 2 < sparse[-1]["distinct_experts_a_layer"]


def test_rounds_that_differ_are_an_error(monkeypatch):
    config = other_shapes.config_of("qwen3_5_27b", True, None)
    model = other_shapes.random_target(config, torch.device("cpu"), torch.float32)
    tokens = iter(([1, 2, 3], [1, 2, 4]))
    monkeypatch.setattr(other_shapes.Session, "run", lambda session, count: (0.0, None, next(tokens)))
    with pytest.raises(SystemExit, match=r"emit \[1, 2, 3\], steps one by one \[1, 2, 4\]"):
        other_shapes.plain_rounds(model)
