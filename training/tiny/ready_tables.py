"""The ablation tables and the headline numbers, from the results that `ablations` left."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hf_hybridspec.bench.results_file import update_results

DRAWS = 2000
MARKERS = ("<!-- results:{} -->", "<!-- end of results:{} -->")


def read_results(folder: Path) -> dict[tuple[str, str], list[dict]]:
    """(table, label) -> the results of its seeds."""
    results = defaultdict(list)
    for path in sorted(folder.glob("*/result.json")):
        result = json.loads(path.read_text())
        results[result["row"]["table"], result["row"]["label"]].append(result)
    return dict(results)


def acceptance_length(
    runs: Sequence[dict], seeds: Sequence[int], prompts: dict[str, np.ndarray] | None = None
) -> float:
    """Mean over kinds of emitted tokens / rounds, pooled over the prompts, then over the seeds. prompts: indices by
    kind (a bootstrap draw); None takes each once."""
    values = []
    for seed in seeds:
        for kind, rows in runs[seed]["kinds"].items():
            chosen = rows if prompts is None else [rows[i] for i in prompts[kind]]
            values.append(sum(row["emitted"] for row in chosen) / sum(row["rounds"] for row in chosen))
    return float(np.mean(values))


def intervals(rows: dict[str, list[dict]]) -> dict[str, dict[str, list[float] | float]]:
    """Mean and 95 % bootstrap interval of each row and of its gain over each other row, in percent.

    Draws resample prompts (the same for all rows, which are paired) and, of each row, its seeds.
    """
    generator = np.random.default_rng(0)
    sizes = {kind: len(prompts) for kind, prompts in next(iter(rows.values()))[0]["kinds"].items()}
    draws: dict[str, list[float]] = {label: [] for label in rows}
    for _ in range(DRAWS):
        prompts = {kind: generator.integers(size, size=size) for kind, size in sizes.items()}
        for label, runs in rows.items():
            seeds = generator.integers(len(runs), size=len(runs))
            draws[label].append(acceptance_length(runs, seeds, prompts))
    summary = {}
    for label, runs in rows.items():
        summary[label] = {
            "mean": acceptance_length(runs, range(len(runs))),
            "interval": np.percentile(draws[label], [2.5, 97.5]).tolist(),
            "seeds": len(runs),
        }
        for other in rows:
            if other != label:
                gains = 100 * (np.array(draws[label]) / np.array(draws[other]) - 1)
                mean = 100 * (summary[label]["mean"] / acceptance_length(rows[other], range(len(rows[other]))) - 1)
                summary[label][f"gain_over_{other}"] = [mean, *np.percentile(gains, [2.5, 97.5]).tolist()]
    return summary


def markdown(results: dict[tuple[str, str], list[dict]]) -> str:
    """The tables as text: acceptance length by kind and on average, and the gain over DSpark and DSpark + FT."""
    baselines = {
        label: _mean(results["headline", label]) for label in ("dspark", "dspark_ft") if ("headline", label) in results
    }
    kinds = list(next(iter(results.values()))[0]["kinds"])
    header = ["table", "row", "seeds", *kinds, "average", *(f"over {name} (%)" for name in baselines)]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for (table, label), runs in results.items():
        values = [np.mean([_pooled(run["kinds"][kind]) for run in runs]) for kind in kinds]
        gains = [100 * (_mean(runs) / baseline - 1) for baseline in baselines.values()]
        cells = [table, label, str(len(runs)), *(f"{value:.3f}" for value in [*values, _mean(runs)])]
        lines.append("| " + " | ".join([*cells, *(f"{gain:+.2f}" for gain in gains)]) + " |")
    return "\n".join(lines) + "\n"


def commits_by_table(results: dict[tuple[str, str], list[dict]]) -> dict[str, str]:
    """Table -> the commit that its rows were measured at. Raises ValueError for a table of several commits."""
    commits: dict[str, set[str]] = {}
    for (table, _), runs in results.items():
        commits.setdefault(table, set()).update(run["commit"] for run in runs)
    for table, found in commits.items():
        if len(found) > 1:
            raise ValueError(f"Table {table} mixes the commits {sorted(found)}. Run all its rows at one commit.")
    return {table: found.pop() for table, found in commits.items()}


def write_summary(folder: Path, table: Path | None, results_path: Path | None, section: str = "ready") -> None:
    """Prints the tables, with intervals for the headline and other rows of several seeds; writes them (into a page
    that is there between the MARKERS of a section), and the headline into a results file whose other keys are kept.

    Raises ValueError where there is no result yet, where a table mixes commits, or where a page has no such section.
    """
    results = read_results(folder)
    if not results:
        raise ValueError(f"{folder} holds no result. Run the rows first.")
    commits = commits_by_table(results)
    headline = {label: runs for (name, label), runs in results.items() if name == "headline"}
    repeated = {
        f"{name}, {label}": runs for (name, label), runs in results.items() if name != "headline" and len(runs) > 1
    }
    summary = intervals(headline) if headline else {}
    # By themselves, so that the headline's draws do not depend on what else is there.
    others = intervals(headline | repeated) if headline and repeated else {}
    text = markdown(results)
    for label, values in (others | summary).items():
        low, high = values["interval"]
        text += f"\n{label}: {values['mean']:.4f} [{low:.4f}, {high:.4f}]"
        gain = values.get("gain_over_dspark_ft")
        text += f", over dspark_ft {gain[0]:+.2f} % [{gain[1]:+.2f}, {gain[2]:+.2f}]\n" if gain else "\n"
    commit = commits.get("headline", next(iter(commits.values())))
    later = {name: other for name, other in commits.items() if other != commit}
    if later:
        rows = "; ".join(f"{name} at commit {other}" for name, other in later.items())
        text += f"\nMeasured at commit {commit}; {rows}.\n"
    print(text)
    if table is not None:
        table.parent.mkdir(parents=True, exist_ok=True)
        page = placed(text, table.read_text(encoding="utf-8") if table.is_file() else "", section)
        table.write_text(page, encoding="utf-8")
    if results_path is not None:
        # On the machine that ran the rows, which need not be this one.
        update_results(results_path, {"acceptance_length": summary}, None, commit)


def placed(text: str, page: str, section: str) -> str:
    """The page with the text between the markers of a section; the text alone where there is no page."""
    if not page:
        return text
    start, end = (marker.format(section) for marker in MARKERS)
    if start not in page or end not in page:
        raise ValueError(f"The page must have the lines {start} and {end}, between which the tables go.")
    return f"{page[: page.index(start)]}{start}\n{text.rstrip()}\n{page[page.index(end) :]}"


def _pooled(rows: Sequence[dict]) -> float:
    return sum(row["emitted"] for row in rows) / sum(row["rounds"] for row in rows)


def _mean(runs: Sequence[dict]) -> float:
    return acceptance_length(runs, range(len(runs)))
