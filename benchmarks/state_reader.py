"""ReaDy's state reader at the paper's shape: 2 layers x 48 heads of 128 x 128, rank 8, seven rows, hidden 5120.

    python -m benchmarks.state_reader --results benchmarks/results/ready_summary.json

Results are checked against the reference first. Every variant is timed in a replayed CUDA graph, as a round runs it,
and launched eagerly; variants are interleaved, times are medians. The states of successive calls lie in different
memory, so that they come from DRAM and not from the L2 cache.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.environment import describe_environment
from hf_hybridspec.bench.results_file import update_results
from hf_hybridspec.kernels.dispatch import use_kernels
from hf_hybridspec.kernels.state_reader import gather_states, project_states, read_projected_states

LAYERS, HEADS, SIZE, RANK, ROWS, HIDDEN, WIDTH = 2, 48, 128, 8, 7, 5120, 32
STACK = 48
BYTES = LAYERS * HEADS * SIZE * SIZE * 4
PAPER = {"gather_us": 4.622, "reader_us": 47.094, "gather_unfused_us": 16.388, "reader_unfused_us": 65.519}


@dataclass(frozen=True)
class Weights:
    """A reader's parameters, bf16."""

    query: Tensor
    key: Tensor
    value: Tensor
    down: Tensor
    up: Tensor


def make_weights() -> Weights:
    states = LAYERS * HEADS

    def draw(*shape: int, fan_in: int) -> Tensor:
        return (torch.randn(*shape, device="cuda") * fan_in**-0.5).bfloat16()

    return Weights(
        draw(states, RANK, HIDDEN, fan_in=HIDDEN),
        draw(states, RANK, SIZE, fan_in=RANK),
        draw(states, SIZE, RANK, fan_in=SIZE),
        draw(WIDTH, states * (RANK + 1), fan_in=states * (RANK + 1)),
        draw(HIDDEN, WIDTH, fan_in=WIDTH),
    )


def fused_reader(states: Tensor, hidden: Tensor, weights: Weights) -> Tensor:
    """As `StateReader.forward` with our kernels."""
    features = read_projected_states(project_states(states, weights.value, weights.key), hidden, weights.query)
    return update(features, hidden, weights)


def update(features: Tensor, hidden: Tensor, weights: Weights) -> Tensor:
    """What follows the features; PyTorch's own kernels in both readers."""
    return hidden + F.linear(F.silu(F.linear(features.to(hidden.dtype), weights.down)), weights.up)


def eager_reader(states: Tensor, hidden: Tensor, weights: Weights) -> Tensor:
    """The formulas one operation after another, rows in bf16 and states in fp32, nothing cast twice."""
    mean_square = states.square().mean((-2, -1)) + 1e-6
    normalised = (states * mean_square.rsqrt()[..., None, None]).bfloat16()
    projected = weights.value.mT @ normalised[0].mT
    narrow = torch.einsum("jrd,bd->jbr", weights.query, hidden[0])
    reads = (narrow @ weights.key) @ projected.mT
    log_rms = (0.5 * mean_square.log()).to(hidden.dtype)[0, :, None, None].expand(-1, ROWS, 1)
    return update(torch.cat((reads, log_rms), -1).transpose(0, 1).flatten(1)[None], hidden, weights)


def eager_gather(stack: Tensor, layers: Tensor, out: Tensor) -> None:
    """The selected layers taken out of the stack, then laid side by side in the buffer."""
    out.copy_(torch.cat(list(stack.index_select(0, layers)), dim=1))


