"""Rows of the ablations, and the tables made of their results."""

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from hf_hybridspec.bench.results_file import update_results
from training.results import current_commit
from training.tiny import ablations
from training.tiny.ablations import Row, all_rows, part_of, train_row
from training.tiny.export_conversations import conversation, tokenised_rows
from training.tiny.ready_tables import read_results, write_summary


def result(folder, row, scale, commit="abc1234"):
    kinds = {kind: [{"emitted": int(scale * (10 + n)), "rounds": 5} for n in range(6)] for kind in ("gsm", "prose")}
    (folder / row.name).mkdir(parents=True)
    content = {"row": {"table": row.table, "label": row.label}, "kinds": kinds, "steps": 4, "commit": commit}
    (folder / row.name / "result.json").write_text(json.dumps(content))


def test_every_ablation_of_the_issue_is_a_row():
    rows = list(all_rows())
    assert len({row.name for row in rows}) == len(rows)
    assert {(row.label, row.seed) for row in rows[:9]} == {
        (label, seed) for label in ("dspark", "dspark_ft", "ready") for seed in range(3)
    }
    tables = {"rank", "state layers", "injection layers", "injection", "reader width", "budget", "stages"}
    assert {row.table for row in rows[9:]} == tables
    assert [row.label for row in rows if row.table == "rank"] == ["4", "16", "64"]


@pytest.mark.parametrize("parts", [1, 3, 8])
def test_parts_share_all_rows_out_evenly(parts):
    rows = list(all_rows())
    shares = [part_of(rows, f"{i}/{parts}") for i in range(parts)]
    assert sorted(row.name for share in shares for row in share) == sorted(row.name for row in rows)
    trained = [sum(bool(row.stages) for row in share) for share in shares]
    assert max(trained) - min(trained) <= 1
    # Headline rows come first in every part.
    assert {share[0].table for share in shares[:6]} == {"headline"}
    for part in ("8/8", "1", "-1/2", "a/b"):
        with pytest.raises(ValueError, match="--part must be I/N"):
            part_of(rows, part)


@pytest.mark.parametrize(
    ("row", "steps", "samples"),
    [
        (Row("headline", "dspark_ft", ("ft",), 2), [8], 12),
        (Row("headline", "ready", ("reader", "joint"), 2, ablations.BASE), [4, 4], 12),
        (Row("stages", "joint alone", ("joint",), 2, ablations.BASE), [8], 12),
        (Row("budget", "ready x2", ("reader", "joint"), 2, ablations.BASE, 2), [8, 8], 24),
    ],
    ids=lambda value: value.label if isinstance(value, Row) else None,
)
def test_a_row_trains_its_stages_on_the_pair_that_was_asked_for(row, steps, samples, tmp_path, monkeypatch):
    runs = []
    monkeypatch.setattr(ablations, "train", lambda arguments, training: runs.append((arguments, training)))
    options = Namespace(target="other", drafter="its-dspark", dataset=Path("rows.jsonl"), steps=8, batch=3)
    options.config, options.device, options.train_arguments = Path("training/configs/tiny_ft.yaml"), "cpu", []
    options.learning_rate, options.reader_learning_rate = 1e-3, 2e-3
    last = train_row(row, options, tmp_path)
    assert last == tmp_path / row.stages[-1] and [arguments.stage for arguments, _ in runs] == list(row.stages)
    assert [training.max_steps for _, training in runs] == steps
    # In one stage or in two, as many steps over as many samples.
    assert all(arguments.max_samples == samples for arguments, _ in runs)
    assert {(arguments.target, arguments.drafter) for arguments, _ in runs} == {("other", "its-dspark")}
    assert [arguments.adapter for arguments, _ in runs] == [None, str(tmp_path / "reader")][: len(runs)]
    assert runs[0][0].reader_state_layers == (None if "ft" in row.stages else [2, 6])
    rates = [2e-3 if stage == "reader" else 1e-3 for stage in row.stages]
    assert [training.learning_rate for _, training in runs] == rates


def test_tables_and_headline(tmp_path, capsys):
    for seed in range(2):
        result(tmp_path, Row("headline", "dspark_ft", ("ft",), seed), 10)
        result(tmp_path, Row("headline", "ready", ("reader",), seed), 11)
    result(tmp_path, Row("rank", "4", ("reader",)), 12)
    results = tmp_path / "summary.json"
    results.write_text(json.dumps({"gather_us": 4.0, "commit": "abc1234"}))
    write_summary(tmp_path, tmp_path / "table.md", results)
    table = (tmp_path / "table.md").read_text()
    assert "| headline | ready | 2 | 27.500 | 27.500 | 27.500 | +10.00 |" in table
    assert "| rank | 4 | 1 | 30.000 | 30.000 | 30.000 | +20.00 |" in table
    content = json.loads(results.read_text())
    assert content["gather_us"] == 4.0 and content["commit"] == "abc1234"
    ready = content["acceptance_length"]["ready"]
    assert ready["mean"] == pytest.approx(27.5) and ready["interval"][0] < 27.5 < ready["interval"][1]
    gain = ready["gain_over_dspark_ft"]
    # The rows are paired: prompts vary, their ratio does not.
    assert gain == pytest.approx([10, 10, 10], abs=0.01)
    assert "over dspark_ft +10.00 %" in capsys.readouterr().out


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no result"):
        write_summary(tmp_path, None, None)
    assert read_results(tmp_path) == {}


