r"""The two ways of verifying GDN rows that ours is compared with, in plain torch on any device, fp32 inside.

Stored: the recurrence itself, row by row, with the state kept after every row; the accepted one is copied back.
Replayed: the state is left behind while recent updates (z_j, k_j, g_j), j = 1..P, wait in a ring. A block reads the
state it would have had through them,

    S_P = e^{g_P} S + sum_j e^{g_P - g_j} k_j z_j^T        so that      K S_P = e^{g_P} K S + (Gamma_P o K K_P^T) Z_P,

without forming it, and then solves its own triangular system as in `gated_delta_rule_reference.py`.
"""

import torch

from .gated_delta_rule import CompactFactors

EPSILON = 1e-6


def store_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    recurrent_state: torch.Tensor,
    states: torch.Tensor,
) -> torch.Tensor:
    """Outputs `[B, n, HV, V]` of n rows after `recurrent_state` `[B, HV, K, V]`, which is only read.

    Arguments are those of `verify_gated_delta_rule`, but `states` `[B, N, HV, K, V]` fp32 takes the place of the
    factors: its first n entries are written.
    """
    group = value.shape[2] // key.shape[2]
    unit_key, unit_query = (_unit(rows).repeat_interleave(group, dim=2) for rows in (key, query))
    state, outputs = recurrent_state, []
    for row in range(value.shape[1]):
        k, q = unit_key[:, row].unsqueeze(-1), unit_query[:, row].unsqueeze(-1)
        state = torch.mul(state, log_decay[:, row].exp()[..., None, None], out=states[:, row])
        z = (value[:, row].float() - (state * k).sum(dim=-2)) * beta[:, row].float().unsqueeze(-1)
        state.addcmul_(k, z.unsqueeze(-2))
        outputs.append((state * q).sum(dim=-2) * k.shape[-2] ** -0.5)
    return torch.stack(outputs, dim=1).to(value.dtype)


def replay_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    recurrent_state: torch.Tensor,
    pending: CompactFactors,
    factors: CompactFactors,
) -> torch.Tensor:
    """Outputs `[B, n, HV, V]` of n rows after `recurrent_state` advanced by the P rows of `pending`.

    Arguments are those of `verify_gated_delta_rule`; `pending` `[B, P, ...]` is only read, its `g` summed from the
    first of the P rows. The first n rows of `factors` are written.
    """
    rows, num_v_heads = value.shape[1:3]
    group = num_v_heads // key.shape[2]
    unit_key = _unit(key)
    k, q = (_heads_first(x.repeat_interleave(group, dim=2)) for x in (unit_key, _unit(query)))
    ring_k = _heads_first(pending.k.repeat_interleave(group, dim=2))
    ring_g = pending.g.transpose(1, 2)
    v, b, g = _heads_first(value.float()), beta.float().transpose(1, 2).unsqueeze(-1), log_decay.cumsum(dim=1)
    head_g = g.transpose(1, 2)

    both = torch.cat([k, q], dim=2)
    waited = (ring_g[..., -1:] - ring_g).exp().unsqueeze(2)
    read = ring_g[..., -1:, None].exp() * (both @ recurrent_state)
    read = (read + (both @ ring_k.mT * waited) @ _heads_first(pending.z)) * head_g.exp().repeat(1, 1, 2).unsqueeze(-1)

    # Above the diagonal the exponent would be positive; it is masked first, and its entries are dropped by tril.
    gamma = (head_g.unsqueeze(-1) - head_g.unsqueeze(-2)).clamp(max=0).exp()
    system = (b * gamma * (k @ k.mT)).tril(-1)
    z = torch.linalg.solve_triangular(system, b * (v - read[:, :, :rows]), upper=False, unitriangular=True)
    output = (read[:, :, rows:] + (gamma * (q @ k.mT)).tril() @ z) * k.shape[-1] ** -0.5
    factors.z[:, :rows], factors.k[:, :rows], factors.g[:, :rows] = z.transpose(1, 2), unit_key, g
    return output.transpose(1, 2).to(value.dtype)


def _unit(rows: torch.Tensor) -> torch.Tensor:
    rows = rows.float()
    return rows * torch.rsqrt((rows * rows).sum(dim=-1, keepdim=True) + EPSILON)


def _heads_first(rows: torch.Tensor) -> torch.Tensor:
    """`[B, n, H, X]` as `[B, H, n, X]`."""
    return rows.transpose(1, 2)
