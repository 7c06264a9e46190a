"""Rotary embedding at a position on the device: as the host's module computes it."""

import pytest
import torch

from hf_hybridspec.kernels.dispatch import use_kernels
from hf_hybridspec.kernels.rotary import rotary_rows
from tests.support import random_target


@pytest.mark.parametrize("kind", ["reference", "triton"])
@pytest.mark.parametrize(("committed", "offset"), [(0, 0), (9, -4), (100_000, 3)])
@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_rows_are_those_of_the_host(kind, committed, offset, family, triton_device):
    module = random_target(family).model.rotary_emb.to(triton_device)
    positions = torch.arange(committed + offset, committed + offset + 5, device=triton_device)[None]
    cos, sin = module(torch.empty(1, device=triton_device), positions)
    with use_kernels(kind):
        length = torch.tensor([committed], dtype=torch.int32, device=triton_device)
        rotation = rotary_rows(
            length, torch.tensor([offset], device=triton_device), module.inv_freq, 1.0, 5, torch.float32
        )
    # Angles are equal in fp32, so only the last bits of their cosines may differ.
    torch.testing.assert_close(rotation.cos, cos[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(rotation.sin, sin[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["reference", "triton"])
def test_results_are_scaled_and_rounded(kind, triton_device):
    zero, frequencies = torch.zeros(1, dtype=torch.int64, device=triton_device), torch.ones(3, device=triton_device)
    with use_kernels(kind):
        rotation = rotary_rows(zero, zero, frequencies, 0.5, 2, torch.bfloat16)
    expected = 0.5 * torch.cos(torch.tensor([0.0, 1.0]))
    assert torch.equal(rotation.cos.cpu(), expected.bfloat16()[:, None].expand(2, 6))


def test_errors_name_what_is_given_and_allowed():
    one, frequencies = torch.zeros(1, dtype=torch.int64), torch.ones(3)
    with pytest.raises(ValueError, match=r"num_rows must be in \[1, 16\], got 17"):
        rotary_rows(one, one, frequencies, 1.0, 17, torch.float32)
    with pytest.raises(ValueError, match="offset must be"):
        rotary_rows(one, one.float(), frequencies, 1.0, 2, torch.float32)
    with pytest.raises(ValueError, match="frequencies must be"):
        rotary_rows(one, one, frequencies.double(), 1.0, 2, torch.float32)
