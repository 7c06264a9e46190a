"""Verification and commit of all GDN layers of Qwen3.6-35B-A3B beside other engines: errors first, then milliseconds.

    python -m benchmarks.gated_delta_rule --peers FOLDER --output benchmarks/results/gated_delta_rule_h200.json

A round verifies n rows in each of 30 layers and commits all n (the costliest case). Rounds are captured into one CUDA
graph per n, which walks through several sets of states, so that every state comes from device memory. As in a forward,
a layer may fetch its state while the kernel before it ends, but reads rows only when it has ended. The graphs of all n
are replayed in turn; a time is the median over replays, divided by the rounds in a graph. The floor is the traffic of
the states at the bandwidth of a large read: once by verify, in and out by commit.

FOLDER holds sglang 0.5.23 and fla-core 0.6.0 (`pip download --no-deps`, unpacked). Their rounds take turns with ours
in the same process, on the same states, and are held against the recurrence too; one that is wrong is not compared.
`--tiny` takes a small shape, and runs without peers on a CPU too, through Triton's interpreter (TRITON_INTERPRET=1).
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.environment import BANDWIDTH, describe_environment, require_gpu
from benchmarks.gated_delta_comparison import Comparison, Work, verdict
from benchmarks.gated_delta_layers import DEVICE, LayerRows, Shape, recurrence, relative_error, verify_layers
from benchmarks.peer_kernels import PeerKernels, load_peers
from benchmarks.replay import Captured, medians, times_in_turn
from hf_hybridspec.kernels.dispatch import use_kernels
from hf_hybridspec.kernels.gated_delta_rule import CompactFactors, commit_gated_delta_rule

LENGTHS = (2, 3, 4, 6, 8, 12, 16)
PARTS = ("round", "verify", "commit")
# Sets of states that the rounds of a graph take in turn: each has left the cache before it is read again.
SETS = 4
TINY = Shape(layers=2, num_k_heads=1, num_v_heads=2, k_dim=32, v_dim=32)
# Relative Frobenius error of (outputs, committed state) against an fp32 recurrence.
LIMITS = {torch.bfloat16: (4.3e-3, 1.7e-3), torch.float32: (1e-4, 1e-6)}


def measure_errors(shape: Shape, rows: int, dtype: torch.dtype) -> dict[str, float]:
    """Relative error of outputs and committed states; SystemExit where one exceeds its limit."""
    inputs, states = shape.rows(rows, dtype), shape.states()
    expected_states = states.clone()
    expected = recurrence(shape, inputs, expected_states)
    with use_kernels("triton"):
        factors = shape.factors(rows)
        output = torch.stack(verify_layers(inputs, states, factors))
        commit_gated_delta_rule(states, factors, _length(rows))
    errors = {"output": relative_error(output, expected), "state": relative_error(states, expected_states)}
    for (name, error), limit in zip(errors.items(), LIMITS[dtype], strict=True):
        # Not "error > limit": a NaN must not pass.
        if not error <= limit:
            raise SystemExit(f"{name} of {rows} rows in {dtype}: relative error {error:.1e} exceeds {limit:.1e}.")
    return errors


def _length(rows: int) -> torch.Tensor:
    return torch.tensor([rows], dtype=torch.int32, device=DEVICE)


def capture(rounds: list[Callable[[], object]]) -> Captured:
    """One graph that runs the given rounds one after another."""
    return Captured(lambda: [run() for run in rounds])


def median_times(graphs: dict[str, Captured], replays: int) -> dict[str, float]:
    """Median milliseconds of a replay, all graphs in turn."""
    return medians(times_in_turn(graphs, replays))


def run_part(
    part: str, inputs: LayerRows, factors: CompactFactors, length: torch.Tensor, states: torch.Tensor
) -> None:
    """A round of ours, or one part of it."""
    if part != "commit":
        verify_layers(inputs, states, factors)
    if part != "verify":
        commit_gated_delta_rule(states, factors, length, states_are_settled=part == "round")


def own_work(shape: Shape, rows: int, dtype: torch.dtype, part: str, state_sets: list[torch.Tensor]) -> Work:
    """Captured rounds of ours, or of one part, on every set of states."""
    inputs, factors = shape.rows(rows, dtype), shape.factors(rows)
    verify_layers(inputs, state_sets[0], factors)
    run = partial(run_part, part, inputs, factors, _length(rows))
    return Work(capture([partial(run, states) for states in state_sets]), len(state_sets))


def compile_share(share: int, workers: int, folder: Path | None, lengths: tuple[int, ...]) -> None:
    """Runs every `workers`-th kernel once on two layers, which leaves it in Triton's cache for the other processes."""
    shape = Shape(layers=2)
    states = shape.states()
    jobs: list[Callable[[], object]] = []
    for dtype, rows in product(LIMITS, range(16, 0, -1)):
        run = partial(run_part, "round", shape.rows(rows, dtype), shape.factors(rows), _length(rows))
        jobs.append(partial(run, states))
    jobs.append(lambda: commit_gated_delta_rule(states, shape.factors(16), _length(0)))
    kernels = folder and load_peers(folder)
    if isinstance(kernels, PeerKernels):
        comparison = Comparison(kernels, shape, lengths, torch.bfloat16)
        for rows in sorted(lengths, reverse=True):
            inputs = shape.rows(rows, torch.bfloat16)
            jobs += [partial(peer.bind(states), inputs) for _, peer in comparison.peers(rows)]
            # Other numbers of rows share the kernels of the next of these.
            if rows in (4, 8, 16):
                jobs += [partial(peer.bind(states), inputs) for peer in comparison.candidates(rows)]
    with use_kernels("triton"):
        for job in jobs[share::workers]:
            job()


