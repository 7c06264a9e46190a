"""The benchmark of sampling: it runs, and ends where the two filters part."""

import json

import pytest
import torch

from benchmarks import sampling


def test_a_dry_run_measures_every_choice(tmp_path):
    path = tmp_path / "sampling.json"
    sampling.main(["--tiny", "--replays", "2", "--output", str(path)])
    records = json.loads(path.read_text())["records"]
    assert [record["rows"] for record in records] == list(sampling.ROWS)
    assert all(record[f"{name}_us"] > 0 for record in records for name in ("greedy", "sampled", "few", "filtered"))


def test_filters_that_differ_end_it(monkeypatch):
    right = sampling.sampling_probs

    def wrong(logits, settings, filtering):
        probs = right(logits, settings, filtering)
        return probs * (1.001 if filtering is sampling.Filtering.FEW else 1.0)

    monkeypatch.setattr(sampling, "sampling_probs", wrong)
    settings = sampling.SamplingSettings.new("cpu")
    settings.set(*sampling.SETTINGS)
    with pytest.raises(SystemExit, match="probabilities of the two filters differ by"):
        sampling.check(torch.randn(3, 90), settings)
