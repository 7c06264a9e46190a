"""Entry point: runs a subcommand and turns what it refuses into one sentence and an exit code."""

import logging as python_logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import huggingface_hub.utils.logging as hub_logging
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers.utils import logging

from . import bench, calibrate
from .arguments import build_parser
from .errors import CommandError
from .generate import run_generate
from .info import run_info

REFUSED, INTERRUPTED, CLOSED_PIPE = 2, 130, 141

COMMANDS = {"generate": run_generate, "calibrate": calibrate.run, "bench": bench.run, "info": run_info}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line (default: that of the process) and returns its exit code.

    0: done. 2: refused, with one sentence on standard error. 130: interrupted. 141: the reader of the output left.
    """
    options = build_parser().parse_args(arguments)
    try:
        with quiet_libraries():
            COMMANDS[options.command](options)
            sys.stdout.flush()
        return 0
    except CommandError as error:
        print(f"hf-hybridspec {options.command}: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("\nhf-hybridspec: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # What is still buffered has nobody to read it; Python would complain about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keeps notes and progress bars of transformers, the Hub client and the package off the terminal.

    What of the notes matters to a user, policy and path, is in the line of statistics.
    """
    verbosity, hub_verbosity = logging.get_verbosity(), hub_logging.get_verbosity()
    bars, hub_bars = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    package_logger = python_logging.getLogger("hf_hybridspec")
    package_level = package_logger.level
    package_logger.setLevel(python_logging.ERROR)
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        package_logger.setLevel(package_level)
        logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        if bars:
            logging.enable_progress_bar()
        if hub_bars:
            enable_progress_bars()
