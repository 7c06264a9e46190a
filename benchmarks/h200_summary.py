"""One number for every question about speed on a GPU, from the files of the benchmarks that measured them.

    python -m benchmarks.h200_summary                (reads and writes benchmarks/results; nothing is measured here)

Files of different GPUs or versions are refused. Files of different commits are summarised together, and the commit of
each is named. A number that no file holds is null, and `missing` says why.
"""

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.environment import REPOSITORY
from hf_hybridspec.calibration.profile import write_atomically

RESULTS = REPOSITORY / "benchmarks" / "results"
SUMMARY = "h200_summary.json"
# What measured it -> its file.
FILES = {
    "gated_delta_rule": "gated_delta_rule_h200.json",
    "target_forward": "target_forward_h200.json",
    "decode": "decode_h200.json",
}
# Versions that results may not mix.
SHARED = ("gpu", "torch", "triton", "transformers")
GDN_ROWS = (2, 4, 8, 16)
FORWARD_ROWS = (4, 6, 8, 12, 16)


@dataclass
class Summary:
    """Numbers found so far.

    Attributes:
        records: of the files that exist, by what measured them.
        missing: key of a number -> why there is none.
    """

    records: dict[str, dict]
    numbers: dict[str, object] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, key: str, source: str, *path: str) -> None:
        """Takes the number at `path` of a file."""
        found: object = self.records.get(source)
        reason = f"{FILES[source]} is missing: run benchmarks.{source}." if found is None else None
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        if found is None:
            self.missing[key] = reason or f"{FILES[source]} holds no {'.'.join(path)}."
        self.numbers[key] = found

    def add_rows(self, key: str, source: str, rows: dict[int, dict], name: str, wanted: tuple[int, ...]) -> None:
        """Takes one number for each number of rows; `rows` maps it to a record of the file."""
        found = {str(count): rows.get(count, {}).get(name) for count in wanted}
        absent = [count for count, number in found.items() if number is None]
        if absent:
            self.missing[key] = f"{FILES[source]} holds no {name} at {', '.join(absent)} rows."
        self.numbers[key] = found


def summarise(records: dict[str, dict]) -> dict:
    """The summary of the files' records, by what measured them (`FILES`).

    Raises:
        ValueError: there are none, or they come from different GPUs or versions.
    """
    shared = _shared(records)
    summary = Summary(records)
    gated = {row["rows"]: row for row in records.get("gated_delta_rule", {}).get("results", ())}
    summary.add_rows("gdn_speedup_over_best_peer", "gated_delta_rule", gated, "speedup_over_best_peer", GDN_ROWS)
    summary.add_rows("gdn_ms", "gated_delta_rule", gated, "round_ms", GDN_ROWS)
    summary.add("ar_ms", "decode", "decode", "ar", "ms_per_round")
    summary.add("ar_fraction_of_floor", "decode", "decode", "ar", "fraction_of_floor")
    summary.add("ar_step_ms", "target_forward", _first(records, "ar_context_"), "ar_ms")
    forwards = records.get("target_forward", {}).get(_first(records, "forward_context_"), ())
    scripted = {row["length"]: row for row in forwards if row["routing"] == "scripted"}
    summary.numbers["forward_routing"] = "scripted, about 8 w^0.66 distinct experts a layer"
    summary.add_rows("forward_ms", "target_forward", scripted, "ms", FORWARD_ROWS)
    summary.add_rows("forward_fraction_of_floor", "target_forward", scripted, "fraction_of_floor", FORWARD_ROWS)
    summary.add("decode_label", "decode", "decode", "scripted", "label")
    for key, name in {
        "decode_tokens_per_second_simulated": "tokens_per_second",
        "decode_acceptance_length": "acceptance_length",
        "decode_mean_length": "mean_length",
        "decode_over_own_ar": "over_own_ar",
    }.items():
        summary.add(key, "decode", "decode", "scripted", name)
    for kind in ("eager", "static"):
        summary.add(f"decode_over_transformers_{kind}", "decode", f"transformers_{kind}", "scripted_over_this")
    summary.add("gpu_idle_fraction", "decode", "gpu_idle_fraction", "scripted")
    summary.add("capture_seconds", "decode", "capture_seconds", "first")
    return {**summary.numbers, "missing": summary.missing, **shared, **_commits(records)}


def _shared(records: dict[str, dict]) -> dict[str, str | None]:
    """GPU and versions of all records."""
    if not records:
        raise ValueError(f"None of {', '.join(FILES.values())} is there. Run `python -m benchmarks.h200` first.")
    environments = {FILES[source]: record["environment"] for source, record in records.items()}
    for name in SHARED:
        values = {file: environment[name] for file, environment in environments.items()}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{value} in {file}" for file, value in values.items())
            raise ValueError(f"Results of one {name} only can be summarised, these have {listed}. Measure them anew.")
    return {name: next(iter(environments.values()))[name] for name in SHARED}


def _commits(records: dict[str, dict]) -> dict[str, object]:
    """The one commit, or all of them, and that of each file."""
    commits = {FILES[source]: record["environment"]["commit"] for source, record in records.items()}
    distinct = sorted({str(commit) for commit in commits.values()})
    return {"commit": ", ".join(distinct), "commits": commits}


def _first(records: dict[str, dict], prefix: str) -> str:
    """The first phase of the forward's file with such a name: that of the shortest context."""
    return next((name for name in records.get("target_forward", {}) if name.startswith(prefix)), prefix)


def read_records(folder: Path) -> dict[str, dict]:
    """The records of the files that are there, by what measured them."""
    paths = {source: folder / file for source, file in FILES.items()}
    return {source: json.loads(path.read_text(encoding="utf-8")) for source, path in paths.items() if path.exists()}


def write_summary(folder: Path) -> dict:
    """Summarises the files of a folder into its `h200_summary.json`."""
    content = summarise(read_records(folder))
    write_atomically(folder / SUMMARY, json.dumps(content, indent=1) + "\n")
    return content


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of the results, and of the summary")
    options = parser.parse_args(arguments)
    try:
        content = write_summary(options.folder)
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    print(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
