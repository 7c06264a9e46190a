"""Projections of at most 16 rows: reference against the formulas in float64, Triton against the reference."""

import pytest
import torch

from hf_hybridspec.kernels import linear
from hf_hybridspec.kernels.dispatch import use_kernels
from hf_hybridspec.kernels.residual_rows import ResidualRows, residual_rows

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
    next_scale = _random(size_n, seed=5, device=device)

    def room() -> ResidualRows:
        return ResidualRows.empty(num_rows, next_scale, torch.float32)

    return {
        "norm": lambda: linear.norm_linear(residual_rows(rows, scale), weight, EPS),
        "gated_norm": lambda: linear.gated_norm_linear(by_head, gate, scale[:width], weight, residual, room(), EPS),
        "gated": lambda: linear.gated_linear(by_head, gate, weight, residual, room()),
    }


def _fields(result) -> dict[str, torch.Tensor]:
    """What two implementations have in common: the squares may be summed over other parts."""
    if isinstance(result, torch.Tensor):
        return {"output": result}
    squares = result.squares[:, : result.shape[0]].sum(0)
    return {"values": result.values, "scaled": result.scaled, "squares": squares}


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
            result = next(iter(_fields(call()).values()))
            torch.testing.assert_close(result.double(), expected[name], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("heads", "width", "size_n"), [(15, 20, 70), (4, 64, 64), (2, 130, 33)])
def test_triton_equals_reference(num_rows, heads, width, size_n, triton_device):
    for name, call in _calls(num_rows, heads, width, size_n, triton_device).items():
        with use_kernels("reference"):
            expected = _fields(call())
        with use_kernels("triton"):
            for field, given in _fields(call()).items():
                torch.testing.assert_close(
                    given, expected[field], atol=TOLERANCE, rtol=TOLERANCE, msg=f"{name} {field}"
                )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter's products are numpy's, whose sums vary")
def test_triton_rows_do_not_depend_on_the_other_rows(triton_device):
    many, one = _calls(16, 4, 64, 64, triton_device), _calls(1, 4, 64, 64, triton_device)
    rows = _random(16, 256, seed=0)[:1]
    assert torch.equal(rows, _random(1, 256, seed=0))
    with use_kernels("triton"):
        assert torch.equal(many["norm"]()[:1], one["norm"]())


@pytest.mark.parametrize("kind", ["reference", "triton"])
def test_a_chain_reads_what_it_wrote(kind, triton_device):
    """The norm of rows that a projection wrote, and of some of them, is the norm of those values."""
    values, gate = _random(2, 5, 4, 16, seed=0, device=triton_device)
    weight, scale = _random(70, 64, seed=1, device=triton_device), _random(70, seed=2, device=triton_device)
    residual, head = _random(5, 70, seed=3, device=triton_device), _random(33, 70, seed=4, device=triton_device)
    with use_kernels(kind):
        rows = linear.gated_linear(values, gate, weight, residual, ResidualRows.empty(5, scale, torch.float32))
        for start, stop in ((0, 5), (0, 2), (1, 4)):
            given = linear.norm_linear(rows.between(start, stop), head, EPS)
            expected = linear.norm_linear(residual_rows(rows.values[start:stop], scale), head, EPS)
            torch.testing.assert_close(given, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_counters_are_zero_again(triton_device):
    rows, weight = _random(3, 4, 64, seed=0, device=triton_device), _random(64, 256, seed=1, device=triton_device)
    counters = torch.zeros(4, dtype=torch.int32, device=triton_device)
    residual, scale = _random(3, 64, seed=2, device=triton_device), torch.ones(64, device=triton_device)
    rooms = [ResidualRows.empty(3, scale, torch.float32) for _ in range(2)]
    with use_kernels("triton"):
        first = linear.gated_linear(rows, rows, weight, residual, rooms[0], counters)
        assert not counters.any()
        again = linear.gated_linear(rows, rows, weight, residual, rooms[1], counters)
        assert torch.equal(again.values, first.values)


def test_errors_name_what_is_given_and_allowed():
    weight, rows = torch.zeros(4, 8), torch.zeros(2, 2, 4)
    room = ResidualRows.empty(2, torch.ones(4), torch.float32)
    with pytest.raises(ValueError, match=r"1 <= n <= 16, got \(17, 2, 4\)"):
        linear.gated_linear(torch.zeros(17, 2, 4), rows, weight, torch.zeros(2, 4), room)
    with pytest.raises(ValueError, match="K = 6"):
        linear.norm_linear(residual_rows(torch.zeros(2, 6), torch.ones(6)), weight, EPS)
    with pytest.raises(ValueError, match="gate must be"):
        linear.gated_linear(rows, torch.zeros(2, 8), weight, torch.zeros(2, 4), room)
    with pytest.raises(ValueError, match="residual must be"):
        linear.gated_linear(rows, rows, weight, torch.zeros(2, 5), room)
    with pytest.raises(ValueError, match=r"output must be contiguous torch.float32 \(2, 4\), got torch.float16"):
        room = ResidualRows.empty(2, torch.ones(4), torch.float16)
        linear.gated_linear(rows, rows, weight, torch.zeros(2, 4), room)
