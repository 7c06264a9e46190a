"""Writes README's tables of results from the files in benchmarks/results.

    python -m benchmarks.readme

Each table stands between two markers, `<!-- results:NAME -->` and `<!-- end of results:NAME -->`.
"""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

from benchmarks.environment import REPOSITORY

RESULTS = REPOSITORY / "benchmarks" / "results"


def acceptance_table(record: dict) -> str:
    """Acceptance length by kind and verification length."""
    settings, acceptance = record["settings"], record["acceptance"]
    policies = list(next(iter(acceptance.values())))
    lines = [
        "| held-out prompts | " + " | ".join(policies) + " | answers identical to plain decoding |",
        "|---" * (len(policies) + 2) + "|",
    ]
    for kind, measured in acceptance.items():
        lengths = " | ".join(f"{measured[policy]['acceptance_length']:.2f}" for policy in policies)
        identity = record["identity"][kind]
        lines.append(f"| {kind} | {lengths} | {identity['identical']} of {identity['answers']} |")
    lines += [
        "",
        f"Greedy, {settings['per_kind']} prompts of each kind, {settings['max_new_tokens']} new tokens, "
        f"{settings['dtype']} on CPU, thinking {'on' if settings['thinking'] else 'off'}; "
        f"commit `{str(record['environment']['commit'])[:10]}`, torch {record['environment']['torch']}, "
        f"transformers {record['environment']['transformers']}.",
    ]
    return "\n".join(lines)


def speed_table(record: dict) -> str:
    """Decoding speed by static length."""
    speed = record["speed"]
    names = list(speed["systems"])
    rates = " | ".join(f"{speed['systems'][name]['tokens_per_second']:.0f}" for name in names)
    ratios = " | ".join(f"{speed['systems'][name]['over_autoregressive']:.2f}" for name in names)
    return "\n".join(
        [
            f"| {speed['kind']} | " + " | ".join(names) + " |",
            "|---" * (len(names) + 1) + "|",
            f"| tokens/s | {rates} |",
            f"| over autoregressive | {ratios} |",
            "",
            f"One CPU thread, {speed['prompts']} prompts, median of {speed['runs']} interleaved runs each, prefill "
            "excluded.",
        ]
    )


# Name of a table -> (file of results, how it is written).
TABLES: dict[str, tuple[str, Callable[[dict], str]]] = {
    "acceptance": ("acceptance_cpu.json", acceptance_table),
    "speed": ("acceptance_cpu.json", speed_table),
}


def with_tables(text: str, results: Path = RESULTS) -> str:
    """The README with every table written anew; raises ValueError if a marker is missing."""
    for name, (file, table) in TABLES.items():
        record = json.loads((results / file).read_text(encoding="utf-8"))
        start, end = f"<!-- results:{name} -->", f"<!-- end of results:{name} -->"
        pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"The text has no markers {start} and {end}. Put them where the table belongs.")
        content = f"{start}\n{table(record)}\n{end}"
        text = pattern.sub(lambda _, content=content: content, text)
    return text


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readme", type=Path, default=REPOSITORY / "README.md")
    options = parser.parse_args(arguments)
    options.readme.write_text(with_tables(options.readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
