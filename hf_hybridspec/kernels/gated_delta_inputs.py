"""The joint producer of a GDN layer: norm, all input projections, convolution and gates of a block in one launch.

The arithmetic is in `gated_delta_inputs_reference.py`.
"""

from dataclasses import dataclass

import torch

from .dispatch import implementation
from .linear import check_weight
from .residual_rows import ResidualRows, check_residual


@dataclass(frozen=True)
class ProducerWeights:
    """Constants of one GDN layer, with C = 2 * H * K + HV * V channels.

    Attributes:
        projection: `[C + HV * V + 2 * HV, hidden]`, rows of query, key and value channels, output gate, b, a.
        row_order: None, or int32 `[C + HV * V + 2 * HV]`: where in `projection` each of these rows lies.
        conv_weight: `[C, kernel]`.
        A_log: `[HV]`.
        dt_bias: `[HV]`.
    """

    projection: torch.Tensor
    conv_weight: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    row_order: torch.Tensor | None = None


@dataclass(frozen=True)
class Produced:
    """What the joint producer gives for n rows.

    Attributes:
        mixed: `[n, C]`, after convolution and SiLU.
        z: `[n, HV * V]`, output gate.
        log_decay: `[n, HV]` fp32.
        beta: `[n, HV]`, rounded to the activation dtype.
    """

    mixed: torch.Tensor
    z: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor


def gated_delta_inputs(
    rows: ResidualRows, weights: ProducerWeights, conv_state: torch.Tensor, conv_rows: torch.Tensor, eps: float
) -> Produced:
    """Runs the joint producer on n rows that follow the committed history (HybridSpec, section on GDN kernels).

    Args:
        rows: of the residual stream, n of them; the norm that follows them is that of the layer.
        conv_state: `[C, kernel]`, the last `kernel` committed columns, oldest first, read only.
        conv_rows: `[N, C]` with N >= n; rows 0..n-1 are written, the channels before the convolution.
        eps: of the norm.

    Raises:
        ValueError: a shape or dtype differs from the above.
    """
    check_residual("rows", rows)
    channels, heads = weights.conv_weight.shape[0], weights.A_log.shape[0]
    check_weight("projection", weights.projection, rows.shape[1], rows.values.dtype)
    size_n = weights.projection.shape[0]
    if size_n - channels - 2 * heads <= 0:
        raise ValueError(
            f"projection must have C + HV * V + 2 * HV rows with C = {channels} and HV = {heads}, got {size_n}."
        )
    if (order := weights.row_order) is not None and (order.shape != (size_n,) or order.dtype != torch.int32):
        raise ValueError(f"row_order must be None or int32 [{size_n}], got {order.dtype} {tuple(order.shape)}.")
    if conv_state.shape != weights.conv_weight.shape:
        raise ValueError(f"conv_state must be {tuple(weights.conv_weight.shape)}, got {tuple(conv_state.shape)}.")
    if conv_rows.dim() != 2 or conv_rows.shape[0] < rows.shape[0] or conv_rows.shape[1] != channels:
        raise ValueError(f"conv_rows must be [N, {channels}] with N >= {rows.shape[0]}, got {tuple(conv_rows.shape)}.")
    kernels = implementation("gated_delta_inputs", conv_rows.device)
    return kernels.gated_delta_inputs(rows, weights, conv_state, conv_rows, eps)
