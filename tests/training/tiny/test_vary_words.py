"""Problems told again with other words: only content words change, and alike in question and solution."""

import re
from itertools import pairwise
from random import Random

import pytest

from training.tiny.dialogues import REASONING_REQUEST
from training.tiny.documents import Dialogue, read_dialogues
from training.tiny.pack import read_rows
from training.tiny.problem_words import FORM_WORDS
from training.tiny.vary_words import dictionary_words, replacement, varied_dialogues, vary_dialogue
from training.tiny.word_problems import word_problem_dialogues

# None of them occurs in a problem.
OTHERS = [f"{start}{middle}oth" for start in "bdfgklmnprstvz" for middle in ("alin", "erro", "ump")]
TOKEN = re.compile(r"[A-Za-z]+|\d+|[^\w\s]")


def stem(word: str) -> str:
    return word.lower().removesuffix("s").removesuffix("e")


def assert_same_but_for_words(old: str, new: str, mapping: dict[str, str]) -> None:
    """Token by token; `mapping` holds what became of each stem so far, and is extended."""
    before, after = TOKEN.findall(old), TOKEN.findall(new)
    assert len(before) == len(after), (old, new)
    for one, other in zip(before, after, strict=True):
        if len(one) < 4 or not one.isalpha() or one.lower() in FORM_WORDS:
            assert one == other, (old, new)
        else:
            assert one[0].isupper() == other[0].isupper()
            assert one.endswith("s") == other.endswith("s")
            # What stays keeps its stem, what changes is a word of the dictionary.
            became = stem(other) if other == one else other.lower().removesuffix("s")
            assert mapping.setdefault(stem(one), became) == became, (one, other)
            assert other == one or became in OTHERS


@pytest.fixture(scope="module")
def problems() -> list[Dialogue]:
    return list(word_problem_dialogues(150, seed=11))


def varied_and_kept(problems):
    """Every problem, and told again; where no sentence was put in between."""
    rng = Random(0)
    for problem, other in pairwise(problems):
        varied = vary_dialogue(problem, other, OTHERS, rng)
        if len(TOKEN.findall(varied.user_turns[0])) == len(TOKEN.findall(problem.user_turns[0])):
            yield problem, varied


def test_words_change_alike_in_question_and_solution_and_nothing_else_does(problems):
    changed = count = 0
    for problem, varied in varied_and_kept(problems):
        mapping: dict[str, str] = {}
        assert varied.enable_thinking == problem.enable_thinking
        for old, new in zip(problem.messages, varied.messages, strict=True):
            assert old.keys() == new.keys() and old["role"] == new["role"]
            for key in old.keys() - {"role"}:
                assert_same_but_for_words(old[key], new[key], mapping)
        changed += sum(before != after for before, after in mapping.items())
        count += 1
    assert count > 60 and changed > 3 * count


def test_a_sentence_of_another_problem_may_stand_in_between(problems):
    """Before the last sentence, which asks."""
    rng, added = Random(0), 0
    for problem, other in pairwise(problems):
        varied = vary_dialogue(problem, other, OTHERS, rng).user_turns[0]
        assert varied.endswith(REASONING_REQUEST) == problem.user_turns[0].endswith(REASONING_REQUEST)
        assert varied.removesuffix(REASONING_REQUEST).rstrip().endswith("?")
        numbers, own = re.findall(r"\d+", varied), re.findall(r"\d+", problem.user_turns[0])
        if len(TOKEN.findall(varied)) > len(TOKEN.findall(problem.user_turns[0])):
            added += 1
            foreign = re.findall(r"\d+", re.split(r"(?<=[.!?])\s+", other.user_turns[0])[0])
            at = next(i for i in range(len(own) + 1) if numbers[:i] + numbers[i + len(foreign) :] == own)
            assert numbers[at : at + len(foreign)] == foreign
        else:
            assert numbers == own
    assert 0.15 * len(problems) < added < 0.5 * len(problems)


def test_a_word_and_its_plural_are_replaced_alike():
    change = replacement(["zebra"], share=1.0, rng=Random(0))
    assert change("Marbles and a marble, boxes and a crate.") == "Zebras and a zebra, zebras and a zebra."
    assert change("How much money is left after 3 hours?") == "How much zebra is left after 3 hours?"
    assert replacement(OTHERS, share=0.0, rng=Random(0))("Marbles in 2 crates.") == "Marbles in 2 crates."
    change = replacement(OTHERS, share=1.0, rng=Random(0))
    assert change("crate") != change("marble") and change("crate") == change("crates").removesuffix("s")


def test_a_seed_gives_the_same_dialogues(problems):
    first, again, other = (
        [dialogue.to_json() for dialogue in varied_dialogues(problems, OTHERS, 20, seed)] for seed in (1, 1, 2)
    )
    assert first == again and first != other


def test_dictionary_words_are_lower_case_and_sorted():
    assert dictionary_words(["Apple a fruit; of trees", "trees bear extraordinarily fruit-like"]) == [
        "bear",
        "fruit",
        "like",
        "trees",
    ]


def test_the_script_adds_a_domain_to_the_corpus(tiny_run):
    dialogues = list(read_dialogues(tiny_run.corpus / "train" / "chat_varied.jsonl.xz"))
    assert len(dialogues) == 30
    text = " ".join(message["content"] for dialogue in dialogues for message in dialogue.messages)
    assert re.search(r"\bword[a-z]+like\b", text, re.IGNORECASE)
    assert len(read_rows(tiny_run.packed, "train", "varied"))
