"""Projections of at most 16 rows: what precedes a weight is applied as its tiles are read, what follows as they end.

Every weight is read once for all rows. A row's sum runs in the same order at every number of rows. The arithmetic is
in `linear_reference.py`.
"""

import torch

from .dispatch import implementation
from .residual_rows import MAX_ROWS, ResidualRows, check_residual, check_room


def norm_linear(rows: ResidualRows, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm, then a projection.

    Args:
        rows: of n rows and K columns.
        weight: `[N, K]` in the dtype of the rows.
        eps: of the norm.

    Returns:
        `[n, N]` in the dtype of the rows.

    Raises:
        ValueError: a shape or dtype differs from the above.
    """
    check_residual("rows", rows)
    check_weight("weight", weight, rows.shape[1], rows.values.dtype)
    return implementation("linear", weight.device).norm_linear(rows, weight, eps)


def gated_norm_linear(
    rows: torch.Tensor,
    gate: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    output: ResidualRows,
    eps: float,
    counters: torch.Tensor | None = None,
) -> ResidualRows:
    """RMSNorm of each head, times SiLU of its gate, then a projection added to the residual: the end of a GDN layer.

    Args:
        rows: `[n, heads, V]`, any strides, 1 <= n <= 16.
        gate: `[n, heads, V]`, before SiLU.
        norm_weight: `[V]`.
        weight: `[N, heads * V]`.
        residual: `[n, N]`.
        output: room for n rows of N columns, whose `norm_scale` is that of the norm that follows; written to.
        eps: of the norm of each head.
        counters: int32 zeros, at least one per 16 columns of N; they are zero again afterwards. None: made here, which
            a captured graph should not do.

    Returns:
        `output`, with as many parts as were written.

    Raises:
        ValueError: a shape or dtype differs from the above.
    """
    _check_heads(rows, gate, weight, residual, output)
    _check_shape("norm_weight", norm_weight, (rows.shape[2],))
    kernels = implementation("linear", rows.device)
    return kernels.gated_norm_linear(rows, gate, norm_weight, weight, residual, output, eps, counters)


def gated_linear(
    rows: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    output: ResidualRows,
    counters: torch.Tensor | None = None,
) -> ResidualRows:
    """Rows times the sigmoid of their gate, then a projection added to the residual: the end of an attention layer.

    Args:
        rows, gate: `[n, heads, D]`, any strides, 1 <= n <= 16.
        weight: `[N, heads * D]`.
        residual: `[n, N]`.
        output, counters: as for `gated_norm_linear`.

    Returns:
        `output`, with as many parts as were written.

    Raises:
        ValueError: a shape or dtype differs from the above.
    """
    _check_heads(rows, gate, weight, residual, output)
    return implementation("linear", rows.device).gated_linear(rows, gate, weight, residual, output, counters)


def check_weight(name: str, weight: torch.Tensor, size_k: int, dtype: torch.dtype) -> None:
    """Raises ValueError where `weight`, an argument called `name`, is not `[N, size_k]` of `dtype`."""
    if weight.dim() != 2 or weight.shape[1] != size_k or weight.dtype != dtype:
        raise ValueError(
            f"{name} must be [N, K] of {dtype} with K = {size_k}, got {weight.dtype} {tuple(weight.shape)}."
        )


def _check_heads(rows, gate, weight, residual, output: ResidualRows) -> None:
    if rows.dim() != 3 or not 1 <= rows.shape[0] <= MAX_ROWS:
        raise ValueError(f"rows must be [n, heads, D] with 1 <= n <= {MAX_ROWS}, got {tuple(rows.shape)}.")
    check_weight("weight", weight, rows.shape[1] * rows.shape[2], rows.dtype)
    _check_shape("gate", gate, tuple(rows.shape))
    _check_shape("residual", residual, (rows.shape[0], weight.shape[0]))
    check_room(output, tuple(residual.shape), rows.dtype)


def _check_shape(name: str, tensor: torch.Tensor, shape: tuple) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must be {shape}, got {tuple(tensor.shape)}.")
