"""Block convolution in Triton: a program holds a few channels and all rows of the block, or of the history.

Committing shifts columns within the history of a channel. All columns are loaded before a barrier and stored after
it, since the thread that stores a column need not be the one that still has to read it.
"""

import torch
import triton
import triton.language as tl

from .common_triton import launch_device

BLOCK_CHANNELS = 128


@triton.jit
def _conv_kernel(
    rows, conv_state, weight, bias, output,
    stride_rb, stride_rn, stride_rc,
    stride_sb, stride_sc, stride_st,
    stride_wc, stride_wt,
    num_rows, num_channels,
    KERNEL: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    i_c, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_n = tl.arange(0, BN)
    o_c = i_c * BC + tl.arange(0, BC)
    m_c = o_c < num_channels
    m_out = (o_n[:, None] < num_rows) & m_c[None, :]
    p_rows = rows + i_b * stride_rb + o_c[None, :] * stride_rc
    p_state = conv_state + i_b * stride_sb + o_c[None, :] * stride_sc

    b_sum = tl.zeros([BN, BC], dtype=tl.float32)
    for i_t in tl.static_range(KERNEL):
        # Row read by this tap, counted from the block's first; negative rows are in the history.
        o_source = o_n + (i_t - KERNEL + 1)
        m_block = (o_source >= 0)[:, None] & m_out
        m_history = (o_source < 0)[:, None] & m_out
        b_block = tl.load(p_rows + o_source[:, None] * stride_rn, mask=m_block, other=0.0)
        b_history = tl.load(p_state + (o_source + KERNEL)[:, None] * stride_st, mask=m_history, other=0.0)
        b_weight = tl.load(weight + o_c * stride_wc + i_t * stride_wt, mask=m_c, other=0.0)
        b_input = b_block.to(weight.dtype.element_ty) + b_history.to(weight.dtype.element_ty)
        b_sum += b_input.to(tl.float32) * b_weight.to(tl.float32)[None, :]
    if HAS_BIAS:
        b_sum += tl.load(bias + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    b_sum = b_sum.to(weight.dtype.element_ty)
    if SILU:
        b_wide = b_sum.to(tl.float32)
        b_sum = (b_wide / (1.0 + tl.exp(-b_wide))).to(weight.dtype.element_ty)
    p_output = output + (i_b * num_rows + o_n[:, None]) * num_channels + o_c[None, :]
    tl.store(p_output, b_sum.to(output.dtype.element_ty), mask=m_out)


@triton.jit(do_not_specialize=["commit_length"])
def _commit_kernel(
    conv_states, rows, commit_length,
    stride_sl, stride_sb, stride_sc, stride_st,
    stride_rl, stride_rb, stride_rn, stride_rc,
    num_channels,
    KERNEL: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, ON_DEVICE: tl.constexpr,
):  # fmt: skip
    i_c, i_b, i_l = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    length = tl.load(commit_length).to(tl.int32) if ON_DEVICE else commit_length
    if length > 0:
        o_c = i_c * BC + tl.arange(0, BC)
        o_t = tl.arange(0, BT)
        m_state = (o_c < num_channels)[:, None] & (o_t < KERNEL)[None, :]
        o_source = o_t + length
        p_state = conv_states + i_l * stride_sl + i_b * stride_sb + o_c[:, None] * stride_sc
        p_rows = rows + i_l * stride_rl + i_b * stride_rb + o_c[:, None] * stride_rc
        m_kept = m_state & (o_source < KERNEL)[None, :]
        b_kept = tl.load(p_state + o_source[None, :] * stride_st, mask=m_kept, other=0.0)
        m_new = m_state & (o_source >= KERNEL)[None, :]
        b_new = tl.load(p_rows + (o_source - KERNEL)[None, :] * stride_rn, mask=m_new, other=0.0)
        b_state = tl.where(m_kept, b_kept, b_new.to(conv_states.dtype.element_ty))
        tl.debug_barrier()
        tl.store(p_state + o_t[None, :] * stride_st, b_state, mask=m_state)


def block_causal_conv(
    rows: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = "silu",
) -> torch.Tensor:
    """As `causal_conv.block_causal_conv`."""
    batch, num_rows, channels = rows.shape
    output = rows.new_empty(batch, num_rows, channels)
    bias = bias if bias is None else bias.contiguous()
    with launch_device(rows):
        _conv_kernel[(triton.cdiv(channels, BLOCK_CHANNELS), batch)](
            rows, conv_state, weight, bias, output,
            *rows.stride(), *conv_state.stride(), *weight.stride(),
            num_rows, channels,
            KERNEL=weight.shape[1], SILU=activation == "silu", HAS_BIAS=bias is not None,
            BN=triton.next_power_of_2(num_rows), BC=BLOCK_CHANNELS,
        )  # fmt: skip
    return output


def commit_causal_conv(conv_states: torch.Tensor, rows: torch.Tensor, commit_length: int | torch.Tensor) -> None:
    """As `causal_conv.commit_causal_conv`."""
    layers, batch, channels, kernel = conv_states.shape
    with launch_device(conv_states):
        _commit_kernel[(triton.cdiv(channels, BLOCK_CHANNELS), batch, layers)](
            conv_states, rows, commit_length,
            *conv_states.stride(), *rows.stride(),
            channels,
            KERNEL=kernel, BT=triton.next_power_of_2(kernel), BC=BLOCK_CHANNELS,
            ON_DEVICE=isinstance(commit_length, torch.Tensor),
        )  # fmt: skip
