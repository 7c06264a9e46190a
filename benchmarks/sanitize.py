"""Kernel tests under compute-sanitizer, in parallel processes; a run that ran out of time goes on where it stopped.

    python -m benchmarks.sanitize --tool racecheck --processes 14 --seconds 500 \
        --output benchmarks/results/racecheck_h200.json

A test is clean if it passes and the tool has no finding while it runs. Where a test stops the tool itself, those
behind it run again in a new process. Kernels of libraries are left out; that ours are not is seen first, by a fault
that the tool has to find (`sanitizer_control`). Under memcheck every tensor has memory of its own, so that no
neighbour hides what lies beyond its end; tests that capture graphs, which cannot allocate so, run once more with
PyTorch's pools. Under racecheck, which takes seconds a launch, long tests ask for fewer launches (`watches_races`).
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
# Parts of names: of our kernels, and of those of libraries that would be taken for ours. Watching a float32 product of
# cuBLAS takes racecheck minutes.
OURS, LEFT_OUT = "_kernel", ("at6native", "at4cuda", "cublas", "nvjet")
OUTCOME = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b.*\[\s*\d+%\]")
# Details of a finding are indented further; pytest's rules end as they begin.
FINDING = re.compile(r"(?<!=)={9} (?!COMPUTE-SANITIZER|.*SUMMARY|Target application)(\S.*[^=])$")
CONTROL_SECONDS = 120
# The second place of a race, below the first.
OTHER_PLACE = re.compile(r"={9} {5}(and (?:Read|Write) access .*)$")
STOPPED = "Internal Sanitizer Error"
# What becomes of a capture that has to allocate without PyTorch's pools: the test fails, which is enough.
NO_CAPTURE = re.compile(r"stream_?capture", re.IGNORECASE)
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
        if (finding := FINDING.search(line)) and not NO_CAPTURE.search(line):
            is_stop = STOPPED in finding[1]
            found[current] = "stopped the tool" if is_stop else f"finding: {finding[1]}"
            if is_stop:
                break
        elif (place := OTHER_PLACE.search(line)) and found[current].startswith("finding"):
            found[current] += f" {place[1]}"
        elif (outcome := OUTCOME.search(line)) and found[current] == "not finished":
            found[current] = {"PASSED": "clean", "SKIPPED": "skipped"}.get(outcome[1], "failed")
    return found


def run_process(tool: str, command: list[str], seconds: float, pools: bool = True) -> str:
    """What a command and the tool print; killed when the time is up."""
    watched = ["compute-sanitizer", "--tool", tool, "--target-processes", "all", "--print-limit", "20"]
    watched += ["--kernel-name", f"kns={OURS}"]
    for name in LEFT_OUT:
        watched += ["--kernel-name-exclude", f"kns={name}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({} if pools else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    environment["WATCHES_RACES"] = str(int(tool == "racecheck"))
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            watched + command,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=REPOSITORY,
            env=environment,
            start_new_session=True,
        )
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        return log.read()


def finding_of_control(tool: str) -> str:
    """What the tool says of a kernel that is at fault, watched as the tests are.

    Raises:
        SystemExit: it says nothing, so that it would find nothing in the tests either.
    """
    fault = "race" if tool == "racecheck" else "memory"
    log = run_process(tool, [sys.executable, "-m", "benchmarks.sanitizer_control", fault], CONTROL_SECONDS)
    finding = next(filter(None, map(FINDING.search, log.splitlines())), None)
    if finding and "_control_kernel" in log:
        return finding[1]
    raise SystemExit(
        f"{tool} has not found the fault of the control, so it would find none in the tests. It said:\n{log}"
    )


class Run:
    """Outcomes so far, saved after every process."""

    def __init__(self, options: argparse.Namespace):
        self._options, self._end, self._lock = options, time.monotonic() + options.seconds, Lock()
        self.report = {"tool": options.tool, "environment": describe_environment(options.commit), "tests": {}}
        self.slow: list[str] = []
        if options.clean_before:
            earlier = json.loads(options.clean_before.read_text(encoding="utf-8"))
            if earlier["tool"] != options.tool:
                raise SystemExit(f"{options.clean_before} is of {earlier['tool']}. Give a file of {options.tool}.")
            clean = {test: outcome for test, outcome in earlier["tests"].items() if outcome in ("clean", "skipped")}
            self.report["clean_before"] = {"commit": earlier["environment"]["commit"], "tests": len(clean)}
            self.report["tests"] = clean
        if options.output.exists():
            before = json.loads(options.output.read_text(encoding="utf-8"))
            same = before["tool"] == options.tool
            if same and before["environment"]["commit"] == self.report["environment"]["commit"]:
                self.report["tests"] |= {
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
        """Runs tests until all have begun or time is up."""
        found = self._through(tests, pools=self._options.tool != "memcheck")
        if self._options.tool == "memcheck" and (failed := [test for test in tests if found.get(test) == "failed"]):
            with self._lock:
                self.report["tests"] |= dict.fromkeys(failed, "not finished")
            self._through(failed, pools=True)

    def _through(self, tests: list[str], pools: bool) -> dict[str, str]:
        """Outcomes of the tests, of which those behind one that stops the tool run in a new process."""
        begun: dict[str, str] = {}
        command = [*PYTEST, "-v", "--no-header", "--tb=line"]
        while (left := [test for test in tests if test not in begun]) and (
            seconds := self._end - time.monotonic()
        ) > 0:
            found = outcomes(run_process(self._options.tool, [*command, *left], seconds, pools), left)
            begun |= found
            with self._lock:
                self.report["tests"] |= found
                self.save()
            if "stopped the tool" not in found.values():
                break
        return begun

    def save(self) -> None:
        counts = Counter(outcome.split(":")[0] for outcome in self.report["tests"].values())
        self.report["counts"] = dict(sorted(counts.items()))
        write_atomically(self._options.output, json.dumps(self.report, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", choices=("memcheck", "racecheck"), required=True)
    parser.add_argument("--tests", nargs="+", default=["tests/kernels"], help="files or folders (tests/kernels)")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--output", type=Path, required=True, help="JSON file, saved after every process")
    parser.add_argument(
        "--clean-before",
        type=Path,
        help="JSON file of the same tool at another commit, after which only what was not clean in it has changed; "
        "its clean tests are taken over, and the output says so",
    )
    parser.add_argument("--commit", help="the commit measured, where the files have no git history")
    options = parser.parse_args(arguments)
    if shutil.which("compute-sanitizer") is None:
        parser.exit(2, "compute-sanitizer was not found. It comes with the CUDA toolkit; add its folder to PATH.\n")
    tests, control = collect(options.tests), finding_of_control(options.tool)
    # Time counts from here.
    run = Run(options)
    run.report["control"] = control
    shards = run.shards(tests)
    print(f"{options.tool}: {sum(map(len, shards))} of {len(tests)} tests", flush=True)
    with ThreadPoolExecutor(options.processes) as pool:
        list(pool.map(run.shard, shards))
    run.report["tests"] |= {test: "not begun" for test in tests if test not in run.report["tests"]}
    run.save()
    print(json.dumps(run.report["counts"]), flush=True)


if __name__ == "__main__":
    main()
