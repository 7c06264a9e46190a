"""The joint producer: reference against transformers' own layer, Triton against the reference."""

from dataclasses import replace

import pytest
import torch

from hf_hybridspec.kernels.dispatch import use_kernels
from hf_hybridspec.kernels.gated_delta_inputs import ProducerWeights, gated_delta_inputs
from hf_hybridspec.kernels.residual_rows import residual_rows
from hf_hybridspec.modeling.gated_delta_net import SeparateProjections
from tests.support import random_target

EPS = 1e-6
# fp32 sums of about a hundred products in another order.
TOLERANCE = 2e-5
# rows, hidden, channels, output gate, value heads, convolution kernel; none a multiple of the tile in the last two.
SHAPES = [(1, 48, 96, 64, 4, 4), (5, 64, 100, 52, 3, 4), (16, 130, 64, 32, 2, 3)]


def _inputs(num_rows, hidden, channels, gates, heads, kernel, device="cpu"):
    generator = torch.Generator().manual_seed(0)

    def random(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(device)

    weights = ProducerWeights(
        projection=random(channels + gates + 2 * heads, hidden, scale=0.2),
        conv_weight=random(channels, kernel),
        A_log=random(heads),
        # Far enough out that softplus is linear in some heads.
        dt_bias=random(heads, scale=15.0),
    )
    return random(num_rows, hidden), 1 + random(hidden, scale=0.2), weights, random(channels, kernel)


def _run(kind, inputs):
    hidden, scale, weights, conv_state = inputs
    conv_rows = torch.full((16, conv_state.shape[0]), float("nan"), device=hidden.device)
    with use_kernels(kind):
        return gated_delta_inputs(residual_rows(hidden, scale), weights, conv_state, conv_rows, EPS), conv_rows


def test_reference_is_the_layer_of_the_target():
    layer = random_target("qwen3_5_moe").model.layers[0]
    mixer = layer.linear_attn
    weights = ProducerWeights(
        projection=torch.cat([getattr(mixer, f"in_proj_{name}").weight.detach() for name in ("qkv", "z", "b", "a")]),
        conv_weight=mixer.conv1d.weight.detach().squeeze(1),
        A_log=mixer.A_log.detach(),
        dt_bias=mixer.dt_bias.detach(),
    )
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    scale = 1 + layer.input_layernorm.weight.detach()
    produced, conv_rows = _run("reference", (hidden, scale, weights, torch.zeros_like(weights.conv_weight)))
    with torch.no_grad():
        normed = layer.input_layernorm(hidden)[None]
        rows = mixer.in_proj_qkv(normed)
        log_decay, beta = SeparateProjections._gates(mixer, mixer.in_proj_b(normed), mixer.in_proj_a(normed))
        convolved = mixer.conv1d(rows.transpose(1, 2))[..., :5].transpose(1, 2)
    for given, expected in (
        (conv_rows[:5], rows),
        (produced.mixed, torch.nn.functional.silu(convolved)),
        (produced.z, mixer.in_proj_z(normed)),
        (produced.log_decay, log_decay),
        (produced.beta, beta),
    ):
        torch.testing.assert_close(given, expected[0].detach(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_triton_equals_reference(shape, triton_device):
    inputs = _inputs(*shape, device=triton_device)
    expected, expected_rows = _run("reference", inputs)
    produced, conv_rows = _run("triton", inputs)
    for name in ("mixed", "z", "log_decay", "beta"):
        torch.testing.assert_close(getattr(produced, name), getattr(expected, name), atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(conv_rows, expected_rows, atol=TOLERANCE, rtol=TOLERANCE, equal_nan=True)


@pytest.mark.parametrize("kind", ["reference", "triton"])
def test_rows_of_the_projection_may_lie_in_any_order(kind, triton_device):
    inputs = _inputs(*SHAPES[1], device=triton_device)
    expected, expected_rows = _run(kind, inputs)
    hidden, scale, weights, conv_state = inputs
    place = torch.randperm(weights.projection.shape[0], generator=torch.Generator().manual_seed(1)).to(triton_device)
    scattered = torch.empty_like(weights.projection)
    scattered[place] = weights.projection
    moved = replace(weights, projection=scattered, row_order=place.int())
    produced, conv_rows = _run(kind, (hidden, scale, moved, conv_state))
    for name in ("mixed", "z", "log_decay", "beta"):
        torch.testing.assert_close(getattr(produced, name), getattr(expected, name), atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(conv_rows, expected_rows, atol=TOLERANCE, rtol=TOLERANCE, equal_nan=True)


def test_errors_name_what_is_given_and_allowed():
    hidden, scale, weights, conv_state = _inputs(2, 48, 96, 64, 4, 4)
    hidden, conv_rows = residual_rows(hidden, scale), torch.zeros(16, 96)
    with pytest.raises(ValueError, match="conv_state must be"):
        gated_delta_inputs(hidden, weights, conv_state[:, :3], conv_rows, EPS)
    with pytest.raises(ValueError, match="conv_rows must be"):
        gated_delta_inputs(hidden, weights, conv_state, conv_rows[:1], EPS)
    with pytest.raises(ValueError, match=r"row_order must be None or int32 \[168\]"):
        gated_delta_inputs(hidden, replace(weights, row_order=torch.arange(168)), conv_state, conv_rows, EPS)
    with pytest.raises(ValueError, match=r"projection must be .* K = 48"):
        gated_delta_inputs(hidden, replace(weights, projection=weights.projection[:, :40]), conv_state, conv_rows, EPS)
    with pytest.raises(ValueError, match="C = 96 and HV = 4, got 104"):
        gated_delta_inputs(hidden, replace(weights, projection=weights.projection[:104]), conv_state, conv_rows, EPS)
