"""Dialogues made from documents: worked problems, coding tasks, completions and continuations.

Every function takes a `random.Random`, so that a corpus is a function of its sources and one seed.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any

from training.tiny.documents import Dialogue

# Ten of the hundred generators of reasoning-gym's gsm_symbolic, never trained on.
HELDOUT_TEMPLATES = (3, 13, 23, 33, 43, 53, 64, 73, 83, 93)
REASONING_REQUEST = "Please reason step by step, and put your final answer within \\boxed{}."
_COMPLETION_REQUESTS = ("Complete this Python code:", "Continue this Python function:", "Finish the following code:")
_CONTINUATION_REQUESTS = ("Continue this passage:", "Continue the following text:", "Write what comes next:")
_SENTENCE_END = re.compile(r"[.!?][\"')]*\s")


def _dialogue(rng: Random, question: str, answer: str, thought: str) -> Dialogue:
    """One turn, with a short thought in a third of the cases so that both template modes are known for every kind."""
    thinks = rng.random() < 1 / 3
    reply = {"role": "assistant", "content": answer}
    if thinks:
        reply["reasoning_content"] = thought
    return Dialogue([{"role": "user", "content": question}, reply], enable_thinking=thinks)


def gsm_question(question: str) -> str:
    return f"{question}\n{REASONING_REQUEST}"


def gsm_dialogue(rng: Random, example: Mapping[str, Any]) -> Dialogue:
    """A worked problem; its solution is the thought in half of the cases, and part of the answer in the others."""
    solution = example["metadata"]["answer_cot"].split("\n####")[0].rstrip()
    final = f"The answer is \\boxed{{{example['answer']}}}."
    question = gsm_question(example["question"]) if rng.random() < 0.9 else example["question"]
    if rng.random() < 0.5:
        reply = {"role": "assistant", "content": final, "reasoning_content": solution}
        return Dialogue([{"role": "user", "content": question}, reply], enable_thinking=True)
    reply = {"role": "assistant", "content": f"{solution}\n\n{final}"}
    return Dialogue([{"role": "user", "content": question}, reply])


def gsm_dialogues(
    generators: Mapping[int, Callable[[Random, float], dict]], templates: list[int], count: int, seed: int
) -> Iterator[Dialogue]:
    """`count` worked problems drawn evenly from `templates` (keys of `generators`).

    A generator that cannot satisfy its own constraints raises ValueError; that draw is skipped and another made.
    """
    rng = Random(seed)
    made = 0
    while made < count:
        try:
            example = generators[rng.choice(templates)](rng, 1.0)
        except ValueError:
            continue
        made += 1
        yield gsm_dialogue(rng, example)


def codeio_dialogue(rng: Random, dialogue: Dialogue) -> Dialogue:
    """A coding task and its answer, with a thought in a third of the cases."""
    question, answer = (message["content"] for message in dialogue.messages)
    arguments = re.search(r"def main_solution\((.*?)\)", answer, re.DOTALL)
    inputs = " ".join(arguments.group(1).split()) if arguments else "its inputs"
    thought = f"The user wants Python code. main_solution takes {inputs}. I write it and return the result."
    return _dialogue(rng, question, answer, thought)


def question_dialogue(rng: Random, dialogue: Dialogue) -> Dialogue:
    """A plain question and answer (or several turns): the last turn gets a thought in a third of the cases."""
    if rng.random() >= 1 / 3:
        return dialogue
    reply = {**dialogue.messages[-1], "reasoning_content": "I answer from what I know."}
    return Dialogue([*dialogue.messages[:-1], reply], enable_thinking=True)


def _blocks(code: str) -> Iterator[str]:
    """Functions, methods and classes of a module, each dedented."""
    starts = [match.start() for match in re.finditer(r"^(?:    )?(?:async )?(?:def|class) ", code, re.MULTILINE)]
    for start, end in zip(starts, [*starts[1:], len(code)], strict=True):
        block = code[start:end]
        indented = block.startswith("    ")
        lines = block.rstrip().split("\n")
        kept = [lines[0]]
        for line in lines[1:]:
            depth = len(line) - len(line.lstrip())
            if line.strip() and depth <= (4 if indented else 0) and not line.lstrip().startswith((")", "]", "#", '"')):
                break
            kept.append(line)
        yield textwrap.dedent("\n".join(kept)).strip()


def completion_dialogues(rng: Random, code: str) -> Iterator[Dialogue]:
    """For each function of 250 to 2,400 characters: its first part is the question, the rest the answer."""
    for block in _blocks(code):
        lines = block.split("\n")
        if not 250 <= len(block) <= 2400 or len(lines) < 6:
            continue
        cut = max(2, int(len(lines) * rng.uniform(0.2, 0.6)))
        head, tail = "\n".join(lines[:cut]), "\n".join(lines[cut:])
        question = f"{rng.choice(_COMPLETION_REQUESTS)}\n\n```python\n{head}\n```"
        yield _dialogue(rng, question, f"```python\n{tail}\n```", "I continue the code from where it stops.")


def _cut_at_sentence(text: str, low: int, high: int) -> int:
    """The end of the last sentence that ends between `low` and `high` characters, else of the last word; 0 if none."""
    ends = [match.end() for match in _SENTENCE_END.finditer(text, low, high)]
    return ends[-1] if ends else text.rfind(" ", low, high) + 1


def continuation_dialogues(rng: Random, document: str) -> Iterator[Dialogue]:
    """The document cut into passages; of each, 150 to 500 characters are the question, up to 900 more the answer."""
    rest = document.strip()
    while len(rest) > 900:
        wanted = rng.randint(150, 500)
        cut = _cut_at_sentence(rest, 100, wanted)
        end = _cut_at_sentence(rest, cut + 300, cut + 900) if cut else 0
        if not end:
            return
        question = f"{rng.choice(_CONTINUATION_REQUESTS)}\n\n{rest[:cut].strip()}"
        yield _dialogue(rng, question, rest[cut:end].strip(), "I continue the passage in the same voice.")
        rest = rest[end:]
