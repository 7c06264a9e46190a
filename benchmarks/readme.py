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


def performance_table(record: dict) -> str:
    """Speed on one GPU: what is measured, what the goal was, and what of it is simulated."""
    accepted, verified = record["decode_acceptance_length"], record["decode_mean_length"]
    commits = ", ".join(f"`{commit[:10]}`" for commit in record["commit"].split(", "))
    return "\n".join(
        [
            "| measure | measured | goal |",
            "|---|---|---|",
            *(f"| {measure} | {measured} | {goal} |" for measure, measured, goal in performance_rows(record)),
            "",
            f"{record['gpu']}, the full shape of Qwen3.6-35B-A3B in bf16 with random weights, one sequence. "
            f"Simulated: how many drafts a round accepts ({_number(accepted, '{:.2f}')} tokens at "
            f"{_number(verified, '{:.1f}')} rows a round, near what is published for this model). Scripted: which "
            "experts a row selects, since random weights would select more than a trained router. All else is "
            f"computed. The floor is the bytes read at 4.3 TB/s. Commit {commits}, torch {record['torch']}, Triton "
            f"{record['triton']}, transformers {record['transformers']}.",
        ]
    )


def performance_rows(record: dict) -> list[tuple[str, str, str]]:
    """Measure, what was measured and the goal, in words."""
    times, speedups = record["gdn_ms"], record["gdn_speedup_over_best_peer"]
    forward = record["forward_fraction_of_floor"]
    one_row = _number(record["ar_ms"], "{:.2f} ms"), _number(record["ar_fraction_of_floor"], "{:.0%} of the floor")
    others = [_number(record[f"decode_over_transformers_{kind}"], "{:.1f}") for kind in ("eager", "static")]
    return [
        (
            f"verify and commit of 30 GDN layers, {' / '.join(times)} rows, ms",
            _numbers(times, "{:.3f}"),
            "0.13 at 2 rows, 0.16 at 16",
        ),
        ("the fastest other kernel over this", _numbers(speedups, "{:.2f}"), "1.25 / 1.5 / 2 / 3.5"),
        ("a round of one row (plain decoding)", ", ".join(one_row), "2.4 ms, 58% of the floor"),
        (f"forward of {' / '.join(forward)} rows, scripted routing, of the floor", _numbers(forward, "{:.0%}"), "70%"),
        (
            "decoding, simulated acceptance, scripted routing",
            _number(record["decode_tokens_per_second_simulated"], "{:.0f} tokens/s"),
            "900 tokens/s",
        ),
        ("the same over our plain decoding", _number(record["decode_over_own_ar"], "{:.2f}"), "1.9"),
        ("the same over transformers, eager / compiled", " / ".join(others), "35 / 7"),
        ("share of a round in which the GPU waits", _number(record["gpu_idle_fraction"], "{:.2%}"), "under 3%"),
        ("capturing the rounds, once", _number(record["capture_seconds"], "{:.1f} s"), "60 s"),
    ]


def _number(value: float | None, form: str) -> str:
    return "not measured yet" if value is None else form.format(value)


def _numbers(values: dict[str, float | None], form: str) -> str:
    return " / ".join("-" if value is None else form.format(value) for value in values.values())


# Name of a table -> (file of results, how it is written).
TABLES: dict[str, tuple[str, Callable[[dict], str]]] = {
    "acceptance": ("acceptance_cpu.json", acceptance_table),
    "speed": ("acceptance_cpu.json", speed_table),
    "performance": ("h200_summary.json", performance_table),
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
