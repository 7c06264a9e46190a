"""Keys and values of a drafter's context rows, for all its layers in one launch.

All layers of a drafter read the same context row, so their key and value projections are one stack of weights. The
arithmetic is in `context_inputs_reference.py`.
"""

import torch

from .dispatch import implementation
from .residual_rows import ResidualRows, check_residual


def context_inputs(
    rows: ResidualRows,
    weights: torch.Tensor,
    key_scales: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_caches: torch.Tensor,
    value_caches: torch.Tensor,
    committed: torch.Tensor,
    eps: float,
) -> None:
    """RMSNorm, k|v projections, norm and RoPE of the keys; results go to the caches.

    Args:
        rows: of n rows and H columns.
        weights: `[L, 2 Hkv D, H]` in the dtype of `rows`, key rows first; layers may lie apart.
        key_scales: `[L, D]` fp32, of the keys' norm.
        cos, sin: `[n, D]` in the dtype of `rows`; whole heads are rotated.
        key_caches, value_caches: `[L, Hkv, S, D]`, dimension D contiguous; rows committed..committed + n - 1 are
            written.
        committed: `[1]` int32; committed + n <= S is up to the caller.
        eps: of both norms.

    Raises:
        ValueError: a shape or dtype differs from the above.
    """
    check_residual("rows", rows)
    if key_caches.dim() != 4 or key_caches.shape[3] % 2:
        raise ValueError(f"key_caches must be [L, Hkv, S, D] with D even, got {tuple(key_caches.shape)}.")
    layers, heads, _, size = key_caches.shape
    expected = {
        "weights": (weights, (layers, 2 * heads * size, rows.shape[1])),
        "key_scales": (key_scales, (layers, size)),
        "cos": (cos, (rows.shape[0], size)),
        "sin": (sin, (rows.shape[0], size)),
        "value_caches": (value_caches, tuple(key_caches.shape)),
        "committed": (committed, (1,)),
    }
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {shape}, got {tuple(tensor.shape)}.")
    if committed.dtype != torch.int32 or {weights.dtype, key_caches.dtype, value_caches.dtype} != {rows.values.dtype}:
        raise ValueError(
            f"weights and caches must be of {rows.values.dtype} and committed of int32, got {weights.dtype}, "
            f"{key_caches.dtype}, {value_caches.dtype} and {committed.dtype}."
        )
    kernels = implementation("context_inputs", weights.device)
    kernels.context_inputs(rows, weights, key_scales, cos, sin, key_caches, value_caches, committed, eps)
