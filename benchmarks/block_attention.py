"""Attention of block rows over a long cache: errors first, then microseconds per layer and the fraction of the floor.

    python -m benchmarks.block_attention --output benchmarks/results/block_attention_h200.json

Layers have the shape of Qwen3.6-35B-A3B. Each variant is one CUDA graph that walks through several layers' caches, so
that keys come from device memory; graphs are replayed in turn, a time is the median over replays. The floor is the
traffic of the keys and values at the bandwidth of a large read. PyTorch's own attention on the sliced cache, which
needs the length on the CPU, runs beside it. `--tiny` runs everything once on any device, without times.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional as F

from benchmarks.environment import BANDWIDTH, describe_environment, require_gpu
from benchmarks.gated_delta_rule import capture, median_times
from hf_hybridspec.kernels.block_attention import HeadNorms, attention_inputs, block_attention
from hf_hybridspec.kernels.dispatch import use_kernels
from hf_hybridspec.kernels.tiles import tile_of, use_tiles

# Largest relative Frobenius error against fp32: probabilities and outputs are rounded to bf16.
LIMIT = 5e-3


@dataclass(frozen=True)
class Shape:
    """Attention layers, rows and the cache of one measurement."""

    queries: int = 16
    heads: int = 2
    size: int = 256
    rotary: int = 64
    layers: int = 4
    context: int = 2048
    rows: int = 4

    @property
    def cache_bytes(self) -> int:
        return 2 * 2 * self.heads * self.size * (self.context + self.rows)


class Inputs:
    """Random tensors of one shape; `committed` rows are in use."""

    def __init__(self, shape: Shape, device: str):
        generator = torch.Generator(device).manual_seed(0)

        def random(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, generator=generator, device=device).to(torch.bfloat16)

        self.shape = shape
        self.caches = random(shape.layers, 2, shape.heads, shape.context + 16, shape.size)
        self.query = random(shape.rows, shape.queries, shape.size)
        self.projected = random(shape.rows, 2 * (shape.queries + shape.heads) * shape.size)
        self.cos, self.sin = random(2, shape.rows, shape.rotary)
        self.norms = HeadNorms(*torch.ones(2, shape.size, device=device), is_gated=True)
        self.committed = torch.tensor([shape.context], dtype=torch.int32, device=device)

    def attend(self, layer: int) -> torch.Tensor:
        keys, values = self.caches[layer]
        return block_attention(self.query, keys, values, self.committed, self.shape.size**-0.5)

    def prepare(self, layer: int) -> None:
        keys, values = self.caches[layer]
        attention_inputs(self.projected, self.norms, self.cos, self.sin, keys, values, self.committed, 1e-6)

    def attend_with_torch(self, layer: int) -> torch.Tensor:
        length, shape = self.shape.context + self.shape.rows, self.shape
        keys, values = self.caches[layer, :, None, :, :length]
        rows = torch.arange(shape.rows, device=keys.device)[:, None] + shape.context
        mask = torch.arange(length, device=keys.device) <= rows
        return F.scaled_dot_product_attention(
            self.query.transpose(0, 1)[None], keys, values, attn_mask=mask, enable_gqa=True
        )


def check(inputs: Inputs) -> float:
    """Relative error of the attention against fp32; SystemExit if it is too large."""
    output = inputs.attend(0).double()
    keys, values = inputs.caches[0].float()
    with use_kernels("reference"):
        expected = block_attention(
            inputs.query.float(), keys, values, inputs.committed, inputs.shape.size**-0.5
        ).double()
    error = ((output - expected).norm() / expected.norm()).item()
    # Not "error > LIMIT": a NaN must not pass.
    if not error <= LIMIT:
        raise SystemExit(f"{inputs.shape}: relative error {error:.1e} exceeds {LIMIT:.1e}.")
    return error


def measure(shapes: list[Shape], replays: int) -> list[dict]:
    """One record per shape: microseconds per layer of both steps and of PyTorch's attention."""
    parts: dict[str, Callable[[Inputs, int], object]] = {
        "inputs": Inputs.prepare,
        "attention": Inputs.attend,
        "torch": Inputs.attend_with_torch,
    }
    records = []
    for shape in shapes:
        inputs = Inputs(shape, "cuda")
        error = check(inputs)
        graphs = {
            name: capture([partial(run, inputs, layer) for layer in range(shape.layers)])
            for name, run in parts.items()
        }
        median_times(graphs, replays=3)
        times = {name: ms * 1e3 / shape.layers for name, ms in median_times(graphs, replays).items()}
        floor = shape.cache_bytes / BANDWIDTH * 1e6
        records.append(
            asdict(shape)
            | {f"{name}_us": round(time, 2) for name, time in times.items()}
            | {"floor_us": round(floor, 2), "fraction_of_floor": round(floor / times["attention"], 3), "error": error}
        )
        print(json.dumps(records[-1]), flush=True)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--chunk", type=int, help="keys of one chunk, instead of the table's")
    parser.add_argument("--overlap", action="store_true", help="kernels start while the one before them ends")
    parser.add_argument("--commit", help="the commit measured, where the files have no git history")
    parser.add_argument("--tiny", action="store_true", help="one small shape, checked and not timed")
    arguments = parser.parse_args()
    if arguments.tiny:
        inputs = Inputs(Shape(4, 2, 32, 8, layers=2, context=300), "cuda" if torch.cuda.is_available() else "cpu")
        inputs.prepare(0)
        inputs.attend_with_torch(0)
        print(f"relative error {check(inputs):.1e}")
        return
    require_gpu(parser, False)
    tiles = {
        name: replace(tile_of(name), overlaps=arguments.overlap)
        for name in ("attention_inputs", "block_attention", "combine_attention")
    }
    if arguments.chunk:
        tiles["block_attention"] = replace(tiles["block_attention"], block_k=arguments.chunk)
    shapes = [Shape(context=context, rows=n) for context in (256, 2048, 8192, 32768) for n in (1, 4, 8, 16)]
    report = {
        "what": "attention of block rows, per layer, cold keys, CUDA-graph replay, median",
        "floor_bandwidth_bytes_per_s": BANDWIDTH,
        "tiles": {name: asdict(tile) for name, tile in tiles.items()},
        "environment": describe_environment(arguments.commit),
    }
    with use_tiles(tiles):
        report["results"] = measure(shapes, arguments.replays)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
