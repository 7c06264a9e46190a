"""The target's forward at the full shape of Qwen3.6-35B-A3B: errors first, then milliseconds by number of rows.

    python -m benchmarks.target_forward --seconds 400 --output benchmarks/results/target_forward_h200.json

Weights are random, so routing is uniform; a second measurement replaces the router's choice (which runs all the same)
by a script with U ~ 8 w^0.66. A forward is Stage 0 and Stage 1 of w rows over a cache of noise, captured as one graph;
graphs take turns, a time is the median over turns. The floor is the bytes read, with the distinct experts that were
counted, at 4.3 TB/s. Also: the step of plain decoding, each kind of launch by itself, kernels that start early,
whether a row's result depends on w, and what joining the weights costs in memory. `--tiles FILE` takes the tiles that
`tune_tiles` chose; `--variants FILE` (name -> kernel -> fields of its tile) are timed in turns with what is given.

    python -m benchmarks.target_forward --tiny --output forward.json     (no GPU: a dry run)
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.environment import BANDWIDTH, require_gpu
from benchmarks.forward_gate import check_layers, row_invariance
from benchmarks.forward_pieces import Pieces, forward_bytes
from benchmarks.full_target import model_bytes, noisy_cache, random_target, target_config
from benchmarks.phased_report import PhasedReport
from benchmarks.replay import Captured, medians, times_in_turn
from benchmarks.routed_forward import Capturer, Forward, RoutedForward
from hf_hybridspec.kernels.tiles import TILES, Tile, use_tiles
from hf_hybridspec.modeling.block_state import BlockState
from hf_hybridspec.modeling.target import text_config

LENGTHS = (1, 2, 4, 6, 8, 12, 16)
GATED_LAYERS = 4
ROUTINGS = ("uniform", "scripted")
# Launches of a forward whose overlap is turned one by one.
FORWARD_KERNELS = (
    "gated_delta_inputs", "gated_norm_linear", "norm_linear", "attention_inputs", "block_attention",
    "combine_attention", "gated_linear", "router", "choose_experts", "expert_gate_up",
    "wide_norm_linear",
)  # fmt: skip
# Those that may let the next one start before they have read their weights.
HEED_EARLY = (
    "gated_delta_inputs", "gated_norm_linear", "norm_linear", "gated_linear", "expert_gate_up",
)  # fmt: skip
# Rows that a cache has free: the step of plain decoding commits one a replay.
ROOM = 512


class Bench(PhasedReport):
    """One target on one device, and the report so far."""

    def __init__(self, arguments: argparse.Namespace):
        super().__init__(
            arguments,
            "one forward of the target (random weights): Stage 0 and Stage 1 of w rows, graph replay, median",
            bandwidth_bytes_per_s=BANDWIDTH,
            tiles={name: asdict(tile) for name, tile in arguments.tiles.items()},
        )
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.lengths = arguments.lengths

    def is_late(self) -> bool:
        return self.elapsed > self.arguments.seconds

    # --- Phases -------------------------------------------------------------------------------------------------

    def build(self) -> None:
        config = target_config(self.arguments.tiny, self.arguments.layers)
        torch.manual_seed(0)
        self.model = random_target(config, self.device, self.dtype)
        self.config = text_config(self.model)
        size, peak = model_bytes(self.model), self._relay()
        self.capturer = Capturer(self.forward, self.config)
        self.save("model", {"layers": config.num_hidden_layers, "bytes": size, "peak_over_bytes": peak})

    def _relay(self) -> float | None:
        """Joins the weights; how far beyond the model's own memory that went, as a share of it."""
        if self.device.type != "cuda":
            self.forward = RoutedForward(self.model)
            return None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        self.forward = RoutedForward(self.model)
        return round(torch.cuda.max_memory_reserved() / before - 1, 4)

    def gate(self) -> None:
        layers = min(GATED_LAYERS, self.config.num_hidden_layers)
        errors = check_layers(self.model, layers, self.device)
        worst = max(errors, key=lambda error: error.median)
        self.save("errors", {"layers": layers, "worst_median_row": asdict(worst), "checks": len(errors)})

    def forwards(self, context: int) -> None:
        """Times of every length and routing at one context."""
        state = self.state(context)
        sizes = forward_bytes(self.forward.weights, state, context)
        forwards = {
            f"{routing} {length}": self.capturer.capture(state, length, routing)
            for length in self.lengths
            for routing in ROUTINGS
        }
        times, counts = self._timed(forwards)
        found = []
        for name, milliseconds in medians(times).items():
            routing, length = name.split(" ")
            distinct = float(np.mean(counts[name]))
            num_bytes = sizes["fixed"] + distinct * self.config.num_hidden_layers * sizes["expert"]
            floor = num_bytes / BANDWIDTH * 1e3
            row = {
                "routing": routing,
                "length": int(length),
                "ms": round(milliseconds, 4),
                "distinct_experts_a_layer": round(distinct, 2),
                "gigabytes": round(num_bytes / 1e9, 3),
                "floor_ms": round(floor, 4),
                "fraction_of_floor": round(floor / milliseconds, 3),
            }
            found.append(row)
            print(f"  {json.dumps(row)}", flush=True)
        self.save(f"forward_context_{context}", found)

    def _timed(self, forwards: dict[str, Forward]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
        """Milliseconds and distinct experts of each turn; every turn draws anew."""
        counts: dict[str, list[float]] = {name: [] for name in forwards}

        def draw(turn: int) -> None:
            for name, forward in forwards.items():
                if turn:
                    counts[name].append(forward.count())
                forward.draw(turn)

        works = {name: forward.captured for name, forward in forwards.items()}
        times = times_in_turn(works, self.arguments.replays, draw)
        for name, forward in forwards.items():
            counts[name].append(forward.count())
        return times, counts

    def decoding_step(self, context: int) -> None:
        """Plain decoding: one row, its argmax as the next token, and its commit."""
        state = self.state(context)
        token, offset = self.capturer.tokens(1, 0), self.capturer.offset()
        one = torch.ones(1, dtype=torch.int32, device=self.device)

        def step() -> torch.Tensor:
            rows = self.forward.stage1(self.forward.stage0(token, offset, state), 1, state)
            token.copy_(rows.logits.argmax(dim=-1))
            state.commit(one)
            return token

        captured = Captured(step)
        sizes = forward_bytes(self.forward.weights, state, context)
        milliseconds = medians(times_in_turn({"step": captured}, self.arguments.replays))["step"]
        experts = self.config.num_hidden_layers * self.config.num_experts_per_tok
        floor = (sizes["fixed"] + experts * sizes["expert"]) / BANDWIDTH * 1e3
        found = {"ar_ms": round(milliseconds, 4), "floor_ms": round(floor, 4)}
        self.save(f"ar_context_{context}", {**found, "ar_fraction_of_floor": round(floor / milliseconds, 3)})

    def pieces(self, context: int, length: int) -> None:
        """Each kind of launch by itself, with scripted routing; their sum leaves out what lies between kinds."""
        state = self.state(context)
        pieces = Pieces(self.forward.weights, state, length, self.capturer.assignments(length, 0))
        works = {name: Captured(work) for name, work in pieces.works().items()}
        times = medians(times_in_turn(works, self.arguments.replays))
        found = {}
        for name, milliseconds in times.items():
            launches = len(pieces.calls[name])
            each = round(1e3 * milliseconds / launches, 2)
            found[name] = {"ms": round(milliseconds, 4), "launches": launches, "us_each": each}
        self.save(f"pieces_length_{length}", {**found, "sum_ms": round(sum(times.values()), 4)})

    def variants(self, context: int) -> None:
        """Forwards by tile: those of `--variants`, and kernels that start earlier or later.

        When a kernel starts changes no bits; another order of a sum does.
        """
        state, found = self.state(context), {"other_bits": []}
        tiles = {**TILES, **self.arguments.tiles}
        variants = {"as given": {}}
        for variant, changed in self.arguments.variants.items():
            variants[variant] = {name: replace(tiles[name], **fields) for name, fields in changed.items()}
        if self.arguments.overlaps:
            variants |= _overlap_variants(tiles, self.arguments.tiny)
        # Nothing to compare: nothing to do.
        for length in self.lengths if len(variants) > 1 else ():
            forwards = {}
            for variant, chosen in variants.items():
                with use_tiles(chosen):
                    forwards[variant] = self.capturer.capture(state, length, "scripted")
            times, _ = self._timed(forwards)
            logits = {variant: forward.captured.result[0].logits for variant, forward in forwards.items()}
            found[str(length)] = {variant: round(ms, 4) for variant, ms in medians(times).items()}
            is_other = {variant: not torch.equal(rows, logits["as given"]) for variant, rows in logits.items()}
            found["other_bits"] += [f"{variant}, length {length}" for variant in logits if is_other[variant]]
            self.save("variants", found)

    def invariance(self) -> None:
        self.save("rows_against_16_rows", row_invariance(self.forward, self.model, self.device))

    # --- Parts --------------------------------------------------------------------------------------------------

    def state(self, context: int) -> BlockState:
        return BlockState(noisy_cache(self.model, context, ROOM))


def _overlap_variants(tiles: dict[str, Tile], is_tiny: bool) -> dict[str, dict[str, Tile]]:
    """Name of a variant -> the tiles that it changes."""
    variants = {"none": {name: replace(tile, overlaps=False) for name, tile in tiles.items()}}
    for steps in (0, 1, 4):
        early = {name: replace(tile, overlaps=True, prefetch=steps) for name, tile in tiles.items()}
        variants[f"all, prefetch {steps}"] = early
    for name in () if is_tiny else FORWARD_KERNELS:
        tile = tiles[name]
        variants[f"{name} {'not' if tile.overlaps else 'too'}"] = {name: replace(tile, overlaps=not tile.overlaps)}
    for name in () if is_tiny else HEED_EARLY:
        variants[f"early {name}"] = {name: replace(tiles[name], next_starts_early=True)}
    variants["early all"] = {name: replace(tiles[name], next_starts_early=True) for name in HEED_EARLY}
    return variants


def run(bench: Bench) -> None:
    """All phases, in the order of what matters; those for which no time is left are skipped."""
    contexts = bench.arguments.contexts
    bench.build()
    bench.gate()
    phases: list[Callable[[], None]] = [
        lambda: bench.decoding_step(contexts[0]),
        lambda: bench.forwards(contexts[0]),
        lambda: bench.pieces(contexts[0], 1),
        lambda: bench.pieces(contexts[0], 6),
        lambda: bench.variants(contexts[0]),
        *(lambda context=context: bench.decoding_step(context) for context in contexts[1:]),
        *(lambda context=context: bench.forwards(context) for context in contexts[1:]),
        bench.invariance,
    ]
    skipped = 0
    for phase in phases:
        if bench.is_late():
            skipped += 1
        else:
            phase()
    bench.save("skipped_phases", skipped)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--seconds", type=float, default=400, help="no phase begins after so many seconds")
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048], help="tokens in the cache, such as 32768")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="rows of a forward")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--layers", type=int, help="fewer layers than the target has")
    parser.add_argument("--tiles", type=_read_tiles, default={}, help="JSON file of tune_tiles")
    parser.add_argument("--variants", type=_read_json, default={}, help="JSON file of other tiles to time")
    parser.add_argument("--overlaps", action="store_true", help="also time kernels that start earlier or later")
    parser.add_argument("--tiny", action="store_true", help="a tiny target; runs on a CPU as well")
    parser.add_argument("--commit", help="the commit measured, where the files have no git history")
    arguments = parser.parse_args()
    require_gpu(parser, arguments.tiny)
    with use_tiles(arguments.tiles):
        run(Bench(arguments))


def _read_json(path: str) -> dict:
    return json.loads(Path(path).read_text())


def _read_tiles(path: str) -> dict[str, Tile]:
    return {name: Tile(**fields) for name, fields in _read_json(path)["chosen"].items()}


if __name__ == "__main__":
    main()
