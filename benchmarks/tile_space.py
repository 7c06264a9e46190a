"""Which tiles of a kernel for few rows are worth trying, in three rounds: cuts, pipelines, overlaps."""

from dataclasses import dataclass, replace
from itertools import product

from hf_hybridspec.kernels.tiles import TILES, Tile

SHARED_MEMORY = 227 * 1024
# What programs hold of a weight in one step: more does not fit registers, or leaves too few programs.
MOST_ENTRIES = 128 * 256


@dataclass(frozen=True)
class Space:
    """The values of each part of a tile that are combined.

    Attributes:
        rows, columns, splits: of round 1, the cuts.
        warps, stages: of round 2, the pipelines.
    """

    rows: tuple[int, ...] = (32, 64, 128)
    columns: tuple[int, ...] = (64, 128, 256)
    splits: tuple[int, ...] = (1,)
    warps: tuple[int, ...] = (2, 4)
    stages: tuple[int, ...] = (3, 4, 6)


# Without 16 rows, 512 columns and 8 warps: among the best of no piece when the norm was still in the loops.
PLAIN, SPLIT = Space(), Space(splits=(4, 8))
SPACES = {
    "gated_linear": SPLIT,
    # One step is one head.
    "gated_norm_linear": Space(columns=(128,), splits=(4, 8)),
    # One step a program, as wide as that takes.
    "router": Space(rows=(16, 32, 64), columns=(512,), splits=(4, 8), warps=(2, 4, 8), stages=(4,)),
    # One row, of one warp.
    "choose_experts": Space(rows=(1,), columns=(1,), warps=(1, 2), stages=(4,)),
    "expert_gate_up": Space((16, 32, 64), (64, 128, 256), (1,), (2, 4, 8), (2, 3, 4, 5)),
    # A cut alone.
    "expert_down": Space((16, 32, 64, 128), (64, 128, 256, 512), (1,), (4,), (4,)),
}


def cuts(kernel: str) -> list[Tile]:
    """Round 1: rows, columns and splits; the tile of the table first."""
    table, space = TILES[kernel], SPACES.get(kernel, PLAIN)
    found = [table]
    for block_n, block_k, splits in product(space.rows, space.columns, space.splits):
        tile = replace(table, block_n=block_n, block_k=block_k, splits=splits)
        tile = replace(tile, num_stages=_first_stages(kernel, tile, space.stages))
        if tile not in found and fits(kernel, tile):
            found.append(tile)
    return found


def pipelines(kernel: str, tile: Tile) -> list[Tile]:
    """Round 2: warps and stages of one cut."""
    space = SPACES.get(kernel, PLAIN)
    tiles = [replace(tile, num_warps=warps, num_stages=count) for warps, count in product(space.warps, space.stages)]
    return [other for other in tiles if other != tile and fits(kernel, other)]


def overlaps(kernel: str, tile: Tile) -> list[Tile]:
    """Round 3: starting early, with and without asking for weights, letting the next kernel start early, and not."""
    if kernel == "expert_down":
        # Starts with the first half, in whose launch it is.
        return []
    tiles = [replace(tile, overlaps=False, prefetch=0, next_starts_early=False)]
    for early, prefetch in product((False, True), (0, 1, 4)):
        tiles.append(replace(tile, overlaps=True, prefetch=prefetch, next_starts_early=early))
    return [other for other in tiles if other != tile]


def held_bytes(kernel: str, tile: Tile, num_stages: int) -> int:
    """Bytes of 16-bit weights and rows in shared memory; a row's gate or factor is counted as another row."""
    columns = tile.block_k * (_weight_rows(kernel, tile) + 2 * 16)
    return 2 * columns * max(1, num_stages - 1)


def fits(kernel: str, tile: Tile) -> bool:
    """Whether the stages of a tile fit the shared memory, and one step the registers."""
    entries = _weight_rows(kernel, tile) * tile.block_k
    return held_bytes(kernel, tile, tile.num_stages) <= SHARED_MEMORY and entries <= MOST_ENTRIES


def _first_stages(kernel: str, tile: Tile, stages: tuple[int, ...]) -> int:
    """Up to four that leave room for a second program, but three if they fit at all: two read nothing ahead."""
    roomy = [count for count in stages if count <= 4 and 2 * held_bytes(kernel, tile, count) <= SHARED_MEMORY]
    ahead = [count for count in stages if count == 3 and held_bytes(kernel, tile, count) <= SHARED_MEMORY]
    return max(roomy + ahead, default=min(stages))


def _weight_rows(kernel: str, tile: Tile) -> int:
    # Gate and up rows.
    return 2 * tile.block_n if kernel == "expert_gate_up" else tile.block_n
