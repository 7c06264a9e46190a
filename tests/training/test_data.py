"""Data: what becomes a sample, what is left out and under which reason, and the mask of what the target wrote."""

import json

import pytest
import torch

from hf_hybridspec.bundled import resolve
from training.collator import AnchorCollator
from training.conversations import UnusableRowError, read_conversation
from training.data import Sample, SampleReader, read_rows, read_template
from training.sampler import LengthBucketSampler

TURN = [{"from": "human", "value": "hello there"}, {"from": "gpt", "value": "good day"}]
SYSTEM = {"from": "system", "value": "be kind"}


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(resolve("tiny"))


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([], "no turns"),
        (TURN[:1], "no assistant turn"),
        ([TURN[1]], "do not alternate"),
        ([TURN[0], TURN[0], TURN[1]], "do not alternate"),
        ([TURN[0], {"from": "gpt", "value": "  "}], "empty turn"),
        ([TURN[0], {"from": "gpt", "value": None}], "empty turn"),
        ([{"from": "narrator", "value": "x"}, TURN[1]], "unknown role 'narrator'"),
        ([*TURN, SYSTEM, *TURN], "system turn after"),
        ([TURN[0], {"from": "gpt", "value": "<think>still"}, TURN[0]], None),
        ([TURN[0], {"from": "gpt", "value": "<think>done</think>"}], "ends while thinking"),
    ],
)
def test_rows_that_cannot_train_are_named(turns, reason):
    if reason is None:
        assert len(read_conversation({"conversations": turns})) == 2
        return
    with pytest.raises(UnusableRowError, match=reason):
        read_conversation({"conversations": turns})


def test_all_column_kinds_give_the_same_conversation():
    expected = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "good day"}]
    assert read_conversation({"conversations": TURN, "source": "x"}) == expected
    assert read_conversation({"messages": expected}) == expected
    thinking = [TURN[0], {"from": "gpt", "value": "<think>\nhm\n</think>\n\ngood day"}]
    assert read_conversation({"conversations": thinking})[1] == {
        "role": "assistant",
        "content": "good day",
        "reasoning_content": "hm",
    }


