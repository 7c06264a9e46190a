"""Decoding at the full shape of Qwen3.6-35B-A3B with simulated acceptance: captured rounds end to end.

    python -m benchmarks.decode --output benchmarks/results/decode_h200.json             (our rounds alone)
    python -m benchmarks.decode --baselines eager static --output ...      (and transformers; static takes minutes)
    python -m benchmarks.decode --tiny --output decode.json                              (no GPU: a dry run)

Weights are random, so nothing that is drafted would be accepted: how many drafts a round accepts, and what the drafter
is confident of, come from `--rounds` (drawn by `simulated_rounds` to meet 4.57 tokens at 6.2 rows a round, or recorded
from a model by `hf-hybridspec calibrate`). All else is computed: proposal, length rule, both stages, acceptance,
commit. Routing is measured twice: as random weights route (uniform, the costliest case), and as a script with
U ~ 8 w^0.66 says. First it is checked that captured rounds emit what the same steps emit one by one.
"""

import argparse
import statistics
from collections import Counter
from pathlib import Path

from benchmarks.environment import BANDWIDTH, require_gpu
from benchmarks.forward_pieces import forward_bytes
from benchmarks.full_pair import device_and_dtype, random_pair
from benchmarks.fused_drafter import floor_bytes
from benchmarks.phased_report import PhasedReport
from benchmarks.round_session import Session
from benchmarks.scripted_forward import ExpertScript, ScriptedForward
from benchmarks.simulated_parts import SimulatedAcceptance, SimulatedDrafter, Trace
from benchmarks.transformers_decode import measure_baseline
from hf_hybridspec.calibration.profile import CalibrationProfile
from hf_hybridspec.calibration.rounds import RoundArrays, read_rounds
from hf_hybridspec.generation.adaptive_policies import HybridSpec
from hf_hybridspec.generation.device_round import GreedyAcceptance
from hf_hybridspec.generation.length_policies import Full
from hf_hybridspec.generation.round_graphs import EagerRounds, RoundGraphs
from hf_hybridspec.generation.statistics import GenerationStatistics
from hf_hybridspec.modeling.fused_drafter import FusedDrafter
from hf_hybridspec.modeling.target import text_config

SIMULATED = Path(__file__).parent / "simulated"
NUM_VARIANTS = 32
GATE_TOKENS = 24


