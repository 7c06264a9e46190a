"""Compiles the kernels of a piece of work before it runs, where kernels are Triton's; elsewhere there are none."""

from collections.abc import Callable

import torch

from .dispatch import implementation, resolve


def compile_ahead(work: Callable[[], None], device: torch.device, on_compiled: Callable[[], None]) -> None:
    """Walks through `work` once, launching no kernel, and returns when all that it would launch are compiled.

    Args:
        work: operations of torch in it do run, and read zeros where a kernel would have written.
        device: where the kernels will run.
        on_compiled: called from other threads, once a kernel.
    """
    if resolve(device) != "triton":
        return
    kernels = implementation("compile_ahead", device)
    if kernels.can_compile_ahead():
        with kernels.compiling_ahead(device, on_compiled):
            work()
