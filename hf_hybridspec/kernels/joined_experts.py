"""Both halves of the experts in one launch: a second half begins when the first half of its own expert has ended.

As `moe_experts.expert_gate_up` and `expert_down` one after the other. The arithmetic is theirs.
"""

import torch

from .dispatch import implementation
from .moe_experts import ExpertWeights, RoutedRows, check_expert_weights
from .residual_rows import ResidualRows, check_residual, check_room


def joined_experts(
    rows: ResidualRows,
    routed: RoutedRows,
    weights: ExpertWeights,
    output: ResidualRows,
    eps: float,
    counters: torch.Tensor | None = None,
) -> ResidualRows:
    """RMSNorm, gate, up and down projections of every selected expert, weighted and added to the rows.

    Args:
        rows: as given to `route_rows`, or the first of them with a routing of as many; also the residual.
        output: room for n rows of H columns, whose `norm_scale` is that of the norm that follows; written to.
        eps: of the norm.
        counters: int32 zeros, at least one per 16 columns of H and one per choice of all rows, and two more; they are
            zero again afterwards. None: made here, which a captured graph should not do.

    Returns:
        `output`, with as many parts as were written.

    Raises:
        ValueError: a shape or dtype differs from the above.
    """
    check_residual("rows", rows)
    check_expert_weights(rows.values, weights)
    check_room(output, tuple(rows.shape), rows.values.dtype)
    needed = -(-rows.shape[1] // 16) + routed.top_k_index.numel() + 2
    if counters is not None and counters.numel() < needed:
        raise ValueError(f"counters must be at least {needed} int32 zeros, got {counters.numel()}.")
    kernels = implementation("joined_experts", rows.values.device)
    return kernels.joined_experts(rows, routed, weights, output, eps, counters)
