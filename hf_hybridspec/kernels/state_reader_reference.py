"""Reference of the state reader: ReaDy's read of the target's committed recurrent states, in fp32.

For a state S (dv x dk; stored transposed, [K, V]) and a draft row h, ReaDy, section 3 (method names in the paper):

    S_bar = S / rms(S),  T = V^T S_bar  (r x dk, once per round),  q = U^T (W_q h),  u = T q,  f = [u, log rms(S)]

with rms(S) = sqrt(mean(S^2) + eps) over all entries of one head's matrix.
"""

import torch
from torch import Tensor


def project_states_reference(states: Tensor, value_projection: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """T [N, J, r, K] and log rms [N, J] of states [N, J, K, V]; see `state_reader.project_states`."""
    states = states.float()
    mean_square = states.square().mean(dim=(-2, -1)) + eps
    normalised = states * mean_square.rsqrt()[..., None, None]
    projected = torch.einsum("jvr,njkv->njrk", value_projection.float(), normalised)
    return projected, 0.5 * mean_square.log()


def read_projected_states_reference(
    projected: Tensor, log_rms: Tensor, hidden: Tensor, query_projection: Tensor, key_projection: Tensor
) -> Tensor:
    """Features [N, B, J * (r + 1)] fp32; see `state_reader.read_projected_states`."""
    narrow = torch.einsum("jrd,nbd->nbjr", query_projection.float(), hidden.float())
    queries = torch.einsum("jrk,nbjr->nbjk", key_projection.float(), narrow)
    reads = torch.einsum("njrk,nbjk->nbjr", projected, queries)
    norms = log_rms[:, None, :, None].expand(*reads.shape[:-1], 1)
    return torch.cat((reads, norms), dim=-1).flatten(2)