@pytest.mark.parametrize("template", [None, "qwen_thinking"])
def test_the_mask_is_what_the_target_would_write(tokenizer, template):
    """Rendering the prompt as for generation and cutting it off leaves exactly the masked tokens."""
    reader = SampleReader(tokenizer, 512, read_template(template))
    turns = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello there"}]
    answer = {"role": "assistant", "content": "good day", "reasoning_content": "a greeting"}
    sample = reader.read([{"messages": [*turns, answer]}]).samples[0]
    prompt = tokenizer.apply_chat_template(
        turns, chat_template=read_template(template), add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert sample.tokens[: len(prompt)].tolist() == prompt
    assert not sample.answer_mask[: len(prompt)].any()
    written = tokenizer.decode(sample.tokens[sample.answer_mask])
    assert written == "a greeting\n</think>\n\ngood day<|im_end|>"


def test_every_assistant_turn_is_supervised_and_nothing_else(tokenizer):
    reader = SampleReader(tokenizer, 512, read_template("qwen_thinking"))
    sample = reader.read([{"conversations": [*TURN, TURN[0], {"from": "gpt", "value": "again"}]}]).samples[0]
    assert tokenizer.decode(sample.tokens[sample.answer_mask]) == "good day<|im_end|>again<|im_end|>"


def test_a_template_without_a_mask_is_refused(tokenizer):
    reader = SampleReader(tokenizer, 512, "{{ messages[0].content }}")
    with pytest.raises(ValueError, match=r"marks nothing as generated.*qwen_thinking"):
        reader.read([{"conversations": TURN}])
    with pytest.raises(ValueError, match=r"shipped templates \(qwen_thinking\)"):
        read_template("no_such_template")


def row(length, start):
    return {"input_ids": [1] * length, "assistant_mask": [0] * start + [1] * (length - start)}


def test_supervision_that_starts_late_is_found_or_counted_and_named(tokenizer):
    """C37."""
    reader = SampleReader(tokenizer, 100)
    dataset = reader.read([row(150, 97), row(150, 120), row(50, 10), row(40, 39), row(30, 30)])
    assert dataset.lengths == [100, 50]
    assert dataset.report.dropped == {
        "no anchor within max_length 100": 1,
        "answer of a single token": 1,
        "no assistant token": 1,
    }
    assert "2 of 5 rows kept (1 of them shortened)" in str(dataset.report)
    anchors = AnchorCollator(16, 0).anchors(dataset.samples[0], 0)
    assert anchors.tolist() == [97, 98]


def test_a_data_set_without_a_usable_row_is_refused_with_the_reasons(tokenizer):
    reader = SampleReader(tokenizer, 100, read_template("qwen_thinking"))
    with pytest.raises(ValueError, match=r"0 of 3 rows kept.*2 x no assistant turn; 1 x empty turn"):
        reader.read([{"conversations": TURN[:1]}] * 2 + [{"conversations": [{"from": "human", "value": ""}]}])
    with pytest.raises(ValueError, match="5 samples were asked for, but only 1 of 1"):
        reader.read([row(50, 10)], limit=5)
    with pytest.raises(ValueError, match="input_ids without an assistant_mask"):
        reader.read([{"input_ids": [1, 2, 3]}])


def test_local_files_are_read_line_by_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row(4, 1)) + "\n\n" + json.dumps(row(5, 1)) + "\n")
    assert [len(r["input_ids"]) for r in read_rows(str(path))] == [4, 5]
    path.write_text("{}\n{not json\n")
    with pytest.raises(ValueError, match=r"Line 2 of .*rows\.jsonl is not JSON"):
        read_rows(str(path))
    with pytest.raises(ValueError, match="does not exist"):
        read_rows(str(tmp_path / "missing.jsonl"))


def sample(length, number, start=5):
    return Sample(torch.arange(length), torch.arange(length) >= start, number)


def test_anchors_belong_to_the_sample_and_the_epoch_not_to_the_batch():
    collator = AnchorCollator(4, 0, seed=3)
    items = [{"sample": sample(30 + n, n), "epoch": 0} for n in range(3)]
    together = collator(items)
    for index, item in enumerate(items):
        alone = collator([item])
        assert torch.equal(
            together["anchors"][index][together["valid"][index]], alone["anchors"][0][alone["valid"][0]]
        )
    later = collator([{**item, "epoch": 1} for item in items])
    assert not torch.equal(together["anchors"], later["anchors"])
    assert together["tokens"].shape == (3, 32) and not together["answer_mask"][0, 30:].any()


def test_a_short_answer_gives_fewer_anchors_and_the_rest_are_not_valid():
    batch = AnchorCollator(8, 0)([{"sample": sample(8, 0), "epoch": 0}, {"sample": sample(40, 1), "epoch": 0}])
    assert batch["valid"].sum(1).tolist() == [2, 8]
    assert batch["anchors"][0][batch["valid"][0]].tolist() == [5, 6]


def test_buckets_hold_similar_lengths_and_depend_on_the_epoch_alone():
    lengths = torch.randint(10, 500, (203,), generator=torch.Generator().manual_seed(0)).tolist()
    sampler = LengthBucketSampler(lengths, 8, seed=1, by_length=True)
    order = list(sampler)
    assert sorted(order) == list(range(203)) and list(sampler) == order
    spread = [max(group) - min(group) for group in zip(*[iter([lengths[i] for i in order[:200]])] * 8, strict=True)]
    assert sum(spread) / len(spread) < 60
    sampler.set_epoch(1)
    assert list(sampler) != order and sorted(sampler) == list(range(203))
    assert sorted(LengthBucketSampler(lengths, 8, 1, by_length=False)) == list(range(203))
