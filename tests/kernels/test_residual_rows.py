"""Rows of the residual stream: what is written beside them is their norm, in both implementations."""

import pytest
import torch

from hf_hybridspec.kernels.dispatch import use_kernels
from hf_hybridspec.kernels.residual_rows import ResidualRows, residual_rows
from hf_hybridspec.kernels.residual_rows_reference import normalised

EPS = 1e-6


def _table(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(30, 50, generator=generator).to(device), torch.randn(50, generator=generator).to(device)


@pytest.mark.parametrize("kind", ["reference", "triton"])
@pytest.mark.parametrize("row_ids", [None, [7], [3, 0, 29, 3]])
def test_what_is_written_gives_the_norm(kind, row_ids, triton_device):
    table, scale = _table(triton_device)
    taken = table[:9] if row_ids is None else table[row_ids]
    ids = None if row_ids is None else torch.tensor(row_ids, device=triton_device)
    with use_kernels(kind):
        rows = residual_rows(table[:9] if row_ids is None else table, scale, ids)
    assert torch.equal(rows.values, taken)
    expected = taken.double() / (taken.double().square().mean(-1, keepdim=True) + EPS).sqrt() * scale
    mean = rows.squares[:, : taken.shape[0]].double().sum(0) / 50
    actual = rows.scaled.double() / (mean + EPS).sqrt()[:, None]
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(normalised(rows, EPS).double(), expected, atol=1e-6, rtol=1e-6)


def test_some_rows_are_views_of_all():
    table, scale = _table()
    rows = residual_rows(table[:9], scale)
    some = rows.between(2, 5)
    assert torch.equal(some.values, table[2:5]) and some.shape == (3, 50)
    for name in ("values", "scaled"):
        assert getattr(some, name).data_ptr() == getattr(rows, name)[2:].data_ptr()
    assert torch.equal(some.squares[:, :3], rows.squares[:, 2:5])


def test_room_holds_the_parts_of_any_tiles():
    room = ResidualRows.empty(3, torch.ones(50), torch.bfloat16)
    assert room.squares.shape == (4, 16) and room.values.dtype == torch.bfloat16
    assert room.of_parts(2).squares.data_ptr() == room.squares.data_ptr() and room.of_parts(2).squares.shape[0] == 2


def test_errors_name_what_is_given_and_allowed():
    table, scale = _table()
    with pytest.raises(ValueError, match=r"1 <= n <= 16, got \(30, 50\) and n = 30"):
        residual_rows(table, scale)
    with pytest.raises(ValueError, match=r"norm_scale must be fp32 \(50,\), got torch.float64"):
        residual_rows(table[:2], scale.double())
    with pytest.raises(ValueError, match="row_ids must be int64"):
        residual_rows(table, scale, torch.zeros(2, dtype=torch.int32))
