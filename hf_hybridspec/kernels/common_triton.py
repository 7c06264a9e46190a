"""What the Triton implementations share: whether the interpreter runs them, and the device that they launch on."""

from contextlib import AbstractContextManager, nullcontext

import torch
from triton import knobs

# Read once: `triton.jit` makes the same decision when it decorates a kernel.
INTERPRETED = bool(knobs.runtime.interpret)


def launch_device(tensor: torch.Tensor) -> AbstractContextManager:
    """Makes the tensor's device current, since Triton launches on the current one and layers may be spread."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
