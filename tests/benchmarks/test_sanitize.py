"""What is read out of a sanitizer's log, and that a run goes on where it stopped; a stand-in plays the tool."""

import json
import os
import stat
from argparse import Namespace

import pytest

from benchmarks import sanitize

TESTS = ["tests/k.py::first[a b]", "tests/k.py::second", "tests/k.py::third", "tests/k.py::fourth"]


def test_outcomes_and_findings_belong_to_the_test_that_ran():
    log = """========= COMPUTE-SANITIZER
collecting ... collected 4 items

tests/k.py::first[a b] PASSED                                            [ 25%]
tests/k.py::second ========= Error: Race reported between Write access at kernel+0xb90
=========     and Write access at kernel+0xb90 [2940 hazards]
=========
PASSED                                                                   [ 50%]
tests/k.py::third ========= Program hit cudaErrorStreamCaptureInvalidated (error 901) due to "operation failed"
=========     Saved host backtrace up to driver entry point at error
FAILED                                                 [ 75%]
tests/k.py::fourth """
    assert sanitize.outcomes(log, TESTS) == {
        TESTS[0]: "clean",
        TESTS[1]: "finding: Error: Race reported between Write access at kernel+0xb90 "
        "and Write access at kernel+0xb90 [2940 hazards]",
        TESTS[2]: "failed",
        TESTS[3]: "not finished",
    }


def test_what_lies_behind_a_stop_of_the_tool_did_not_run():
    log = f"""{TESTS[0]} SKIPPED (no) [ 25%]
{TESTS[1]} ========= Internal Sanitizer Error: The Sanitizer failed to handle a hardware exception.
FAILED [ 50%]
{TESTS[2]} FAILED [ 75%]
{TESTS[3]} FAILED [100%]
========= ERROR SUMMARY: 1 error"""
    assert sanitize.outcomes(log, TESTS) == {TESTS[0]: "skipped", TESTS[1]: "stopped the tool"}


FINDS = """case "$*" in *benchmarks.sanitizer_control*)
echo "========= Invalid __global__ write of size 4 bytes"
echo "=========     at _control_kernel+0x1e0"
exit 1;; esac"""


def _play(folder, monkeypatch, *lines: str) -> None:
    """A stand-in for compute-sanitizer: does what the lines say, then runs what follows its options."""
    script = folder / "bin" / "compute-sanitizer"
    script.parent.mkdir(exist_ok=True)
    loop = 'while [ "$2" != -m ]; do shift; done'
    script.write_text("\n".join(("#!/bin/sh", 'echo "========= COMPUTE-SANITIZER"', *lines, loop, 'exec "$@"', "")))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
def tool(tmp_path, monkeypatch):
    _play(tmp_path, monkeypatch, FINDS)


def test_a_run_is_saved_and_goes_on(tool, tmp_path, capsys):
    output = tmp_path / "found.json"
    options = ["--tool", "racecheck", "--tests", "tests/kernels/test_residual_rows.py", "--processes", "2"]
    options += ["--output", str(output), "--commit", "abc"]
    sanitize.main(options)
    report = json.loads(output.read_text())
    assert report["control"] == "Invalid __global__ write of size 4 bytes"
    assert report["tool"] == "racecheck" and report["environment"]["commit"] == "abc"
    assert set(report["counts"]) == {"clean"} and report["counts"]["clean"] == len(report["tests"]) > 4

    name = next(iter(report["tests"]))
    report["tests"][name] = "not finished"
    output.write_text(json.dumps(report))
    capsys.readouterr()
    sanitize.main(options)
    assert capsys.readouterr().out.startswith(f"racecheck: 1 of {len(report['tests'])} tests")
    assert json.loads(output.read_text())["tests"][name] == "clean"


def test_a_tool_that_finds_no_fault_checks_nothing(tmp_path, monkeypatch):
    _play(tmp_path, monkeypatch, "exec true")
    with pytest.raises(SystemExit, match="memcheck has not found the fault of the control"):
        sanitize.main(["--tool", "memcheck", "--output", str(tmp_path / "found.json")])


def test_what_fails_with_memory_of_its_own_runs_once_more(tmp_path, monkeypatch):
    cannot = """case "$PYTORCH_NO_CUDA_MEMORY_CACHING" in 1)
for test in "$@"; do case "$test" in *::*) echo "$test FAILED [ 50%]";; esac; done; exit 1;; esac"""
    _play(tmp_path, monkeypatch, FINDS, cannot)
    output = tmp_path / "found.json"
    sanitize.main(["--tool", "memcheck", "--tests", "tests/kernels/test_rotary.py", "--output", str(output)])
    assert set(json.loads(output.read_text())["counts"]) == {"clean"}

    # Without time for the second run nothing is known of them.
    monkeypatch.setattr(sanitize.Run, "_through", first_alone(sanitize.Run._through))
    output.unlink()
    sanitize.main(["--tool", "memcheck", "--tests", "tests/kernels/test_rotary.py", "--output", str(output)])
    assert set(json.loads(output.read_text())["counts"]) == {"not finished"}


def first_alone(through):
    """Runs with memory of their own, and none with pools."""
    return lambda self, tests, pools: {} if pools else through(self, tests, pools)


def test_a_missing_tool_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit):
        sanitize.main(["--tool", "memcheck", "--output", str(tmp_path / "found.json")])
    assert "compute-sanitizer was not found" in capsys.readouterr().err


def test_without_time_nothing_begins(tool, tmp_path):
    output = tmp_path / "found.json"
    options = ["--tool", "memcheck", "--tests", "tests/kernels/test_rotary.py", "--output", str(output)]
    sanitize.main([*options, "--seconds", "0"])
    assert set(json.loads(output.read_text())["counts"]) == {"not begun"}


def test_what_did_not_end_before_runs_alone(tmp_path):
    output = tmp_path / "found.json"
    report = {"tool": "racecheck", "environment": {"commit": "abc"}}
    report["tests"] = {TESTS[0]: "clean", TESTS[1]: "not finished", TESTS[2]: "failed"}
    output.write_text(json.dumps(report))
    options = {"tool": "racecheck", "commit": "abc", "output": output, "seconds": 1.0, "processes": 2}
    options["clean_before"] = None
    assert sanitize.Run(Namespace(**options)).shards(TESTS) == [[TESTS[1]], [TESTS[2]], [TESTS[3]]]
    # Another commit's outcomes say nothing.
    options["commit"] = "def"
    assert sanitize.Run(Namespace(**options)).shards(TESTS) == [TESTS[::2], TESTS[1::2]]
    # Unless the caller says that only what was not clean has changed.
    run = sanitize.Run(Namespace(**options | {"output": tmp_path / "new.json", "clean_before": output}))
    assert run.shards(TESTS) == [[TESTS[1], TESTS[3]], [TESTS[2]]]
    assert run.report["clean_before"] == {"commit": "abc", "tests": 1}
    with pytest.raises(SystemExit, match=r"is of racecheck\. Give a file of memcheck"):
        sanitize.Run(Namespace(**options | {"tool": "memcheck", "clean_before": output}))
