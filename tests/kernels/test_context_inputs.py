"""Context inputs: reference against a drafter's own projections, Triton against the reference."""

import pytest
import torch

from hf_hybridspec.kernels.context_inputs import context_inputs
from hf_hybridspec.kernels.dispatch import use_kernels
from hf_hybridspec.kernels.residual_rows import residual_rows
from tests.modeling.drafter_helpers import HIDDEN, make_drafter

EPS = 1e-6
# fp32 sums of a few hundred products in another order.
TOLERANCE = 2e-5


def _call(num_rows, layers, heads, size, hidden, device="cpu", dtype=torch.float32):
    """Arguments up to `committed`; weights and caches lie apart."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

    weights = random(layers, 3 * heads * size, hidden, scale=hidden**-0.5)[:, heads * size :]
    caches = torch.zeros(2, layers, heads, 30, size, device=device, dtype=dtype)
    scales = 1 + 0.3 * random(layers, size).float()
    rotation = random(16, 2 * size)[:num_rows].chunk(2, dim=1)
    rows = random(16, hidden)[:num_rows]
    committed = torch.tensor([9], dtype=torch.int32, device=device)
    rows = residual_rows(rows, 1 + 0.3 * random(hidden).float())
    return rows, weights, scales, *rotation, *caches, committed


def _written(kind, *sizes):
    with use_kernels(kind):
        arguments = _call(*sizes)
        context_inputs(*arguments, EPS)
    return arguments[5:7]


def test_reference_is_the_drafters_projection():
    drafter = make_drafter("dflash")
    generator = torch.Generator().manual_seed(1)
    fused = torch.randn(4, HIDDEN, generator=generator)
    rotation = drafter.rotation(torch.arange(9, 13))
    attentions = [layer.self_attn for layer in drafter.layers]
    weights = torch.stack([torch.cat([module.k_proj.weight, module.v_proj.weight]) for module in attentions])
    scales = torch.stack([module.k_norm.weight for module in attentions])
    keys, values = torch.zeros(2, len(attentions), 2, 30, 16)
    committed = torch.tensor([9], dtype=torch.int32)
    with torch.no_grad(), use_kernels("reference"):
        context_inputs(
            residual_rows(fused, drafter.hidden_norm.weight), weights, scales, rotation.cos[0, 0], rotation.sin[0, 0],
            keys, values, committed, EPS,
        )  # fmt: skip
        for module, key, value in zip(attentions, keys, values, strict=True):
            expected = module.keys_values(drafter.hidden_norm(fused)[None], rotation)
            torch.testing.assert_close(key[:, 9:13], expected.keys[0], atol=TOLERANCE, rtol=TOLERANCE)
            torch.testing.assert_close(value[:, 9:13], expected.values[0], atol=TOLERANCE, rtol=TOLERANCE)
            assert not key[:, :9].any() and not key[:, 13:].any()


@pytest.mark.parametrize("num_rows", [1, 5, 16])
@pytest.mark.parametrize(("layers", "heads", "size", "hidden"), [(3, 2, 16, 48), (2, 3, 24, 200), (1, 1, 64, 128)])
def test_triton_equals_reference(num_rows, layers, heads, size, hidden, triton_device):
    sizes = (num_rows, layers, heads, size, hidden, triton_device)
    for result, expected in zip(_written("triton", *sizes), _written("reference", *sizes), strict=True):
        torch.testing.assert_close(result, expected, atol=TOLERANCE, rtol=TOLERANCE)
        assert result[:, :, 9 : 9 + num_rows].abs().min() > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter's bf16 products are wrong")
@pytest.mark.parametrize(("layers", "heads", "size", "hidden"), [(6, 8, 128, 2048), (5, 2, 256, 2048)])
def test_triton_in_bf16_is_near_the_reference(layers, heads, size, hidden):
    sizes = 16, layers, heads, size, hidden
    # On the CPU: racecheck is stopped by the products of cuBLAS that the reference would take.
    expected = _written("reference", *sizes, "cpu", torch.bfloat16)
    for result, near in zip(_written("triton", *sizes, "cuda", torch.bfloat16), expected, strict=True):
        # A few roundings to bf16 of values of order one.
        torch.testing.assert_close(result.cpu(), near, atol=6e-2, rtol=2e-2)


def test_rows_beyond_the_cache_are_dropped(triton_device):
    with use_kernels("triton"):
        *arguments, committed = _call(5, 2, 2, 16, 48, triton_device)
        committed.fill_(27)
        context_inputs(*arguments, committed, EPS)
    keys = arguments[5]
    assert keys[:, :, 27:].abs().min() > 0 and not keys[:, :, :27].any()


def test_errors_name_what_is_given_and_allowed():
    rows, *rest = _call(2, 2, 2, 16, 48)
    with pytest.raises(ValueError, match=r"weights must be \(2, 64, 48\)"):
        context_inputs(rows, rest[0][:, :-1], *rest[1:], EPS)
    with pytest.raises(ValueError, match="committed of int32"):
        context_inputs(rows, *rest[:-1], rest[-1].long(), EPS)
