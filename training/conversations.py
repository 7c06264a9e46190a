"""Rows of chat data sets as conversations: Open-PerfectBlend and ShareGPT (`conversations`), `messages`.

A row that cannot train a drafter is refused with one of the reasons below, never repaired silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

# Names that public data sets give to the roles of a chat template.
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
THINK_START, THINK_END = "<think>", "</think>"


class UnusableRowError(ValueError):
    """A row that training leaves out; its message is the reason under which the row is counted."""


def read_conversation(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """The turns of a row as messages (`role`, `content`, and `reasoning_content` where an answer has think tags).

    Turns after the last answer are left out, for nothing there is learnt. Raises UnusableRowError.
    """
    turns = row.get("messages") or row.get("conversations")
    if not turns:
        raise UnusableRowError("no turns")
    messages = [_message(turn) for turn in turns]
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if not messages:
        raise UnusableRowError("no assistant turn")
    roles = [message["role"] for message in messages if message["role"] not in ("system", "tool")]
    if roles[0] != "user" or any(a == b for a, b in pairwise(roles)):
        raise UnusableRowError("turns do not alternate between user and assistant")
    if any(message["role"] == "system" for message in messages[1:]):
        raise UnusableRowError("system turn after the first turn")
    return messages


def _message(turn: Mapping[str, Any]) -> dict[str, str]:
    name = turn.get("role", turn.get("from"))
    content = turn.get("content", turn.get("value"))
    if name not in ROLES:
        raise UnusableRowError(f"unknown role {name!r}")
    if not isinstance(content, str) or not content.strip():
        raise UnusableRowError("empty turn")
    message = {"role": ROLES[name], "content": content}
    if message["role"] == "assistant":
        reasoning, found, answer = content.partition(THINK_END)
        if found:
            message["reasoning_content"] = reasoning.replace(THINK_START, "").strip()
            message["content"] = answer.strip()
            if not message["content"]:
                raise UnusableRowError("answer that ends while thinking")
        if turn.get("reasoning_content"):
            message["reasoning_content"] = turn["reasoning_content"]
    return message
