"""The feed-forward half of a decoder layer with its router apart from its experts.

The router boundary lies between `route` and `run_experts`. A dense layer has no router: everything is after the
boundary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Routing:
    """Expert assignment of n rows, as transformers names it.

    Attributes:
        router_logits: `[n, E]`.
        top_k_index: `[n, k]` int64, experts of each row.
        top_k_weights: `[n, k]`, their routing weights.
    """

    router_logits: torch.Tensor
    top_k_index: torch.Tensor
    top_k_weights: torch.Tensor

    def first(self, num_rows: int) -> "Routing":
        """The routing of the first `num_rows` rows. Views."""
        return Routing(self.router_logits[:num_rows], self.top_k_index[:num_rows], self.top_k_weights[:num_rows])

    def num_distinct(self, num_rows: int) -> torch.Tensor:
        """`[]` int64 U(num_rows): distinct experts that the first `num_rows` rows select."""
        hit = torch.zeros(self.router_logits.shape[-1], dtype=torch.bool, device=self.top_k_index.device)
        return hit.index_fill_(0, self.top_k_index[:num_rows].flatten(), True).sum()


def has_router(mlp: nn.Module) -> bool:
    """Whether the feed-forward module is a sparse MoE block."""
    return hasattr(mlp, "gate") and hasattr(mlp, "experts")


def route(mlp: nn.Module, hidden_states: torch.Tensor) -> Routing | None:
    """Runs the router of an MoE block on `[B, n, hidden]`; None for a dense layer."""
    if not has_router(mlp):
        return None
    router_logits, top_k_weights, top_k_index = mlp.gate(hidden_states.flatten(0, 1))
    return Routing(router_logits, top_k_index, top_k_weights)


def run_experts(mlp: nn.Module, hidden_states: torch.Tensor, routing: Routing | None) -> torch.Tensor:
    """The rest of the layer's feed-forward, `[B, n, hidden]`: routed and shared experts, or the dense MLP."""
    if routing is None:
        return mlp(hidden_states)
    rows = hidden_states.flatten(0, 1)
    routed = mlp.experts(rows, routing.top_k_index, routing.top_k_weights)
    shared = F.sigmoid(mlp.shared_expert_gate(rows)) * mlp.shared_expert(rows)
    return (routed + shared).view_as(hidden_states)
