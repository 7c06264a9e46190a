"""The joint producer in plain torch. With x the normalised row and P the projection's rows by purpose:

    mixed     = silu(conv(history, P_qkv x))                       z    = P_z x
    log alpha = -exp(A_log) softplus(P_a x + dt_bias)              beta = sigmoid(P_b x)

Roundings are the host's: the projections and beta to the activation dtype, the log-decay fp32.
"""

import torch.nn.functional as F

from .causal_conv_reference import block_causal_conv
from .gated_delta_inputs import Produced, ProducerWeights
from .residual_rows import ResidualRows
from .residual_rows_reference import normalised


def gated_delta_inputs(rows: ResidualRows, weights: ProducerWeights, conv_state, conv_rows, eps) -> Produced:
    """As `gated_delta_inputs.gated_delta_inputs`."""
    projected = F.linear(normalised(rows, eps), weights.projection)
    if weights.row_order is not None:
        projected = projected[:, weights.row_order.long()]
    channels, heads = weights.conv_weight.shape[0], weights.A_log.shape[0]
    projected_rows, z, b, a = projected.split(
        [channels, projected.shape[1] - channels - 2 * heads, heads, heads], dim=-1
    )
    conv_rows[: rows.shape[0]] = projected_rows
    mixed = block_causal_conv(projected_rows[None], conv_state[None], weights.conv_weight, None, "silu")[0]
    log_decay = -weights.A_log.float().exp() * F.softplus(a.float() + weights.dt_bias.float())
    return Produced(mixed, z.contiguous(), log_decay, b.sigmoid())
