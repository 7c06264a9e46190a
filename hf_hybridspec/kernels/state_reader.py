"""State reader: turns committed recurrent states into per-row features of a draft block (ReaDy).

The math is in `state_reader_reference.py`. Sizes: N blocks of B draft rows, J states (selected layers times value
heads), rank r, state [K, V], hidden size d.
"""

from types import ModuleType

import torch
from torch import Tensor

from . import state_reader_reference
from .dispatch import implementation
from .state_reader_reference import ProjectedStates


def gather_states(recurrent_states: Tensor, layers: Tensor, out: Tensor) -> None:
    """Copies the states of the selected layers into a preallocated buffer, in one launch.

    Args:
        recurrent_states: [L, N, HV, K, V], the committed states of all layers as the cache stacks them; not mutated.
        layers: [n] int32 or int64 on the same device, places in L. They must be in range: that is not checked.
        out: [N, n * HV, K, V], contiguous, floating; overwritten, layer by layer in the order of `layers`.

    Raises ValueError for shapes or dtypes that do not match.
    """
    if recurrent_states.dim() != 5 or layers.dim() != 1 or layers.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            "recurrent_states must be [L, N, HV, K, V] and layers [n] int32 or int64, got "
            f"{tuple(recurrent_states.shape)} and {layers.dtype} {tuple(layers.shape)}."
        )
    _, N, HV, K, V = recurrent_states.shape
    expected = (N, layers.shape[0] * HV, K, V)
    if tuple(out.shape) != expected or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {expected}, got {tuple(out.shape)}.")
    implementation("state_reader", out.device).gather_states(recurrent_states, layers, out)


def project_states(states: Tensor, value_projection: Tensor, key_projection: Tensor) -> ProjectedStates:
    """Reduces each state to what rows read of it, once per round.

    Args:
        states: [N, J, K, V], floating (the cache keeps fp32); not mutated.
        value_projection: [J, V, r] (V). key_projection: [J, r, K] (U).

    Raises ValueError for shapes that do not match.
    """
    if states.dim() != 4 or value_projection.dim() != 3:
        raise ValueError(
            "states must be [N, J, K, V] and value_projection [J, V, r], got "
            f"{tuple(states.shape)} and {tuple(value_projection.shape)}."
        )
    _, J, K, V = states.shape
    if tuple(value_projection.shape[:2]) != (J, V):
        raise ValueError(
            f"value_projection {tuple(value_projection.shape)} does not fit states {tuple(states.shape)}: "
            f"it must be [{J}, {V}, r]."
        )
    _check_shape("key_projection", key_projection, (J, value_projection.shape[2], K))
    kernels = _kernels(states, value_projection, key_projection)
    return kernels.project_states(states, value_projection, key_projection)


def read_projected_states(states: ProjectedStates, hidden: Tensor, query_projection: Tensor) -> Tensor:
    """Reads the projected states with each draft row.

    Args:
        states: of the N blocks.
        hidden: [N, B, d], the rows' representation, floating.
        query_projection: [J, r, d] (W_q).

    Returns [N, B, J * (r + 1)] fp32: per state the r reads, then log rms. Raises ValueError for shapes that do not
    match.
    """
    N, J, _, r, _ = states.core.shape
    _check_shape("query_projection", query_projection, (J, r, hidden.shape[-1]))
    if hidden.dim() != 3 or hidden.shape[0] != N:
        raise ValueError(f"hidden must be [{N}, B, d], one block per set of states, got {tuple(hidden.shape)}.")
    kernels = _kernels(states.core, states.mean_square, hidden, query_projection)
    return kernels.read_projected_states(states, hidden, query_projection)


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{name} must be {expected}, got {tuple(tensor.shape)}.")


def _kernels(*tensors: Tensor) -> ModuleType:
    """The reference where a gradient is wanted: the Triton kernels have no backward pass."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return state_reader_reference
    return implementation("state_reader", tensors[0].device)
