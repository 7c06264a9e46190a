"""Reference of the state reader: ReaDy's read of the target's committed recurrent states, in fp32, differentiable.

For a state S (dv x dk; stored transposed, [K, V]) and a draft row h, per state (arXiv 2610.20503):

    S_bar = S / rms(S),  T = V^T S_bar  (r x dk, once per round),  q = U^T (W_q h),  u = T q,  f = [u, log rms(S)]

with rms(S) = sqrt(mean(S^2) + 1e-6) over all entries of one head's matrix.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

RMS_EPS = 1e-6


@dataclass(frozen=True)
class ProjectedStates:
    """What the rows of a round read: projected [N, J, r, K] = V^T S_bar, log_rms [N, J]; both fp32."""

    projected: Tensor
    log_rms: Tensor


def gather_states(recurrent_states: Tensor, layers: Tensor, out: Tensor) -> None:
    """See `state_reader.gather_states`."""
    out.copy_(recurrent_states[layers].transpose(0, 1).flatten(1, 2))


def project_states(states: Tensor, value_projection: Tensor) -> ProjectedStates:
    """See `state_reader.project_states`."""
    states = states.float()
    mean_square = states.square().mean(dim=(-2, -1)) + RMS_EPS
    normalised = states * mean_square.rsqrt()[..., None, None]
    projected = torch.einsum("jvr,njkv->njrk", value_projection.float(), normalised)
    return ProjectedStates(projected, 0.5 * mean_square.log())


def read_projected_states(
    states: ProjectedStates, hidden: Tensor, query_projection: Tensor, key_projection: Tensor
) -> Tensor:
    """See `state_reader.read_projected_states`."""
    narrow = torch.einsum("jrd,nbd->nbjr", query_projection.float(), hidden.float())
    queries = torch.einsum("jrk,nbjr->nbjk", key_projection.float(), narrow)
    reads = torch.einsum("njrk,nbjk->nbjr", states.projected, queries)
    norms = states.log_rms[:, None, :, None].expand(*reads.shape[:-1], 1)
    return torch.cat((reads, norms), dim=-1).flatten(2)
