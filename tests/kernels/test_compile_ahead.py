"""Compiling ahead: nothing is launched, everything is compiled, and other threads launch as ever."""

import threading

import pytest
import torch
import triton
import triton.language as tl

from hf_hybridspec.kernels import compile_ahead_triton
from hf_hybridspec.kernels.compile_ahead import compile_ahead
from hf_hybridspec.kernels.compile_ahead_triton import can_compile_ahead, compiling_ahead
from hf_hybridspec.kernels.dispatch import use_kernels

pytestmark = pytest.mark.skipif(not can_compile_ahead(), reason="this Triton does not compile in the background")


@triton.jit
def _fill_kernel(numbers, value, SIZE: tl.constexpr):
    tl.store(numbers + tl.arange(0, SIZE), value)


@triton.jit
def _wrong_kernel(numbers, SIZE: tl.constexpr):
    tl.static_assert(SIZE < 0)
    tl.store(numbers + tl.arange(0, SIZE), 0)


def filled(device: str, value: int, size: int = 16) -> torch.Tensor:
    numbers = torch.empty(size, dtype=torch.int64, device=device)
    _fill_kernel[(1,)](numbers, value, SIZE=size)
    return numbers


def test_nothing_is_launched_and_memory_is_zero(triton_device):
    table = torch.arange(40, 44, device=triton_device)
    with compiling_ahead(torch.device(triton_device)):
        # An index that no kernel has written: 2^62, say.
        found = table[filled(triton_device, 3)]
        assert found.tolist() == [40] * 16
        for zeros in (found.new_empty(3), torch.empty_like(found), torch.empty_strided((2, 2), (1, 2))):
            assert not zeros.any()
    assert table[filled(triton_device, 3)].tolist() == [43] * 16


def test_other_threads_launch(triton_device):
    seen = []
    with compiling_ahead(torch.device(triton_device)):
        thread = threading.Thread(target=lambda: seen.append(filled(triton_device, 5).tolist()))
        thread.start()
        thread.join()
    assert seen == [[5] * 16]


def test_an_error_of_the_code_ends_it(triton_device):
    with pytest.raises(ZeroDivisionError), compiling_ahead(torch.device(triton_device)):
        _ = 1 / 0
    assert filled(triton_device, 6).tolist() == [6] * 16


def test_only_kernels_of_triton_are_compiled(triton_device):
    seen, device = [], torch.device(triton_device)
    with use_kernels("reference"):
        compile_ahead(lambda: seen.append(0), device, lambda: None)
    assert seen == []
    with use_kernels("triton"):
        compile_ahead(lambda: seen.append(filled(triton_device, 7).tolist()), device, lambda: None)
    assert seen == [[0] * 16]


def test_a_triton_that_cannot(monkeypatch):
    monkeypatch.delattr(compile_ahead_triton.triton, "AsyncCompileMode")
    assert not can_compile_ahead()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_launches_find_their_kernels_compiled(monkeypatch, tmp_path):
    compiled, counted = [], []
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **found: compiled.append(found["repr"]))
    with compiling_ahead(torch.device("cuda"), lambda: counted.append(1)):
        for size in (32, 64, 128):
            filled("cuda", 3, size)
        # It is reported where it is launched.
        _wrong_kernel[(1,)](torch.zeros(4, device="cuda"), SIZE=4)
    assert len(compiled) == 3 and len(counted) == 4
    for size in (32, 64, 128):
        assert filled("cuda", 3, size).tolist() == [3] * size
    assert len(compiled) == 3
    with pytest.raises(triton.CompilationError):
        _wrong_kernel[(1,)](torch.zeros(4, device="cuda"), SIZE=4)
