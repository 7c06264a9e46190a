"""Block convolution and its commit: reference against the host's formula, Triton against the reference."""

import pytest
import torch
import torch.nn.functional as F

from hf_hybridspec.kernels.causal_conv import block_causal_conv, commit_causal_conv
from hf_hybridspec.kernels.dispatch import use_kernels


def inputs(rows, channels=70, kernel=4, batch=2, dtype=torch.float32, device="cpu"):
    """Rows as a strided view of a wider projection, history, weight and bias."""
    generator = torch.Generator().manual_seed(rows)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    wide = draw(batch, rows, channels + 10)
    return wide[..., :channels], draw(batch, channels, kernel), draw(channels, kernel), draw(channels)


def host_convolution(rows, conv_state, weight, bias, activation):
    """As transformers' single-step update computes it, in the dtype of the weight."""
    inputs = torch.cat([conv_state, rows.transpose(1, 2)], dim=-1)
    output = F.conv1d(inputs, weight.unsqueeze(1), bias, groups=weight.shape[0])[..., -rows.shape[1] :]
    return (F.silu(output) if activation else output).transpose(1, 2)


@pytest.fixture(params=["reference", "triton"])
def device(request):
    """Runs a test with either implementation, on the device where that one runs."""
    with use_kernels(request.param):
        yield request.getfixturevalue("triton_device") if request.param == "triton" else "cpu"


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("with_bias", [True, False])
def test_block_equals_the_hosts_convolution(rows, activation, with_bias, device):
    x, state, weight, bias = inputs(rows, device=device)
    bias = bias if with_bias else None
    before = state.clone()
    output = block_causal_conv(x, state, weight, bias, activation)
    torch.testing.assert_close(output, host_convolution(x, state, weight, bias, activation), rtol=1e-5, atol=1e-6)
    assert torch.equal(state, before)


def test_other_kernel_width(device):
    x, state, weight, bias = inputs(4, kernel=3, device=device)
    output = block_causal_conv(x, state, weight, bias)
    torch.testing.assert_close(output, host_convolution(x, state, weight, bias, "silu"), rtol=1e-5, atol=1e-6)


def test_bf16_is_rounded_before_the_activation():
    """As the host rounds it; sums may differ by one rounding of bf16. Triton's bf16 is tested on a GPU, below."""
    x, state, weight, bias = inputs(6, dtype=torch.bfloat16)
    with use_kernels("reference"):
        output = block_causal_conv(x, state, weight, bias)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, host_convolution(x, state, weight, bias, "silu"), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 2, 4, 7, 16])
@pytest.mark.parametrize("on_device", [False, True])
def test_commit_keeps_the_last_columns(rows, on_device, device):
    """C11: after each prefix the history holds no rejected row, in every layer; bitwise."""
    layers = [inputs(rows, device=device) for _ in range(2)]
    block = torch.stack([x for x, *_ in layers])
    for length in range(rows + 1):
        states = torch.stack([state for _, state, *_ in layers])
        expected = torch.cat([states, block[:, :, :length].transpose(2, 3)], dim=-1)[..., -4:].clone()
        poisoned = block.clone()
        poisoned[:, :, length:] = torch.nan
        commit_causal_conv(states, poisoned, torch.tensor([length], device=device) if on_device else length)
        assert torch.equal(states, expected)


def test_block_commit_continue_equals_one_row_at_a_time(device):
    x, state, weight, bias = inputs(12, device=device)
    single, history = [], state.clone()
    for i in range(12):
        single.append(block_causal_conv(x[:, i : i + 1], history, weight, bias))
        commit_causal_conv(history[None], x[None, :, i : i + 1], 1)
    single = torch.cat(single, dim=1)

    position, history = 0, state.clone()
    for rows, length in ((5, 2), (4, 4), (3, 0), (6, 1), (5, 3)):
        block = x[:, position : position + rows]
        output = block_causal_conv(block, history, weight, bias)
        torch.testing.assert_close(output, single[:, position : position + rows], rtol=1e-5, atol=1e-6)
        commit_causal_conv(history[None], block[None], length)
        position += length


def test_refused_inputs():
    x, state, weight, bias = inputs(4)
    for arguments, message in [
        ((x[0], state, weight, bias), r"rows must be \[B, n, C\]"),
        ((x, state, weight[:3], bias), r"C = 70 as in rows"),
        ((x, state, weight, bias[:3]), r"C = 70 as in rows"),
        ((x, state[..., 1:], weight, bias), r"conv_state must be .* \(2, 70, 4\), got \(2, 70, 3\)"),
        ((x, state, weight, bias, "gelu"), "activation must be 'silu' or None, got 'gelu'"),
    ]:
        with pytest.raises(ValueError, match=message):
            block_causal_conv(*arguments)
    for arguments, message in [
        ((state, x, 1), "Stack the layers"),
        ((state[None], x[None, ..., :3], 1), r"L, B, C = 1, 2, 70, got \(1, 2, 4, 3\)"),
        ((state[None], x[None], 5), r"commit_length must be in \[0, 4\], the rows of the block, got 5"),
        ((state[None], x[None], torch.tensor(1.5)), "one int32 or int64 element"),
    ]:
        with pytest.raises(ValueError, match=message):
            commit_causal_conv(*arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 6, 16])
def test_compiled_kernels_at_full_width(rows):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    x, state, weight, bias = inputs(rows, channels=8192, dtype=torch.bfloat16, device="cuda")
    with use_kernels("triton"):
        output = block_causal_conv(x, state, weight, bias)
    with use_kernels("reference"):
        expected = block_causal_conv(x, state, weight, bias)
    torch.testing.assert_close(output, expected, rtol=2**-7, atol=1e-3)
    for length in range(rows + 1):
        states, expected = state[None].repeat(3, 1, 1, 1), state[None].repeat(3, 1, 1, 1)
        block = x[None].expand(3, -1, -1, -1)
        with use_kernels("triton"):
            commit_causal_conv(states, block, torch.tensor([length], dtype=torch.int32, device="cuda"))
        with use_kernels("reference"):
            commit_causal_conv(expected, block, length)
        assert torch.equal(states, expected)
