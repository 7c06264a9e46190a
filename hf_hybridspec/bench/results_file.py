"""Results files: JSON whose keys are written by several commands, each with the commit that it measured."""

import json
from pathlib import Path
from typing import Any

from ..calibration.profile import write_atomically

# Keys that say where the others come from.
ABOUT = ("gpu", "commit", "commits")


def update_results(path: Path, values: dict[str, Any], gpu: str | None, commit: str) -> None:
    """Sets keys of a results file; other keys stay.

    `commits` says at which commit each key was measured, `commit` names all of these.

    Args:
        gpu: what measured the values; None leaves what the file says, which is "none" at first.
        commit: the one that was measured; what writes a summary later takes it from the results.
    """
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    before = {key: content.get("commit") for key in content if key not in ABOUT}
    commits = before | content.get("commits", {}) | dict.fromkeys(values, commit)
    content |= values
    content["gpu"] = gpu or content.get("gpu", "none")
    content["commit"] = ", ".join(sorted({str(one) for one in commits.values()}))
    content["commits"] = commits
    write_atomically(path, json.dumps(content, indent=2) + "\n")
