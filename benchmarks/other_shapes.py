"""The engine on the shapes of other targets: a dense Qwen3.5-27B and the layers of Qwen3-Next-80B-A3B that fit.

    python -m benchmarks.other_shapes --output benchmarks/results/other_shapes_h200.json

First every kind of layer is held against the host's, and captured rounds against the same steps one by one; then the
step of plain decoding and forwards of w rows are timed (random weights, so uniform routing; graph replay, median).

    python -m benchmarks.other_shapes --tiny --output shapes.json     (no GPU: a dry run)
"""

import argparse
import gc
import json
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel, Qwen3_5TextConfig, Qwen3NextConfig

from benchmarks.environment import BANDWIDTH, describe_environment, require_gpu
from benchmarks.forward_gate import check_layers
from benchmarks.forward_pieces import forward_bytes
from benchmarks.full_target import TINY, noisy_cache, random_target
from benchmarks.replay import Captured, medians, times_in_turn
from benchmarks.round_session import Session
from benchmarks.routed_forward import RoutedForward
from benchmarks.tile_pieces import count_distinct
from hf_hybridspec.generation.device_round import GreedyAcceptance
from hf_hybridspec.generation.round_graphs import EagerRounds
from hf_hybridspec.modeling.block_state import BlockState
from hf_hybridspec.modeling.fused_forward import FusedForward

LENGTHS = (1, 4, 8, 16)
CONTEXT, GATED_LAYERS, GATE_TOKENS = 1024, 4, 24
SHAPES: dict[str, partial[PreTrainedConfig]] = {
    "qwen3_5_27b": partial(
        Qwen3_5TextConfig, hidden_size=5120, intermediate_size=17408, num_hidden_layers=64, num_attention_heads=24,
        num_key_value_heads=4, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=48,
    ),
    # All 48 layers are 160 GB.
    "qwen3_next_80b": partial(Qwen3NextConfig, num_hidden_layers=24),
}  # fmt: skip


def config_of(shape: str, is_tiny: bool, num_layers: int | None) -> PreTrainedConfig:
    """The text config of a shape; fewer layers keep their kinds."""
    options = {} if num_layers is None else {"num_hidden_layers": num_layers}
    if is_tiny:
        options = {**TINY, "intermediate_size": 96, **options}
        if shape == "qwen3_5_27b":
            options = {name: value for name, value in options.items() if "expert" not in name and "moe" not in name}
    return SHAPES[shape](**options)


def plain_rounds(model: PreTrainedModel) -> dict:
    """Captured rounds of plain decoding against the same steps one by one, and their time."""
    session = Session(model, FusedForward(model, ()), None, CONTEXT, 256)
    seconds = session.prepare(None, GreedyAcceptance())
    captured = session.run(GATE_TOKENS)[2]
    session.prepare(None, GreedyAcceptance(), EagerRounds())
    if captured != (stepped := session.run(GATE_TOKENS)[2]):
        raise SystemExit(f"Captured rounds emit {captured}, steps one by one {stepped}.")
    session.prepare(None, GreedyAcceptance())
    times = [session.run(128)[0] / 128 for _ in range(4)][1:]
    return {
        "equal_tokens": len(captured),
        "capture_seconds": round(seconds, 2),
        "ar_ms": round(1e3 * sorted(times)[1], 4),
    }


def forwards(model: PreTrainedModel, lengths: tuple[int, ...], replays: int) -> list[dict]:
    """Milliseconds of Stage 0 and Stage 1 by number of rows, and the share of the floor."""
    forward, state = RoutedForward(model), BlockState(noisy_cache(model, CONTEXT, 64))
    device, generator = forward.weights.embedding.device, torch.Generator().manual_seed(0)
    offset = torch.zeros(1, dtype=torch.int64, device=device)
    token_ids = torch.randint(forward.weights.embedding.shape[0], (max(lengths),), generator=generator).to(device)

    def work(length: int) -> list:
        rows = forward.stage1(forward.stage0(token_ids[:length], offset, state), length, state)
        return [rows, *forward.routings]

    captured = {length: Captured(partial(work, length)) for length in lengths}
    sizes, found = forward_bytes(forward.weights, state, CONTEXT), []
    for length, milliseconds in medians(times_in_turn(captured, replays)).items():
        # Buffers of the first routing are every forward's.
        routings = captured[length].result[2:]
        distinct = float(np.mean([count_distinct(routed) for routed in routings])) if routings else 0.0
        num_bytes = sizes["fixed"] + distinct * len(forward.weights.layers) * sizes["expert"]
        floor = 1e3 * num_bytes / BANDWIDTH
        found.append(
            {
                "length": length,
                "ms": round(milliseconds, 4),
                "floor_ms": round(floor, 4),
                "distinct_experts_a_layer": round(distinct, 1),
                "fraction_of_floor": round(floor / milliseconds, 3),
            }
        )
    return found


def measure(shape: str, arguments: argparse.Namespace) -> dict:
    """Everything about one shape."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = config_of(shape, arguments.tiny, arguments.layers)
    model = random_target(config, device, dtype)
    errors = check_layers(model, min(GATED_LAYERS, config.num_hidden_layers), device)
    found = {
        "layers": config.num_hidden_layers,
        "worst_median_error": max(error.median for error in errors),
        "plain": plain_rounds(model),
    }
    return {**found, "forward": forwards(model, LENGTHS, arguments.replays)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file, written after every shape")
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="tiny sizes; runs on a CPU as well")
    parser.add_argument("--commit", help="the commit measured, where the files have no git history")
    options = parser.parse_args(arguments)
    require_gpu(parser, options.tiny)
    report: dict = {
        "what": "other shapes through the same engine, random weights, context 1024; gate first",
        "environment": describe_environment(options.commit),
        "bandwidth_bytes_per_s": BANDWIDTH,
    }
    for shape in options.shapes:
        report[shape] = measure(shape, options)
        # The next shape needs the room of this one, whose parts refer to each other.
        gc.collect()
        torch.cuda.empty_cache()
        print(shape, json.dumps(report[shape]), flush=True)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
