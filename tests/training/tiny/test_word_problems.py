"""Worked problems: right arithmetic, the same ones for a seed, and no sentence of a held-out template."""

import json
import re
from collections.abc import Iterator
from random import Random

import pytest

from hf_hybridspec.bundled import BUNDLED_MODELS
from training.tiny import word_problems
from training.tiny.build_corpus import write_word_problems
from training.tiny.documents import read_dialogues
from training.tiny.story import Story, number, plural, vary
from training.tiny.word_problems import FAMILIES, word_problem_dialogues, worked_problem

# `3 * $4 + $5 = $17`: the left side is of numbers, brackets and signs alone.
EQUATION = re.compile(r"([(\d$€£][\d$€£ .+\-*/()%]*) = [$€£]?(\d+(?:\.\d+)?)")
# Money is rounded to cents.
HALF_A_CENT = 0.005001


def equations(line: str) -> list[tuple[str, float]]:
    """Left and right sides of a solution line's equations; fails if one of its equal signs stands in none."""
    found = EQUATION.findall(line)
    assert len(found) == line.count("="), line
    return [(left, float(right)) for left, right in found]


def value(expression: str) -> float:
    """Of numbers, `+ - * /` and brackets: `EQUATION` lets nothing else through."""
    return eval(re.sub(r"(\d+)%", r"(\1/100)", re.sub(r"[$€£]", "", expression)))


@pytest.mark.parametrize("family", dict.fromkeys(FAMILIES), ids=lambda family: family.__name__)
def test_every_equation_is_right_and_the_last_gives_the_answer(family):
    rng = Random(family.__name__)
    for _ in range(2_000 // len(set(FAMILIES)) + 1):
        story = Story(rng)
        family(story)
        right = None
        for left, right in (equation for line in story.solution for equation in equations(line)):
            assert abs(value(left) - right) < HALF_A_CENT, (left, right)
        assert right is not None and abs(right - story.answer) < HALF_A_CENT, story
        assert story.question[-1].endswith("?") and story.answer >= 0


def test_a_seed_gives_the_same_problems_and_another_seed_others():
    texts = [[dialogue.to_json() for dialogue in word_problem_dialogues(40, seed)] for seed in (3, 3, 4)]
    assert texts[0] == texts[1] and not set(texts[0]) & set(texts[2])
    assert len(set(texts[0])) == 40


def skeletons(text: str) -> Iterator[str]:
    """Its sentences that state a number, with all numbers and names alike and without punctuation."""
    for sentence in re.split(r"(?<=[.!?])\s+", text):
        plain = re.sub(r"\b[A-Z]\w*", "@", re.sub(r"\d[\d.,]*", "0", sentence))
        if "0" in plain:
            yield " ".join(re.sub(r"[^\w@ ]", "", plain).split())


def test_no_sentence_of_a_heldout_template_is_reproduced():
    lines = (BUNDLED_MODELS["tiny"].parent / "prompts" / "gsm.jsonl").read_text(encoding="utf-8").splitlines()
    heldout = {skeleton for line in lines for skeleton in skeletons(json.loads(line)["turns"][0])}
    assert len(heldout) > 50
    rng = Random(5)
    made = {skeleton for _ in range(2_000) for skeleton in skeletons(worked_problem(rng)["question"])}
    assert len(made) > 500 and not made & heldout


def test_the_corpus_part_is_training_text_of_the_asked_size(tmp_path):
    entry = write_word_problems(tmp_path, count=30, seed=1)
    dialogues = list(read_dialogues(tmp_path / "train" / "chat_problems.jsonl.xz"))
    assert len(dialogues) == entry["train_dialogues"] == 30 and not (tmp_path / "heldout").exists()
    for dialogue in dialogues:
        reply = dialogue.messages[-1]
        assert ("reasoning_content" in reply) == dialogue.enable_thinking
        solution = reply.get("reasoning_content", reply["content"])
        boxed = re.search(r"\\boxed\{(.+?)\}", reply["content"]).group(1)
        assert abs(equations(solution)[-1][1] - float(boxed)) < HALF_A_CENT


def test_the_grammar():
    assert {vary(Random(seed), "a [b|c [d|e]] f[|g]") for seed in range(60)} == {
        f"a {middle} f{end}" for middle in ("b", "c d", "c e") for end in ("", "g")
    }
    assert list(map(plural, ("shirt", "brush", "box of cereal", "loaf of bread", "pair of socks"))) == [
        "shirts",
        "brushes",
        "boxes of cereal",
        "loaves of bread",
        "pairs of socks",
    ]
    assert list(map(number, (3, 2.5, 10.0, 1.239))) == ["3", "2.5", "10", "1.24"]


def test_the_script_prints_problems(capsys):
    word_problems.main(["--count", "2", "--seed", "1"])
    first = worked_problem(Random(1))
    printed = capsys.readouterr().out
    assert printed.startswith(f"{first['question']}\n\n{first['metadata']['answer_cot']}\n\n{first['answer']}\n-")
    assert printed.count("-" * 40) == 2
