"""Variants of the GDN kernels in turns: errors against the fp32 recurrence first, then microseconds of all layers.

    git show 2b16362:hf_hybridspec/kernels/gated_delta_rule_triton.py > OLD.py
    python -m benchmarks.gated_delta_variants --beside OLD.py --workers 14 --output VARIANTS.json

A variant is a tile and a precision of verification, or a tile of the commit; `--beside` adds a file of the same
kernels at another commit. Each is verified and committed once at 2, 8, 12 and 16 rows, on random keys and on keys
nearly alike, and dropped at lengths where it exceeds its limit; the rest are captured as in `gated_delta_rule.py` and
replayed in turn. A verification is timed by itself and as part of a round, a commit by itself. `--tiny` takes a small
shape and runs without a GPU, through Triton's interpreter (TRITON_INTERPRET=1).
"""

import argparse
import importlib.util
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType

import torch

from benchmarks.environment import describe_environment, require_gpu
from benchmarks.gated_delta_layers import DEVICE, LayerRows, Shape, recurrence, relative_error, verify_layers
from benchmarks.gated_delta_rule import LIMITS, TINY, capture, median_times, run_part
from hf_hybridspec.kernels import gated_delta_rule_triton as kernels
from hf_hybridspec.kernels.dispatch import use_kernels

LENGTHS = (2, 8, 12, 16)
PARTS = ("verify", "round", "commit")
SETS = 3


@dataclass(frozen=True)
class Variant:
    """Kernels of one file with fields of `VERIFY_TILE`, a precision and fields of `COMMIT_TILE`; None: the file's."""

    module: ModuleType
    tile: dict[str, int | None] | None = None
    precision: str | None = None
    commit: dict[str, int | None] | None = None

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """The public functions call this variant."""
        module, public = self.module, _functions(kernels)
        own = module.VERIFY_TILE, module.HALF_PRECISION, module.COMMIT_TILE
        module.VERIFY_TILE = replace(own[0], **self.tile or {})
        module.HALF_PRECISION = self.precision or own[1]
        module.COMMIT_TILE = replace(own[2], **self.commit or {})
        kernels.verify_gated_delta_rule, kernels.commit_gated_delta_rule = _functions(self.module)
        try:
            yield
        finally:
            module.VERIFY_TILE, module.HALF_PRECISION, module.COMMIT_TILE = own
            kernels.verify_gated_delta_rule, kernels.commit_gated_delta_rule = public


def _functions(module: ModuleType) -> tuple:
    return module.verify_gated_delta_rule, module.commit_gated_delta_rule


def variants(beside: Path | None) -> dict[str, Variant]:
    """By name, the adopted one first."""
    found = {
        "adopted": Variant(kernels),
        "bf16x3": Variant(kernels, precision="bf16x3"),
        "tf32": Variant(kernels, precision="tf32"),
        "16 columns, 2 warps": Variant(kernels, {"block_v": 16, "num_warps": 2}),
        "64 columns, 8 warps": Variant(kernels, {"block_v": 64, "num_warps": 8}),
    }
    for columns, warps in ((16, 2), (32, 8), (64, 4), (64, 8), (128, 8)):
        commit = {"block_v": columns, "num_warps": warps}
        found[f"commit of {columns} columns, {warps} warps"] = Variant(kernels, commit=commit)
    if beside is not None:
        found["beside"] = Variant(_load(beside))
    return found


