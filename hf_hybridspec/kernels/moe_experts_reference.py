"""The MoE block in plain torch. With x the normalised row, p its softmax over the experts, T its top-k:

    w_e = p_e / sum_{T} p                          y_e = D_e (silu(G_e x) * U_e x)
    out = r + sum_{e in T} w_e y_e + sigmoid(g x) y_shared

What the host rounds to the activation dtype is rounded here too; the weighted sum is fp32 and rounded once.
"""

import torch
import torch.nn.functional as F

from .moe_experts import ExpertWeights, RoutedRows
from .residual_rows import ResidualRows
from .residual_rows_reference import normalised, write_residual


def route_rows(rows: ResidualRows, weight, eps, routed: RoutedRows) -> None:
    """As `moe_experts.route_rows`, into `routed`."""
    logits = F.linear(normalised(rows, eps), weight)
    num_experts, top_k = routed.slots.shape[1], routed.top_k_index.shape[1]
    top_probs, top_k_index = logits[:, :num_experts].softmax(dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
    routed.top_k_index.copy_(top_k_index)
    routed.top_k_weights.copy_((top_probs / top_probs.sum(dim=-1, keepdim=True)).to(logits.dtype))
    routed.shared_gate.copy_(logits[:, num_experts].sigmoid())
    positions = torch.arange(top_k, dtype=torch.int8, device=logits.device)
    routed.slots.fill_(-1).scatter_(1, top_k_index, positions.expand_as(top_k_index))


def add_experts(
    rows: ResidualRows, routed: RoutedRows, weights: ExpertWeights, output: ResidualRows, eps, counters=None
) -> ResidualRows:
    """As `moe_experts.add_experts`; needs no counters."""
    normed, (num_rows, top_k) = normalised(rows, eps), routed.top_k_index.shape
    outputs = normed.new_zeros(num_rows, top_k, normed.shape[1], dtype=torch.float32)
    for expert, members, slots in _by_expert(routed):
        activated = _swiglu(F.linear(normed[members], weights.gate_up[expert]))
        outputs[members, slots] = F.linear(activated.float(), weights.down[expert].float())
    total = rows.values.float()
    for slot in range(top_k):
        total = total + routed.top_k_weights[:, slot, None] * outputs[:, slot]
    activated = _swiglu(F.linear(normed, weights.shared_gate_up))
    shared = F.linear(activated.float(), weights.shared_down.float())
    return write_residual((total + routed.shared_gate[:, None] * shared).to(rows.values.dtype), output)


def _by_expert(routed: RoutedRows):
    """(expert, its rows, their positions of it) for every distinct expert, ascending."""
    for expert in (routed.slots >= 0).any(dim=0).nonzero().flatten().tolist():
        slots = routed.slots[:, expert]
        members = (slots >= 0).nonzero().flatten()
        yield expert, members, slots[members].long()


def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
