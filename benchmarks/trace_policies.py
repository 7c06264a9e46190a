"""Length policies on recorded rounds of a large target's shape: who verifies the best number of rows?

    hf-hybridspec calibrate --split all --output runs/tiny.json             # records runs/tiny.json.rounds.jsonl
    python -m benchmarks.trace_policies --rounds runs/tiny.json.rounds.jsonl --output benchmarks/results
    python -m benchmarks.trace_policies --rounds ... --output ... --costs benchmarks/results/policies_h200.json

Recorded on a small pair: the drafter's confidence and entropy, and what it had accepted at full length. Scripted:
expert counts of a 40-layer target with 8 of 256 experts. Simulated: what a round takes, from bytes at memory
bandwidth, or from what rounds of every length took where `policies_h200` measured them (`--costs`). Half of the
prompts of each kind calibrate, the other half is measured.
"""

import argparse
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from random import Random

from benchmarks.environment import describe_environment
from benchmarks.routing_bound import trace_with_known_experts
from hf_hybridspec.bench.floor_costs import TargetBytes, floor_costs
from hf_hybridspec.bench.report import table
from hf_hybridspec.bench.scripted_routing import RoutingScript, with_scripted_routing
from hf_hybridspec.bench.trace import CostSource, ModelledCosts, TraceResult, run_trace, static_lengths
from hf_hybridspec.calibration.acceptance_model import assess, predict_prefix
from hf_hybridspec.calibration.calibrate import MeasuredCosts, PromptSet, assemble
from hf_hybridspec.calibration.profile import CalibrationProfile, CostModel, write_atomically
from hf_hybridspec.calibration.rounds import PromptRounds, RoundArrays, read_rounds
from hf_hybridspec.generation.length_policies import Static, parse_policy

POLICIES = ("full", "dcut", "evict", "nominal", "hybridspec")


def split(prompts: list[PromptRounds], seed: int) -> tuple[list[PromptRounds], list[PromptRounds]]:
    """Calibration and test prompts: half of each kind each."""
    halves: tuple[list, list] = ([], [])
    for kind in sorted({prompt.kind for prompt in prompts}):
        members = sorted((prompt for prompt in prompts if prompt.kind == kind), key=lambda prompt: prompt.prompt)
        Random(f"{seed}-{kind}").shuffle(members)
        halves[0].extend(members[::2])
        halves[1].extend(members[1::2])
    return halves


@dataclass(frozen=True)
class Costs:
    """What rounds take: the model, where it comes from, and the name of the files for results under it."""

    model: CostModel
    description: str
    note: str
    file_name: str

    @classmethod
    def of_bytes(cls, num_drafts: int, script: RoutingScript) -> "Costs":
        """From bytes at memory bandwidth."""
        model = floor_costs(num_drafts, script, TargetBytes())
        description = "memory bandwidth floor of Qwen3.6-35B-A3B on an H200"
        return cls(model, description, "The cost curve is simulated.", "policies_trace_simulated")

    @classmethod
    def measured(cls, path: Path, num_drafts: int) -> "Costs":
        """As a report of `policies_h200` has them.

        Raises:
            ValueError: the file holds no costs, or those of another number of drafts.
        """
        report = json.loads(path.read_text(encoding="utf-8"))
        found = report.get("costs", {})
        if len(found.get("measured", ())) != num_drafts:
            raise ValueError(
                f"{path} must hold costs of {num_drafts} lengths, as many as the recorded rounds have drafts, got "
                f"{len(found.get('measured', ()))}. Write it by `python -m benchmarks.policies_h200` on these rounds."
            )
        given = {field.name: found[field.name] for field in fields(CostModel)}
        environment = report["environment"]
        description = f"rounds of every length as measured on {environment['gpu']}, commit {environment['commit']}"
        note = "The cost curve was measured in another run."
        return cls(CostModel(**given), description, note, "policies_trace_measured_costs")


def calibrate(
    prompts: list[PromptRounds], rounds: RoundArrays, pair, script: RoutingScript, costs: Costs
) -> CalibrationProfile:
    """The profile of the calibration rounds under given costs."""
    source = PromptSet("calibration half of a trace", tuple(prompt.prompt for prompt in prompts))
    return assemble(rounds, MeasuredCosts(costs.model, 1.0, (costs.note,)), pair, source, script.top_k)


def measure(profile: CalibrationProfile, rounds: RoundArrays, costs: CostSource) -> dict[str, TraceResult]:
    """Every policy, and every fixed length, on some rounds."""
    policies = {name: parse_policy(name, profile) for name in POLICIES}
    policies["static"] = Static(profile.static_length)
    policies |= {f"static:{length}": Static(length) for length in static_lengths(rounds)}
    return {name: run_trace(policy, rounds, costs) for name, policy in policies.items()}


