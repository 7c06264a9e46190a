"""Compiles the kernels of a piece of work in parallel before it runs: code is walked through once, launching nothing.

Triton compiles a kernel, and what launches it, where it is first launched, one after the other; dozens of kernels then
take half a minute.
"""

import os
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import KernelInterface

from .common_triton import launch_device

_ALLOCATIONS = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)
# Triton tells apart pointers that are multiples of it.
_ALIGNMENT = 16
_one_at_a_time = threading.Lock()


def can_compile_ahead() -> bool:
    """Whether this Triton compiles in the background."""
    return hasattr(triton, "AsyncCompileMode")


@contextmanager
def compiling_ahead(device: torch.device, on_compiled: Callable[[], None] = lambda: None) -> Iterator[None]:
    """The enclosed code launches no kernel of Triton; those that it would launch are compiled when the block ends.

    Operations of torch run, on zeros where a kernel would have written memory that the code has allocated. What cannot
    be compiled is not reported: it fails where it is launched.

    Args:
        device: where the kernels will run.
        on_compiled: called from other threads, once a kernel.
    """
    workers = _Workers(device, on_compiled)
    compiles = triton.AsyncCompileMode(workers, ignore_errors=True)
    with _one_at_a_time, workers, compiles, _without_launches(threading.get_ident()), _ZeroAllocations():
        yield


@contextmanager
def _without_launches(thread: int) -> Iterator[None]:
    """Launches of one thread end once their kernel is known; those of others go on."""
    launcher_of, known = KernelInterface.__getitem__, set()

    def compiler_of(kernel: KernelInterface, grid) -> Callable:
        if threading.get_ident() != thread:
            return launcher_of(kernel, grid)

        def compile_once(*args, **kwargs):
            key = (id(kernel), *map(_kind, args), *((name, _kind(value)) for name, value in kwargs.items()))
            # Layers launch the same kernels, and finding out which these are takes Triton milliseconds.
            if key not in known:
                known.add(key)
                kernel.run(*args, grid=grid, warmup=True, **kwargs)

        return compile_once

    KernelInterface.__getitem__ = compiler_of
    try:
        yield
    finally:
        KernelInterface.__getitem__ = launcher_of


def _kind(argument: object) -> Hashable:
    """What a kernel may depend on: of a tensor its dtype and alignment."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % _ALIGNMENT
    return type(argument), argument


class _Workers(ThreadPoolExecutor):
    """A thread for each core; compilers of Triton let go of Python's lock nearly all of the time."""

    def __init__(self, device: torch.device, on_compiled: Callable[[], None]):
        super().__init__(os.cpu_count(), thread_name_prefix="hybridspec-compile")
        self._place, self._on_compiled = torch.empty(0, device=device), on_compiled

    def submit(self, work: Callable, /, *args, **kwargs) -> Future:
        future = super().submit(self._compiled, work, *args, **kwargs)
        future.add_done_callback(lambda _: self._on_compiled())
        return future

    def _compiled(self, work: Callable, *args, **kwargs):
        with launch_device(self._place):
            kernel = work(*args, **kwargs)
            # Loads it and compiles what launches it, in C, for which the first launch would wait.
            _ = kernel.run
        return kernel


class _ZeroAllocations(TorchDispatchMode):
    """Memory that is allocated holds zeros: whatever indices a kernel would have written, zero is one."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        return result.zero_() if operation in _ALLOCATIONS else result
