"""Reference of the state reader: ReaDy's read of the target's committed recurrent states, in fp32, differentiable.

For a state S (dv x dk; stored transposed, [K, V]) and a draft row h, per state (arXiv 2610.20503):

    S_bar = S / rms(S),  T = V^T S_bar  (r x dk),  q = U^T (W_q h),  u = T q,  f = [u, log rms(S)]

with rms(S) = sqrt(mean(S^2) + 1e-6) over all entries of one head's matrix. As u = (V^T S U^T) (W_q h) / rms(S), all
that rows need of a state is an r x r matrix and its mean square, which are made once per round.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

RMS_EPS = 1e-6


@dataclass(frozen=True)
class ProjectedStates:
    """What the rows of a round read, both fp32, in P parts that are to be added up (so that no program needs all of a
    state): core [N, J, P, r, r] = V^T S U^T, not yet divided by rms(S); mean_square [N, J, P] of S."""

    core: Tensor
    mean_square: Tensor


def gather_states(recurrent_states: Tensor, layers: Tensor, out: Tensor) -> None:
    """See `state_reader.gather_states`."""
    out.copy_(recurrent_states[layers].transpose(0, 1).flatten(1, 2))


def project_states(states: Tensor, value_projection: Tensor, key_projection: Tensor) -> ProjectedStates:
    """See `state_reader.project_states`; P is 1."""
    states = states.float()
    projected = torch.einsum("jvr,njkv->njrk", value_projection.float(), states)
    core = torch.einsum("njrk,jsk->njrs", projected, key_projection.float())
    return ProjectedStates(core[:, :, None], states.square().mean(dim=(-2, -1))[..., None])


def read_projected_states(states: ProjectedStates, hidden: Tensor, query_projection: Tensor) -> Tensor:
    """See `state_reader.read_projected_states`."""
    mean_square = states.mean_square.sum(-1) + RMS_EPS
    core = states.core.sum(2) * mean_square.rsqrt()[..., None, None]
    narrow = torch.einsum("jrd,nbd->nbjr", query_projection.float(), hidden.float())
    reads = torch.einsum("njrs,nbjs->nbjr", core, narrow)
    norms = 0.5 * mean_square.log()[:, None, :, None].expand(*reads.shape[:-1], 1)
    return torch.cat((reads, norms), dim=-1).flatten(2)
