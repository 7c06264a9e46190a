"""State reader in Triton: one launch each for gathering and for projecting, two for reading.

Gather: a copy, spread over (part of a state, state, sequence). Project: since u = (T U^T)(W_q h), rows need r x r
numbers of a state. Its k add up, so a program takes a few rows of a stored state [K, V] and leaves its part. Read:
W_q of all states is one matrix [J r, d]; a program takes 16 of its rows and a stretch of d, each number once for all
rows of the blocks. A last launch adds the parts in a fixed order, so that results repeat, and packs reads and log rms.

Everything is split so far that all multiprocessors have work at batch 1. fp32 products take three tf32 steps on tensor
cores: those of fp32 units held whole operands in registers and spilled 2.5 KB a thread. Forward only: the dispatcher
takes the reference where a gradient is wanted.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common_triton import launch_device
from .state_reader_reference import RMS_EPS, ProjectedStates

GATHER_BLOCK = 4096
# Rows of a stored state in one program: 16 KB of a state of 128 columns.
STATE_ROWS = 32
# Columns of one step. A state of 128 has four, all of which are asked for before the first is used.
STATE_COLUMNS = 32
# Numbers of d that one step of the read takes, of 2 and of 4 bytes.
STEP_HALF, STEP_FLOAT = 512, 128
# The read splits d until it has about so many programs: three to four on each multiprocessor of a large GPU.
READ_PROGRAMS = 480


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
    states, value_projection, key_projection, core, mean_square,
    stride_sn, stride_sj, stride_sk, stride_sv, J,
    R: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    i_part, i_j, i_n = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    o_r, o_v, o_k = tl.arange(0, BR), tl.arange(0, BV), i_part * BK + tl.arange(0, BK)
    m_r, m_k = o_r < R, o_k < K
    p_state = states + i_n * stride_sn + i_j.to(tl.int64) * stride_sj
    p_state += o_k[:, None] * stride_sk + o_v[None, :] * stride_sv
    # Strides of the projections are constants: the compiler has to know that rows of r are aligned.
    p_value = value_projection + i_j * V * R + o_v[:, None] * R + o_r[None, :]
    p_key = key_projection + i_j * R * K + o_r[None, :] * K + o_k[:, None]
    b_key = tl.load(p_key, mask=m_k[:, None] & m_r[None, :], other=0.0).to(tl.float32)

    # T of these k, transposed; then their part of T U^T.
    b_projected = tl.zeros([BK, BR], dtype=tl.float32)
    b_squares = tl.zeros([BK, BV], dtype=tl.float32)
    for start in range(0, V, BV):
        m_v = start + o_v < V
        b_state = tl.load(p_state, mask=m_k[:, None] & m_v[None, :], other=0.0).to(tl.float32)
        b_value = tl.load(p_value, mask=m_v[:, None] & m_r[None, :], other=0.0).to(tl.float32)
        b_projected = tl.dot(b_state, b_value, b_projected, input_precision="tf32x3")
        b_squares += b_state * b_state
        p_state += BV * stride_sv
        p_value += BV * R
    b_core = tl.dot(tl.trans(b_projected), b_key, input_precision="tf32x3")
    i_out = (i_n * J + i_j) * tl.num_programs(0) + i_part
    p_core = core + i_out * R * R + o_r[:, None] * R + o_r[None, :]
    tl.store(p_core, b_core, mask=m_r[:, None] & m_r[None, :])
    tl.store(mean_square + i_out, tl.sum(tl.sum(b_squares, axis=1), axis=0) / (K * V))


@triton.jit
def _narrow_kernel(
    hidden, query_projection, narrow, stride_hn, stride_hb, stride_hd, stride_wj, stride_wr, stride_wd, J, B, NUM_ROWS,
    D: tl.constexpr, R: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, STEPS: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    i_w, i_part, i_row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_w, o_b = i_w * BN + tl.arange(0, BN), (i_row * BB + tl.arange(0, BB)).to(tl.int64)
    m_w, m_b = o_w < J * R, o_b < NUM_ROWS
    o_d = i_part * STEPS * BD + tl.arange(0, BD)
    p_query = query_projection + (o_w // R).to(tl.int64)[None, :] * stride_wj + (o_w % R)[None, :] * stride_wr
    p_query += o_d[:, None] * stride_wd
    p_hidden = hidden + (o_b // B)[:, None] * stride_hn + (o_b % B)[:, None] * stride_hb + o_d[None, :] * stride_hd
    b_narrow = tl.zeros([BB, BN], dtype=tl.float32)
    for step in tl.static_range(STEPS):
        m_d = o_d + step * BD < D
        b_query = tl.load(p_query + step * BD * stride_wd, mask=m_d[:, None] & m_w[None, :], other=0.0)
        b_hidden = tl.load(p_hidden + step * BD * stride_hd, mask=m_b[:, None] & m_d[None, :], other=0.0)
        if HALF:
            b_narrow += tl.dot(b_hidden, b_query)
        else:
            b_narrow += tl.dot(b_hidden.to(tl.float32), b_query.to(tl.float32), input_precision="tf32x3")
    p_narrow = narrow + (i_part.to(tl.int64) * NUM_ROWS + o_b[:, None]) * J * R + o_w[None, :]
    tl.store(p_narrow, b_narrow, mask=m_b[:, None] & m_w[None, :])


@triton.jit
def _pack_kernel(
    core, mean_square, narrow, features, J, B, NUM_ROWS,
    R: tl.constexpr, BR: tl.constexpr, CORE_PARTS: tl.constexpr, PARTS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    i_row, i_j = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_state = (i_row // B) * J + i_j
    o_r = tl.arange(0, BR)
    m_r = o_r < R
    b_narrow = tl.zeros([BR], dtype=tl.float32)
    for part in tl.static_range(PARTS):
        b_narrow += tl.load(narrow + ((part * NUM_ROWS + i_row) * J + i_j) * R + o_r, mask=m_r, other=0.0)
    b_core = tl.zeros([BR, BR], dtype=tl.float32)
    b_mean_square = EPS
    for part in tl.static_range(CORE_PARTS):
        p_core = core + (i_state * CORE_PARTS + part) * R * R + o_r[:, None] * R + o_r[None, :]
        b_core += tl.load(p_core, mask=m_r[:, None] & m_r[None, :], other=0.0)
        b_mean_square += tl.load(mean_square + i_state * CORE_PARTS + part)
    b_reads = tl.sum(b_core * b_narrow[None, :], axis=1) * tl.rsqrt(b_mean_square)
    p_features = features + (i_row * J + i_j) * (R + 1)
    tl.store(p_features + o_r, b_reads, mask=m_r)
    tl.store(p_features + R, 0.5 * tl.log(b_mean_square))


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


def project_states(states: Tensor, value_projection: Tensor, key_projection: Tensor) -> ProjectedStates:
    """As `state_reader.project_states`."""
    N, J, K, V = states.shape
    R = value_projection.shape[2]
    rows = min(STATE_ROWS, _padded(K))
    parts = triton.cdiv(K, rows)
    core = torch.empty(N, J, parts, R, R, dtype=torch.float32, device=states.device)
    mean_square = torch.empty(N, J, parts, dtype=torch.float32, device=states.device)
    with launch_device(states):
        _project_kernel[(parts, J, N)](
            states, value_projection.contiguous(), key_projection.contiguous(), core, mean_square, *states.stride(), J,
            R=R, K=K, V=V, BR=_padded(R), BK=rows, BV=min(STATE_COLUMNS, _padded(V)), num_warps=4, num_stages=5,
        )  # fmt: skip
    return ProjectedStates(core, mean_square)


def read_projected_states(states: ProjectedStates, hidden: Tensor, query_projection: Tensor) -> Tensor:
    """As `state_reader.read_projected_states`."""
    N, J, core_parts, R, _ = states.core.shape
    B, D = hidden.shape[1:]
    half = hidden.dtype == query_projection.dtype and hidden.dtype in (torch.bfloat16, torch.float16)
    step = min(STEP_HALF if half else STEP_FLOAT, _padded(D))
    tiles, row_tiles = triton.cdiv(J * R, 16), triton.cdiv(N * B, 16)
    parts = min(triton.cdiv(D, step), triton.cdiv(READ_PROGRAMS, tiles * row_tiles))
    steps = triton.cdiv(triton.cdiv(D, step), parts)
    # Steps are shared out evenly; a part that would have none is left out.
    parts = triton.cdiv(triton.cdiv(D, step), steps)
    narrow = torch.empty(parts, N * B, J * R, dtype=torch.float32, device=hidden.device)
    features = torch.empty(N, B, J * (R + 1), dtype=torch.float32, device=hidden.device)
    with launch_device(hidden):
        _narrow_kernel[(tiles, parts, row_tiles)](
            hidden, query_projection, narrow, *hidden.stride(), *query_projection.stride(), J, B, N * B,
            D=D, R=R, BB=16, BN=16, BD=step, STEPS=steps, HALF=half, num_warps=4,
        )  # fmt: skip
        _pack_kernel[(N * B, J)](
            states.core.contiguous(), states.mean_square.contiguous(), narrow, features, J, B, N * B,
            R=R, BR=_padded(R), CORE_PARTS=core_parts, PARTS=parts, EPS=RMS_EPS, num_warps=1 if R <= 16 else 4,
        )  # fmt: skip
    return features


def _padded(size: int) -> int:
    """The power of two that holds `size`, at least the 16 that `tl.dot` needs."""
    return max(16, triton.next_power_of_2(size))
