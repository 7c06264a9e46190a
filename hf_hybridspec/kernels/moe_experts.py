"""The MoE block of at most 16 rows: router, then every distinct expert's weights read once for all its rows.

The shared expert runs along as one more expert that every row selects. The arithmetic is in
`moe_experts_reference.py`.
"""

from dataclasses import dataclass

import torch

from .dispatch import implementation
from .linear import check_weight
from .residual_rows import MAX_ROWS, ResidualRows, check_residual, check_room

# Positions in a top-k are int8.
MAX_TOP_K = 127


@dataclass(frozen=True)
class RoutedRows:
    """What the router decides for n rows.

    Attributes:
        top_k_index: `[n, k]` int32, experts of each row, most probable first.
        top_k_weights: `[n, k]` fp32, their weights, which sum to 1 in each row before the host's rounding.
        shared_gate: `[n]` fp32, weight of the shared expert.
        slots: `[n, E]` int8, position of every expert in the row's top-k, -1 where the row did not select it. Any
            strides; `empty` puts the rows of an expert side by side, which is how the experts' kernels read them.
    """

    top_k_index: torch.Tensor
    top_k_weights: torch.Tensor
    shared_gate: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def empty(cls, num_rows: int, top_k: int, num_experts: int, device: torch.device) -> "RoutedRows":
        """Room for the routing of `num_rows` rows."""
        return cls(
            top_k_index=torch.empty(num_rows, top_k, dtype=torch.int32, device=device),
            top_k_weights=torch.empty(num_rows, top_k, dtype=torch.float32, device=device),
            shared_gate=torch.empty(num_rows, dtype=torch.float32, device=device),
            slots=torch.empty(num_experts, MAX_ROWS, dtype=torch.int8, device=device).T[:num_rows],
        )

    def first(self, num_rows: int) -> "RoutedRows":
        """The routing of the first rows, views."""
        return RoutedRows(*(getattr(self, name)[:num_rows] for name in vars(self)))


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of one MoE block, all in one dtype.

    Attributes:
        gate_up: `[E, 2 * I, H]`, gate rows first.
        down: `[E, H, I]`.
        shared_gate_up: `[2 * J, H]`, of the shared expert.
        shared_down: `[H, J]`.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    shared_gate_up: torch.Tensor
    shared_down: torch.Tensor


def route_rows(
    rows: ResidualRows,
    weight: torch.Tensor,
    top_k: int,
    eps: float,
    routed: RoutedRows | None = None,
) -> RoutedRows:
    """RMSNorm, router, softmax and top-k.

    Args:
        rows: of n rows and H columns.
        weight: `[E + 1, H]` in the dtype of the rows, the router's rows and, last, the shared expert's gate.
        top_k: experts of a row, at most 127.
        eps: of the norm.
        routed: from `RoutedRows.empty` with n rows or more, written to and returned as the views of n rows, as when
            another graph reads it. None: made here.

    Raises:
        ValueError: a shape or dtype differs from the above.
    """
    check_residual("rows", rows)
    check_weight("weight", weight, rows.shape[1], rows.values.dtype)
    num_rows, num_experts = rows.shape[0], weight.shape[0] - 1
    if not 1 <= top_k <= min(num_experts, MAX_TOP_K):
        raise ValueError(
            f"top_k must be in [1, {min(num_experts, MAX_TOP_K)}] with {num_experts} experts, got {top_k}."
        )
    if routed is None:
        routed = RoutedRows.empty(num_rows, top_k, num_experts, weight.device)
    sizes = (*routed.top_k_index.shape, routed.slots.shape[1])
    if sizes[0] < num_rows or sizes[1:] != (top_k, num_experts):
        raise ValueError(
            f"routed must hold {num_rows} rows or more of {top_k} choices of {num_experts} experts, got {sizes}."
        )
    routed = routed.first(num_rows)
    implementation("moe_experts", weight.device).route_rows(rows, weight, eps, routed)
    return routed


def add_experts(
    rows: ResidualRows,
    routed: RoutedRows,
    weights: ExpertWeights,
    output: ResidualRows,
    eps: float,
    counters: torch.Tensor | None = None,
) -> ResidualRows:
    """RMSNorm, every selected expert, and the residual stream after them.

    Gate and up projections, SwiGLU, down projections; these are weighted and added to the residual in the order of
    each row's top-k, the shared expert last.

    Args:
        rows: as given to `route_rows`, or the first of them with a routing of as many; also the residual.
        output: room for n rows of H columns, whose `norm_scale` is that of the norm that follows; written to.
        eps: of the norm.
        counters: int32, at least `num_counters(H, n * k)`, at first zeros, then as the call before left them, of
            whatever rows; the first `most_tiles(H)` are zeros again, which other kernels may use. None: made here,
            which a captured graph should not do.

    Returns:
        `output`, with as many parts as were written.

    Raises:
        ValueError: a shape or dtype differs from the above.
    """
    check_residual("rows", rows)
    _check_weights(rows.values, weights)
    check_room(output, tuple(rows.shape), rows.values.dtype)
    needed = num_counters(rows.shape[1], routed.top_k_index.numel())
    if counters is not None and counters.numel() < needed:
        raise ValueError(f"counters must be at least {needed} int32, got {counters.numel()}.")
    kernels = implementation("moe_experts", rows.values.device)
    return kernels.add_experts(rows, routed, weights, output, eps, counters)


def num_counters(hidden: int, choices: int) -> int:
    """Counters of `add_experts`: of tiles of the output, of the shared expert, and of every choice."""
    return most_tiles(hidden) + 1 + choices


def most_tiles(hidden: int) -> int:
    """Tiles of an output row, which have 16 columns or more."""
    return -(-hidden // 16)


def _check_weights(rows: torch.Tensor, weights: ExpertWeights) -> None:
    hidden = rows.shape[1]
    experts, _, inner = weights.down.shape
    shared = weights.shared_down.shape[1]
    _check_shape("gate_up", weights.gate_up, (experts, 2 * inner, hidden))
    _check_shape("down", weights.down, (experts, hidden, inner))
    _check_shape("shared_gate_up", weights.shared_gate_up, (2 * shared, hidden))
    _check_shape("shared_down", weights.shared_down, (hidden, shared))
    dtypes = {getattr(weights, name).dtype for name in ("gate_up", "down", "shared_gate_up", "shared_down")}
    if dtypes != {rows.dtype}:
        raise ValueError(f"All expert weights must be of {rows.dtype}, got {sorted(map(str, dtypes))}.")


def _check_shape(name: str, tensor: torch.Tensor, shape: tuple) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must be {shape}, got {tuple(tensor.shape)}.")
