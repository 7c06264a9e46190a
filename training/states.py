"""Committed recurrent states at many anchors of a sequence, from one forward of the target.

What a GDN layer feeds to its recurrence (k, v, log-decay, beta) is recorded; the rule is then run chunk by chunk for
the states at chunk boundaries and the rows z that each token writes (HybridSpec, equations 3 and 7), and every
anchor's state is the commit formula applied from the last boundary before it:

    S_p = e^{g_p} S_chunk + sum_{j < p in chunk} e^{g_p - g_j} k_j z_j^T

No prefill is run for any anchor, and nothing here depends on how many anchors there are except the last product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_hybridspec.modeling.gated_delta_net import BlockGatedDeltaNet

CHUNK = 64
NORM_EPS = 1e-6


@dataclass(frozen=True)
class DeltaRuleInputs:
    """What the recurrence of one GDN layer reads over B sequences of S tokens.

    key: [B, S, H, K] after convolution, not normalised. value: [B, S, HV, V]. log_decay: [B, S, HV] fp32.
    beta: [B, S, HV], rounded as the host rounds it.
    """

    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor


@torch.no_grad()
def delta_rule_inputs(layer: nn.Module, hidden_states: Tensor) -> DeltaRuleInputs:
    """The recurrence's inputs of a GDN layer (swapped by `attach` or `swap_gated_delta_nets`) whose own input is
    hidden_states [B, S, hidden], from empty states."""
    if not isinstance(layer, BlockGatedDeltaNet):
        raise TypeError(f"{type(layer).__name__} is no prepared GDN layer: call swap_gated_delta_nets(model) first.")
    inputs = layer._project(hidden_states)
    weight, length = layer.conv1d.weight, hidden_states.shape[1]
    rows = inputs.rows.transpose(1, 2).to(weight.dtype)
    mixed = F.conv1d(rows, weight, layer.conv1d.bias, padding=weight.shape[-1] - 1, groups=weight.shape[0])
    mixed = F.silu(mixed[..., :length]).to(inputs.rows.dtype).transpose(1, 2)
    key_dim, value_dim = layer.num_k_heads * layer.head_k_dim, layer.num_v_heads * layer.head_v_dim
    _, key, value = mixed.split([key_dim, key_dim, value_dim], dim=-1)
    return DeltaRuleInputs(
        key.unflatten(-1, (layer.num_k_heads, layer.head_k_dim)),
        value.unflatten(-1, (layer.num_v_heads, layer.head_v_dim)),
        inputs.log_decay,
        inputs.beta,
    )


@dataclass(frozen=True)
class ChunkedRule:
    """The recurrence over C chunks: per chunk its first state and, per row, the compact factors.

    states: [B, HV, C, K, V] before each chunk. k: [B, HV, C, chunk, K], z: [B, HV, C, chunk, V], g: [B, HV, C, chunk]
    (log-decay summed from the chunk's first row). All fp32.
    """

    states: Tensor
    k: Tensor
    z: Tensor
    g: Tensor


@torch.no_grad()
def run_chunks(inputs: DeltaRuleInputs, chunk: int = CHUNK) -> ChunkedRule:
    """Runs the recurrence from an empty state, in fp32."""
    group = inputs.value.shape[2] // inputs.key.shape[2]
    key = inputs.key.float()
    key = key * torch.rsqrt(key.square().sum(-1, keepdim=True) + NORM_EPS)
    k = _chunks(key.repeat_interleave(group, dim=2), chunk)
    value = _chunks(inputs.value.float(), chunk)
    beta = _chunks(inputs.beta.float().unsqueeze(-1), chunk)
    g = _chunks(inputs.log_decay.unsqueeze(-1), chunk).squeeze(-1).cumsum(-1)
    # Exponents above the diagonal would be positive; they are clamped first and dropped by tril.
    gamma = (g.unsqueeze(-1) - g.unsqueeze(-2)).clamp_(max=0).exp_()
    system = (beta * (k @ k.mT) * gamma).tril_(-1)
    decay = g.exp().unsqueeze(-1)
    # Z = H^-1 diag(beta) V - H^-1 diag(beta e^g) K S: both right sides are solved for all chunks at once.
    right = torch.cat((beta * value, beta * decay * k), dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    written, reading = solved.split([value.shape[-1], k.shape[-1]], dim=-1)
    to_end = k * (g[..., -1:] - g).exp().unsqueeze(-1)

    batch, heads, count, _, width = k.shape
    states = k.new_empty(batch, heads, count, width, value.shape[-1])
    z = torch.empty_like(written)
    state = k.new_zeros(batch, heads, width, value.shape[-1])
    for index in range(count):
        states[:, :, index] = state
        z[:, :, index] = written[:, :, index] - reading[:, :, index] @ state
        state = state * decay[:, :, index, -1:] + to_end[:, :, index].mT @ z[:, :, index]
    return ChunkedRule(states, k, z, g)


@torch.no_grad()
def states_at(rule: ChunkedRule, anchors: Tensor) -> Tensor:
    """Committed states before positions anchors [B, N] int64 (after tokens 0..p-1) -> [B, N, HV, K, V] fp32.

    Positions lie in [0, S]; position 0 has the empty state.
    """
    chunk, count = rule.g.shape[-1], rule.g.shape[2]
    index = (anchors // chunk).clamp(max=count - 1)
    rows = anchors - index * chunk
    batch = torch.arange(anchors.shape[0], device=anchors.device).unsqueeze(1)
    k, z, g, start = (x[batch, :, index] for x in (rule.k, rule.z, rule.g, rule.states))
    last = g.gather(-1, (rows - 1).clamp(min=0)[..., None, None].expand(*g.shape[:-1], 1))
    kept = torch.arange(chunk, device=anchors.device) < rows[..., None]
    weight = (last - g).clamp_(max=0).exp_() * kept.unsqueeze(2)
    decay = torch.where(rows[..., None, None] > 0, last, 0.0).exp()
    return decay.unsqueeze(-1) * start + (k * weight.unsqueeze(-1)).mT @ z


def _chunks(rows: Tensor, chunk: int) -> Tensor:
    """[B, S, heads, width] -> [B, heads, C, chunk, width], the end filled with zeros (rows that change nothing)."""
    rows = rows.transpose(1, 2)
    return F.pad(rows, (0, 0, 0, -rows.shape[2] % chunk)).unflatten(2, (-1, chunk))
