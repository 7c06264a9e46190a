"""Worked arithmetic problems from many small families, so that no template is seen often enough to be learnt by heart.

Ninety templates alone teach a tiny target ninety stories: on an unseen story it answers with fragments of them. Each
family draws its people, things, numbers, number of steps and the wording of every sentence, and the solution quotes
the question's own words, which is what carries over to new stories.

    python -m training.tiny.word_problems --count 5        # prints a few
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from random import Random

from training.tiny.dialogues import gsm_dialogue
from training.tiny.documents import Dialogue
from training.tiny.problems_of_events import (
    average,
    bill_shared,
    decimal_comparison,
    fractions_of_things,
    groups_of_people,
    profit,
    reading,
    recipe,
    tank,
    theater,
    trip_cost,
    two_workers,
)
from training.tiny.problems_of_measures import ages, rectangle, savings, schedule, travel, two_offers, wages
from training.tiny.problems_of_things import changes, comparison, parts_of_group, production, shopping, supplies
from training.tiny.story import Story, number

FAMILIES: tuple[Callable[[Story], None], ...] = (
    changes, changes, shopping, shopping, wages, comparison, comparison, parts_of_group, travel, production,
    schedule, savings, rectangle, ages, two_offers, supplies, recipe, average, theater, reading, tank,
    fractions_of_things, decimal_comparison, two_workers, trip_cost, profit, groups_of_people, bill_shared,
)  # fmt: skip


def worked_problem(rng: Random) -> dict:
    """One problem with its solution, in reasoning-gym's form (`question`, `answer`, `metadata.answer_cot`)."""
    story = Story(rng)
    rng.choice(FAMILIES)(story)
    answer = number(story.answer)
    question = " ".join(" ".join(story.question).split()).replace(" ?", "?").replace(" .", ".")
    separator = "\n" if rng.random() < 0.8 else " "
    lines = [" ".join(line.split()) for line in story.solution]
    return {"question": question, "answer": answer, "metadata": {"answer_cot": separator.join(lines)}}


def word_problem_dialogues(count: int, seed: int) -> Iterator[Dialogue]:
    """`count` dialogues of worked problems, in the forms of the other worked problems."""
    rng = Random(seed)
    for _ in range(count):
        yield gsm_dialogue(rng, worked_problem(rng))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    rng = Random(options.seed)
    for _ in range(options.count):
        problem = worked_problem(rng)
        print(f"{problem['question']}\n\n{problem['metadata']['answer_cot']}\n\n{problem['answer']}\n{'-' * 40}")


if __name__ == "__main__":
    main()