def test_a_page_keeps_what_stands_around_its_table(tmp_path):
    result(tmp_path, Row("headline", "dspark_ft", ("ft",)), 10)
    page = tmp_path / "page.md"
    page.write_text("# Before\n\n<!-- results:ready -->\nold\n<!-- end of results:ready -->\n\nafter\n")
    for _ in range(2):
        write_summary(tmp_path, page, None)
        text = page.read_text()
        assert text.startswith("# Before\n\n<!-- results:ready -->\n| table | row |")
        assert text.endswith("\n<!-- end of results:ready -->\n\nafter\n") and "old" not in text
    with pytest.raises(ValueError, match="must have the lines <!-- results:early -->"):
        write_summary(tmp_path, page, None, "early")
    assert page.read_text() == text


def test_results_of_several_commits_are_refused(tmp_path):
    for seed, commit in enumerate(("abc", "def")):
        result(tmp_path, Row("headline", "ready", ("reader",), seed), 10, commit)
    with pytest.raises(
        ValueError, match=r"headline mixes the commits \['abc', 'def'\]. Run all its rows at one commit"
    ):
        write_summary(tmp_path, None, tmp_path / "results.json")
    assert not (tmp_path / "results.json").exists()


def test_a_later_table_says_its_commit_and_leaves_the_headline_as_it_was(tmp_path, capsys):
    for seed in range(2):
        result(tmp_path, Row("headline", "dspark_ft", ("ft",), seed), 10, "abc")
        result(tmp_path, Row("headline", "ready", ("reader",), seed), 11 + seed, "abc")
    write_summary(tmp_path, None, tmp_path / "before.json")
    assert "at commit" not in capsys.readouterr().out
    for seed in range(2):
        result(tmp_path, Row("stages", "joint alone", ("joint",), seed), 12, "def")
    result(tmp_path, Row("rank", "4", ("reader",)), 12, "abc")
    write_summary(tmp_path, None, tmp_path / "after.json")
    text = capsys.readouterr().out
    assert "Measured at commit abc; stages at commit def." in text and "rank at" not in text
    # Several seeds have an interval, one seed has none.
    assert "stages, joint alone: 30.0000 [27.6" in text and "over dspark_ft +20.00 % [+20.00, +20.00]" in text
    assert "rank, 4:" not in text
    before, after = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("before", "after"))
    assert after == before and after["commit"] == "abc"


def test_the_measured_commit_is_the_given_one_or_this_checkouts():
    assert current_commit("abc") == "abc"
    found = current_commit()
    assert found == "unknown" or len(found) == 40


def test_results_keep_what_other_commands_wrote(tmp_path):
    update_results(tmp_path / "new" / "file.json", {"a": 1}, "H", commit="abc")
    update_results(tmp_path / "new" / "file.json", {"b": 2}, "H", commit="def")
    content = json.loads((tmp_path / "new" / "file.json").read_text())
    assert (content["a"], content["b"], content["commit"]) == (1, 2, "abc, def")
    update_results(tmp_path / "new" / "file.json", {"a": 3}, "H", commit="def")
    content = json.loads((tmp_path / "new" / "file.json").read_text())
    assert (content["a"], content["commit"], content["commits"]) == (3, "def", {"a": "def", "b": "def"})


def test_rendered_rows_become_conversations():
    head = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    expected = {"from": "human", "value": "hi"}
    assert conversation(head + "\n</think>\n\nyes<|im_end|>") == [expected, {"from": "gpt", "value": "yes"}]
    thinking = conversation(head + "hm\n</think>\n\nyes<|im_end|>")
    assert thinking[1]["value"] == "<think>\nhm\n</think>\n\nyes"
    assert conversation(head + "hm<|im_end|>") is None
    assert conversation(head + "hm\n</think>\n\nyes") is None


def test_tokenised_rows_mark_the_answer():
    assert list(tokenised_rows([(torch.tensor([5, 6, 7]), 2)])) == [
        {"input_ids": [5, 6, 7], "assistant_mask": [0, 0, 1]}
    ]
