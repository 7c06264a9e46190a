"""The dense MLP in plain torch. With x the normalised row:

    a = silu(G x) * U x          out = r + D a

What enters a product is rounded to the dtype of the rows, as the host rounds it; the residual is added in fp32 before
the one rounding at the end.
"""

import torch
import torch.nn.functional as F


def dense_gate_up(rows, norm_scale, gate_up_weight, eps) -> torch.Tensor:
    """As `dense_mlp.dense_gate_up`."""
    wide = rows.float()
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * norm_scale
    gate, up = F.linear(normed.to(rows.dtype), gate_up_weight).chunk(2, dim=-1)
    return F.silu(gate) * up


def dense_down(activated, down_weight, residual, counters=None) -> torch.Tensor:
    """As `dense_mlp.dense_down`; needs no counters."""
    return (residual.float() + F.linear(activated.float(), down_weight.float())).to(activated.dtype)
