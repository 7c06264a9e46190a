"""What a measurement was made on."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch


def current_commit(commit: str | None = None) -> str:
    """The commit that is measured: the one given (for a copy of the files without its git history), else this
    checkout's; "unknown" without either."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        found = commit or subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        found = None
    return found or "unknown"


def gpu_name() -> str | None:
    """The GPU that measures, or None."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
