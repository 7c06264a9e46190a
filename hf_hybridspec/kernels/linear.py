"""Projections of at most 16 rows: what precedes a weight is applied as its tiles are read, what follows as they end.

Every weight is read once for all rows. A row's sum runs in the same order at every number of rows. The arithmetic is
in `linear_reference.py`.
"""

import torch

from .dispatch import implementation

MAX_ROWS = 16


def norm_linear(rows: torch.Tensor, norm_scale: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm, then a projection.

    Args:
        rows: `[n, K]` fp32, bf16 or fp16, 1 <= n <= 16.
        norm_scale: `[K]` fp32, the factor after normalising (1 + w where the norm is zero-centred).
        weight: `[N, K]` in the dtype of `rows`.
        eps: of the norm.

    Returns:
        `[n, N]` in the dtype of `rows`.

    Raises:
        ValueError: a shape or dtype differs from the above.
    """
    _check(rows, weight)
    _check_shape("norm_scale", norm_scale, (rows.shape[1],))
    return implementation("linear", rows.device).norm_linear(rows, norm_scale, weight, eps)


def gated_norm_linear(
    rows: torch.Tensor,
    gate: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    eps: float,
    counters: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """RMSNorm of each head, times SiLU of its gate, then a projection added to the residual: the end of a GDN layer.

    Args:
        rows: `[n, heads, V]`, any strides, 1 <= n <= 16.
        gate: `[n, heads, V]`, before SiLU.
        norm_weight: `[V]`.
        weight: `[N, heads * V]`.
        residual: `[n, N]`.
        counters: int32 zeros, at least one per 16 columns of N; they are zero again afterwards. None: made here, which
            a captured graph should not do.
        output: contiguous `[n, N]` to write to, as when another graph reads it. None: made here.

    Returns:
        `[n, N]` in the dtype of `rows`.

    Raises:
        ValueError: a shape or dtype differs from the above.
    """
    _check(rows.flatten(1), weight)
    _check_shape("gate", gate, tuple(rows.shape))
    _check_shape("norm_weight", norm_weight, (rows.shape[2],))
    _check_shape("residual", residual, (rows.shape[0], weight.shape[0]))
    if output is not None:
        _check_shape("output", output, tuple(residual.shape))
    kernels = implementation("linear", rows.device)
    return kernels.gated_norm_linear(rows, gate, norm_weight, weight, residual, eps, counters, output)


def gated_linear(
    rows: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows times the sigmoid of their gate, then a projection added to the residual: the end of an attention layer.

    Args:
        rows, gate: `[n, heads, D]`, any strides, 1 <= n <= 16.
        weight: `[N, heads * D]`.
        residual: `[n, N]`.
        counters: as for `gated_norm_linear`.

    Returns:
        `[n, N]` in the dtype of `rows`.

    Raises:
        ValueError: a shape or dtype differs from the above.
    """
    _check(rows.flatten(1), weight)
    _check_shape("gate", gate, tuple(rows.shape))
    _check_shape("residual", residual, (rows.shape[0], weight.shape[0]))
    return implementation("linear", rows.device).gated_linear(rows, gate, weight, residual, counters)


def _check(rows: torch.Tensor, weight: torch.Tensor) -> None:
    if rows.dim() != 2 or not 1 <= rows.shape[0] <= MAX_ROWS:
        raise ValueError(f"rows must be [n, K] with 1 <= n <= {MAX_ROWS}, got {tuple(rows.shape)}.")
    if weight.dim() != 2 or weight.shape[1] != rows.shape[1] or weight.dtype != rows.dtype:
        raise ValueError(
            f"weight must be [N, K] of {rows.dtype} with K = {rows.shape[1]}, got "
            f"{weight.dtype} {tuple(weight.shape)}."
        )


def _check_shape(name: str, tensor: torch.Tensor, shape: tuple) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must be {shape}, got {tuple(tensor.shape)}.")
