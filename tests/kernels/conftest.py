"""The device on which the kernel tests run Triton."""

import pytest
import torch

from hf_hybridspec.kernels.common_triton import INTERPRETED


@pytest.fixture(scope="session")
def triton_device() -> str:
    """`cuda` where there is one, else `cpu` under the interpreter; anything else would test nothing."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert (device == "cpu") == INTERPRETED, (
        "TRITON_INTERPRET must be set, and only without CUDA, before triton is imported"
    )
    return device
