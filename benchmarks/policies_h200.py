"""Length policies on recorded rounds while the full shape of Qwen3.6-35B-A3B computes every round, captured.

    hf-hybridspec calibrate --split all --output runs/tiny.json                (records runs/tiny.json.rounds.jsonl)
    python -m benchmarks.policies_h200 --rounds runs/tiny.json.rounds.jsonl --output runs/policies_h200.json
    python -m benchmarks.policies_h200 --rounds ... --output policies.json --tiny                 (no GPU: a dry run)

Recorded on a small pair: the drafter's confidence and entropy, and what it had accepted at full length. Scripted: the
experts (U ~ 8 w^0.66 in a layer, new Layer-0 experts correlate with later ones), since weights are random. All else is
computed: proposal, length rule, both stages, acceptance, commit. Half of the prompts of each kind calibrates, on costs
that are measured first on the same captured rounds; every policy then takes the same rounds of the other half, in
turn, and its time is the median over turns. `--summary` writes the ratios as a file of their own.
"""

import argparse
import json
import statistics
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.environment import require_gpu
from benchmarks.full_pair import device_and_dtype, random_pair
from benchmarks.phased_report import PhasedReport
from benchmarks.policy_cells import POLICIES, STATIC_LENGTHS, cell_of, numbers, page, pooled, ratios
from benchmarks.recorded_rounds import CALIBRATION, OrderedRounds
from benchmarks.replay import Captured, medians, times_in_turn
from benchmarks.round_session import CountedRounds, Session
from benchmarks.scripted_forward import ExpertScript, ScriptedForward
from benchmarks.simulated_parts import SimulatedAcceptance, SimulatedDrafter, Trace
from benchmarks.trace_policies import split
from hf_hybridspec.bench.scripted_routing import RoutingScript, with_scripted_routing
from hf_hybridspec.bench.trace import TraceResult, draft_of, execute
from hf_hybridspec.calibration.acceptance_model import assess, predict_prefix
from hf_hybridspec.calibration.calibrate import PromptSet, assemble, modelled
from hf_hybridspec.calibration.capture import new_experts
from hf_hybridspec.calibration.fused_latency import expert_seconds, stage0_row_seconds
from hf_hybridspec.calibration.latency import RoundTimes
from hf_hybridspec.calibration.profile import write_atomically
from hf_hybridspec.calibration.rounds import RoundArrays, read_rounds
from hf_hybridspec.generation.device_round import GreedyAcceptance
from hf_hybridspec.generation.length_policies import Static, parse_policy
from hf_hybridspec.generation.round_loop import Launches
from hf_hybridspec.kernels.length_selection import Selection, count_new_experts
from hf_hybridspec.kernels.round_steps import MAX_ROWS
from hf_hybridspec.modeling.fused_drafter import FusedDrafter
from hf_hybridspec.modeling.fused_forward import FusedForward
from hf_hybridspec.modeling.target import text_config

NUM_VARIANTS = 96
GATE_ROUNDS = 24
WARM_ROUNDS = 2
# Of one graph that times the rule.
RULES = 16
# The device and the host compute probabilities in another order: where two lengths score alike they may differ.
MOST_NEAR_TIES = 2


