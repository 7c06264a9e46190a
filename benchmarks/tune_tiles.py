"""Tries tiles of every kernel for few rows at the shapes of Qwen3.6-35B-A3B, weights cold, and prints the best.

    python -m benchmarks.tune_tiles --seconds 300 --output benchmarks/results/tiles_h200.json
    python -m benchmarks.tune_tiles --seconds 90 --kernels expert_gate_up expert_down --output tiles.json   (a minute)

Three rounds: how the weight is cut; warps and stages of the best cuts; starting while the kernel before ends, of the
best of those. Each round compiles all its tiles in parallel processes, then times them one by one (replays of a graph
of calls on different weights). A tile whose result differs from the table's is dropped. Results are written after
every piece. At last the best of every piece take turns with the table's tile, at several numbers of rows.

    TRITON_INTERPRET=1 python -m benchmarks.tune_tiles --tiny --seconds 60 --output tiles.json     (no GPU: a dry run)
"""

import argparse
import json
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import chain, pairwise
from pathlib import Path

import torch

from benchmarks.environment import BANDWIDTH, describe_environment, require_gpu
from benchmarks.tile_pieces import PIECES, TINY, Maker, Piece, Shape
from benchmarks.tile_space import cuts, overlaps, pipelines
from hf_hybridspec.kernels.dispatch import use_kernels
from hf_hybridspec.kernels.tiles import TILES, Tile, use_tiles

# Rows at which a piece is tuned, and at which its best tiles are compared at the end.
TUNED_ROWS = {"expert_gate_up": (1, 6), "expert_down": (1, 6), "router": (1, 8), "choose_experts": (1, 8)}
COMPARED_ROWS = (1, 6, 16)
# A graph repeats its calls until it lasts about this long, so that a time is not one of launching graphs.
CALLS_A_GRAPH = 24
# Relative difference from the table's tile that another order of the sums explains.
LIMITS = {torch.bfloat16: 1e-2, torch.float32: 1e-4}


@dataclass
class Run:
    """What the command was asked for, and what it has found.

    Attributes:
        pool: processes that compile; None without a GPU.
        found: (piece, rows) -> [(milliseconds, tile)], best first.
    """

    maker: Maker
    pool: ProcessPoolExecutor | None
    output: Path
    seconds: float
    commit: str | None
    started: float = field(default_factory=time.monotonic)
    found: dict[tuple[str, int], list[tuple[float, Tile]]] = field(default_factory=dict)
    compared: dict[str, list[dict]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def is_late(self, share: float = 1.0) -> bool:
        """Whether `share` of the time has passed."""
        return time.monotonic() > self.started + share * self.seconds

    def chosen(self) -> dict[str, Tile]:
        """For each kernel the tile that is fastest over the numbers of rows compared, each counted alike."""
        fields = Tile.__dataclass_fields__
        totals: dict[str, dict[Tile, float]] = {}
        for key, rows in self.compared.items():
            total = totals.setdefault(key.split(" ")[0], {})
            for row in rows:
                tile = Tile(**{name: row[name] for name in fields})
                total[tile] = total.get(tile, 0.0) + row["us"] / rows[0]["us"]
        return {name: min(total, key=total.get) for name, total in totals.items()}

    def save(self) -> None:
        report = {
            "what": "time of a kernel call by tile, weights cold, graph replay, median; overlap is within a chain",
            "environment": describe_environment(self.commit),
            "bandwidth_bytes_per_s": BANDWIDTH,
            "best": {
                f"{name} w={num_rows}": [{"us": round(1e3 * ms, 2), **asdict(tile)} for ms, tile in tried[:8]]
                for (name, num_rows), tried in self.found.items()
            },
            "tried": {f"{name} w={num_rows}": len(tried) for (name, num_rows), tried in self.found.items()},
            "chosen": {name: asdict(tile) for name, tile in self.chosen().items()},
            "compared": self.compared,
            "failed": self.failed,
        }
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.output.write_text(json.dumps(report, indent=1) + "\n")


_compiling: dict[Shape, Maker] = {}


def compile_tile(shape: Shape, name: str, num_rows: int, tile: Tile) -> None:
    """Runs a piece once in a process of its own, which fills the compiler's cache on disk."""
    maker = _compiling.setdefault(shape, Maker(shape, "cuda", torch.bfloat16, only_once=True))
    with use_kernels("triton"), use_tiles({name: tile}):
        maker.piece(name, num_rows).calls[0]()
    torch.cuda.synchronize()


def compile_all(run: Run, wanted: dict[tuple[str, int], list[Tile]]) -> dict[tuple[str, int], list[Tile]]:
    """Compiles tiles side by side; those that fail are noted and left out."""
    if run.pool is None:
        return wanted
    # One compiled kernel serves every number of rows.
    jobs = {
        (name, tile): run.pool.submit(compile_tile, run.maker.shape, name, num_rows, tile)
        for (name, num_rows), tiles in reversed(wanted.items())
        for tile in tiles
    }
    errors = {key: job.exception() for key, job in jobs.items()}
    run.failed += [f"{name} {tile}: {str(error)[:120]}" for (name, tile), error in errors.items() if error]
    return {
        (name, num_rows): [tile for tile in tiles if not errors[name, tile]]
        for (name, num_rows), tiles in wanted.items()
    }


def timed(piece: Piece, tile: Tile, replays: int) -> float:
    """Median milliseconds of a call with a tile."""
    calls = (piece.calls * CALLS_A_GRAPH)[: max(CALLS_A_GRAPH, len(piece.calls))]
    with use_kernels("triton"), use_tiles({piece.kernel: tile}):
        calls[0]()
        if not torch.cuda.is_available():
            start = time.perf_counter()
            calls[0]()
            return 1e3 * (time.perf_counter() - start)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    return statistics.median(replay_times(graph, replays)) / len(calls)


def replay_times(graph: torch.cuda.CUDAGraph, replays: int) -> list[float]:
    """Milliseconds of each replay after one that warms up."""
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairwise(events)]