def _load(path: Path) -> ModuleType:
    """The file as a module of the kernels' package, so that its relative imports hold."""
    spec = importlib.util.spec_from_file_location("hf_hybridspec.kernels.gated_delta_rule_beside", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_nearly_equal_keys(rows: LayerRows) -> LayerRows:
    """As repeated tokens make them: keys almost alike, hardly any decay, every row written in full."""
    key = (rows.key[:, :, :1].float() + 0.01 * rows.key.float()).to(rows.key.dtype)
    return replace(rows, key=key, log_decay=1e-3 * rows.log_decay, beta=torch.full_like(rows.beta, 0.99))


def errors(shape: Shape, rows: LayerRows) -> dict[str, float]:
    """Of outputs and committed states, for the variant in use."""
    states, factors = shape.states(), shape.factors(rows.num_rows)
    expected_states = states.clone()
    expected = recurrence(shape, rows, expected_states)
    output = torch.stack(verify_layers(rows, states, factors))
    kernels.commit_gated_delta_rule(states, factors, rows.num_rows)
    return {"output": relative_error(output, expected), "state": relative_error(states, expected_states)}


def check(shape: Shape, dtype: torch.dtype, beside: Path | None) -> list[dict]:
    """A record for each variant and length, with its errors and whether they are within the limits."""
    records, small = [], replace(shape, layers=2)
    for (name, variant), n in product(variants(beside).items(), LENGTHS):
        record: dict = {"variant": name, "rows": n, "right": True}
        random = small.rows(n, dtype)
        with variant.in_use():
            for kind, rows in (("random", random), ("nearly equal keys", with_nearly_equal_keys(random))):
                record[kind] = errors(small, rows)
                limits = zip(record[kind].values(), LIMITS[dtype], strict=True)
                # Not "error > limit": a NaN must not pass.
                record["right"] &= all(error <= limit for error, limit in limits)
        records.append(record)
    return records


def compile_share(share: int, workers: int, beside: Path | None) -> None:
    """Runs a round of every `workers`-th variant and length, which leaves its kernels in Triton's cache."""
    shape = Shape(layers=2)
    states, jobs = shape.states(), list(product(variants(beside).values(), reversed(LENGTHS)))
    with use_kernels("triton"):
        for variant, n in jobs[share::workers]:
            length = torch.tensor([n], dtype=torch.int32, device=DEVICE)
            with variant.in_use():
                run_part("round", shape.rows(n, torch.bfloat16), shape.factors(n), length, states)


def measure(shape: Shape, dtype: torch.dtype, beside: Path | None, replays: int, seconds: float) -> list[dict]:
    """The records of `check` with microseconds of all layers. At least one replay, none begun when time is up."""
    start = time.perf_counter()
    records, found, works = check(shape, dtype, beside), variants(beside), {}
    sets = [shape.states() for _ in range(SETS)]
    inputs = {n: (shape.rows(n, dtype), shape.factors(n)) for n in LENGTHS}
    for i, record in enumerate(records):
        if record["right"]:
            n = record["rows"]
            arguments = (*inputs[n], torch.tensor([n], dtype=torch.int32, device=DEVICE))
            with found[record["variant"]].in_use():
                for part in PARTS:
                    works[i, part] = capture([partial(run_part, part, *arguments, states) for states in sets])
    times: dict = {key: [] for key in works}
    for _ in range(replays):
        for key, ms in median_times(works, replays=1).items():
            times[key].append(ms)
        if time.perf_counter() - start > seconds:
            break
    for (i, part), values in times.items():
        records[i][f"{part}_us"] = round(1e3 * sorted(values)[len(values) // 2] / SETS, 2)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--beside", type=Path, help="gated_delta_rule_triton.py of another commit")
    parser.add_argument("--replays", type=int, default=40)
    parser.add_argument(
        "--workers", type=int, default=1, help="processes that compile ahead; more than 1 on a GPU only"
    )
    parser.add_argument("--seconds", type=float, default=50.0, help="after which no replay is started")
    parser.add_argument("--tiny", action="store_true", help="a small shape; runs on a CPU as well")
    parser.add_argument("--commit", help="the commit measured, where the files have no git history")
    arguments = parser.parse_args()
    require_gpu(parser, arguments.tiny)
    torch.manual_seed(0)
    shape, dtype = (TINY, torch.float32) if DEVICE == "cpu" else (Shape(), torch.bfloat16)
    start = time.perf_counter()
    if arguments.workers > 1 and DEVICE == "cuda":
        with get_context("spawn").Pool(arguments.workers) as pool:
            work = partial(compile_share, workers=arguments.workers, beside=arguments.beside)
            pool.map(work, range(arguments.workers), chunksize=1)
    seconds = arguments.seconds - (time.perf_counter() - start)
    with use_kernels("triton"):
        records = measure(shape, dtype, arguments.beside, arguments.replays, seconds)
    for record in records:
        print(json.dumps(record), flush=True)
    report = {"environment": describe_environment(arguments.commit), "layers": shape.layers, "results": records}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
