"""Pooled numbers from decode records: throughput, acceptance length, lengths, speed over plain decoding."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from .records import DecodeRecord
from .systems import AUTOREGRESSIVE

ALL_KINDS = "average"


@dataclass(frozen=True)
class Cell:
    """A system on one kind of prompts, pooled over prompts and sessions.

    Attributes:
        tokens_per_second: tokens emitted after the prefill over decode time.
        speed_ratio: over plain decoding of the same prompts.
        acceptance_length: emitted tokens per round.
        mean_length: rows of the target's forward per round.
        milliseconds_per_round: decode time over rounds.
        lengths: verification length -> rounds.
        identical: share of decodes with the tokens of plain decoding.
    """

    tokens_per_second: float
    speed_ratio: float
    acceptance_length: float
    mean_length: float
    milliseconds_per_round: float
    lengths: dict[int, int]
    identical: float


@dataclass(frozen=True)
class AlikeTexts:
    """Prompts that every system decodes to one text in every session, and what `summarise` says of them.

    Attributes:
        num_prompts: of these.
        num_all: of all prompts.
    """

    num_prompts: int
    num_all: int
    summary: dict[str, dict[str, Cell]]


def summarise(records: Iterable[DecodeRecord]) -> dict[str, dict[str, Cell]]:
    """Cells by system and kind, and `average`: the arithmetic mean over the kinds, lengths added up.

    Raises:
        ValueError: no prompt gave a token after its prefill.
    """
    records = [record for record in records if record.num_tokens]
    if not records:
        raise ValueError(
            "No prompt gave a token after its prefill: every answer ended at once. Give prompts with longer answers, "
            "or raise the number of new tokens."
        )
    kinds = sorted({record.kind for record in records})
    digests = {(r.prompt, r.session): r.digest for r in records if r.system == AUTOREGRESSIVE}
    by_cell: dict[str, dict[str, list[DecodeRecord]]] = {}
    for record in records:
        by_cell.setdefault(record.system, {}).setdefault(record.kind, []).append(record)
    plain = {kind: _throughput(by_cell[AUTOREGRESSIVE][kind]) for kind in kinds}
    summary = {}
    for system, cells in by_cell.items():
        summary[system] = {kind: _cell(cells[kind], plain[kind], digests) for kind in kinds if kind in cells}
        summary[system][ALL_KINDS] = _average(list(summary[system].values()))
    return summary


def summarise_alike(records: Iterable[DecodeRecord]) -> AlikeTexts | None:
    """Of greedy decodes, the prompts that are decoded alike; None where all are, or none is.

    Another text has another acceptance length: where rounding flips a near-tie, systems are compared on what the one
    or the other happened to write.
    """
    records = [record for record in records if record.num_tokens]
    digests: dict[str, set[str]] = {}
    for record in records:
        digests.setdefault(record.prompt, set()).add(record.digest)
    alike = {prompt for prompt, found in digests.items() if len(found) == 1}
    if len(alike) in (0, len(digests)):
        return None
    summary = summarise(record for record in records if record.prompt in alike)
    return AlikeTexts(len(alike), len(digests), summary)


def _throughput(records: list[DecodeRecord]) -> float:
    return sum(record.num_tokens for record in records) / sum(record.seconds for record in records)


def _cell(records: list[DecodeRecord], plain: float, digests: dict[tuple[str, int], str]) -> Cell:
    rounds = sum(record.rounds for record in records)
    lengths: Counter[int] = Counter()
    for record in records:
        lengths.update({int(length): count for length, count in record.lengths.items()})
    same = [record.digest == digests[record.prompt, record.session] for record in records]
    throughput = _throughput(records)
    return Cell(
        tokens_per_second=throughput,
        speed_ratio=throughput / plain,
        acceptance_length=sum(record.num_tokens for record in records) / rounds,
        mean_length=sum(length * count for length, count in lengths.items()) / rounds,
        milliseconds_per_round=1e3 * sum(record.seconds for record in records) / rounds,
        lengths=dict(sorted(lengths.items())),
        identical=sum(same) / len(same),
    )


def _average(cells: list[Cell]) -> Cell:
    def mean(name: str) -> float:
        return sum(getattr(cell, name) for cell in cells) / len(cells)

    lengths: Counter[int] = Counter()
    for cell in cells:
        lengths.update(cell.lengths)
    numbers = (
        "tokens_per_second",
        "speed_ratio",
        "acceptance_length",
        "mean_length",
        "milliseconds_per_round",
        "identical",
    )
    return Cell(**{name: mean(name) for name in numbers}, lengths=dict(sorted(lengths.items())))
