"""Which implementation runs, and that an explicit choice never falls back."""

import logging

import pytest
import torch

from hf_hybridspec.kernels import dispatch
from hf_hybridspec.kernels.dispatch import implementation, resolve, use_kernels

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    """No environment variable, and no memory of what was found or said before or by these tests."""
    monkeypatch.delenv(dispatch.ENVIRONMENT_VARIABLE, raising=False)
    for function in (dispatch._triton_obstacle, dispatch._announce):
        function.cache_clear()
    yield
    for function in (dispatch._triton_obstacle, dispatch._announce):
        function.cache_clear()


@pytest.fixture
def no_triton(monkeypatch):
    def failing_import(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(dispatch, "import_module", failing_import)


def test_auto_takes_triton_on_cuda_and_the_reference_elsewhere():
    assert resolve(CPU) == "reference"
    assert resolve(CUDA) == "triton"
    assert resolve(torch.device("meta")) == "reference"


def test_the_choice_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, logger=dispatch.__name__):
        for _ in range(3):
            resolve(CUDA)
    assert [record.getMessage() for record in caplog.records] == ["Kernels on cuda: triton."]


def test_auto_without_triton_warns_once_and_runs_the_reference(no_triton, caplog):
    assert [resolve(CUDA) for _ in range(3)] == ["reference"] * 3
    assert len(caplog.records) == 1 and "cannot be imported" in caplog.text


def test_environment_variable_and_override(monkeypatch):
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "reference")
    assert resolve(CUDA) == "reference"
    with use_kernels("triton"):
        assert resolve(CUDA) == "triton"
        with use_kernels("auto"):
            assert resolve(CPU) == "reference"
        assert resolve(CUDA) == "triton"
    assert resolve(CUDA) == "reference"


def test_unknown_kinds_are_refused(monkeypatch):
    with (
        pytest.raises(ValueError, match="use_kernels must be one of auto, triton, reference, got 'fast'"),
        use_kernels("fast"),
    ):
        pass
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "cuda")
    with pytest.raises(ValueError, match="HYBRIDSPEC_KERNELS must be one of auto, triton, reference, got 'cuda'"):
        resolve(CPU)


def test_explicit_triton_that_cannot_run_raises_with_the_condition(monkeypatch):
    common = dispatch.import_module("hf_hybridspec.kernels.common_triton")
    monkeypatch.setattr(common, "INTERPRETED", False)
    with use_kernels("triton"):
        assert resolve(CUDA) == "triton"
        with pytest.raises(RuntimeError, match=r"on a cpu device .*TRITON_INTERPRET=1.* Use `reference`"):
            resolve(CPU)
        with pytest.raises(RuntimeError, match="on a mps device"):
            resolve(torch.device("mps"))


def test_explicit_triton_without_the_package_raises(no_triton):
    with use_kernels("triton"), pytest.raises(RuntimeError, match="the package triton cannot be imported"):
        resolve(CUDA)


@pytest.mark.parametrize("operator", ["gated_delta_rule", "causal_conv"])
def test_the_named_module_runs(operator):
    for kind in ("triton", "reference"):
        with use_kernels(kind):
            module = implementation(operator, CUDA)
        assert module.__name__ == f"hf_hybridspec.kernels.{operator}_{kind}"
