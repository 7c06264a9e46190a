"""Results files: JSON whose keys are written by several commands, each with what it was measured on."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

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


def update_results(path: Path, values: dict[str, Any], commit: str) -> None:
    """Sets keys of a results file, with the GPU and the commit they were measured on; other keys stay.

    commit: the one that was measured, see `current_commit`; what writes a summary later takes it from the results.
    """
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    content |= values
    content["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else content.get("gpu", "none")
    content["commit"] = commit
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
