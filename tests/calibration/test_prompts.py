"""Prompts: sources, templates of known sets, the split, and what is refused."""

import json

import pytest
import torch

from hf_hybridspec.calibration.evaluation_sets import EVALUATION_SETS, PLACEHOLDER
from hf_hybridspec.calibration.prompts import (
    PromptText,
    load_prompts,
    prompts_hash,
    render,
    split_prompts,
    take_per_kind,
)
from tests.conftest import character_tokenizer


def lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_bundled_prompts_have_four_kinds_and_halves_that_share_nothing():
    prompts = load_prompts("bundled")
    assert {prompt.kind for prompt in prompts} == {"gsm", "code", "dialogue", "prose"}
    halves = [split_prompts(prompts, name, seed=3) for name in ("calibration", "test")]
    keys = [{prompt.key for prompt in half} for half in halves]
    assert not keys[0] & keys[1] and keys[0] | keys[1] == {prompt.key for prompt in prompts}
    assert {prompt.kind for prompt in halves[0]} == {prompt.kind for prompt in halves[1]}
    assert keys[0] != {prompt.key for prompt in split_prompts(prompts, "calibration", seed=4)}
    few = take_per_kind(halves[1], 2)
    assert len(few) == 8 and prompts_hash(p.key for p in few) == prompts_hash(p.key for p in few[::-1])


def test_a_file_of_turns_is_read_once_each(tmp_path):
    path = lines(tmp_path / "mine.jsonl", {"turns": ["one", "two"]}, {"turns": ["one"]}, {"kind": "k", "turns": ["x"]})
    assert load_prompts(str(path)) == [PromptText("mine", "one"), PromptText("k", "x")]


@pytest.mark.parametrize(
    ("name", "row", "kind", "start", "end"),
    [
        ("gsm8k", {"question": "Q?", "answer": "4"}, "gsm8k", "Q?\nPlease reason step by step", "\\boxed{}."),
        ("openai/gsm8k", {"question": "Q?", "answer": "4"}, "gsm8k", "Q?\nPlease", "\\boxed{}."),
        ("math500", {"problem": "P", "answer": "4"}, "math500", "P\nPlease reason", "\\boxed{}."),
        ("mbpp", {"prompt": "Write f.", "task_id": 1}, "mbpp", "Write f.", "Write f."),
        ("humaneval", {"prompt": "def f():\n"}, "humaneval", "Write a solution to the following", "def f():\n\n```"),
        ("mt-bench", {"category": "math", "prompt": ["a", "b"]}, "math", "a", "a"),
        ("alpaca", {"instruction": "Sort.", "input": "2 1"}, "alpaca", "Sort.", "\n\nInput:\n2 1"),
        ("alpaca", {"instruction": "Sort.", "input": ""}, "alpaca", "Sort.", "Sort."),
        ("livecodebench", {"question_content": "Add.", "starter_code": "def g():"}, "livecodebench", "You", "block."),
        ("speed-bench", {"category": "rag", "turns": ["text"], "question_id": "1"}, "rag", "text", "text"),
    ],
)
def test_rows_of_known_sets_become_prompts(tmp_path, name, row, kind, start, end):
    prompt = load_prompts(f"{name}={lines(tmp_path / 'rows.jsonl', row)}")[0]
    assert prompt.kind == kind and prompt.text.startswith(start) and prompt.text.endswith(end)


def test_placeholders_of_speed_bench_are_refused_with_the_publishers_instruction(tmp_path):
    turn = f"{PLACEHOLDER} USING SPECDEC_BENCH"
    path = lines(tmp_path / "rows.jsonl", {"category": "rag", "turns": [turn], "question_id": "q7"})
    with pytest.raises(ValueError, match=r"question q7 is a placeholder.*`prepare_data.py`.*speed-bench=FILE"):
        load_prompts(f"speed-bench={path}")


def test_what_cannot_be_read_is_refused_in_words(tmp_path):
    with pytest.raises(ValueError, match="No prompts 'nothing': give 'bundled', a JSONL file, or a data set"):
        load_prompts("nothing")
    with pytest.raises(ValueError, match="holds no prompt"):
        load_prompts(str(lines(tmp_path / "empty.jsonl")))
    with pytest.raises(ValueError, match=r"Line 2 of .*bad.jsonl is no prompt"):
        load_prompts(str(lines(tmp_path / "bad.jsonl", {"turns": ["x"]}, {"question": "x"})))
    with pytest.raises(ValueError, match=r"Row 1 of gsm8k=.* has not the columns of openai/gsm8k: 'question'"):
        load_prompts(f"gsm8k={lines(tmp_path / 'other.jsonl', {'prompt': 'x'})}")
    with pytest.raises(ValueError, match=r"absent.jsonl cannot be read"):
        load_prompts(f"mbpp={tmp_path / 'absent.jsonl'}")


def test_one_prompt_has_a_calibration_half_only():
    one = [PromptText("k", "x")]
    assert split_prompts(one, "calibration", 0) == split_prompts(one, "all", 0) == one
    with pytest.raises(ValueError, match=r"The test half of 1 prompt is empty.*--split all"):
        split_prompts(one, "test", 0)


def test_prompts_are_rendered_as_chats():
    prompt = PromptText("k", "hi")
    tokenizer = character_tokenizer()
    rendered = render([prompt], tokenizer, torch.device("cpu"))[0]
    assert tokenizer.decode(rendered.input_ids[0]) == "user: hi\nassistant: " and rendered.key == prompt.key
    quiet = render([prompt], tokenizer, torch.device("cpu"), thinking=False)[0]
    assert tokenizer.decode(quiet.input_ids[0]).endswith("assistant: (no thinking) ")


def test_every_known_set_names_its_source():
    assert set(EVALUATION_SETS) >= {"gsm8k", "math500", "mbpp", "humaneval", "livecodebench", "mt-bench", "alpaca"}
    assert all("/" in known.hub_id for known in EVALUATION_SETS.values())
