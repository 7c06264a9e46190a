"""How the Triton kernels for at most 16 rows cut their weights: one small table, which a measurement may override.

Tiles change times alone: `block_k` and `splits` fix the order of a row's sum, the same at every number of rows.

Measured on an H200 at the shapes of Qwen3.6-35B-A3B (`benchmarks/tune_tiles.py`, `benchmarks/block_attention.py`,
benchmarks/NOTES.md) are those of a sparse target's forward, all but that of the output head. Those of dense targets
are guesses. All kernels of a sparse target's forward overlap: by themselves few gain from it, all together 4 % at one
row and 2 % at eight.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """What one program reads at a time, and how it is launched.

    Attributes:
        block_n, block_k: rows and columns of the weight in one step.
        splits: programs that share the columns of the same rows.
        num_warps, num_stages: of a program; stages of 16-bit entries, of which fp32 takes half.
        overlaps: whether the kernel starts while the one before it ends (programmatic dependent launch). It then waits
            before it touches anything but weights. Ignored where the device cannot.
        prefetch: steps whose weights a kernel that overlaps asks for before it waits.
        next_starts_early: whether the kernel after one that overlaps may start when this one begins to read its
            weights, instead of when it has read them. Heeded by the kernels of a sparse target's forward that read
            weights; the router and those of the attention always do so.
    """

    block_n: int
    block_k: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 4
    overlaps: bool = False
    prefetch: int = 0
    next_starts_early: bool = False


TILES = {
    "norm_linear": Tile(block_n=32, block_k=128, num_warps=2, overlaps=True, prefetch=1),
    # The output head: so many rows that programs never run short.
    "wide_norm_linear": Tile(block_n=64, block_k=128, overlaps=True, prefetch=1),
    "gated_delta_inputs": Tile(block_n=32, block_k=128, num_warps=2, num_stages=6, overlaps=True, prefetch=1),
    # One step is one head, whose norm it needs.
    "gated_norm_linear": Tile(block_n=128, block_k=128, splits=8, num_warps=8, overlaps=True, prefetch=1),
    "gated_linear": Tile(block_n=128, block_k=128, splits=8, num_warps=8, overlaps=True, prefetch=1),
    # One step a program, as wide as that takes.
    "router": Tile(block_n=32, block_k=512, splits=4, overlaps=True),
    # One row, of one warp.
    "choose_experts": Tile(block_n=1, block_k=1, num_warps=1, overlaps=True),
    # Gate and up rows: a step reads 2 * block_n rows. The second half is of the same launch and has a cut alone.
    "expert_gate_up": Tile(block_n=32, block_k=128, num_warps=2, overlaps=True, prefetch=1),
    "expert_down": Tile(block_n=64, block_k=128),
    "dense_gate_up": Tile(block_n=32, block_k=128, num_stages=3),
    "dense_down": Tile(block_n=32, block_k=128, splits=4, num_stages=3),
    # block_n keys in one step, block_k keys in a chunk, which one program reads alone.
    "block_attention": Tile(block_n=32, block_k=32, num_stages=3, overlaps=True, prefetch=1),
    # One head; block_n columns of one. Both by one warp, which needs no barrier.
    "attention_inputs": Tile(block_n=1, block_k=1, num_warps=1, overlaps=True),
    "combine_attention": Tile(block_n=32, block_k=1, num_warps=1, overlaps=True),
    # Whole heads.
    "context_inputs": Tile(block_n=1, block_k=128, num_stages=3),
}

_override: ContextVar[dict[str, Tile] | None] = ContextVar("hybridspec_tiles", default=None)


def tile_of(kernel: str) -> Tile:
    """The tile of a kernel of TILES: that of the innermost `use_tiles` which names it, else the table's."""
    return (_override.get() or {}).get(kernel) or TILES[kernel]


@contextmanager
def use_tiles(tiles: dict[str, Tile]) -> Iterator[None]:
    """Runs the enclosed code with other tiles for the kernels named.

    Raises:
        ValueError: a kernel is not in TILES.
    """
    if unknown := sorted(set(tiles) - set(TILES)):
        raise ValueError(f"Tiles can be given for {', '.join(TILES)}, got {', '.join(unknown)}.")
    token = _override.set({**(_override.get() or {}), **tiles})
    try:
        yield
    finally:
        _override.reset(token)
