"""Which implementation of a kernel runs: the only place that chooses, and the only environment variable.

`HYBRIDSPEC_KERNELS` is `auto` (default), `triton` or `reference`; `use_kernels` overrides it for a block of code.
`auto` takes Triton for CUDA tensors when the package is importable and the reference otherwise, and says so once in
the log. `triton` never falls back: where it cannot run, the call raises and names the condition that fails. Under
Triton's interpreter (`TRITON_INTERPRET=1` before the first import of triton), `triton` runs on CPU tensors as well.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

logger = logging.getLogger(__name__)

ENVIRONMENT_VARIABLE = "HYBRIDSPEC_KERNELS"
KINDS = ("auto", "triton", "reference")

_override: ContextVar[str | None] = ContextVar("hybridspec_kernels", default=None)


@contextmanager
def use_kernels(kind: str) -> Iterator[None]:
    """Runs the enclosed code with `kind` (`auto`, `triton` or `reference`), whatever the environment says."""
    token = _override.set(_checked(kind, "use_kernels"))
    try:
        yield
    finally:
        _override.reset(token)


def requested_kind() -> str:
    """The kind asked for: the innermost `use_kernels`, else `HYBRIDSPEC_KERNELS`, else `auto`."""
    return _override.get() or _checked(os.environ.get(ENVIRONMENT_VARIABLE, "auto"), ENVIRONMENT_VARIABLE)


def resolve(device: torch.device) -> str:
    """Returns `triton` or `reference`, the kind that runs for tensors on `device`.

    Raises:
        ValueError: the kind asked for is unknown.
        RuntimeError: `triton` is asked for and cannot run; the message names the condition that fails.
    """
    kind = requested_kind()
    if kind == "reference":
        return kind
    obstacle = _triton_obstacle(device.type)
    if kind == "auto":
        _announce(device.type, obstacle)
        return "reference" if obstacle or device.type != "cuda" else "triton"
    if obstacle:
        raise RuntimeError(
            f"Triton kernels were asked for, but {obstacle}. Use `reference` or `auto` kernels instead."
        )
    return kind


def implementation(operator: str, device: torch.device) -> ModuleType:
    """The module that implements `operator` (`gated_delta_rule`, ...) for tensors on `device`."""
    return _load(operator, resolve(device))


@cache
def _load(operator: str, kind: str) -> ModuleType:
    return import_module(f"{__package__}.{operator}_{kind}")


@cache
def _triton_obstacle(device_type: str) -> str | None:
    """Why Triton cannot run on this kind of device, or None."""
    try:
        interpreted = import_module(f"{__package__}.common_triton").INTERPRETED
    except ImportError as error:
        return f"the package triton cannot be imported ({error})"
    if device_type == "cuda" or (device_type == "cpu" and interpreted):
        return None
    return f"the tensors are on a {device_type} device (allowed: cuda, or cpu with TRITON_INTERPRET=1)"


@cache
def _announce(device_type: str, obstacle: str | None) -> None:
    if device_type == "cuda" and obstacle:
        logger.warning("Slow reference kernels run on a CUDA device: %s.", obstacle)
    else:
        logger.info("Kernels on %s: %s.", device_type, "triton" if device_type == "cuda" else "reference")


def _checked(kind: str, origin: str) -> str:
    if kind not in KINDS:
        raise ValueError(f"{origin} must be one of {', '.join(KINDS)}, got {kind!r}.")
    return kind
