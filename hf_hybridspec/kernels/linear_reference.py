"""Projections in plain torch. With W the weight, s the norm's scale, all sums in fp32:

    norm_linear         y = W (x / rms(x) * s)
    gated_norm_linear   y = r + W (x_h / rms(x_h) * w * silu(g_h)), each head h on its own
    gated_linear        y = r + W (x * sigmoid(g))

What enters the product is rounded to the dtype of the rows, as the host rounds it; the residual is added before the
one rounding at the end.
"""

import torch
import torch.nn.functional as F

from .residual_rows import ResidualRows
from .residual_rows_reference import normalised, write_residual


def norm_linear(rows: ResidualRows, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `linear.norm_linear`."""
    return F.linear(normalised(rows, eps), weight)


def gated_norm_linear(rows, gate, norm_weight, weight, residual, output, eps, counters=None) -> ResidualRows:
    """As `linear.gated_norm_linear`; needs no counters."""
    wide = rows.float()
    normed = norm_weight * (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)).to(rows.dtype)
    mixed = (normed * F.silu(gate.float())).to(rows.dtype)
    return add_projection(residual, mixed.flatten(1), weight, output)


def gated_linear(rows, gate, weight, residual, output, counters=None) -> ResidualRows:
    """As `linear.gated_linear`; needs no counters."""
    return add_projection(residual, (rows * torch.sigmoid(gate)).flatten(1), weight, output)


def add_projection(residual: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, output: ResidualRows):
    """r + W x, into `output`."""
    return write_residual((residual.float() + F.linear(rows.float(), weight.float())).to(rows.dtype), output)