def summarise(results: dict[str, dict[str, TraceResult]]) -> dict[str, float]:
    """HybridSpec over the others: the worst ratio of all kinds. The best static length is chosen for each kind."""

    def worst(chosen) -> float:
        return min(
            cells["hybridspec"].tokens_per_second / max(cells[name].tokens_per_second for name in chosen(cells))
            for cells in results.values()
        )

    return {
        "hybridspec_over_best_static": worst(lambda cells: [name for name in cells if name.startswith("static:")]),
        "hybridspec_over_calibrated_static": worst(lambda cells: ["static"]),
        "hybridspec_over_full": worst(lambda cells: ["full"]),
        "hybridspec_over_nominal": worst(lambda cells: ["nominal"]),
        "hybridspec_over_best_other": worst(lambda cells: [name for name in cells if name != "hybridspec"]),
    }


def most_of_correction(
    profile: CalibrationProfile,
    rounds: RoundArrays,
    costs: ModelledCosts,
    results: dict[str, dict[str, TraceResult]],
) -> dict[str, float]:
    """Kind -> what a rule that knows all experts wins over nominal only: as much as a correction can hope for."""
    return {
        kind: trace_with_known_experts(profile.acceptance, rounds[rounds.kind == kind], costs).tokens_per_second
        / cells["nominal"].tokens_per_second
        for kind, cells in results.items()
    }


def markdown(
    results: dict[str, dict[str, TraceResult]], summary: dict[str, float], most: dict[str, float], description: str
) -> str:
    """Tables of a run."""
    names = [name for name in next(iter(results.values())) if ":" not in name]
    kinds = list(results)
    header = ["policy", *(f"{kind} {number}" for kind in kinds for number in ("AL", "w", "tokens/s"))]
    rows = []
    for name in names:
        cells = [results[kind][name] for kind in kinds]
        numbers = [(f"{c.acceptance_length:.2f}", f"{c.mean_length:.2f}", f"{c.tokens_per_second:.0f}") for c in cells]
        rows.append([name, *(number for triple in numbers for number in triple)])
    best = [_best_static(results[kind]) for kind in kinds]
    lines = [
        "# Length policies on recorded rounds",
        "",
        f"Times: {description}. Acceptance: recorded on the bundled pair. Expert counts: scripted. No figure here is "
        "the speed of a real decode.",
        "",
        *table(header, rows),
        "",
        "Best fixed length of each kind, chosen on the measured rounds: "
        + ", ".join(f"{kind} {name.removeprefix('static:')}" for kind, name in zip(kinds, best, strict=True))
        + ".",
        "",
        *table(["worst ratio of all kinds", ""], [[name, f"{value:.3f}"] for name, value in summary.items()]),
        "",
        "A rule that knows the experts of every layer before it chooses, for nothing, over nominal only: "
        + ", ".join(f"{kind} {value:.3f}" for kind, value in most.items())
        + ". A routing correction, which sees Layer 0 alone, cannot hope for more.",
    ]
    return "\n".join(lines) + "\n"


def _best_static(cells: dict[str, TraceResult]) -> str:
    return max((name for name in cells if ":" in name), key=lambda name: cells[name].tokens_per_second)


def main() -> None:
    """Runs the trace and writes JSON and Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=Path, required=True, help="file of captured rounds")
    parser.add_argument("--output", type=Path, required=True, help="folder for the results")
    parser.add_argument("--seed", type=int, default=0)
    spread = RoutingScript.spread
    parser.add_argument("--spread", type=float, default=spread, help=f"of a layer's new experts by row ({spread:g})")
    parser.add_argument("--costs", type=Path, help="report of policies_h200, whose measured costs are taken")
    options = parser.parse_args()

    settings, prompts = read_rounds(options.rounds)
    script = RoutingScript(spread=options.spread)
    calibration, test = split([prompt for prompt in prompts if prompt.rounds], options.seed)
    known = with_scripted_routing(RoundArrays.of(calibration), script, options.seed)
    unseen = with_scripted_routing(RoundArrays.of(test), script, options.seed + 1)
    drafts = known.num_drafts
    source = Costs.measured(options.costs, drafts) if options.costs else Costs.of_bytes(drafts, script)
    profile = calibrate(calibration, known, settings.pair, script, source)
    costs = ModelledCosts(profile.costs, profile.routing, source.description)
    results = {kind: measure(profile, unseen[unseen.kind == kind], costs) for kind in sorted(set(unseen.kind))}
    summary, most = summarise(results), most_of_correction(profile, unseen, costs, results)
    quality = assess(predict_prefix(profile.acceptance, unseen), unseen, held_out=True)
    content = {
        **summary,
        "all_experts_known_over_nominal": most,
        "calibration_error": quality.calibration_error,
        "times": costs.description,
        "spread": script.spread,
        "routing_correlation": profile.quality.routing_correlation,
        "calibration_rounds": known.num_rounds,
        "test_rounds": unseen.num_rounds,
        **describe_environment(),
        "results": {kind: {name: asdict(cell) for name, cell in cells.items()} for kind, cells in results.items()},
    }
    write_atomically(options.output / f"{source.file_name}.json", json.dumps(content, indent=1) + "\n")
    page = markdown(results, summary, most, costs.description)
    write_atomically(options.output / f"{source.file_name}.md", page)
    print(page)


if __name__ == "__main__":
    main()
