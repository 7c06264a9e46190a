"""Worked solutions that begin by restating their problem, sentence by sentence, as reasoning models do.

A target of thirteen million parameters loses the thread of a story that it never met and answers with fragments of
those that it knows. What it has just copied, it keeps to. Only solutions are changed: the prompts stay what they were.
"""

from __future__ import annotations

import re
from dataclasses import replace

from training.tiny.dialogues import REASONING_REQUEST
from training.tiny.documents import Dialogue

OPENING = "The problem says:"
_SENTENCE = re.compile(r"(?<=[.!?])\s+")


def restatement(question: str) -> str:
    """The sentences of a question as a list, without the request to reason."""
    sentences = _SENTENCE.split(question.removesuffix(REASONING_REQUEST).strip())
    return "\n".join([OPENING, *(f"- {' '.join(sentence.split())}" for sentence in sentences)])


def restated(dialogue: Dialogue) -> Dialogue:
    """`dialogue` with its problem restated before the solution: in the thought if there is one, else in the answer."""
    reply = dict(dialogue.messages[-1])
    place = "reasoning_content" if reply.get("reasoning_content") else "content"
    reply[place] = f"{restatement(dialogue.user_turns[-1])}\n\n{reply[place]}"
    return replace(dialogue, messages=[*dialogue.messages[:-1], reply])
