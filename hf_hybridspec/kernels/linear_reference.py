"""Projections in plain torch. With W the weight, s the norm's scale, all sums in fp32:

    norm_linear         y = W (x / rms(x) * s)
    gated_norm_linear   y = r + W (x_h / rms(x_h) * w * silu(g_h)), each head h on its own
    gated_linear        y = r + W (x * sigmoid(g))

What enters the product is rounded to the dtype of the rows, as the host rounds it; the residual is added before the
one rounding at the end.
"""

import torch
import torch.nn.functional as F


def norm_linear(rows: torch.Tensor, norm_scale: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `linear.norm_linear`."""
    normed = _normalised(rows, eps) * norm_scale
    return F.linear(normed.to(rows.dtype), weight)


def gated_norm_linear(rows, gate, norm_weight, weight, residual, eps, counters=None, output=None) -> torch.Tensor:
    """As `linear.gated_norm_linear`; needs no counters."""
    normed = norm_weight * _normalised(rows, eps).to(rows.dtype)
    mixed = (normed * F.silu(gate.float())).to(rows.dtype)
    result = _add_projection(residual, mixed.flatten(1), weight)
    return result if output is None else output.copy_(result)


def gated_linear(rows, gate, weight, residual, counters=None) -> torch.Tensor:
    """As `linear.gated_linear`; needs no counters."""
    return _add_projection(residual, (rows * torch.sigmoid(gate)).flatten(1), weight)


def _normalised(rows: torch.Tensor, eps: float) -> torch.Tensor:
    wide = rows.float()
    return wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)


def _add_projection(residual: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (residual.float() + F.linear(rows.float(), weight.float())).to(rows.dtype)
