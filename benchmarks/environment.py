"""What a result was measured on: device, driver, versions, commit. Every results file carries this record."""

import argparse
import platform
import subprocess
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parent.parent
# Bytes per second of a large read on an H200: the floor of everything that is bound by memory.
BANDWIDTH = 4.3e12


def describe_environment(commit: str | None = None) -> dict[str, str | None]:
    """The record of this machine and checkout; fields that cannot be found out are None.

    Args:
        commit: the commit that is measured, for a copy of the files without its git history.
    """
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "python": platform.python_version(),
        "commit": commit or _output("git", "-C", str(REPOSITORY), "rev-parse", "HEAD"),
        "date": date.today().isoformat(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """The first line that the command prints, or None where it is missing or fails."""
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return None
    return lines[0].strip() if lines else None


def require_gpu(parser: argparse.ArgumentParser, is_tiny: bool) -> None:
    """Ends a benchmark that needs a GPU and finds none, unless its sizes are those of a dry run."""
    if not is_tiny and not torch.cuda.is_available():
        parser.exit(2, "This benchmark needs a CUDA device; none was found. --tiny runs without one.\n")
