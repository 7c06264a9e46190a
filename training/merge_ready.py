"""Merges an adapter into its drafter and writes a plain checkpoint, which needs neither PEFT nor the base drafter.

python training/merge_ready.py --adapter runs/ready_stage2 --output runs/ready
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):
    # Run as a file: the repository's root is not on the path yet.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hf_hybridspec.modeling.auto import AutoDrafter
from hf_hybridspec.modeling.ready.adapter import ADAPTER_CONFIG


def merge(adapter: str, output: Path, dtype: str = "auto") -> None:
    """Writes the merged drafter. Raises ValueError for a folder that is no adapter, or an output that is in use."""
    if Path(adapter).is_dir() and not Path(adapter, ADAPTER_CONFIG).is_file():
        raise ValueError(
            f"{adapter} is no adapter: it has no {ADAPTER_CONFIG}. Give the output_dir of train_ready.py."
        )
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} is not empty. Give a new folder.")
    drafter = AutoDrafter.from_pretrained(adapter, dtype=dtype)
    drafter.save_pretrained(output)
    print(f"{drafter.describe()['family']} drafter with {drafter.describe()['parameters']} parameters: {output}")


def main(command_line: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 2 with one sentence on stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", required=True, help="folder or Hub id")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--dtype", default="auto", help="auto keeps the base drafter's")
    options = parser.parse_args(command_line)
    try:
        merge(options.adapter, options.output, options.dtype)
    except (ValueError, OSError) as error:
        print(f"merge_ready: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