class Bench(PhasedReport):
    """One pair, its recorded rounds, and the report so far."""

    def __init__(self, arguments: argparse.Namespace):
        what = "length policies: every round computed at the full shape, acceptance recorded on a small pair"
        super().__init__(arguments, what, context=arguments.context)
        self.device, _ = device_and_dtype()
        self.settings, prompts = read_rounds(arguments.rounds)
        self.halves = split([prompt for prompt in prompts if prompt.rounds], arguments.seed)
        self.recorded = OrderedRounds.of(*self.halves, arguments.seed)
        self.kinds = self.recorded.kinds
        self.results: dict[str, dict[str, TraceResult]] = {}

    def is_late(self) -> bool:
        return self.elapsed > self.arguments.seconds

    # --- Phases -------------------------------------------------------------------------------------------------

    def build(self) -> None:
        """Models, the records on the device, and the buffers of drafting and of plain rounds."""
        arguments = self.arguments
        self.model, drafter = random_pair(arguments.tiny, arguments.layers)
        config = text_config(self.model)
        script = RoutingScript(config.num_hidden_layers, config.num_experts, config.num_experts_per_tok)
        self.known = with_scripted_routing(self.recorded.known, script, arguments.seed)
        self.unseen = with_scripted_routing(self.recorded.unseen, script, arguments.seed + 1)
        self.trace = Trace(self.recorded.rounds, drafter.num_draft_tokens, self.device)
        context, room = arguments.context, (arguments.count + 2) * MAX_ROWS
        self.forward = ScriptedForward(self.model, drafter.target_layer_ids)
        self.forward.script = ExpertScript(config, NUM_VARIANTS, self.device)
        simulated = SimulatedDrafter(FusedDrafter(drafter, context + room), self.trace, self.forward.script)
        self.drafting = Session(self.model, self.forward, simulated, context, room)
        self.plain = Session(self.model, ScriptedForward(self.model), None, context, room)
        self.plain.prepare(None, GreedyAcceptance())
        self.launches: dict[str, Launches] = {"ar": self.plain.launches}
        counts = {name: count for name, (_, count) in self.recorded.windows.items()}
        pair = asdict(self.settings.pair)
        # Names, not where they lay.
        pair |= {name: Path(pair[name]).name for name in ("target", "drafter")}
        self.save("rounds", {"recorded": counts, "of_each_run": self.count, "pair": pair})

    def costs(self) -> None:
        """Rounds of every fixed length, and the two small latencies; from them the profile."""
        lengths = range(2, self.trace.signals.shape[2] + 2)
        for length in lengths:
            self.prepare(f"static:{length}", Static(length))
        names = ["ar", *(f"static:{length}" for length in lengths)]
        self.warm(names)
        turns = [self.turn(names, [CALIBRATION], number)[CALIBRATION] for number in range(self.arguments.repeats)]
        seconds = {name: statistics.median(turn[name].seconds for turn in turns) / self.count for name in names}
        times = RoundTimes(tuple(seconds[f"static:{length}"] for length in lengths), seconds["ar"])
        forward = FusedForward(self.model)
        stage0_row = stage0_row_seconds(forward, self.plain.state, MAX_ROWS)
        costs = modelled(times, stage0_row, expert_seconds(forward, MAX_ROWS))
        source = PromptSet("calibration half of a trace", tuple(prompt.prompt for prompt in self.halves[0]))
        self.profile = assemble(
            self.known, costs, self.settings.pair, source, text_config(self.model).num_experts_per_tok
        )
        quality = assess(predict_prefix(self.profile.acceptance, self.unseen), self.unseen, held_out=True)
        self.save("calibration_error", quality.calibration_error)
        found = asdict(costs.model) | {"r2": costs.r2, "rho": self.profile.rho, "notes": self.profile.notes}
        correlation, static = self.profile.quality.routing_correlation, self.profile.static_length
        self.save("costs", found | {"static_length": static, "routing_correlation": correlation})

    def gate(self) -> None:
        """Lengths and tokens of captured rounds against the same rule on the host, over the same records."""
        kind, found = self.kinds[0], {}
        count = min(GATE_ROUNDS, self.count)
        records = self.with_experts(self.unseen[self.unseen.kind == kind], count)
        for name in ("nominal", "hybridspec"):
            policy = parse_policy(name, self.profile)
            self.prepare(name, policy)
            run = self.run(name, kind, count)
            expected = [execute(policy, records, index) for index in range(count)]
            pairs = zip(zip(run.lengths, run.emitted, strict=True), expected, strict=True)
            wrong = [(pair, asdict(one)) for pair, one in pairs if pair != (one.length, one.num_emitted)]
            if len(wrong) > MOST_NEAR_TIES:
                raise SystemExit(f"{name}: captured rounds differ from the rule on the host: {wrong}")
            found[name] = {"rounds": count, "differ": len(wrong)}
        self.save("gate", found)

    def policies(self) -> None:
        """Every policy on the same rounds of every kind, in turn; saved after every turn."""
        for name in ("dcut", "evict", "full"):
            self.prepare(name, parse_policy(name, self.profile))
        self.prepare("static", Static(self.profile.static_length))
        names = ["ar", *(f"static:{length}" for length in STATIC_LENGTHS), *POLICIES]
        self.warm(names)
        turns: list[dict] = []
        longest = 0.0
        # No turn that would not end in time: whoever ends this run then would end it before its summary.
        while len(turns) < self.arguments.repeats and not (turns and self.elapsed + longest > self.arguments.seconds):
            start = self.elapsed
            turns.append(self.turn(names, self.kinds, len(turns)))
            longest = max(longest, self.elapsed - start)
            self.results = {
                kind: {name: cell_of([turn[kind][name] for turn in turns]) for name in names} for kind in self.kinds
            }
            every = self.results | {"all": pooled(self.results)}
            self.report["turns"] = len(turns)
            self.save(
                "results", {kind: {name: numbers(cells[name]) for name in names} for kind, cells in every.items()}
            )

    def selector(self) -> None:
        """Selection, count of new experts and correction by themselves, as a round has them."""
        policy, drafts = parse_policy("hybridspec", self.profile), self.trace.signals.shape[2]
        draft = draft_of(self.unseen, 0)
        draft = replace(draft, confidence=draft.confidence.to(self.device), entropy=draft.entropy.to(self.device))
        selection = Selection.empty(drafts, self.device)
        experts = self.forward.script.rows(0, MAX_ROWS)["top_k_index"]
        last_row = torch.full((1,), MAX_ROWS - 1, dtype=torch.int32, device=self.device)

        def work() -> None:
            for _ in range(RULES):
                policy.select_on_device(draft, selection)
                policy.correct_on_device(count_new_experts(experts, last_row), selection)

        milliseconds = medians(times_in_turn({"rule": Captured(work)}, 20))["rule"]
        self.save("selector_us", round(1e3 * milliseconds / RULES, 3))

    def summarise(self) -> None:
        """The ratios, and a page of tables."""
        environment = self.report["environment"]
        summary = ratios(self.results)
        summary |= {name: self.report[name] for name in ("selector_us", "calibration_error")}
        summary |= {name: environment[name] for name in ("gpu", "torch", "triton", "transformers", "commit")}
        self.save("summary", summary)
        write_atomically(self.arguments.output.with_suffix(".md"), page(self.results, summary, self.report))
        if self.arguments.summary is not None:
            write_atomically(self.arguments.summary, json.dumps(summary, indent=1) + "\n")

    # --- Parts --------------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Rounds of one run."""
        return self.arguments.count

    def prepare(self, name: str, policy) -> None:
        """Captures the rounds of a policy."""
        self.drafting.prepare(policy, SimulatedAcceptance(self.trace))
        self.launches[name] = self.drafting.launches

    def run(self, name: str, kind: str, count: int) -> CountedRounds:
        """Rounds of one policy on the records of a kind."""
        session = self.plain if name == "ar" else self.drafting
        session.launches = self.launches[name]
        self.trace.take(*self.recorded.windows[kind])
        return session.run_rounds(count)

    def warm(self, names: list[str]) -> None:
        for name in names:
            self.run(name, self.kinds[0], WARM_ROUNDS)

    def turn(self, names: list[str], kinds: list[str], number: int) -> dict[str, dict[str, CountedRounds]]:
        """A run of every policy on every kind; each turn begins with another policy."""
        shift = number * 7 % len(names)
        order = [*names[shift:], *names[:shift]]
        return {kind: {name: self.run(name, kind, self.count) for name in order} for kind in kinds}

    def with_experts(self, rounds: RoundArrays, count: int) -> RoundArrays:
        """The first rounds with the new Layer-0 experts that the script on the device gives them."""
        script, counts = self.forward.script, []
        for index in range(count):
            script.advance(torch.tensor([index], device=self.device))
            counts.append(new_experts(script.rows(0, MAX_ROWS)["top_k_index"])[1:].cpu())
        taken = rounds[np.arange(count) % rounds.num_rounds]
        return replace(taken, new_layer0=torch.stack(counts).numpy())


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=Path, required=True, help="file of captured rounds")
    parser.add_argument("--output", type=Path, required=True, help="JSON file; tables go to the .md beside it")
    parser.add_argument("--summary", type=Path, help="another JSON file, with the ratios alone")
    parser.add_argument(
        "--seconds",
        type=float,
        default=400,
        help="no phase begins, no second turn ends later",
    )
    parser.add_argument("--count", type=int, default=320, help="rounds of a run")
    parser.add_argument("--context", type=int, default=1024, help="rows in the cache at the start of a run")
    parser.add_argument("--repeats", type=int, default=3, help="turns behind a median")
    parser.add_argument("--seed", type=int, default=0, help="of the split into calibration and test prompts")
    parser.add_argument("--layers", type=int, help="fewer layers than the target has")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, for a dry run without a GPU")
    parser.add_argument("--commit", help="the commit measured, where the files have no git history")
    options = parser.parse_args(arguments)
    require_gpu(parser, options.tiny)
    return options


def main(arguments: list[str] | None = None) -> None:
    bench, skipped = Bench(parse(arguments)), []
    for phase in (bench.build, bench.costs, bench.gate, bench.selector, bench.policies, bench.summarise):
        # Results that are there are always summed up.
        if bench.is_late() and not (phase == bench.summarise and bench.results):
            skipped.append(phase.__name__)
        else:
            phase()
    bench.save("skipped_phases", skipped)


if __name__ == "__main__":
    main()
