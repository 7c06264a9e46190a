"""The benchmark of sampling: it runs, and ends where two ways choose other tokens."""

import json

import pytest

from benchmarks import sampling


def test_a_dry_run_measures_every_way(tmp_path):
    path = tmp_path / "sampling.json"
    sampling.main(["--tiny", "--replays", "2", "--output", str(path)])
    records = json.loads(path.read_text())["records"]
    assert [record["rows"] for record in records] == list(sampling.ROWS)
    ways = ["greedy", *(f"{name}_reference" for name in sampling.SETTINGS)]
    assert all(record[f"{way}_us"] > 0 for record in records for way in ways)


def test_ways_that_choose_other_tokens_end_it():
    logits = sampling.logits_of(3, 500, "cpu")
    qwen, other = sampling.SETTINGS["qwen"], (0.8, 20, 0.8, 0.0)
    same = {"first": sampling.Choice(logits, qwen, "reference"), "second": sampling.Choice(logits, qwen, "reference")}
    sampling.check(same, 3)
    with pytest.raises(SystemExit, match=r"3 rows, uniforms .* accepted drafts and next token are"):
        sampling.check(same | {"third": sampling.Choice(logits, other, "reference")}, 3)
