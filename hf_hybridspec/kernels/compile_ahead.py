"""Compiles the kernels of a piece of work in parallel before it runs: code is walked through once, launching nothing.

Triton compiles a kernel where it is first launched, one after the other; dozens of kernels then take as many seconds.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import KernelInterface

_ALLOCATIONS = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)
_one_at_a_time = threading.Lock()


def can_compile_ahead() -> bool:
    """Whether this Triton compiles in the background."""
    return hasattr(triton, "AsyncCompileMode")


@contextmanager
def compiling_ahead(on_compiled: Callable[[], None] = lambda: None) -> Iterator[None]:
    """The enclosed code launches no kernel of Triton; those that it would launch are compiled when the block ends.

    Operations of torch run, on zeros where a kernel would have written memory that the code has allocated. What cannot
    be compiled is not reported: it fails where it is launched.

    Args:
        on_compiled: called from other threads, once a kernel.
    """
    workers, thread = _Workers(on_compiled), threading.get_ident()
    compiles = triton.AsyncCompileMode(workers, ignore_errors=True)
    with _one_at_a_time, workers, compiles, _without_launches(thread), _ZeroAllocations():
        yield


@contextmanager
def _without_launches(thread: int) -> Iterator[None]:
    """Launches of one thread end once their kernel is known; those of others go on."""
    launcher_of = KernelInterface.__getitem__

    def compiler_of(kernel: KernelInterface, grid) -> Callable:
        if threading.get_ident() != thread:
            return launcher_of(kernel, grid)
        return lambda *args, **kwargs: kernel.run(*args, grid=grid, warmup=True, **kwargs)

    KernelInterface.__getitem__ = compiler_of
    try:
        yield
    finally:
        KernelInterface.__getitem__ = launcher_of


class _Workers(ThreadPoolExecutor):
    """A thread for each core; compilers of Triton let go of Python's lock nearly all of the time."""

    def __init__(self, on_compiled: Callable[[], None]):
        super().__init__(os.cpu_count(), thread_name_prefix="hybridspec-compile")
        self._on_compiled = on_compiled

    def submit(self, work: Callable, /, *args, **kwargs) -> Future:
        future = super().submit(work, *args, **kwargs)
        future.add_done_callback(lambda _: self._on_compiled())
        return future


class _ZeroAllocations(TorchDispatchMode):
    """Memory that is allocated holds zeros: whatever indices a kernel would have written, zero is one."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        return result.zero_() if operation in _ALLOCATIONS else result
