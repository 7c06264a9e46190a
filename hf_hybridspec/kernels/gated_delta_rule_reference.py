r"""Gated delta rule over a block in plain torch, fp32 inside: the CPU path and the oracle of the Triton kernels.

Per value head, with rows i = 1..n, unit keys k_i, queries q_i scaled by K^-1/2, log-decays summed from the block's
first row g_i, write strengths beta_i, and the state S as the cache keeps it, [K, V] (HybridSpec, equations 3, 10, 7):

    H Z  = diag(beta) (V - diag(e^g) K S)          H = I + tril_{-1}(diag(beta) (Gamma o K K^T))
    O    = diag(e^g) Q S + (Gamma o Q K^T) Z       Gamma_ij = e^{g_i - g_j} for j <= i, else 0
    S_m  = e^{g_m} S + K_{1:m}^T diag(e^{g_m - g_{1:m}}) Z_{1:m}

H is lower triangular, so the first m rows of Z depend on the first m rows alone: a rejected suffix is dropped by not
reading it. Differences g_i - g_j with j > i are masked before the exponential, where they could overflow. Work grows
with n alone; nothing is padded. One row follows the operation order of transformers' recurrent step, bit for bit.
"""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .gated_delta_rule import CompactFactors

EPSILON = 1e-6


def verify_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    recurrent_state: torch.Tensor,
    factors: "CompactFactors",
) -> torch.Tensor:
    """As `gated_delta_rule.verify_gated_delta_rule`."""
    rows = query.shape[1]
    key, query = _normalised(key), _normalised(query)
    if rows == 1:
        z, g, output = _verify_one_row(query, key, value, log_decay, beta, recurrent_state)
    else:
        z, g, output = _verify_rows(query, key, value, log_decay, beta, recurrent_state)
    factors.z[:, :rows] = z
    factors.k[:, :rows] = key
    factors.g[:, :rows] = g
    return output.to(value.dtype)


def commit_gated_delta_rule(
    recurrent_states: torch.Tensor, factors: "CompactFactors", commit_length: int | torch.Tensor
) -> None:
    """As `gated_delta_rule.commit_gated_delta_rule`."""
    rows = int(commit_length)
    if rows == 0:
        return
    layers, batch, num_v_heads, k_dim, v_dim = recurrent_states.shape
    num_k_heads = factors.k.shape[3]
    g = factors.g[:, :, :rows]
    z, last = factors.z[:, :, :rows], g[:, :, -1]
    if rows > 1:
        z = z * (last.unsqueeze(2) - g).exp_().unsqueeze(-1)
    z = z.reshape(layers, batch, rows, num_k_heads, -1).transpose(2, 3)
    update = factors.k[:, :, :rows].permute(0, 1, 3, 4, 2) @ z
    update = update.view(layers, batch, num_k_heads, k_dim, -1, v_dim).transpose(3, 4)
    grouped = recurrent_states.unflatten(2, (num_k_heads, -1))
    grouped.mul_(last.exp().view(layers, batch, num_k_heads, -1, 1, 1)).add_(update)


def _normalised(rows: torch.Tensor) -> torch.Tensor:
    """`[B, n, H, K]` scaled to unit length in fp32."""
    rows = rows.float()
    return rows * torch.rsqrt((rows * rows).sum(dim=-1, keepdim=True) + EPSILON)


def _verify_one_row(query, key, value, log_decay, beta, recurrent_state):
    """The recurrence itself, in the host's order of operations: (z, g, output), each with its row dimension."""
    num_k_heads, k_dim = key.shape[2:]
    group = value.shape[2] // num_k_heads
    query, key = (x[:, 0].unsqueeze(2).expand(-1, -1, group, -1).flatten(1, 2).unsqueeze(-1) for x in (query, key))
    state = recurrent_state * log_decay[:, 0].exp()[..., None, None]
    z = (value[:, 0].float() - (state * key).sum(dim=-2)) * beta[:, 0].float().unsqueeze(-1)
    state += key * z.unsqueeze(-2)
    output = (state * (query / k_dim**0.5)).sum(dim=-2)
    return z.unsqueeze(1), log_decay, output.unsqueeze(1)


def _verify_rows(query, key, value, log_decay, beta, recurrent_state):
    """Equations 3 and 10 for n >= 2: (z, g, output), each `[B, n, ...]`."""
    rows, num_k_heads, k_dim = key.shape[1:]
    heads = (num_k_heads, value.shape[2] // num_k_heads)

    # Keys above queries, so that the state and the keys are each read by one product.
    keys_queries = torch.cat([key, query], dim=1).transpose(1, 2)
    read = keys_queries.unsqueeze(2) @ recurrent_state.unflatten(1, heads)
    overlap = (keys_queries @ key.permute(0, 2, 3, 1)).unsqueeze(2)

    g = log_decay.cumsum(dim=1)
    per_head = g.transpose(1, 2).unflatten(1, heads)
    gamma = (per_head.unsqueeze(-1) - per_head.unsqueeze(-2)).masked_fill_(_later_rows(rows, key.device), -torch.inf)
    gamma = gamma.exp_()
    decay = per_head.exp().unsqueeze(-1)
    beta = beta.float().transpose(1, 2).unflatten(1, heads).unsqueeze(-1)
    value = value.float().transpose(1, 2).unflatten(1, heads)

    # The solver takes the diagonal for ones and ignores what is above it, so H needs no further masking.
    system = overlap[..., :rows, :] * gamma * beta
    z = torch.linalg.solve_triangular(
        system, (value - decay * read[..., :rows, :]) * beta, upper=False, unitriangular=True
    )
    output = (decay * read[..., rows:, :] + (overlap[..., rows:, :] * gamma) @ z) * k_dim**-0.5
    z, output = (x.flatten(1, 2).transpose(1, 2) for x in (z, output))
    return z, g, output


def _later_rows(rows: int, device: torch.device) -> torch.Tensor:
    return torch.ones(rows, rows, dtype=torch.bool, device=device).triu_(1)
