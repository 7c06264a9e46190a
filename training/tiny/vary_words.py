"""Tells worked problems again with other words: what a solution takes from its question must then be copied.

    python -m training.tiny.vary_words --corpus runs/corpus --count 60000       # adds chat_varied.jsonl.xz to train/

A target that meets the same ninety stories over and over answers a new one with fragments of them. Here the content
words of a problem are replaced by random words of the dictionary, the same everywhere in its question and its
solution, and some questions get a sentence of another problem in between. Numbers and the solution's steps stay.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

from training.tiny.dialogues import REASONING_REQUEST
from training.tiny.documents import SENTENCE_BREAK, Dialogue, read_dialogues, read_documents, write_dialogues
from training.tiny.problem_words import FORM_WORDS

_WORD = re.compile(r"[A-Za-z]{4,}")
_DICTIONARY_WORD = re.compile(r"\b[a-z]{4,11}\b")


def replacement(words: list[str], share: float, rng: Random) -> Callable[[str], str]:
    """A function that replaces `share` of the content words of any text, a word and its plural always alike."""
    chosen: dict[str, str] = {}

    def other(match: re.Match) -> str:
        word = match.group()
        stem = word.lower().removesuffix("s").removesuffix("e")
        if word.lower() in FORM_WORDS:
            return word
        if stem not in chosen:
            chosen[stem] = rng.choice(words) if rng.random() < share else ""
        new = chosen[stem]
        if not new:
            return word
        new += "s" if word.endswith("s") else ""
        return new.capitalize() if word[0].isupper() else new

    return lambda text: _WORD.sub(other, text)


def vary_dialogue(dialogue: Dialogue, other: Dialogue, words: list[str], rng: Random) -> Dialogue:
    """The same problem in other words; in a third of the cases with a sentence of `other`'s question in between."""
    change = replacement(words, rng.uniform(0.1, 0.9), rng)
    question = dialogue.user_turns[0]
    body, request = question, ""
    if question.endswith(REASONING_REQUEST):
        body, request = question[: -len(REASONING_REQUEST)].rstrip(), "\n" + REASONING_REQUEST
    sentences = SENTENCE_BREAK.split(change(body))
    if len(sentences) > 1 and rng.random() < 1 / 3:
        foreign = SENTENCE_BREAK.split(other.user_turns[0].removesuffix(REASONING_REQUEST).strip())
        sentences.insert(rng.randrange(len(sentences) - 1), replacement(words, 0.5, rng)(foreign[0]))
    reply = {key: text if key == "role" else change(text) for key, text in dialogue.messages[-1].items()}
    return replace(dialogue, messages=[{"role": "user", "content": " ".join(sentences) + request}, reply])


def varied_dialogues(dialogues: list[Dialogue], words: list[str], count: int, seed: int) -> Iterator[Dialogue]:
    """`count` problems told again, drawn from `dialogues`."""
    rng = Random(seed)
    for _ in range(count):
        yield vary_dialogue(rng.choice(dialogues), rng.choice(dialogues), words, rng)


def dictionary_words(documents: list[str]) -> list[str]:
    """The distinct lower-case words of 4 to 11 letters, in order."""
    return sorted({word for document in documents for word in _DICTIONARY_WORD.findall(document)})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--count", type=int, default=60_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    train = options.corpus / "train"
    words = dictionary_words(read_documents(train / "dict_wn.txt.xz"))
    gsm, problems = (list(read_dialogues(train / f"chat_{name}.jsonl.xz")) for name in ("gsm", "problems"))
    # As many of one source as of the other.
    dialogues = gsm + Random(options.seed).choices(problems, k=len(gsm))
    write_dialogues(train / "chat_varied.jsonl.xz", varied_dialogues(dialogues, words, options.count, options.seed))
    print(json.dumps({"words": len(words), "problems": len(dialogues), "varied": options.count}))


if __name__ == "__main__":
    main()
