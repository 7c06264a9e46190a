"""The dense MLP in plain torch. With x the normalised row:

    a = silu(G x) * U x          out = r + D a

What enters a product is rounded to the dtype of the rows, as the host rounds it; the residual is added in fp32 before
the one rounding at the end.
"""

import torch
import torch.nn.functional as F

from .linear_reference import add_projection
from .residual_rows import ResidualRows
from .residual_rows_reference import normalised


def dense_gate_up(rows: ResidualRows, gate_up_weight, eps) -> torch.Tensor:
    """As `dense_mlp.dense_gate_up`."""
    gate, up = F.linear(normalised(rows, eps), gate_up_weight).chunk(2, dim=-1)
    return F.silu(gate) * up


def dense_down(activated, down_weight, residual, output: ResidualRows, counters=None) -> ResidualRows:
    """As `dense_mlp.dense_down`; needs no counters."""
    return add_projection(residual, activated, down_weight, output)
