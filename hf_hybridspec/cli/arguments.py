"""The command line: options, their ranges and their help."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from ..generation.adaptive_policies import CALIBRATED_POLICIES
from . import bench, calibrate

DTYPES = ("auto", "float32", "bfloat16", "float16")

GENERATE_NOTES = """\
Output: the text as it is decoded, then a line of statistics. Every verification round emits the accepted drafts and
one token of the target; the acceptance length is emitted tokens per round, the mean verification length is rows of the
target's forward per round. The prefill is not part of tokens per second.

With --json, standard output is one JSON object and nothing else:
  text                    the new text
  tokens                  number of new tokens
  rounds                  number of verification rounds
  acceptance_length       emitted tokens per round
  mean_verification_length  rows of the target's forward per round
  path                    "round" (our loop) or "host" (transformers' loop)
  tokens_per_second       decoding speed
  autoregressive_tokens_per_second   with --compare: the speed without the drafter
  identical_to_autoregressive        with --compare: true or false; null when sampling, where the texts may differ

Exit codes: 0 done; 2 the input is refused, with the reason on standard error; 130 interrupted.
"""


class OneLineParser(argparse.ArgumentParser):
    """Answers wrong usage with one sentence instead of the whole usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}. See {self.prog} --help.\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of `hf-hybridspec`; parsed options carry the subcommand's name in `command`."""
    parser = OneLineParser("hf-hybridspec", description="Exact speculative decoding of hybrid Qwen models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands)
    for name, verb in (("calibrate", calibrate), ("bench", bench)):
        verb.add_arguments(commands.add_parser(name, help=verb.HELP, description=verb.DESCRIPTION))
    info = commands.add_parser("info", help="describe a target or drafter, or check that a pair fits")
    info.add_argument("id", help="bundled name, folder, or Hub repository")
    info.add_argument("--with", dest="other", metavar="ID", help="the other half of a pair: does it fit?")
    return parser


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="decode a prompt speculatively",
        description="Decodes a prompt with a drafter; the text is what the target alone would write.",
        epilog=GENERATE_NOTES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="a user's message")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    parser.add_argument(
        "--thinking",
        action=argparse.BooleanOptionalAction,
        help="thinking mode of the chat template (default: the template's)",
    )
    parser.add_argument(
        "--target", default="tiny", metavar="ID", help="bundled name, folder or Hub id (default: tiny)"
    )
    parser.add_argument("--drafter", default="tiny-dflash", metavar="ID", help="likewise (default: tiny-dflash)")
    parser.add_argument(
        "--policy",
        metavar="NAME",
        help="rows verified in a round: full, static:W with W from 2 to the drafter's block, or with --profile "
        f"{', '.join(CALIBRATED_POLICIES)} (default: hybridspec with a profile; without, full on a dense target and "
        "static:6 on an MoE target)",
    )
    parser.add_argument("--profile", type=Path, metavar="FILE", help="of `hf-hybridspec calibrate`, for this pair")
    parser.add_argument("--max-new-tokens", type=_integer(1), default=256, metavar="N", help="default: 256")
    parser.add_argument(
        "--temperature",
        type=_number("0 or more", lambda value: value >= 0),
        default=0.0,
        metavar="T",
        help="0 (default) decodes greedily, more samples",
    )
    in_unit = _number("above 0 and at most 1", lambda value: 0 < value <= 1)
    parser.add_argument("--top-p", type=in_unit, metavar="P", help="with a temperature: nucleus (default: 1, all)")
    parser.add_argument("--top-k", type=_integer(0), metavar="K", help="with a temperature: 0 (default) keeps all")
    parser.add_argument("--seed", type=_integer(0, 2**32 - 1), metavar="S", help="of sampling")
    parser.add_argument(
        "--compare", action="store_true", help="also decode without the drafter: same tokens? how much faster?"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of streaming")
    parser.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:N (default: cuda where there is one)")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="auto (default): float32 on cpu, the checkpoint's on cuda"
    )


def _integer(least: int, most: int | None = None) -> Callable[[str], int]:
    allowed = f"{least} or more" if most is None else f"from {least} to {most}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"must be an integer, {allowed}, got {text!r}")
        return value

    return parse


def _number(allowed: str, is_allowed: Callable[[float], bool]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not is_allowed(value):
            raise argparse.ArgumentTypeError(f"must be a number {allowed}, got {text!r}")
        return value

    return parse
