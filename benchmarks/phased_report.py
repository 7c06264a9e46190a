"""Reports that are written anew after every phase, so that a benchmark may be ended at any moment."""

import argparse
import json
import time

from benchmarks.environment import describe_environment
from hf_hybridspec.calibration.profile import write_atomically

# Of a phase's findings as they are printed; the file has all of them.
PRINTED = 1500


class PhasedReport:
    """The report of one run so far.

    Args:
        arguments: with `output`, the JSON file, and `commit`.
        what: is measured.
        settings: of the run, written beside the environment.

    Attributes:
        report: what has been found, by phase.
    """

    def __init__(self, arguments: argparse.Namespace, what: str, **settings: object):
        self.arguments, self._started = arguments, time.monotonic()
        self.report = {"what": what, "environment": describe_environment(arguments.commit), **settings}

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._started

    def save(self, phase: str, found: object) -> None:
        """Adds what a phase has found and writes the report."""
        self.report[phase] = found
        self.report["seconds"] = round(self.elapsed, 1)
        write_atomically(self.arguments.output, json.dumps(self.report, indent=1) + "\n")
        print(f"[{self.report['seconds']:.0f} s] {phase}: {json.dumps(found)[:PRINTED]}", flush=True)
