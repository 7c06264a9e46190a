"""Problems restated sentence by sentence: before worked solutions, as reasoning models do, and as a task of its own.

    python -m training.tiny.restate --corpus runs/corpus --count 60000       # adds chat_restated.jsonl.xz to train/

A target of thirteen million parameters loses the thread of a story that it never met and answers with fragments of
those that it knows. What it has just copied, it keeps to. But to copy it must trust what it reads more than what it
remembers, and in worked problems the two always agree. So the task of its own restates texts that nobody remembers:
their sentences begin like one and end like another.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

from training.tiny.dialogues import REASONING_REQUEST
from training.tiny.documents import SENTENCE_BREAK, Dialogue, read_dialogues, read_documents, write_dialogues

OPENING = "The problem says:"
REQUESTS = ("State the problem in a list.", "Restate this, sentence by sentence.", "List what is said here.")
# Sources of sentences, by the start of a file's name, and how many documents of each file are read.
SOURCES = {"chat_gsm": 20_000, "chat_problems": 20_000, "chat_varied": 20_000, "chat_factbook": 4_000, "prose_": 400}
_NUMBER = re.compile(r"\b\d+\b")


def sentences_of(text: str) -> list[str]:
    """The sentences of a text, each on one line."""
    return [" ".join(sentence.split()) for sentence in SENTENCE_BREAK.split(text.strip()) if sentence.strip()]


def restatement(question: str) -> str:
    """The sentences of a question as a list, without the request to reason."""
    sentences = sentences_of(question.removesuffix(REASONING_REQUEST))
    return "\n".join([OPENING, *(f"- {sentence}" for sentence in sentences)])


def restated(dialogue: Dialogue) -> Dialogue:
    """`dialogue` with its problem restated before the solution: in the thought if there is one, else in the answer."""
    reply = dict(dialogue.messages[-1])
    place = "reasoning_content" if reply.get("reasoning_content") else "content"
    reply[place] = f"{restatement(dialogue.user_turns[-1])}\n\n{reply[place]}"
    return replace(dialogue, messages=[*dialogue.messages[:-1], reply])


def spliced(first: str, second: str, rng: Random) -> str:
    """The beginning of one sentence and the end of another, some numbers replaced."""
    head, tail = first.split(" "), second.split(" ")
    words = head[: rng.randint(1, len(head))] + tail[rng.randrange(len(tail)) :]
    return _NUMBER.sub(
        lambda match: str(rng.randint(2, 400)) if rng.random() < 0.5 else match.group(), " ".join(words)
    )


def restating_dialogues(sentences: list[str], count: int, seed: int) -> Iterator[Dialogue]:
    """`count` requests to restate two to six sentences, most of them spliced, a third of the answers as a thought."""
    rng = Random(seed)
    for _ in range(count):
        chosen = []
        for _ in range(rng.randint(2, 6)):
            sentence = rng.choice(sentences)
            for _ in range(rng.choice((0, 1, 1, 2))):
                sentence = spliced(sentence, rng.choice(sentences), rng)
            chosen.append(sentence if sentence.endswith((".", "!", "?")) else f"{sentence}.")
        text = " ".join(chosen)
        reply = {"role": "assistant", "content": restatement(text)}
        thinks = rng.random() < 1 / 3
        if thinks:
            reply |= {"content": "That is all.", "reasoning_content": reply["content"]}
        question = {"role": "user", "content": f"{text}\n{rng.choice(REQUESTS)}"}
        yield Dialogue([question, reply], enable_thinking=thinks)


def _short_enough(sentences: list[str]) -> list[str]:
    return [sentence for sentence in sentences if 2 <= sentence.count(" ") <= 40]


def corpus_sentences(train: Path, seed: int) -> list[str]:
    """Sentences of the corpus's questions and prose, those of extreme length left out."""
    found, rng = [], Random(seed)
    for path in sorted(train.iterdir()):
        limit = next((limit for prefix, limit in SOURCES.items() if path.name.startswith(prefix)), 0)
        if not limit:
            continue
        if path.name.endswith(".txt.xz"):
            texts = read_documents(path)
        elif path.name.startswith("prose_"):
            continue
        else:
            texts = [dialogue.user_turns[0].removesuffix(REASONING_REQUEST) for dialogue in read_dialogues(path)]
        for text in rng.sample(texts, min(limit, len(texts))):
            found += _short_enough(sentences_of(text))
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--count", type=int, default=60_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    train = options.corpus / "train"
    sentences = corpus_sentences(train, options.seed)
    dialogues = restating_dialogues(sentences, options.count, options.seed)
    write_dialogues(train / "chat_restated.jsonl.xz", dialogues)
    print(json.dumps({"sentences": len(sentences), "restated": options.count}))


if __name__ == "__main__":
    main()
