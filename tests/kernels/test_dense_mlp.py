"""The dense MLP of at most 16 rows: reference against the formulas in float64, Triton against the reference."""

import pytest
import torch

from hf_hybridspec.kernels.dense_mlp import dense_down, dense_gate_up
from hf_hybridspec.kernels.dispatch import use_kernels
from hf_hybridspec.kernels.residual_rows import ResidualRows, residual_rows

EPS = 1e-6
# fp32 sums of a few hundred products in another order.
TOLERANCE = 2e-5
# One rounding to bf16 of the activation, one of the output.
BF16_TOLERANCE = 2e-2
ROWS = (1, 2, 7, 16)


def _weights(num_rows: int, size: int, inner: int, device: str = "cpu", dtype: torch.dtype = torch.float32):
    """rows, norm scale, gate and up, down, residual; both weights lie inside a larger tensor."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(device)

    gate_up = random(2 * inner + 3, size + 2, scale=size**-0.5)[3:, 2:]
    down = random(size, inner + 5, scale=inner**-0.5)[:, :inner]
    rows, residual = random(16, size)[:num_rows], random(16, size)[:num_rows]
    return rows.to(dtype), 1 + random(size, scale=0.2), gate_up.to(dtype), down.to(dtype), residual.to(dtype)


def _run(kind: str, num_rows: int, size: int, inner: int, device: str = "cpu", dtype: torch.dtype = torch.float32):
    rows, scale, gate_up, down, residual = _weights(num_rows, size, inner, device, dtype)
    with use_kernels(kind):
        activated = dense_gate_up(residual_rows(rows, scale), gate_up, EPS)
        output = dense_down(activated, down, residual, ResidualRows.empty(num_rows, scale, dtype))
        return activated, output.values, output.scaled, output.squares[:, :num_rows].T


def _whole(results):
    """The parts of each row's sum of squares added up, the other results as they are."""
    *others, squares = results
    return *others, squares.sum(-1)


def _expected(num_rows: int, size: int, inner: int, dtype: torch.dtype = torch.float32):
    rows, scale, gate_up, down, residual = (tensor.double() for tensor in _weights(num_rows, size, inner, dtype=dtype))
    normed = rows / (rows.square().mean(-1, keepdim=True) + EPS).sqrt() * scale
    gate, up = normed @ gate_up[:inner].T, normed @ gate_up[inner:].T
    activated = gate * torch.sigmoid(gate) * up
    output = residual + activated @ down.T
    return activated, output, output * scale, output.square().sum(-1)


@pytest.mark.parametrize("num_rows", ROWS)
def test_reference_follows_the_formulas(num_rows):
    results = _whole(_run("reference", num_rows, 48, 70))
    for result, expected in zip(results, _expected(num_rows, 48, 70), strict=True):
        torch.testing.assert_close(result.double(), expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("size", "inner"), [(48, 70), (256, 32), (130, 600)])
def test_triton_equals_reference(num_rows, size, inner, triton_device):
    results, expected = (_whole(_run(kind, num_rows, size, inner, triton_device)) for kind in ("triton", "reference"))
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter's bf16 products are wrong")
@pytest.mark.parametrize(("size", "inner"), [(2048, 6144), (5120, 17408)])
def test_triton_in_bf16_is_near_the_formulas(size, inner):
    expected = _expected(16, size, inner, torch.bfloat16)
    many, one = (_run("triton", n, size, inner, "cuda", torch.bfloat16) for n in (16, 1))
    for result, wanted in zip(_whole(many), expected, strict=True):
        torch.testing.assert_close(result.double().cpu(), wanted, atol=BF16_TOLERANCE, rtol=BF16_TOLERANCE)
    for result, single in zip(many, one, strict=True):
        assert torch.equal(result[:1], single), "a row depends on the other rows"


def test_counters_are_zero_again(triton_device):
    rows, scale, _, down, residual = _weights(3, 64, 64, triton_device)
    counters = torch.zeros(4, dtype=torch.int32, device=triton_device)
    rooms = [ResidualRows.empty(3, scale, torch.float32) for _ in range(2)]
    with use_kernels("triton"):
        first = dense_down(rows, down, residual, rooms[0], counters)
        assert not counters.any()
        assert torch.equal(dense_down(rows, down, residual, rooms[1], counters).values, first.values)


def test_errors_name_what_is_given_and_allowed():
    room = ResidualRows.empty(2, torch.ones(8), torch.float32)
    rows = residual_rows(torch.zeros(2, 8), torch.ones(8))
    with pytest.raises(ValueError, match=r"1 <= n <= 16, got \(17, 8\)"):
        dense_down(torch.zeros(17, 8), torch.zeros(8, 8), torch.zeros(17, 8), room)
    with pytest.raises(ValueError, match="as many gate as up rows, got 5"):
        dense_gate_up(rows, torch.zeros(5, 8), EPS)
    with pytest.raises(ValueError, match=r"gate_up_weight must be .* K = 8"):
        dense_gate_up(rows, torch.zeros(4, 6), EPS)
    with pytest.raises(ValueError, match="K = 4"):
        dense_down(torch.zeros(2, 4), torch.zeros(8, 6), torch.zeros(2, 8), room)
    with pytest.raises(ValueError, match="residual must be"):
        dense_down(torch.zeros(2, 4), torch.zeros(8, 4), torch.zeros(2, 6), room)
