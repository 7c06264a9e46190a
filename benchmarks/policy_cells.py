"""Results of length policies by kind: cells from runs, ratios of HybridSpec to the others, a page of tables."""

import statistics
from collections import Counter
from dataclasses import asdict

from benchmarks.round_session import CountedRounds
from benchmarks.trace_policies import summarise
from hf_hybridspec.bench.report import table
from hf_hybridspec.bench.trace import TraceResult

# Fixed lengths beside those that a policy chooses; `static` is the one that calibration names.
STATIC_LENGTHS = (2, 4, 6, 8, 12, 16)
POLICIES = ("static", "full", "dcut", "evict", "nominal", "hybridspec")

Results = dict[str, dict[str, TraceResult]]


def cell_of(runs: list[CountedRounds]) -> TraceResult:
    """Tokens and lengths of a run, which all turns share, and the median of the times.

    Raises:
        ValueError: the turns differ in what they computed.
    """
    first = runs[0]
    if any((run.lengths, run.emitted) != (first.lengths, first.emitted) for run in runs):
        raise ValueError("Turns of one policy chose other lengths on the same records.")
    lengths = dict(sorted(Counter(first.lengths).items()))
    return TraceResult(sum(first.emitted), statistics.median(run.seconds for run in runs), len(first.lengths), lengths)


def numbers(cell: TraceResult) -> dict:
    """A cell and what follows from it."""
    derived = {name: getattr(cell, name) for name in ("tokens_per_second", "acceptance_length", "mean_length")}
    return asdict(cell) | {name: round(value, 4) for name, value in derived.items()}


def pooled(results: Results) -> dict[str, TraceResult]:
    """All kinds together, policy by policy."""
    cells = {}
    for name in next(iter(results.values())):
        members = [of_kind[name] for of_kind in results.values()]
        lengths = sum((Counter(member.lengths) for member in members), Counter())
        cells[name] = TraceResult(
            sum(member.tokens for member in members),
            sum(member.seconds for member in members),
            sum(member.rounds for member in members),
            dict(sorted(lengths.items())),
        )
    return cells


def ratios(results: Results) -> dict[str, float]:
    """HybridSpec over the others: the worst ratio of all kinds, and over all kinds pooled.

    The best fixed length is chosen for each kind on the rounds that are measured.
    """
    found = {name: round(value, 4) for name, value in summarise(results).items()}
    together = {name: round(value, 4) for name, value in summarise({"all": pooled(results)}).items()}
    over_ar = [cells["hybridspec"].tokens_per_second / cells["ar"].tokens_per_second for cells in results.values()]
    return found | {"hybridspec_over_ar": round(min(over_ar), 4), "pooled": together}


def page(results: Results, summary: dict, report: dict) -> str:
    """Markdown: what was measured and how, all policies by kind, the ratios."""
    every = results | {"all": pooled(results)}
    kinds, names = list(every), list(next(iter(results.values())))
    header = ["policy", *(f"{kind} {number}" for kind in kinds for number in ("AL", "w", "tokens/s"))]
    rows = []
    for name in names:
        cells = [every[kind][name] for kind in kinds]
        rows.append([name, *(number for cell in cells for number in _formatted(cell))])
    scalars = [[name, f"{value:.3f}"] for name, value in summary.items() if isinstance(value, float)]
    scalars += [[f"pooled: {name}", f"{value:.3f}"] for name, value in summary["pooled"].items()]
    environment = report["environment"]
    lines = [
        "# Length policies, every round computed at the full shape",
        "",
        f"{environment['gpu']}, torch {environment['torch']}, Triton {environment['triton']}, transformers "
        f"{environment['transformers']}, commit `{str(environment['commit'])[:10]}`. Weights are random. **Recorded** "
        "on a small pair: the drafter's signals and how many drafts are accepted. **Scripted**: the experts of a row "
        "(about 8 w^0.66 distinct ones in a layer). **Computed**: everything else, so times are those of real rounds, "
        "but no row is the decoding speed of a trained model.",
        "",
        f"{report['rounds']['of_each_run']} rounds of each kind and policy, the median of {report['turns']} "
        "interleaved turns; prompts of calibration and test are disjoint. AL: emitted tokens a round, w: its verified "
        f"rows. `static` is the length that calibration chose ({report['costs']['static_length']}).",
        "",
        *table(header, rows),
        "",
        *table(["worst of all kinds", ""], scalars),
    ]
    return "\n".join(lines) + "\n"


def _formatted(cell: TraceResult) -> tuple[str, str, str]:
    return f"{cell.acceptance_length:.2f}", f"{cell.mean_length:.2f}", f"{cell.tokens_per_second:.0f}"
