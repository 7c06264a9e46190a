"""Verification and commit of all GDN layers of Qwen3.6-35B-A3B: errors first, then milliseconds per round.

    python -m benchmarks.gated_delta_rule --output benchmarks/results/gated_delta_rule_h200.json

A round verifies n rows in each of 30 layers and commits all n in one launch (the costliest case). Rounds are captured
into one CUDA graph per n, which walks through several sets of states, so that every state comes from device memory.
As in a forward, a layer may fetch its state while the kernel before it ends, but reads rows only when it has ended.
The graphs of all n are replayed in turn; a time is the median over replays, divided by the rounds in a graph. The
floor is the traffic of the states at the bandwidth of a large read: once by verify, in and out by commit.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.environment import describe_environment
from hf_hybridspec.kernels.dispatch import use_kernels
from hf_hybridspec.kernels.gated_delta_rule import CompactFactors, commit_gated_delta_rule, verify_gated_delta_rule

BANDWIDTH = 4.3e12
LENGTHS = (2, 3, 4, 6, 8, 12, 16)
# Relative Frobenius error of (outputs, committed state) against an fp32 recurrence.
LIMITS = {"bfloat16": (4.3e-3, 1.7e-3), "float32": (1e-4, 1e-6)}


@dataclass(frozen=True)
class Shape:
    """GDN layers of the target."""

    layers: int = 30
    num_k_heads: int = 16
    num_v_heads: int = 32
    k_dim: int = 128
    v_dim: int = 128

    @property
    def state_bytes(self) -> int:
        return 4 * self.layers * self.num_v_heads * self.k_dim * self.v_dim

    def states(self) -> torch.Tensor:
        return torch.randn(self.layers, 1, self.num_v_heads, self.k_dim, self.v_dim, device="cuda")

    def factors(self, rows: int) -> CompactFactors:
        heads = {name: size for name, size in asdict(self).items() if name != "layers"}
        return CompactFactors.empty(self.layers, 1, rows, **heads, device="cuda")

    def rows(self, rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Query, key, value, log-decay and beta of all layers, `[L, 1, n, ...]`."""
        query, key = torch.randn(2, self.layers, 1, rows, self.num_k_heads, self.k_dim, device="cuda").to(dtype)
        value = torch.randn(self.layers, 1, rows, self.num_v_heads, self.v_dim, device="cuda").to(dtype)
        log_decay = -torch.rand(self.layers, 1, rows, self.num_v_heads, device="cuda")
        beta = torch.randn(self.layers, 1, rows, self.num_v_heads, device="cuda").to(dtype).sigmoid()
        return query, key, value, log_decay, beta


def verify_layers(rows: tuple[torch.Tensor, ...], states: torch.Tensor, factors: CompactFactors) -> torch.Tensor:
    """One round's verifications: outputs `[L, 1, n, HV, V]`.

    The first layer follows whatever ran before, which may have written its state; the others follow a verification.
    """
    return torch.stack(
        [
            verify_gated_delta_rule(*(x[i] for x in rows), state, factors[i], state_is_settled=i > 0)
            for i, state in enumerate(states)
        ]
    )


def measure_errors(shape: Shape, rows: int, dtype: torch.dtype) -> dict[str, float]:
    """Relative error of outputs and committed states against the recurrence, one fp32 row at a time."""
    inputs, states = shape.rows(rows, dtype), shape.states()
    expected_states, expected, single = states.clone(), [], shape.factors(1)
    with use_kernels("reference"):
        for i in range(rows):
            row = tuple(x[:, :, i : i + 1].float() for x in inputs)
            expected.append(verify_layers(row, expected_states, single))
            commit_gated_delta_rule(expected_states, single, 1)
    with use_kernels("triton"):
        factors = shape.factors(rows)
        output = verify_layers(inputs, states, factors)
        commit_gated_delta_rule(states, factors, torch.tensor([rows], dtype=torch.int32, device="cuda"))
    errors = {
        "output": _relative_error(output, torch.cat(expected, dim=2)),
        "state": _relative_error(states, expected_states),
    }
    for (name, error), limit in zip(errors.items(), LIMITS[str(dtype).removeprefix("torch.")], strict=True):
        # Not "error > limit": a NaN must not pass.
        if not error <= limit:
            raise SystemExit(f"{name} of {rows} rows in {dtype}: relative error {error:.1e} exceeds {limit:.1e}.")
    return errors


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@dataclass(frozen=True)
class CapturedRounds:
    """A graph and the rounds it was captured from, whose tensors it reads and does not keep alive by itself."""

    graph: torch.cuda.CUDAGraph
    rounds: list[Callable[[], None]]

    def replay(self) -> None:
        self.graph.replay()


