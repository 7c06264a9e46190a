"""The dense SwiGLU MLP of at most 16 rows in two launches, every weight read once for all rows.

A row's sum runs in the same order at every number of rows. The arithmetic is in `dense_mlp_reference.py`.
"""

import torch

from .dispatch import implementation
from .linear import check_weight
from .residual_rows import MAX_ROWS, ResidualRows, check_residual, check_room


def dense_gate_up(rows: ResidualRows, gate_up_weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm, gate and up projections and SwiGLU.

    Args:
        rows: of n rows and H columns.
        gate_up_weight: `[2 * I, H]` in the dtype of the rows, gate rows first.
        eps: of the norm.

    Returns:
        `[n, I]` in the dtype of the rows.

    Raises:
        ValueError: a shape or dtype differs from the above.
    """
    check_residual("rows", rows)
    check_weight("gate_up_weight", gate_up_weight, rows.shape[1], rows.values.dtype)
    if gate_up_weight.shape[0] % 2:
        raise ValueError(f"gate_up_weight must hold as many gate as up rows, got {gate_up_weight.shape[0]} rows.")
    return implementation("dense_mlp", gate_up_weight.device).dense_gate_up(rows, gate_up_weight, eps)


def dense_down(
    activated: torch.Tensor,
    down_weight: torch.Tensor,
    residual: torch.Tensor,
    output: ResidualRows,
    counters: torch.Tensor | None = None,
) -> ResidualRows:
    """A projection added to the residual: the end of a dense MLP, and of an attention layer that has no gate.

    Args:
        activated: `[n, I]` fp32, bf16 or fp16, 1 <= n <= 16.
        down_weight: `[H, I]` in the dtype of `activated`.
        residual: `[n, H]`.
        output: room for n rows of H columns, whose `norm_scale` is that of the norm that follows; written to.
        counters: int32 zeros, at least one per 16 columns of H; they are zero again afterwards. None: made here, which
            a captured graph should not do.

    Returns:
        `output`, with as many parts as were written.

    Raises:
        ValueError: a shape or dtype differs from the above.
    """
    if activated.dim() != 2 or not 1 <= activated.shape[0] <= MAX_ROWS:
        raise ValueError(f"activated must be [n, I] with 1 <= n <= {MAX_ROWS}, got {tuple(activated.shape)}.")
    check_weight("down_weight", down_weight, activated.shape[1], activated.dtype)
    shape = (activated.shape[0], down_weight.shape[0])
    if tuple(residual.shape) != shape:
        raise ValueError(f"residual must be {shape}, got {tuple(residual.shape)}.")
    check_room(output, shape, activated.dtype)
    kernels = implementation("dense_mlp", activated.device)
    return kernels.dense_down(activated, down_weight, residual, output, counters)
