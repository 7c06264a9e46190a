"""Projections of at most 16 rows: reference against the formulas in float64, Triton against the reference."""

import pytest
import torch

from hf_hybridspec.kernels import linear
from hf_hybridspec.kernels.dispatch import use_kernels

EPS = 1e-6
# fp32 sums of a few hundred products in another order.
TOLERANCE = 2e-5
ROWS = (1, 2, 7, 16)


def _random(*shape: int, seed: int, device: str = "cpu") -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def _calls(num_rows: int, heads: int, width: int, size_n: int, device: str = "cpu"):
    """One call of every operator; the gate of an attention layer lies between other columns."""
    size_k = heads * width
    rows, weight = _random(num_rows, size_k, seed=0, device=device), _random(size_n, size_k, seed=1, device=device)
    scale, residual = _random(size_k, seed=2, device=device), _random(num_rows, size_n, seed=3, device=device)
    gates = _random(num_rows, heads, 2 * width, seed=4, device=device)
    by_head, gate = rows.view(num_rows, heads, width), gates[..., width:]
    return {
        "norm": lambda: linear.norm_linear(rows, scale, weight, EPS),
        "gated_norm": lambda: linear.gated_norm_linear(by_head, gate, scale[:width], weight, residual, EPS),
        "gated": lambda: linear.gated_linear(by_head, gate, weight, residual),
    }


@pytest.mark.parametrize("num_rows", ROWS)
def test_reference_follows_the_formulas(num_rows):
    heads, width, size_n = 3, 20, 50
    rows, weight = _random(num_rows, 60, seed=0).double(), _random(size_n, 60, seed=1).double()
    scale, residual = _random(60, seed=2).double(), _random(num_rows, size_n, seed=3).double()
    gate = _random(num_rows, heads, 40, seed=4)[..., width:].double()
    by_head = rows.view(num_rows, heads, width)

    def normalised(x):
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()

    silu = gate * torch.sigmoid(gate)
    expected = {
        "norm": (normalised(rows) * scale) @ weight.T,
        "gated_norm": residual + (normalised(by_head) * scale[:width] * silu).flatten(1) @ weight.T,
        "gated": residual + (by_head * torch.sigmoid(gate)).flatten(1) @ weight.T,
    }
    with use_kernels("reference"):
        for name, call in _calls(num_rows, heads, width, size_n).items():
            torch.testing.assert_close(call().double(), expected[name], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("heads", "width", "size_n"), [(15, 20, 70), (4, 64, 64), (2, 130, 33)])
def test_triton_equals_reference(num_rows, heads, width, size_n, triton_device):
    for name, call in _calls(num_rows, heads, width, size_n, triton_device).items():
        with use_kernels("reference"):
            expected = call()
        with use_kernels("triton"):
            torch.testing.assert_close(call(), expected, atol=TOLERANCE, rtol=TOLERANCE, msg=name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter's products are numpy's, whose sums vary")
def test_triton_rows_do_not_depend_on_the_other_rows(triton_device):
    many, one = _calls(16, 4, 64, 64, triton_device), _calls(1, 4, 64, 64, triton_device)
    rows = _random(16, 256, seed=0)[:1]
    assert torch.equal(rows, _random(1, 256, seed=0))
    with use_kernels("triton"):
        assert torch.equal(many["norm"]()[:1], one["norm"]())


def test_counters_are_zero_again(triton_device):
    rows, weight = _random(3, 4, 64, seed=0, device=triton_device), _random(64, 256, seed=1, device=triton_device)
    counters = torch.zeros(4, dtype=torch.int32, device=triton_device)
    residual = _random(3, 64, seed=2, device=triton_device)
    with use_kernels("triton"):
        first = linear.gated_linear(rows, rows, weight, residual, counters)
        assert not counters.any()
        assert torch.equal(linear.gated_linear(rows, rows, weight, residual, counters), first)


def test_errors_name_what_is_given_and_allowed():
    weight = torch.zeros(4, 8)
    with pytest.raises(ValueError, match=r"1 <= n <= 16, got \(17, 8\)"):
        linear.norm_linear(torch.zeros(17, 8), torch.ones(8), weight, EPS)
    with pytest.raises(ValueError, match="K = 6"):
        linear.norm_linear(torch.zeros(2, 6), torch.ones(6), weight, EPS)
    with pytest.raises(ValueError, match="norm_scale must be"):
        linear.norm_linear(torch.zeros(2, 8), torch.ones(6), weight, EPS)
    with pytest.raises(ValueError, match="gate must be"):
        linear.gated_linear(torch.zeros(2, 2, 4), torch.zeros(2, 8), weight, torch.zeros(2, 4))
    with pytest.raises(ValueError, match="residual must be"):
        linear.gated_linear(torch.zeros(2, 2, 4), torch.zeros(2, 2, 4), weight, torch.zeros(2, 5))