def as_graph(calls: list[Callable[[], object]]) -> Callable[[], None]:
    """All calls in one graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def microseconds(run: Callable[[], None], calls: int) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return 1000 * start.elapsed_time(stop) / calls


def interleaved(variants: dict[str, Callable[[], None]], calls: int, repeats: int) -> dict[str, float]:
    """Median microseconds a call of every variant, run in turn."""
    times = {name: [] for name in variants}
    for _ in range(repeats):
        for name, run in variants.items():
            times[name].append(microseconds(run, calls))
    return {name: statistics.median(values) for name, values in times.items()}


def check(stack: Tensor, layers: Tensor, hidden: Tensor, weights: Weights) -> None:
    """Raises AssertionError unless fused, eager and reference agree."""
    out = torch.empty(1, LAYERS * HEADS, SIZE, SIZE, device="cuda")
    gather_states(stack, layers, out)
    expected = torch.cat([stack[int(layer)] for layer in layers], dim=1)
    assert torch.equal(out, expected)
    eager_gather(stack, layers, out.zero_())
    assert torch.equal(out, expected)
    with use_kernels("reference"):
        reference = fused_reader(out, hidden, weights)
    for reader in (fused_reader, eager_reader):
        # Rows cancel in places: errors are measured against the whole, bf16 rounds each step by up to 0.004.
        error = (reader(out, hidden, weights).float() - reference.float()).norm() / reference.float().norm()
        assert error < 0.02, f"{reader.__name__} differs from the reference by {error:.4f} of its norm"


@torch.no_grad()
def measure(copies: int, repeats: int) -> dict[str, dict[str, float]]:
    """{"graph", "eager"} -> microseconds of each variant."""
    torch.manual_seed(0)
    weights = make_weights()
    layers = torch.tensor([STACK // 2 - 2, STACK - 2], device="cuda")
    stacks = [torch.randn(STACK, 1, HEADS, SIZE, SIZE, device="cuda") for _ in range(copies)]
    outs = [torch.randn(1, LAYERS * HEADS, SIZE, SIZE, device="cuda") for _ in range(copies)]
    hidden = torch.randn(1, ROWS, HIDDEN, device="cuda").bfloat16()
    check(stacks[0], layers, hidden, weights)
    projected = [project_states(out, weights.value, weights.key) for out in outs]
    features = read_projected_states(projected[0], hidden, weights.query)
    calls = {
        "gather": [lambda s=s, o=o: gather_states(s, layers, o) for s, o in zip(stacks, outs, strict=True)],
        "gather_eager": [lambda s=s, o=o: eager_gather(s, layers, o) for s, o in zip(stacks, outs, strict=True)],
        "reader": [lambda o=o: fused_reader(o, hidden, weights) for o in outs],
        "reader_eager": [lambda o=o: eager_reader(o, hidden, weights) for o in outs],
        "reader_project": [lambda o=o: project_states(o, weights.value, weights.key) for o in outs],
        "reader_read": [lambda p=p: read_projected_states(p, hidden, weights.query) for p in projected],
        "reader_update": [lambda: update(features, hidden, weights) for _ in outs],
    }

    def in_turn(parts: list[Callable[[], object]]) -> Callable[[], None]:
        return lambda: [part() for part in parts]

    graphs = {name: as_graph(parts) for name, parts in calls.items()}
    eager = {name: in_turn(parts) for name, parts in calls.items()}
    return {
        "graph": interleaved(graphs, copies, repeats),
        "eager": interleaved(eager, copies, repeats),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, required=True, help="JSON file; other keys in it are kept")
    parser.add_argument("--copies", type=int, default=24, help="sets of states; together larger than the L2 cache")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--commit", help="the commit measured, where the files have no git history")
    options = parser.parse_args(arguments)
    times = measure(options.copies, options.repeats)
    graph = times["graph"]
    bandwidth = {"gather_gb_per_s": round(2 * BYTES / graph["gather"] / 1000, 1)}
    environment = describe_environment(options.commit)
    values = {
        "gather_us": round(graph["gather"], 3),
        "gather_speedup": round(graph["gather_eager"] / graph["gather"], 3),
        "reader_us": round(graph["reader"], 3),
        "reader_speedup": round(graph["reader_eager"] / graph["reader"], 3),
        "state_reader": {"microseconds": times, "paper": PAPER, "environment": environment} | bandwidth,
    }
    update_results(options.results, values, environment["gpu"], str(environment["commit"]))
    print(json.dumps(values, indent=1))


if __name__ == "__main__":
    main()
