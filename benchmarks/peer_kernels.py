"""Kernels of other packages, without the packages around them: SGLang 0.5.23 and fla-core 0.6.0.

A folder holds both as their wheels do: site-packages of an environment that has them, or unpacked wheels. Only the
files of the kernels are executed; the few helpers of SGLang that ask about the device are answered here.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType

import torch

LINEAR = "sglang.kernels.ops.attention.linear"
# Executed files, relative to the folder.
FILES = (
    f"{LINEAR.replace('.', '/')}/fused_sigmoid_gating_recurrent.py",
    f"{LINEAR.replace('.', '/')}/gdn_replayssm_spec_decode.py",
    f"{LINEAR.replace('.', '/')}/gdn_replayssm_spec_fold.py",
    "sglang/kernels/ops/mamba/mamba_state_scatter_triton.py",
    "sglang/kernels/ops/memory/ptr_table.py",
    "fla/ops/gated_delta_rule/fused_recurrent.py",
    "fla/ops/utils/op.py",
    "fla/ops/utils/softplus.py",
    "fla/utils/__init__.py",
)


@dataclass(frozen=True)
class PeerKernels:
    """Modules of the two packages; `narrow` and `wide` are one file that sees a Hopper device or another."""

    narrow: ModuleType
    wide: ModuleType
    scatter: ModuleType
    replay: ModuleType
    fold: ModuleType
    prefix: ModuleType
    versions: dict[str, str]


def load_peers(folder: Path) -> PeerKernels | str:
    """The kernels in `folder`, or one sentence that says what is missing there. `sys.modules` is left as it was."""
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        return f"{folder} lacks {missing[0]}; unpack the wheels sglang==0.5.23 and fla-core==0.6.0 there."
    modules = {}
    for is_hopper in (False, True):
        with _hollow_packages(folder, is_hopper):
            modules["narrow" if is_hopper else "wide"] = importlib.import_module(
                f"{LINEAR}.fused_sigmoid_gating_recurrent"
            )
            modules["replay"] = importlib.import_module(f"{LINEAR}.gdn_replayssm_spec_decode")
            modules["fold"] = importlib.import_module(f"{LINEAR}.gdn_replayssm_spec_fold")
            modules["scatter"] = importlib.import_module("sglang.kernels.ops.mamba.mamba_state_scatter_triton")
            modules["prefix"] = importlib.import_module("fla.ops.gated_delta_rule.fused_recurrent")
    versions = {found.metadata["Name"]: found.version for found in metadata.distributions(path=[str(folder)])}
    return PeerKernels(**modules, versions={name: versions.get(name, "unknown") for name in ("sglang", "fla-core")})


@contextmanager
def _hollow_packages(folder: Path, is_hopper: bool) -> Iterator[None]:
    """Both packages importable from the folder without their `__init__`, which would import the engines."""
    has_cuda = torch.cuda.is_available()
    capability = torch.cuda.get_device_capability() if has_cuda else (0, 0)
    packages = {".".join(Path(name).parts[:depth]) for name in FILES for depth in range(1, len(Path(name).parts))}
    packages -= {"fla.utils"}
    answers = {
        "sglang.kernels.jit.utils": {"is_arch_support_pdl": lambda: capability[0] >= 9},
        "sglang.kernels.ops.attention.fla.utils": {"is_tf32_supported": capability[0] >= 8},
        "sglang.srt.utils": {
            "is_cuda": lambda: has_cuda,
            "is_hip": lambda: False,
            "is_gfx95_supported": lambda: False,
            "is_sm90_supported": lambda: is_hopper,
            "get_device_sm": lambda: 10 * capability[0] + capability[1],
        },
        "sglang.srt.utils.common": {
            "get_device_core_count": lambda: torch.cuda.get_device_properties(0).multi_processor_count
        },
    }
    before = {name: sys.modules.pop(name) for name in [*sys.modules] if name.split(".")[0] in ("sglang", "fla")}
    for name in packages | {name.rpartition(".")[0] for name in answers}:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(folder / name.replace(".", "/"))]
    sys.modules["fla"].__version__ = "hollow"
    for name, values in answers.items():
        module = sys.modules.setdefault(name, ModuleType(name))
        vars(module).update(values)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] in ("sglang", "fla")]:
            del sys.modules[name]
        sys.modules.update(before)
