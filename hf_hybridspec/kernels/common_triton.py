"""What the Triton implementations share: whether the interpreter runs them, where they launch, how they overlap."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
import triton
import triton.language as tl
from triton import knobs

from .tiles import Tile

# Read once: `triton.jit` makes the same decision when it decorates a kernel.
INTERPRETED = bool(knobs.runtime.interpret)
# Compute capability from which a kernel can start while the one before it ends.
OVERLAP_CAPABILITY = 9


def launch_device(tensor: torch.Tensor) -> AbstractContextManager:
    """Makes the tensor's device current, since Triton launches on the current one and layers may be spread."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def launch_options(tile: Tile, tensor: torch.Tensor) -> dict:
    """Keyword arguments of a launch that come from its tile; the kernel itself has OVERLAPS and PREFETCH (columns)."""
    # Stages are counted for 16-bit entries; shared memory holds half as many of fp32.
    num_stages = tile.num_stages if tensor.element_size() < 4 else (tile.num_stages + 1) // 2
    options = {"num_warps": tile.num_warps, "num_stages": num_stages, "OVERLAPS": False, "PREFETCH": 0}
    if tile.overlaps and tensor.is_cuda and _can_overlap(tensor.device):
        options |= {"OVERLAPS": True, "PREFETCH": tile.prefetch * tile.block_k, "launch_pdl": True}
    return options


@cache
def _can_overlap(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= OVERLAP_CAPABILITY


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr):
    """Before this, a kernel that overlaps may read weights only; what the kernel before it wrote is there after it."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(OVERLAPS: tl.constexpr):
    """Called when the weights were read: the next kernel takes the place of programs that only have to finish."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def hold_until_here(b_tile, OVERLAPS: tl.constexpr):
    """The tile as it is, in the registers in which it was loaded or computed.

    A compiler moves operands of a product to shared memory as soon as it can: weights right where they are loaded, for
    which it waits there, and rows before what is computed from them, which every warp then computes.
    """
    if OVERLAPS:
        PACKED: tl.constexpr = 32 // b_tile.dtype.primitive_bitwidth
        b_tile = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [b_tile], dtype=b_tile.dtype, is_pure=False, pack=PACKED
        )
    return b_tile


@triton.jit
def prefetch_rows(
    weight, o_n, first_k, stride_n, stride_k, N: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Asks for COLUMNS columns of the weight rows `o_n`, a cache line of 128 bytes each, before anything waits."""
    if OVERLAPS and COLUMNS > 0:
        LINE: tl.constexpr = 128 // (weight.dtype.element_ty.primitive_bitwidth // 8)
        o_k = first_k + tl.arange(0, (COLUMNS + LINE - 1) // LINE) * LINE
        # What lies past the end is asked for at the last row and column, which are read anyway.
        p_lines = weight + tl.minimum(o_n, N - 1)[:, None].to(tl.int64) * stride_n
        _prefetch(p_lines + tl.minimum(o_k, K - 1)[None, :] * stride_k)


@triton.jit
def prefetch_share(
    weight, i_share, stride_n, stride_k, N: tl.constexpr, K: tl.constexpr, SHARES: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Asks for one of SHARES parts of a matrix, as `prefetch_rows` does; shares from SHARES on are nothing."""
    if OVERLAPS:
        LINE: tl.constexpr = 128 // (weight.dtype.element_ty.primitive_bitwidth // 8)
        LINES: tl.constexpr = (K + LINE - 1) // LINE
        SHARE: tl.constexpr = triton.next_power_of_2((N * LINES + SHARES - 1) // SHARES)
        if i_share * SHARE < N * LINES:
            o_line = tl.minimum(i_share * SHARE + tl.arange(0, SHARE), N * LINES - 1)
            _prefetch(weight + (o_line // LINES) * stride_n + (o_line % LINES) * LINE * stride_k)


@triton.jit
def _prefetch(p_lines):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [p_lines.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
