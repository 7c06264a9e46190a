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
    state_is_settled: bool = False,
) -> torch.Tensor:
    """As `gated_delta_rule.verify_gated_delta_rule`; nothing here overlaps."""
    rows = query.shape[1]
    verify = _verify_one_row if rows == 1 else _verify_rows
    output, z, unit_key, g = verify(query, key, value, log_decay, beta, recurrent_state)
    factors.z[:, :rows] = z
    factors.k[:, :rows] = unit_key
    factors.g[:, :rows] = g
    return output.to(value.dtype)


def commit_gated_delta_rule(
    recurrent_states: torch.Tensor,
    factors: "CompactFactors",
    commit_length: int | torch.Tensor,
    states_are_settled: bool = False,
) -> None:
    """As `gated_delta_rule.commit_gated_delta_rule`; nothing here overlaps."""
    rows = int(commit_length)
    if rows == 0:
        return
    layers, batch, _, k_dim, v_dim = recurrent_states.shape
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
    """The recurrence itself, in the host's order of operations: (output, z, k, g) of one row."""
    unit_key, query = _normalised(key), _normalised(query)
    group = value.shape[2] // key.shape[2]
    k, q = (x[:, 0].unsqueeze(2).expand(-1, -1, group, -1).flatten(1, 2).unsqueeze(-1) for x in (unit_key, query))
    state = recurrent_state * log_decay[:, 0].exp()[..., None, None]
    z = (value[:, 0].float() - (state * k).sum(dim=-2)) * beta[:, 0].float().unsqueeze(-1)
    state += k * z.unsqueeze(-2)
    output = (state * (q / k.shape[-2] ** 0.5)).sum(dim=-2)
    return output.unsqueeze(1), z.unsqueeze(1), unit_key, log_decay


def _verify_rows(query, key, value, log_decay, beta, recurrent_state):
    """Equations 3 and 10 for n >= 2: (output, z, k, g), each `[B, n, ...]`.

    At these sizes the time is the number of torch calls, so keys and queries share every call that can take both.
    """
    batch, rows, num_k_heads, k_dim = key.shape
    num_v_heads = value.shape[2]
    unit = _normalised(torch.cat([key, query], dim=1))
    grouped = unit.transpose(1, 2).unsqueeze(2).expand(-1, -1, num_v_heads // num_k_heads, -1, -1)
    keys_queries = grouped.reshape(batch * num_v_heads, 2 * rows, k_dim)
    read = keys_queries.bmm(recurrent_state.flatten(0, 1))
    overlap = keys_queries.bmm(keys_queries[:, :rows].mT)

    g = log_decay.cumsum(dim=1)
    beta, head_g = (_per_head(x, batch * num_v_heads, rows, 1) for x in (beta, g))
    value = _per_head(value, batch * num_v_heads, rows, value.shape[3])
    # Above the diagonal the exponent would be positive; it is masked first, and its entries are dropped by tril.
    gamma = (head_g - head_g.mT).clamp_(max=0).exp_()
    overlap = overlap.unflatten(1, (2, rows)).mul_(gamma.unsqueeze(1)).tril_()
    decay = head_g.exp()

    # H's diagonal is one; the solver does not read the entries that stand there.
    right_side = torch.addcmul(value, decay, read[:, :rows], value=-1).mul_(beta)
    z = torch.linalg.solve_triangular(overlap[:, 0] * beta, right_side, upper=False, unitriangular=True)
    scale = k_dim**-0.5
    output = torch.baddbmm(decay * read[:, rows:], overlap[:, 1], z, beta=scale, alpha=scale)
    output, z = (x.unflatten(0, (batch, num_v_heads)).transpose(1, 2) for x in (output, z))
    return output, z, unit[:, :rows], g


def _per_head(rows: torch.Tensor, heads: int, num_rows: int, width: int) -> torch.Tensor:
    """`[B, n, HV, ...]` as fp32 `[B * HV, n, width]`."""
    return rows.float().transpose(1, 2).reshape(heads, num_rows, width)
