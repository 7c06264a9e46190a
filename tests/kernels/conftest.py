"""The device on which the kernel tests run Triton, and how much of it they ask for."""

import os

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


@pytest.fixture(scope="session")
def watches_races() -> bool:
    """Whether racecheck watches, which takes seconds a launch: one launch of every kind is then enough.

    It follows the shared memory of single launches; longer caches and larger layers add more of the same.
    """
    return os.environ.get("WATCHES_RACES") == "1"
