"""Documents and dialogues of the tiny corpus: reading, writing, and the held-out split.

A corpus folder holds `train/` and `heldout/`. In both, `NAME.txt.xz` is plain text whose documents are separated by a
line `<|endoftext|>`, and `NAME.jsonl.xz` holds one dialogue per line (`Dialogue.to_json`).
"""

from __future__ import annotations

import hashlib
import json
import lzma
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

DOCUMENT_SEPARATOR = "<|endoftext|>"
SENTENCE_BREAK = re.compile(r"(?<=[.!?])\s+")
_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)
_THINKING = re.compile(r"^<think>\n(.*?)\n?</think>\n\n", re.DOTALL)


@dataclass(frozen=True)
class Dialogue:
    """One chat: alternating user and assistant turns, the first from the user, the last from the assistant.

    `messages` are chat template messages (`role`, `content`, and `reasoning_content` on the last one if it thinks);
    `enable_thinking` is the template's switch for the last turn.
    """

    messages: list[dict[str, str]]
    enable_thinking: bool = False

    def to_json(self) -> str:
        return json.dumps({"messages": self.messages, "enable_thinking": self.enable_thinking}, ensure_ascii=False)

    @classmethod
    def from_json(cls, line: str) -> Dialogue:
        record = json.loads(line)
        return cls(record["messages"], record["enable_thinking"])

    @property
    def user_turns(self) -> list[str]:
        return [message["content"] for message in self.messages if message["role"] == "user"]


def split_documents(text: str) -> list[str]:
    """The documents of `text`, without empty ones."""
    documents = re.split(rf"(?:^|\n){re.escape(DOCUMENT_SEPARATOR)}(?:\n|$)", text)
    return [document for document in documents if document.strip()]


def read_documents(path: Path) -> list[str]:
    with lzma.open(path, "rt", encoding="utf-8", newline="") as file:
        return split_documents(file.read())


def write_documents(path: Path, documents: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(path, "wt", encoding="utf-8", newline="", preset=4) as file:
        for document in documents:
            file.write(document.rstrip("\n") + "\n" + DOCUMENT_SEPARATOR + "\n")


def read_dialogues(path: Path) -> Iterator[Dialogue]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield Dialogue.from_json(line)


def write_dialogues(path: Path, dialogues: Iterable[Dialogue]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(path, "wt", encoding="utf-8", preset=4) as file:
        for dialogue in dialogues:
            file.write(dialogue.to_json() + "\n")


def parse_chat(document: str) -> Dialogue | None:
    """A dialogue from text with `<|im_start|>` markers; trailing user turns are dropped, None if no answer is left."""
    messages = []
    for role, content in _TURN.findall(document):
        content = _THINKING.sub("", content).strip()
        messages.append({"role": role, "content": content})
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    return Dialogue(messages) if messages else None


def document_hash(text: str) -> str:
    """sha256 of the document, blank space at its ends ignored."""
    return hashlib.sha256(text.strip().encode()).hexdigest()


def is_heldout(text: str, per_mille: int) -> bool:
    """True for about `per_mille` of 1,000 documents, decided by the document's own hash and nothing else."""
    return int(document_hash(text)[:8], 16) % 1000 < per_mille
