"""State reader in Triton: one launch each for gathering, for normalising and projecting, and for reading and packing.

Gather: a copy, spread over (part of a state, state, sequence). Project: one program a state holds its whole [K, V],
so that rms, normalisation and V^T S_bar need one read of it. Read: one program a state; since u = T U^T (W_q h), the
r x r product T U^T takes the place of the K-wide queries, and W_q is read once for all rows of the block.

Forward only: the dispatcher takes the reference where a gradient is wanted.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common_triton import launch_device
from .state_reader_reference import RMS_EPS, ProjectedStates

GATHER_BLOCK = 4096


@triton.jit
def _gather_kernel(
    states, layers, out, stride_sl, stride_sb, stride_sh, stride_sk, stride_sv, NUM_LAYERS,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i_part, i_state, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_l = tl.load(layers + i_state // HV).to(tl.int64)
    o_e = i_part * BLOCK + tl.arange(0, BLOCK)
    m_e = o_e < K * V
    p_state = states + i_l * stride_sl + i_b * stride_sb + (i_state % HV).to(tl.int64) * stride_sh
    b_state = tl.load(p_state + (o_e // V) * stride_sk + (o_e % V) * stride_sv, mask=m_e, other=0.0)
    p_out = out + (i_b * NUM_LAYERS * HV + i_state) * (K * V) + o_e
    tl.store(p_out, b_state.to(out.dtype.element_ty), mask=m_e)


@triton.jit
def _project_kernel(
    states, value_projection, projected, log_rms,
    stride_sn, stride_sj, stride_sk, stride_sv, stride_pj, stride_pv, stride_pr, J,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BR: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    i_j, i_n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_r, o_k, o_v = tl.arange(0, BR), tl.arange(0, BK), tl.arange(0, BV)
    m_r, m_k, m_v = o_r < R, o_k < K, o_v < V
    p_state = states + i_n * stride_sn + i_j.to(tl.int64) * stride_sj
    p_state += o_k[:, None] * stride_sk + o_v[None, :] * stride_sv
    b_state = tl.load(p_state, mask=m_k[:, None] & m_v[None, :], other=0.0).to(tl.float32)
    b_mean_square = tl.sum(tl.sum(b_state * b_state, axis=1), axis=0) / (K * V) + EPS

    p_value = value_projection + i_j * stride_pj + o_v[:, None] * stride_pv + o_r[None, :] * stride_pr
    b_value = tl.load(p_value, mask=m_v[:, None] & m_r[None, :], other=0.0).to(tl.float32)
    b_projected = tl.dot(b_state, b_value, input_precision="ieee") * tl.rsqrt(b_mean_square)
    p_projected = projected + ((i_n * J + i_j) * R + o_r[None, :]) * K + o_k[:, None]
    tl.store(p_projected, b_projected, mask=m_k[:, None] & m_r[None, :])
    tl.store(log_rms + i_n * J + i_j, 0.5 * tl.log(b_mean_square))


@triton.jit
def _read_kernel(
    projected, log_rms, hidden, query_projection, key_projection, features,
    stride_hn, stride_hb, stride_hd, stride_wj, stride_wr, stride_wd, stride_uj, stride_ur, stride_uk, J, B,
    D: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    BB: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    i_j, i_n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_b, o_r, o_k, o_d = tl.arange(0, BB), tl.arange(0, BR), tl.arange(0, BK), tl.arange(0, BD)
    m_b, m_r, m_k = o_b < B, o_r < R, o_k < K

    # 1. W_q h of all rows.
    p_query = query_projection + i_j.to(tl.int64) * stride_wj + o_r[:, None] * stride_wr + o_d[None, :] * stride_wd
    p_hidden = hidden + i_n * stride_hn + o_b[None, :] * stride_hb + o_d[:, None] * stride_hd
    b_narrow = tl.zeros([BR, BB], dtype=tl.float32)
    for start in range(0, D, BD):
        m_d = start + o_d < D
        b_query = tl.load(p_query, mask=m_r[:, None] & m_d[None, :], other=0.0)
        b_hidden = tl.load(p_hidden, mask=m_d[:, None] & m_b[None, :], other=0.0)
        if HALF:
            b_narrow += tl.dot(b_query, b_hidden)
        else:
            b_narrow += tl.dot(b_query.to(tl.float32), b_hidden.to(tl.float32), input_precision="ieee")
        p_query += BD * stride_wd
        p_hidden += BD * stride_hd

    # 2. T U^T, then the reads, packed with log rms behind them.
    p_projected = projected + ((i_n * J + i_j) * R + o_r[:, None]) * K + o_k[None, :]
    b_projected = tl.load(p_projected, mask=m_r[:, None] & m_k[None, :], other=0.0)
    p_key = key_projection + i_j.to(tl.int64) * stride_uj + o_r[None, :] * stride_ur + o_k[:, None] * stride_uk
    b_key = tl.load(p_key, mask=m_k[:, None] & m_r[None, :], other=0.0).to(tl.float32)
    b_mixed = tl.dot(b_projected, b_key, input_precision="ieee")
    b_reads = tl.dot(b_mixed, b_narrow, input_precision="ieee")
    p_features = features + ((i_n * B + o_b) * J + i_j) * (R + 1)
    tl.store(p_features[None, :] + o_r[:, None], b_reads, mask=m_r[:, None] & m_b[None, :])
    b_log_rms = tl.load(log_rms + i_n * J + i_j)
    tl.store(p_features + R, tl.zeros([BB], dtype=tl.float32) + b_log_rms, mask=m_b)


def gather_states(recurrent_states: Tensor, layers: Tensor, out: Tensor) -> None:
    """As `state_reader.gather_states`."""
    _, batch, num_v_heads, k_dim, v_dim = recurrent_states.shape
    count = layers.shape[0]
    block = min(GATHER_BLOCK, triton.next_power_of_2(k_dim * v_dim))
    with launch_device(recurrent_states):
        _gather_kernel[(triton.cdiv(k_dim * v_dim, block), count * num_v_heads, batch)](
            recurrent_states, layers, out, *recurrent_states.stride(), count,
            HV=num_v_heads, K=k_dim, V=v_dim, BLOCK=block, num_warps=8,
        )  # fmt: skip


def project_states(states: Tensor, value_projection: Tensor) -> ProjectedStates:
    """As `state_reader.project_states`."""
    N, J, K, V = states.shape
    R = value_projection.shape[2]
    projected = torch.empty(N, J, R, K, dtype=torch.float32, device=states.device)
    log_rms = torch.empty(N, J, dtype=torch.float32, device=states.device)
    with launch_device(states):
        _project_kernel[(J, N)](
            states, value_projection, projected, log_rms, *states.stride(), *value_projection.stride(), J,
            R=R, K=K, V=V, BR=_padded(R), BK=_padded(K), BV=_padded(V), EPS=RMS_EPS, num_warps=8,
        )  # fmt: skip
    return ProjectedStates(projected, log_rms)


def read_projected_states(
    states: ProjectedStates, hidden: Tensor, query_projection: Tensor, key_projection: Tensor
) -> Tensor:
    """As `state_reader.read_projected_states`."""
    N, J, R, K = states.projected.shape
    B, D = hidden.shape[1:]
    features = torch.empty(N, B, J * (R + 1), dtype=torch.float32, device=hidden.device)
    half = hidden.dtype == query_projection.dtype and hidden.dtype in (torch.bfloat16, torch.float16)
    with launch_device(hidden):
        _read_kernel[(J, N)](
            states.projected.contiguous(), states.log_rms.contiguous(), hidden, query_projection, key_projection,
            features,
            *hidden.stride(), *query_projection.stride(), *key_projection.stride(), J, B,
            D=D, R=R, K=K, BB=_padded(B), BD=256 if R <= 16 else 64, BR=_padded(R), BK=_padded(K), HALF=half,
            num_warps=4,
        )  # fmt: skip
    return features


def _padded(size: int) -> int:
    """The power of two that holds `size`, at least the 16 that `tl.dot` needs."""
    return max(16, triton.next_power_of_2(size))
