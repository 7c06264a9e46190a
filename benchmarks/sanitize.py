"""Kernel tests under compute-sanitizer, in parallel processes; a run that ran out of time goes on where it stopped.

    python -m benchmarks.sanitize --tool racecheck --processes 14 --seconds 500 \
        --output benchmarks/results/racecheck_h200.json

PyTorch's own kernels are left out. A test is clean if it passes and the tool has no finding while it runs. Where a
test stops the tool itself, those behind it run again in a new process.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from benchmarks.environment import REPOSITORY, describe_environment
from hf_hybridspec.calibration.profile import write_atomically

PYTEST = (sys.executable, "-m", "pytest", "-o", "addopts=", "-m", "", "-p", "no:cacheprovider")
# Kernels of PyTorch and of cuBLAS.
LEFT_OUT = ("at6native", "nvjet")
OUTCOME = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b.*\[\s*\d+%\]")
# Details of a finding are indented further; pytest's rules end as they begin.
FINDING = re.compile(r"(?<!=)={9} (?!COMPUTE-SANITIZER|.*SUMMARY|Target application)(\S.*[^=])$")
STOPPED = "Internal Sanitizer Error"
# Outcomes that another run need not repeat.
SETTLED = ("clean", "skipped", "finding", "stopped the tool")


def collect(paths: list[str]) -> list[str]:
    """Ids of all tests below the paths, GPU tests or not, in a fixed mixture."""
    command = [*PYTEST, "--collect-only", "-q", *paths]
    output = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=True).stdout
    found = [line for line in output.splitlines() if "::" in line]
    random.Random(0).shuffle(found)
    return found


def outcomes(log: str, tests: list[str]) -> dict[str, str]:
    """Test -> outcome, of those that a process began; the tests are named in the log in the order of the list.

    A test that had not ended is "not finished", and so is all behind one that stopped the tool.
    """
    found: dict[str, str] = {}
    current, waiting = None, list(tests)
    for line in log.splitlines():
        if waiting and line.startswith(waiting[0]):
            current = waiting.pop(0)
            found[current] = "not finished"
        if current is None:
            continue
        if finding := FINDING.search(line):
            is_stop = STOPPED in finding[1]
            found[current] = "stopped the tool" if is_stop else f"finding: {finding[1]}"
            if is_stop:
                break
        elif (outcome := OUTCOME.search(line)) and found[current] == "not finished":
            found[current] = {"PASSED": "clean", "SKIPPED": "skipped"}.get(outcome[1], "failed")
    return found


def run_process(tool: str, tests: list[str], seconds: float) -> str:
    """What pytest and the tool print; ended by an interrupt when the time is up."""
    command = ["compute-sanitizer", "--tool", tool, "--target-processes", "all", "--print-limit", "20"]
    for name in LEFT_OUT:
        command += ["--kernel-name-exclude", f"kns={name}"]
    command += [*PYTEST, "-v", "--no-header", "--tb=line", *tests]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=REPOSITORY, env=environment, start_new_session=True
        )
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        return log.read()


class Run:
    """Outcomes so far, saved after every process."""

    def __init__(self, options: argparse.Namespace):
        self._options, self._end, self._lock = options, time.monotonic() + options.seconds, Lock()
        self.report = {"tool": options.tool, "environment": describe_environment(options.commit), "tests": {}}
        self.slow: list[str] = []
        if options.output.exists():
            before = json.loads(options.output.read_text(encoding="utf-8"))
            same = before["tool"] == options.tool
            if same and before["environment"]["commit"] == self.report["environment"]["commit"]:
                self.report["tests"] = {
                    test: outcome for test, outcome in before["tests"].items() if outcome.startswith(SETTLED)
                }
                self.slow = [test for test, outcome in before["tests"].items() if outcome == "not finished"]

    def shards(self, tests: list[str]) -> list[list[str]]:
        """Tests that are left, by process: those that did not end before each in one of its own, first of all."""
        left = [test for test in tests if test not in self.report["tests"]]
        others = [test for test in left if test not in self.slow]
        count = self._options.processes
        return [[test] for test in left if test in self.slow] + [others[shard::count] for shard in range(count)]

    def shard(self, tests: list[str]) -> None:
        """Runs tests until all have begun or time is up; again behind each that stops the tool."""
        while tests and (seconds := self._end - time.monotonic()) > 0:
            found = outcomes(run_process(self._options.tool, tests, seconds), tests)
            with self._lock:
                self.report["tests"] |= found
                self.save()
            if "stopped the tool" not in found.values():
                return
            tests = [test for test in tests if test not in found]

    def save(self) -> None:
        counts = Counter(outcome.split(":")[0] for outcome in self.report["tests"].values())
        self.report["counts"] = dict(sorted(counts.items()))
        write_atomically(self._options.output, json.dumps(self.report, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", choices=("memcheck", "racecheck", "synccheck", "initcheck"), required=True)
    parser.add_argument("--tests", nargs="+", default=["tests/kernels"], help="files or folders (tests/kernels)")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--output", type=Path, required=True, help="JSON file, saved after every process")
    parser.add_argument("--commit", help="the commit measured, where the files have no git history")
    options = parser.parse_args(arguments)
    if shutil.which("compute-sanitizer") is None:
        parser.exit(2, "compute-sanitizer was not found. It comes with the CUDA toolkit; add its folder to PATH.\n")
    run, tests = Run(options), collect(options.tests)
    shards = run.shards(tests)
    print(f"{options.tool}: {sum(map(len, shards))} of {len(tests)} tests", flush=True)
    with ThreadPoolExecutor(options.processes) as pool:
        list(pool.map(run.shard, shards))
    run.report["tests"] |= {test: "not begun" for test in tests if test not in run.report["tests"]}
    run.save()
    print(json.dumps(run.report["counts"]), flush=True)


if __name__ == "__main__":
    main()
