"""All measurements on a GPU, one after the other, and their summary.

    python -m benchmarks.h200 --output benchmarks/results --seconds 1500 --peers FOLDER
    python -m benchmarks.h200 --output runs/dry --tiny                                   (no GPU: a dry run)

Each part is a command of its own, which checks that results are right before it measures, and writes its file after
every phase. A part that fails ends the run; one that runs out of time is ended, and what it has written counts. After
each part the summary (`h200_summary.json`) is written anew, and `h200_parts.json` says how the parts went.
`--peers` is of `gated_delta_rule`, `--rounds` of `policies_h200`; without them, those comparisons are left out.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.environment import REPOSITORY, describe_environment, require_gpu
from benchmarks.h200_summary import FILES, write_summary
from hf_hybridspec.calibration.profile import write_atomically

PARTS = "h200_parts.json"
POLICIES, RATIOS = "policies_h200.json", "policies_summary.json"
# Part -> its file.
OUTPUTS = FILES | {"policies_h200": POLICIES}
# Longest times. Parts that watch the clock themselves are told to begin nothing new after three quarters of theirs.
SECONDS = {"gated_delta_rule": 300, "target_forward": 400, "decode": 600, "policies_h200": 400}
# Sizes of a dry run.
TINY = {
    "gated_delta_rule": ("--tiny", "--replays", "2", "--lengths", "2"),
    "target_forward": ("--tiny", "--replays", "2", "--contexts", "32", "--lengths", "1", "4", "--seconds", "6"),
    "decode": ("--tiny", "--tokens", "40", "--context", "40", "--repeats", "1"),
    "policies_h200": ("--tiny", "--count", "3", "--context", "40", "--repeats", "1"),
}


@dataclass(frozen=True)
class Part:
    """A command `python -m benchmarks.NAME` and the seconds it may take."""

    name: str
    options: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class PartReport:
    """How a part went: `done`, `failed` or `out of time`."""

    name: str
    outcome: str
    seconds: float


def parts(options: argparse.Namespace) -> list[Part]:
    """The parts, those that matter most first."""
    sizes = TINY if options.tiny else _full_sizes(options.seconds)
    given: dict[str, tuple[str, ...]] = {}
    if options.peers is not None:
        given["gated_delta_rule"] = ("--peers", str(options.peers))
    if options.rounds is not None:
        given["policies_h200"] = ("--rounds", str(options.rounds), "--summary", str(options.output / RATIOS))
    return [
        Part(name, (*sizes[name], *given.get(name, ()), "--output", str(options.output / file)), SECONDS[name])
        for name, file in OUTPUTS.items()
        if name in options.parts and (name in given or name != "policies_h200")
    ]


def _full_sizes(seconds: float) -> dict[str, tuple[str, ...]]:
    return {
        "gated_delta_rule": ("--workers", str(min(8, os.cpu_count() or 1))),
        "target_forward": ("--seconds", str(min(SECONDS["target_forward"], seconds) * 0.75)),
        "decode": ("--tokens", "512", "--repeats", "3", "--baselines", "eager", "static"),
        "policies_h200": ("--seconds", str(min(SECONDS["policies_h200"], seconds) * 0.75)),
    }


def run_part(part: Part, seconds: float, commit: str | None) -> PartReport:
    """Runs a part for at most so many seconds; its output goes where ours goes."""
    command = [sys.executable, "-m", f"benchmarks.{part.name}", *part.options]
    if commit is not None:
        command += ["--commit", commit]
    print(f"== {' '.join(command[1:])}", flush=True)
    start = time.monotonic()
    # The one part that measures Triton kernels whatever the device is.
    interprets = part.name == "gated_delta_rule" and not torch.cuda.is_available()
    environment = os.environ | ({"TRITON_INTERPRET": "1"} if interprets else {})
    try:
        code = subprocess.run(command, cwd=REPOSITORY, env=environment, timeout=seconds, check=False).returncode
        outcome = "failed" if code else "done"
    except subprocess.TimeoutExpired:
        outcome = "out of time"
    return PartReport(part.name, outcome, round(time.monotonic() - start, 1))


def run_all(options: argparse.Namespace) -> list[PartReport]:
    """Runs the parts for which there is time, and writes the summary after each."""
    end, reports = time.monotonic() + options.seconds, []
    commit = options.commit or describe_environment()["commit"]
    for part in parts(options):
        left = end - time.monotonic()
        report = PartReport(part.name, "out of time", 0.0)
        if left > 0:
            report = run_part(part, min(part.seconds, left), commit)
        reports.append(report)
        content = json.dumps([asdict(one) for one in reports], indent=1)
        write_atomically(options.output / PARTS, content + "\n")
        if report.outcome == "failed":
            break
        try:
            write_summary(options.output)
        except ValueError as error:
            # Results that lay there before may not fit; those that are being measured are not lost with them.
            print(f"No summary: {error}", file=sys.stderr)
    return reports


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the files and the summary")
    parser.add_argument("--seconds", type=float, default=1500, help="of all parts together")
    parser.add_argument("--peers", type=Path, help="folder with the files of sglang 0.5.23 and fla-core 0.6.0")
    parser.add_argument("--rounds", type=Path, help="file of captured rounds, for length policies")
    parser.add_argument("--parts", nargs="+", choices=tuple(TINY), default=tuple(TINY), help="only these")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, for a dry run without a GPU")
    parser.add_argument("--commit", help="the commit measured, where the files have no git history")
    options = parser.parse_args(arguments)
    require_gpu(parser, options.tiny)
    # Parts run in the folder of the project.
    options.output = options.output.resolve()
    options.rounds = options.rounds and options.rounds.resolve()
    options.peers = options.peers and options.peers.resolve()
    options.output.mkdir(parents=True, exist_ok=True)
    failed = [report.name for report in run_all(options) if report.outcome == "failed"]
    if failed:
        parser.exit(1, f"{failed[0]} failed; the parts after it were not run.\n")


if __name__ == "__main__":
    main()
