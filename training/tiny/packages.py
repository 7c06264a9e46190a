"""Documents out of published packages: PyPI wheels, npm tarballs and Debian packages."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module


def gsm_generators() -> dict[int, Callable]:
    """The hundred problem generators of reasoning-gym's gsm_symbolic, by number."""
    generators = {}
    for half in ("generators_00_49", "generators_50_99"):
        module = import_module(f"reasoning_gym.arithmetic.gsm_symbolic.{half}")
        for name in dir(module):
            if name.startswith("generate_"):
                generators[int(name.removeprefix("generate_"))] = getattr(module, name)
    return generators
