"""The dense SwiGLU MLP of at most 16 rows in two launches, every weight read once for all rows.

A row's sum runs in the same order at every number of rows. The arithmetic is in `dense_mlp_reference.py`.
"""

import torch

from .dispatch import implementation

MAX_ROWS = 16


def dense_gate_up(
    rows: torch.Tensor, norm_scale: torch.Tensor, gate_up_weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """RMSNorm, gate and up projections and SwiGLU.

    Args:
        rows: `[n, H]` fp32, bf16 or fp16, the residual stream, 1 <= n <= 16.
        norm_scale: `[H]` fp32, the factor after normalising (1 + w where the norm is zero-centred).
        gate_up_weight: `[2 * I, H]` in the dtype of `rows`, gate rows first.
        eps: of the norm.

    Returns:
        `[n, I]` in the dtype of `rows`.

    Raises:
        ValueError: a shape or dtype differs from the above.
    """
    _check(rows, "gate_up_weight", gate_up_weight)
    if gate_up_weight.shape[0] % 2:
        raise ValueError(f"gate_up_weight must hold as many gate as up rows, got {gate_up_weight.shape[0]} rows.")
    _check_shape("norm_scale", norm_scale, (rows.shape[1],))
    return implementation("dense_mlp", rows.device).dense_gate_up(rows, norm_scale, gate_up_weight, eps)


def dense_down(
    activated: torch.Tensor,
    down_weight: torch.Tensor,
    residual: torch.Tensor,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """A projection added to the residual: the end of a dense MLP, and of an attention layer that has no gate.

    Args:
        activated: `[n, I]` fp32, bf16 or fp16, 1 <= n <= 16.
        down_weight: `[H, I]` in the dtype of `activated`.
        residual: `[n, H]`.
        counters: int32 zeros, at least one per 16 columns of H; they are zero again afterwards. None: made here, which
            a captured graph should not do.

    Returns:
        `[n, H]` in the dtype of `activated`.

    Raises:
        ValueError: a shape or dtype differs from the above.
    """
    _check(activated, "down_weight", down_weight)
    _check_shape("residual", residual, (activated.shape[0], down_weight.shape[0]))
    return implementation("dense_mlp", activated.device).dense_down(activated, down_weight, residual, counters)


def _check(rows: torch.Tensor, name: str, weight: torch.Tensor) -> None:
    if rows.dim() != 2 or not 1 <= rows.shape[0] <= MAX_ROWS:
        raise ValueError(f"rows must be [n, K] with 1 <= n <= {MAX_ROWS}, got {tuple(rows.shape)}.")
    if weight.dim() != 2 or weight.shape[1] != rows.shape[1] or weight.dtype != rows.dtype:
        raise ValueError(
            f"{name} must be [N, K] of {rows.dtype} with K = {rows.shape[1]}, got {weight.dtype} "
            f"{tuple(weight.shape)}."
        )


def _check_shape(name: str, tensor: torch.Tensor, shape: tuple) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must be {shape}, got {tuple(tensor.shape)}.")
