"""Attention of block rows over a long cache: errors first, then microseconds per layer and the fraction of the floor.

    python -m benchmarks.block_attention --output benchmarks/results/block_attention_h200.json
    python -m benchmarks.block_attention --tiles --output attention_tiles.json                      (a minute)

Layers have the shape of Qwen3.6-35B-A3B. Each part is one CUDA graph that walks through several layers' caches, so
that keys come from device memory; graphs are replayed in turn, a time is the median over replays. The floor is the
traffic of the keys and values at the bandwidth of a large read. PyTorch's own attention on the sliced cache, which
needs the length on the CPU, runs beside it. `--tiles` tries other tiles, each checked for errors and for rows that
depend on others. `--tiny` runs everything once on any device, without times.
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
from hf_hybridspec.kernels.tiles import TILES, Tile, use_tiles

# Caches that one graph reads before it meets the same ones again: several times the 50 MB of an H200's L2 cache.
COLD_BYTES = 150e6
# Largest relative Frobenius error against fp32: probabilities and outputs are rounded to bf16.
LIMIT = 5e-3


@dataclass(frozen=True)
class Shape:
    """Attention layers, rows and the cache of one measurement."""

    queries: int = 16
    heads: int = 2
    size: int = 256
    rotary: int = 64
    context: int = 2048
    rows: int = 4
    most_layers: int = 48

    @property
    def cache_bytes(self) -> int:
        return 2 * 2 * self.heads * self.size * (self.context + self.rows)

    @property
    def layers(self) -> int:
        """So many that their caches do not stay on the chip."""
        return min(self.most_layers, 1 + int(COLD_BYTES / self.cache_bytes))


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

    def prepare_and_attend(self, layer: int) -> torch.Tensor:
        """As a layer runs them, so that both overlap."""
        self.prepare(layer)
        return self.attend(layer)

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


def check_rows(inputs: Inputs) -> None:
    """SystemExit if the first row depends on the rows after it."""
    together = inputs.attend(0)[:1]
    rest = inputs.query
    inputs.query = rest[:1]
    alone = inputs.attend(0)
    inputs.query = rest
    if not torch.equal(alone, together):
        raise SystemExit(f"{inputs.shape}: the first row depends on the rows after it.")


def times_of(inputs: Inputs, parts: dict[str, Callable[[Inputs, int], object]], replays: int) -> dict[str, float]:
    """Microseconds of each part per layer, their graphs replayed in turn."""
    graphs = {
        name: capture([partial(run, inputs, layer) for layer in range(inputs.shape.layers)])
        for name, run in parts.items()
    }
    median_times(graphs, replays=3)
    return {name: ms * 1e3 / inputs.shape.layers for name, ms in median_times(graphs, replays).items()}


def measure(shapes: list[Shape], replays: int) -> list[dict]:
    """One record per shape: microseconds per layer of both steps, alone and together, and of PyTorch's attention."""
    records = []
    for shape in shapes:
        inputs = Inputs(shape, "cuda")
        error = check(inputs)
        times = times_of(
            inputs,
            {
                "inputs": Inputs.prepare,
                "attention": Inputs.attend,
                "both": Inputs.prepare_and_attend,
                "torch": Inputs.attend_with_torch,
            },
            replays,
        )
        floor = shape.cache_bytes / BANDWIDTH * 1e6
        records.append(
            asdict(shape)
            | {f"{name}_us": round(time, 2) for name, time in times.items()}
            | {"floor_us": round(floor, 2), "fraction_of_floor": round(floor / times["attention"], 3), "error": error}
        )
        print(json.dumps(records[-1]), flush=True)
    return records


def tile_variants() -> list[dict[str, Tile]]:
    """The table's tiles, then one of them changed at a time."""
    attention, combination = TILES["block_attention"], TILES["combine_attention"]
    attentions = (
        {"block_k": 64}, {"block_k": 128}, {"num_stages": 2}, {"prefetch": 0}, {"block_n": 16, "block_k": 16},
    )  # fmt: skip
    combinations = ((32, 1), (32, 2), (64, 4))
    return [
        {},
        *({"block_attention": replace(attention, **change)} for change in attentions),
        *({"combine_attention": replace(combination, block_n=size, num_warps=warps)} for size, warps in combinations),
        {"attention_inputs": replace(TILES["attention_inputs"], num_warps=2)},
    ]


def measure_tiles(shapes: list[Shape], replays: int) -> list[dict]:
    """One record per variant and shape; a variant with wrong results ends the run."""
    records = []
    for shape in shapes:
        inputs = Inputs(shape, "cuda")
        for tiles in tile_variants():
            with use_tiles(tiles):
                error = check(inputs)
                check_rows(inputs)
                times = times_of(inputs, {"attention": Inputs.attend, "both": Inputs.prepare_and_attend}, replays)
            records.append(
                {"context": shape.context, "rows": shape.rows}
                | {f"{name}_us": round(time, 2) for name, time in times.items()}
                | {"error": error, "tiles": {name: asdict(tile) for name, tile in tiles.items()}}
            )
            print(json.dumps(records[-1]), flush=True)
    return records


def check_tiny() -> None:
    """One small shape with every tile, whichever device there is."""
    shape = Shape(4, 2, 32, 8, context=300, rows=3, most_layers=2)
    inputs = Inputs(shape, "cuda" if torch.cuda.is_available() else "cpu")
    inputs.prepare_and_attend(0)
    inputs.attend_with_torch(0)
    for tiles in tile_variants():
        with use_tiles(tiles):
            check_rows(inputs)
            print(f"relative error {check(inputs):.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--tiles", action="store_true", help="other tiles at a few shapes, instead of all shapes")
    parser.add_argument("--commit", help="the commit measured, where the files have no git history")
    parser.add_argument("--tiny", action="store_true", help="one small shape, checked and not timed")
    arguments = parser.parse_args()
    if arguments.tiny:
        check_tiny()
        return
    require_gpu(parser, False)
    report = {
        "what": "attention of block rows, per layer, cold keys, CUDA-graph replay, median",
        "floor_bandwidth_bytes_per_s": BANDWIDTH,
        "tiles": {name: asdict(tile) for name, tile in TILES.items() if "attention" in name},
        "environment": describe_environment(arguments.commit),
    }
    contexts, rows = ((1024, 2048, 32768), (1, 6)) if arguments.tiles else ((256, 2048, 8192, 32768), (1, 4, 8, 16))
    run = measure_tiles if arguments.tiles else measure
    report["results"] = run([Shape(context=context, rows=n) for context in contexts for n in rows], arguments.replays)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
