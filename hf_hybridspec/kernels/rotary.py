"""Rotary embedding of the rows of a block, whose position lives on the device.

The arithmetic is in `rotary_reference.py`.
"""

from dataclasses import dataclass

import torch

from .dispatch import implementation

MAX_ROWS = 16


@dataclass(frozen=True)
class Rotation:
    """What turns the rows of a block: `cos` and `sin` `[n, R]`, the same in both halves of R."""

    cos: torch.Tensor
    sin: torch.Tensor


def rotary_rows(
    committed: torch.Tensor,
    offset: torch.Tensor,
    frequencies: torch.Tensor,
    scaling: float,
    num_rows: int,
    dtype: torch.dtype,
) -> Rotation:
    """cos and sin of the positions committed + offset, and those after it, in one launch.

    Args:
        committed: `[1]` int32 or int64.
        offset: `[1]` int32 or int64, what positions are ahead of the rows of the cache; may be negative.
        frequencies: `[R / 2]` fp32.
        scaling: of cos and sin.
        num_rows: n, 1 <= n <= 16.
        dtype: of the result.

    Raises:
        ValueError: a shape or dtype differs from the above.
    """
    if not 1 <= num_rows <= MAX_ROWS:
        raise ValueError(f"num_rows must be in [1, {MAX_ROWS}], got {num_rows}.")
    for name, tensor in (("committed", committed), ("offset", offset)):
        if tensor.shape != (1,) or tensor.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be [1] of int32 or int64, got {tensor.dtype} {tuple(tensor.shape)}.")
    if frequencies.dim() != 1 or frequencies.dtype != torch.float32:
        raise ValueError(f"frequencies must be fp32 [R / 2], got {frequencies.dtype} {tuple(frequencies.shape)}.")
    cos, sin = frequencies.new_empty(2, num_rows, 2 * frequencies.shape[0], dtype=dtype)
    implementation("rotary", cos.device).rotary_rows(committed, offset, frequencies, scaling, cos, sin)
    return Rotation(cos, sin)
