"""Measured decodes: one line of JSON each, appended as they finish, so that an interrupted benchmark goes on."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FORMAT = "hf-hybridspec-bench"


@dataclass(frozen=True)
class DecodeRecord:
    """One prompt decoded by one system in one session.

    Attributes:
        num_tokens: emitted after the prefill.
        seconds: decode time, prefill excluded.
        rounds: forwards of the target after the prefill.
        lengths: verification length -> rounds.
        digest: hash of the new tokens.
        path: loop that ran, `plain` without a drafter.
    """

    system: str
    kind: str
    prompt: str
    session: int
    num_tokens: int
    seconds: float
    rounds: int
    lengths: dict[str, int]
    digest: str
    path: str

    @property
    def key(self) -> tuple[str, str, int]:
        """What is decoded once: system, prompt, session."""
        return self.system, self.prompt, self.session


class RecordFile:
    """An append-only file of records under one set of settings.

    Raises:
        ValueError: the file holds records of other settings, or is no such file.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path = path
        self.records: dict[tuple[str, str, int], DecodeRecord] = {}
        header = {"format": FORMAT, "settings": settings}
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write(header)
            return
        found, records, num_bytes = _read(path)
        if found != json.loads(json.dumps(header)):
            raise ValueError(f"{path} was measured with other settings. Delete it, or give another --output.")
        self.records = {record.key: record for record in records}
        # What an interruption left of its last line would be glued to the next one.
        with path.open("r+b") as file:
            file.truncate(num_bytes)

    def append(self, record: DecodeRecord) -> None:
        """Adds a record; it is on disk when this returns."""
        self._write(asdict(record))
        self.records[record.key] = record

    def __iter__(self) -> Iterator[DecodeRecord]:
        return iter(self.records.values())

    def _write(self, content: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(content) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _read(path: Path) -> tuple[Any, list[DecodeRecord], int]:
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    try:
        header, *lines = [json.loads(line) for line in whole.splitlines()]
        return header, [DecodeRecord(**line) for line in lines], len(whole)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is no file of benchmark records ({error}). Delete it.") from error