def is_right(piece: Piece, tile: Tile, dtype: torch.dtype) -> bool:
    """Whether the first call gives what it gives with the table's tile."""
    with use_kernels("triton"):
        expected = piece.calls[0]().float()
        with use_tiles({piece.kernel: tile}):
            actual = piece.calls[0]().float()
    # Not "difference > limit": a NaN must not pass.
    return bool((actual - expected).norm() / expected.norm() <= LIMITS[dtype])


def try_tiles(run: Run, name: str, num_rows: int, tiles: list[Tile], share: float) -> None:
    """Times compiled tiles of a piece, until `share` of the time is used up."""
    piece, found = run.maker.piece(name, num_rows), run.found.setdefault((name, num_rows), [])
    for tile in tiles:
        if run.is_late(share) and found:
            break
        if is_right(piece, tile, run.maker.dtype):
            found.append((timed(piece, tile, replays=5), tile))
        else:
            run.failed.append(f"{name} w={num_rows} {tile}: wrong result")
    run.save()
    if not found:
        return
    found.sort(key=lambda entry: entry[0])
    ms, tile = found[0]
    fraction = piece.num_bytes / BANDWIDTH * 1e3 / ms
    print(
        f"{name} w={num_rows}: {1e3 * ms:.2f} us, {fraction:.0%} of the floor, {len(found)} tried, {tile}", flush=True
    )
    run.save()


def compare(run: Run, name: str, candidates: list[Tile], num_rows: int) -> None:
    """The best tiles of a piece in turns, at one number of rows."""
    piece = run.maker.piece(name, num_rows)
    times = {tile: [] for tile in candidates}
    for _ in range(3):
        for tile in candidates:
            times[tile].append(timed(piece, tile, replays=7))
    floor = piece.num_bytes / BANDWIDTH * 1e3
    rows = [
        {
            "us": round(1e3 * statistics.median(measured), 2),
            "fraction_of_floor": round(floor / statistics.median(measured), 3),
            "is_in_table": tile == TILES[piece.kernel],
            **asdict(tile),
        }
        for tile, measured in times.items()
    ]
    run.compared[f"{name} w={num_rows}"] = sorted(rows, key=lambda row: row["us"])
    for row in run.compared[f"{name} w={num_rows}"]:
        print(f"  {name} w={num_rows}: {json.dumps(row)}", flush=True)
    run.save()


def search(run: Run, names: list[str]) -> None:
    """The three rounds, then the comparison."""
    jobs = [(name, num_rows) for name in names for num_rows in TUNED_ROWS.get(name, (8,))]

    def best_of(job: tuple[str, int], count: int) -> list[Tile]:
        return [tile for _, tile in run.found.get(job, [])[:count]]

    rounds = (
        (0.45, lambda job: cuts(job[0])),
        (0.7, lambda job: [new for tile in best_of(job, 2) for new in pipelines(job[0], tile)]),
        (0.85, lambda job: [new for tile in best_of(job, 2) for new in overlaps(job[0], tile)]),
    )
    for number, (share, candidates) in enumerate(rounds, start=1):
        compiled = compile_all(run, {job: candidates(job) for job in jobs})
        print(f"round {number}: compiled after {time.monotonic() - run.started:.0f} s", flush=True)
        for (name, num_rows), tiles in compiled.items():
            try_tiles(run, name, num_rows, tiles, share)
    for name in names:
        mine = [job for job in jobs if job[0] == name]
        plain = [[tile for _, tile in run.found[job] if not tile.overlaps][:1] for job in mine]
        candidates = [TILES[name], *(tile for job in mine for tile in best_of(job, 2)), *chain(*plain)]
        for num_rows in COMPARED_ROWS:
            if not run.is_late():
                compare(run, name, list(dict.fromkeys(candidates)), num_rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--seconds", type=float, default=300, help="wall-clock limit of the search")
    parser.add_argument("--kernels", nargs="+", choices=list(PIECES), default=list(PIECES))
    parser.add_argument("--processes", type=int, default=14, help="processes that compile")
    parser.add_argument("--tiny", action="store_true", help="small shapes in fp32 through the interpreter, no GPU")
    parser.add_argument("--commit", help="the commit measured, where the files have no git history")
    arguments = parser.parse_args()
    require_gpu(parser, arguments.tiny)
    shape, device = (TINY, "cpu") if arguments.tiny else (Shape(), "cuda")
    dtype = torch.float32 if arguments.tiny else torch.bfloat16
    pool = None
    if not arguments.tiny:
        pool = ProcessPoolExecutor(arguments.processes, mp_context=multiprocessing.get_context("spawn"))
    maker = Maker(shape, device, dtype, only_once=arguments.tiny)
    run = Run(maker, pool, arguments.output, arguments.seconds, arguments.commit)
    search(run, arguments.kernels)
    run.save()
    if pool is not None:
        pool.shutdown()


if __name__ == "__main__":
    main()