def compile_ahead(workers: int, folder: Path | None, lengths: tuple[int, ...]) -> None:
    """All kernels by so many processes: one after another they would take minutes."""
    with get_context("spawn").Pool(workers) as pool:
        pool.map(partial(compile_share, workers=workers, folder=folder, lengths=lengths), range(workers))


def measure_times(
    shape: Shape,
    lengths: tuple[int, ...],
    dtype: torch.dtype,
    state_sets: list[torch.Tensor],
    replays: int,
    comparison: Comparison | None,
) -> dict[int, dict[str, float]]:
    """Milliseconds at each n of a round of ours and of its two parts, and of a round of every peer."""
    works = {f"{rows} {part}": own_work(shape, rows, dtype, part, state_sets) for rows in lengths for part in PARTS}
    if comparison is not None:
        works |= comparison.works(state_sets)
    captured = {name: work.captured for name, work in works.items()}
    median_times(captured, replays=3)
    times: dict[int, dict[str, float]] = {rows: {} for rows in lengths}
    for name, ms in median_times(captured, replays).items():
        rows, part = name.split()
        times[int(rows)][part] = ms / works[name].num_rounds
    return times


def measure(arguments: argparse.Namespace) -> dict:
    """The report, without what it was measured on."""
    shape, lengths = (TINY if arguments.tiny else Shape()), tuple(arguments.lengths)
    dtypes = tuple(LIMITS) if DEVICE == "cuda" else (torch.float32,)
    dtype, floor = dtypes[0], 3 * shape.state_bytes / BANDWIDTH * 1e3
    kernels = find_peers(arguments.peers)
    if arguments.workers > 1 and DEVICE == "cuda":
        compile_ahead(arguments.workers, arguments.peers if isinstance(kernels, PeerKernels) else None, lengths)
    report: dict = {
        "what": "GDN verify + commit, all layers, every row committed, cold L2, CUDA-graph replay, median",
        "shape": asdict(shape),
        "state_traffic_bytes": 3 * shape.state_bytes,
        "floor_ms": round(floor, 4),
        "floor_bandwidth_bytes_per_s": BANDWIDTH,
        "relative_errors": {
            _name(dtype): {rows: measure_errors(shape, rows, dtype) for rows in range(1, 17)} for dtype in dtypes
        },
        "results": [],
    }
    state_sets = [shape.states() for _ in range(SETS)]
    comparison, peer_errors = None, {}
    if isinstance(kernels, PeerKernels):
        comparison = Comparison(kernels, shape, lengths, dtype)
        comparison.tune(state_sets, replays=max(3, arguments.replays // 5))
        peer_errors = comparison.errors()
        report["peers"] = {
            "versions": kernels.versions,
            "launches_tuned": comparison.launches,
            "relative_errors": peer_errors,
        }
    else:
        report["peers_skipped"] = kernels
    for rows, times in measure_times(shape, lengths, dtype, state_sets, arguments.replays, comparison).items():
        record = {"rows": rows, "committed": rows} | {f"{part}_ms": round(times.pop(part), 4) for part in PARTS}
        record["fraction_of_floor"] = round(floor / record["round_ms"], 3)
        if comparison is not None:
            record |= verdict(record["round_ms"], times, {name: peer_errors[name][rows] for name in times})
        print(json.dumps(record), flush=True)
        report["results"].append(record)
    return report


def find_peers(folder: Path | None) -> PeerKernels | str:
    """The peers' kernels, or why there are none."""
    if folder is None:
        return "no folder of peers was given (--peers FOLDER)."
    if DEVICE == "cpu":
        return "the peers need a CUDA device."
    return load_peers(folder)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--peers", type=Path, help="folder with the files of sglang 0.5.23 and fla-core 0.6.0")
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="numbers of rows")
    parser.add_argument(
        "--workers", type=int, default=1, help="processes that compile ahead; more than 1 on a GPU only"
    )
    parser.add_argument("--tiny", action="store_true", help="a small shape; runs on a CPU as well")
    parser.add_argument("--commit", help="the commit measured, where the files have no git history")
    arguments = parser.parse_args()
    require_gpu(parser, arguments.tiny)
    torch.manual_seed(0)
    with use_kernels("triton"):
        report = measure(arguments)
    report["environment"] = describe_environment(arguments.commit)
    if "peers_skipped" in report:
        print(f"Not compared: {report['peers_skipped']}", file=sys.stderr)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
