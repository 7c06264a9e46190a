"""Prompts for calibration and benchmarks: bundled, of a known data set, or from a file; split, rendered as chats."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from random import Random

import torch
from transformers import PreTrainedTokenizerBase

from .capture import Prompt
from .evaluation_sets import EVALUATION_SETS, is_known, load_rows

BUNDLED = "bundled"
SPLITS = ("calibration", "test", "all")


@dataclass(frozen=True)
class PromptText:
    """The first turn of a user, and its kind."""

    kind: str
    text: str

    @property
    def key(self) -> str:
        """Hash of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]


def load_prompts(source: str) -> list[PromptText]:
    """All prompts of `bundled`, of a data set by its name or Hub id, or of a JSONL file; repeats are dropped.

    A file holds `{"turns": [...]}` with an optional `kind`, or the columns of a known data set, which is then named as
    `NAME=FILE`.

    Raises:
        ValueError: the source is unknown, unreadable, or holds no prompt.
    """
    if source == BUNDLED:
        prompts = _bundled()
    elif is_known(source):
        prompts = [PromptText(kind, text) for kind, text in load_rows(source)]
    elif Path(source).is_file():
        prompts = _from_file(Path(source))
    else:
        raise ValueError(
            f"No prompts {source!r}: give '{BUNDLED}', a JSONL file, or a data set ({', '.join(EVALUATION_SETS)}), or "
            "NAME=FILE for a local file with the columns of that data set."
        )
    unique = list({prompt.text: prompt for prompt in prompts if prompt.text.strip()}.values())
    if not unique:
        raise ValueError(f"{source} holds no prompt. Give at least one.")
    return unique


def split_prompts(prompts: list[PromptText], split: str, seed: int) -> list[PromptText]:
    """The calibration or test half of every kind, shuffled by `seed`; the two never share a prompt.

    Raises:
        ValueError: no prompt is left on that side.
    """
    if split == "all":
        return prompts
    chosen = []
    for kind in dict.fromkeys(prompt.kind for prompt in prompts):
        members = [prompt for prompt in prompts if prompt.kind == kind]
        Random(f"{seed}-{kind}").shuffle(members)
        half = (len(members) + 1) // 2
        chosen += members[:half] if split == "calibration" else members[half:]
    if not chosen:
        raise ValueError(
            f"The {split} half of {len(prompts)} prompt is empty. Give more prompts, or --split all to use every one."
        )
    return chosen


def take_per_kind(prompts: list[PromptText], count: int | None) -> list[PromptText]:
    """The first `count` prompts of each kind, or all."""
    if count is None:
        return prompts
    seen: dict[str, int] = {}
    taken = []
    for prompt in prompts:
        seen[prompt.kind] = seen.get(prompt.kind, 0) + 1
        if seen[prompt.kind] <= count:
            taken.append(prompt)
    return taken


def render(
    prompts: list[PromptText],
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    thinking: bool | None = None,
) -> list[Prompt]:
    """Prompts as token ids after the chat template (or as they are, without one)."""
    switch = {} if thinking is None else {"enable_thinking": thinking}
    rendered = []
    for prompt in prompts:
        if tokenizer.chat_template is None:
            ids = tokenizer(prompt.text, return_tensors="pt")["input_ids"]
        else:
            chat = [{"role": "user", "content": prompt.text}]
            ids = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True, **switch
            )["input_ids"]
        rendered.append(Prompt(prompt.key, prompt.kind, ids.to(device)))
    return rendered


def prompts_hash(keys: Iterable[str]) -> str:
    """Hash of a set of prompts, given the hash of each."""
    return hashlib.sha256("".join(sorted(keys)).encode()).hexdigest()[:16]


def _bundled() -> list[PromptText]:
    folder = resources.files("hf_hybridspec.bundled") / "prompts"
    files = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".jsonl")), key=lambda file: file.name)
    return [prompt for file in files for prompt in _parse(file.read_text(encoding="utf-8"), file.name)]


def _from_file(path: Path) -> list[PromptText]:
    try:
        return _parse(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"The prompts {path} cannot be read ({error}).") from error


def _parse(content: str, name: str) -> list[PromptText]:
    prompts = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            prompts.append(PromptText(str(record.get("kind", Path(name).stem)), record["turns"][0]))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(
                f'Line {number} of {name} is no prompt: each line must be {{"turns": ["..."]}}, with an optional '
                '"kind". For a data set with other columns give NAME=FILE.'
            ) from error
    return prompts