class Bench(PhasedReport):
    """One target, its drafter, and the report so far."""

    def __init__(self, arguments: argparse.Namespace):
        super().__init__(
            arguments,
            "decoding with simulated acceptance: rounds captured, acceptance counts from a record",
            rounds=str(arguments.rounds.name),
            tokens=arguments.tokens,
            context=arguments.context,
            bandwidth_bytes_per_s=BANDWIDTH,
        )
        self.device, _ = device_and_dtype()
        self.rounds = RoundArrays.of(read_rounds(arguments.rounds)[1])
        self.policy = HybridSpec(CalibrationProfile.load(arguments.profile), is_guarded=False)

    @property
    def _room(self) -> int:
        """Rows after the context; the same for all, since the noise in a cache depends on its size."""
        return self.arguments.tokens + 64

    # --- Phases -------------------------------------------------------------------------------------------------

    def build(self) -> None:
        self.model, self.drafter = random_pair(self.arguments.tiny, self.arguments.layers)
        layers = text_config(self.model).num_hidden_layers
        self.trace = Trace(self.rounds, self.drafter.num_draft_tokens, self.device)
        self.save("model", {"layers": layers, "dtype": str(self.model.dtype)})

    def sessions(self) -> None:
        """Buffers for plain decoding and for both kinds of routing; the first capture compiles the kernels as well."""
        context, room, taps = self.arguments.context, self._room, self.drafter.target_layer_ids
        self.all: dict[str, Session] = {}
        self.forwards: dict[str, ScriptedForward] = {}
        captures = {}
        for name in ("ar", "scripted", "uniform"):
            forward = ScriptedForward(self.model, () if name == "ar" else taps)
            script = None
            if name == "scripted":
                script = forward.script = ExpertScript(text_config(self.model), NUM_VARIANTS, self.device)
            drafter = None
            if name != "ar":
                fused = FusedDrafter(self.drafter, context + room)
                drafter = SimulatedDrafter(fused, self.trace, script)
            session = Session(self.model, forward, drafter, context, room)
            acceptance = GreedyAcceptance() if name == "ar" else SimulatedAcceptance(self.trace)
            captures[name] = round(session.prepare(self.policy, acceptance), 2)
            self.all[name], self.forwards[name] = session, forward
        self.save("capture_seconds", {"first": captures["ar"] + captures["scripted"], "each": captures})

    def gate(self) -> None:
        """Captured rounds against the same steps one by one, with the drafter's own tokens; then plain rounds."""
        context, room = self.arguments.context, self._room
        forward = ScriptedForward(self.model, self.drafter.target_layer_ids)
        session = Session(self.model, forward, FusedDrafter(self.drafter, context + room), context, room)
        found = {}
        for name, policy in (("full", Full()), ("hybridspec", self.policy)):
            outputs = []
            for executor in (session.executor, EagerRounds()):
                session.prepare(policy, GreedyAcceptance(), executor)
                outputs.append(session.run(GATE_TOKENS)[2])
            if outputs[0] != outputs[1]:
                raise SystemExit(f"{name}: captured rounds emit {outputs[0]}, steps one by one {outputs[1]}.")
            found[name] = len(outputs[0])
        plain = self.all["ar"].run(GATE_TOKENS)[2]
        equal = next((i for i, pair in enumerate(zip(plain, outputs[0], strict=True)) if len(set(pair)) > 1), None)
        self.save("gate", {"equal_tokens": found, "plain_rounds_differ_at": equal})

    def decode(self) -> None:
        """All sessions in turn, several times; medians."""
        seconds = {name: [] for name in self.all}
        last = {}
        for turn in range(self.arguments.repeats + 1):
            for name, session in self.all.items():
                taken, counted, tokens = session.run(self.arguments.tokens)
                assert len(tokens) == self.arguments.tokens
                last[name] = counted
                # The first turn warms up.
                if turn:
                    seconds[name].append(taken)
        found = {name: self._row(name, statistics.median(seconds[name]), last[name]) for name in self.all}
        for name in ("scripted", "uniform"):
            found[name]["over_own_ar"] = round(found[name]["tokens_per_second"] / found["ar"]["tokens_per_second"], 3)
        self.save("decode", found)

    def _row(self, name: str, seconds: float, counted: GenerationStatistics) -> dict:
        tokens = self.arguments.tokens
        lengths = Counter(counted.verification_lengths)
        distinct = {length: self.forwards[name].distinct_experts(length) for length in lengths}
        floor = sum(count * self._floor(name, length, distinct[length]) for length, count in lengths.items())
        return {
            "label": "plain decoding" if name == "ar" else f"simulated acceptance, {name} routing",
            "tokens_per_second": round(tokens / seconds, 1),
            "ms_per_round": round(1e3 * seconds / counted.rounds, 4),
            "rounds": counted.rounds,
            "acceptance_length": round(counted.acceptance_length, 3),
            "mean_length": round(counted.mean_verification_length, 3),
            "distinct_experts_a_layer": {str(length): round(distinct[length], 1) for length in sorted(distinct)},
            "floor_ms_per_round": round(1e3 * floor / counted.rounds, 4),
            "fraction_of_floor": round(floor / seconds, 3),
        }

    def _floor(self, name: str, length: int, distinct: float) -> float:
        """Seconds that the bytes of a round take."""
        session, forward = self.all[name], self.forwards[name]
        sizes = forward_bytes(forward.weights, session.state, self.arguments.context)
        total = sizes["fixed"] + distinct * len(forward.weights.layers) * sizes["expert"]
        if session.fused is not None:
            total += sum(floor_bytes(self.drafter).values())
        return total / BANDWIDTH

    def idle(self) -> None:
        found = {name: session.idle_fraction(self.arguments.tokens) for name, session in self.all.items()}
        self.save("gpu_idle_fraction", {name: share and round(share, 5) for name, share in found.items()})

    def recapture(self) -> None:
        """Capturing again with all kernels compiled: what a second process pays, whose compiled kernels are cached."""
        session = self.all["scripted"]
        executor = RoundGraphs(self.device) if self.device.type == "cuda" else EagerRounds()
        acceptance = SimulatedAcceptance(self.trace)
        self.save("capture_seconds_compiled", round(session.prepare(self.policy, acceptance, executor), 2))
        session.prepare(self.policy, acceptance)

    def baselines(self) -> None:
        """transformers' own loops on the same weights; our buffers are given back first."""
        decoded = self.report["decode"]
        self.all.clear()
        self.forwards.clear()
        for kind in self.arguments.baselines:
            found = measure_baseline(self.model, kind, self.arguments.context)
            ratio = decoded["scripted"]["tokens_per_second"] / found["tokens_per_second"]
            self.save(f"transformers_{kind}", {**found, "scripted_over_this": round(ratio, 2)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file, written after every phase")
    parser.add_argument("--rounds", type=Path, default=SIMULATED / "rounds.jsonl", help="file of captured rounds")
    parser.add_argument("--profile", type=Path, default=SIMULATED / "profile.json", help="of the length rule")
    parser.add_argument("--tokens", type=int, default=1024, help="of a measured sequence")
    parser.add_argument("--context", type=int, default=1024, help="rows in the cache at its start")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, help="fewer layers than the target has")
    parser.add_argument("--baselines", nargs="*", default=[], choices=("eager", "static"))
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, for a dry run without a GPU")
    parser.add_argument("--commit", help="the commit measured, where the files have no git history")
    arguments = parser.parse_args()
    require_gpu(parser, arguments.tiny)
    bench = Bench(arguments)
    for phase in (bench.build, bench.sessions, bench.gate, bench.decode, bench.idle, bench.recapture, bench.baselines):
        phase()


if __name__ == "__main__":
    main()