def capture(rounds: list[Callable[[], None]]) -> CapturedRounds:
    """One graph that runs the given rounds one after another, each warmed up before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        rounds[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in rounds:
            run()
    return CapturedRounds(graph, rounds)


def median_times(graphs: dict[str, CapturedRounds], replays: int) -> dict[str, float]:
    """Median milliseconds of a replay; the graphs take turns, so that slow phases of the device hit all of them."""
    times = {name: [] for name in graphs}
    for _ in range(replays):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(graphs) + 1)]
        events[0].record()
        for graph, event in zip(graphs.values(), events[1:], strict=True):
            graph.replay()
            event.record()
        torch.cuda.synchronize()
        for name, (start, end) in zip(graphs, pairwise(events), strict=True):
            times[name].append(start.elapsed_time(end))
    return {name: statistics.median(values) for name, values in times.items()}


def rounds_of(shape: Shape, rows: int, part: str, state_sets: list[torch.Tensor]) -> Iterator[Callable[[], None]]:
    """A round, or one part of it, on each set of states."""
    inputs, factors = shape.rows(rows, torch.bfloat16), shape.factors(rows)
    length = torch.tensor([rows], dtype=torch.int32, device="cuda")
    verify_layers(inputs, state_sets[0], factors)

    def run(states: torch.Tensor) -> None:
        if part != "commit":
            for i in range(shape.layers):
                verify_gated_delta_rule(*(x[i] for x in inputs), states[i], factors[i], state_is_settled=i > 0)
        if part != "verify":
            commit_gated_delta_rule(states, factors, length, states_are_settled=part == "round")

    for states in state_sets:
        yield lambda states=states: run(states)


def measure_times(shape: Shape, lengths: tuple[int, ...], sets: int, replays: int) -> dict[int, dict[str, float]]:
    """Milliseconds of a round and of its two parts at each n."""
    state_sets = [shape.states() for _ in range(sets)]
    parts = ("round", "verify", "commit")
    with use_kernels("triton"):
        graphs = {
            f"{rows} {part}": capture(list(rounds_of(shape, rows, part, state_sets)))
            for rows in lengths
            for part in parts
        }
    median_times(graphs, replays=3)
    times = median_times(graphs, replays)
    return {rows: {part: times[f"{rows} {part}"] / sets for part in parts} for rows in lengths}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--commit", help="the commit measured, where the files have no git history")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "This benchmark needs a CUDA device; none was found.\n")

    torch.manual_seed(0)
    shape = Shape()
    results = []
    errors = {
        dtype: {rows: measure_errors(shape, rows, getattr(torch, dtype)) for rows in range(1, 17)} for dtype in LIMITS
    }
    floor = 3 * shape.state_bytes / BANDWIDTH * 1e3
    for rows, times in measure_times(shape, LENGTHS, sets=4, replays=arguments.replays).items():
        results.append(
            {
                "rows": rows,
                "committed": rows,
                "round_ms": round(times["round"], 4),
                "verify_ms": round(times["verify"], 4),
                "commit_ms": round(times["commit"], 4),
                "fraction_of_floor": round(floor / times["round"], 3),
            }
        )
        print(json.dumps(results[-1]))
    report = {
        "what": "GDN verify + commit, all layers, every row committed, cold L2, CUDA-graph replay, median",
        "shape": asdict(shape),
        "state_traffic_bytes": 3 * shape.state_bytes,
        "floor_ms": round(floor, 4),
        "floor_bandwidth_bytes_per_s": BANDWIDTH,
        "environment": describe_environment(arguments.commit),
        "results": results,
        "relative_errors": errors,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
