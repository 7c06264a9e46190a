"""hf-hybridspec calibrate: measures a target and drafter on this machine and writes a calibration profile."""

import argparse
from pathlib import Path

from ..calibration.calibrate import TIMED_TOKENS, CalibrationPlan, calibrate
from ..calibration.profile import CalibrationProfile
from ..calibration.prompts import load_prompts, render, split_prompts, take_per_kind
from .errors import CommandError
from .pair_arguments import add_pair_arguments, add_prompt_arguments, load_pair

HELP = "measure a pair on this machine, for length_policy=HybridSpec(profile)"
DESCRIPTION = """\
Decodes calibration prompts at full length, fits the acceptance model, times every verification length, and writes one
JSON profile. An interrupted run continues where it stopped: its rounds are kept beside the profile.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the subcommand."""
    add_pair_arguments(parser)
    add_prompt_arguments(parser, split="calibration", limit=6)
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="the profile to write")
    parser.add_argument(
        "--max-new-tokens", type=int, default=96, metavar="N", help="of a captured answer (default: 96)"
    )
    parser.add_argument(
        "--timed-prompts", type=int, default=3, metavar="N", help="prompts decoded at every length (default: 3)"
    )
    parser.add_argument(
        "--timed-tokens",
        type=int,
        metavar="N",
        help=f"of a timed answer (default: {TIMED_TOKENS['graphs']} where rounds are captured, else "
        f"{TIMED_TOKENS['eager']})",
    )


def run(options: argparse.Namespace) -> None:
    """Calibrates, writes the profile and prints what it found; raises CommandError."""
    for name in ("max_new_tokens", "timed_prompts", "timed_tokens"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise CommandError(f"--{name.replace('_', '-')} must be at least 1, got {value}.")
    try:
        texts = take_per_kind(
            split_prompts(load_prompts(options.prompts), options.split, options.seed), options.limit_per_kind
        )
        pair = load_pair(options)
        prompts = render(texts, pair.tokenizer, pair.target.device, options.thinking)
        plan = CalibrationPlan(
            prompts=prompts,
            prompts_name=f"{options.prompts}, {options.split} split, seed {options.seed}",
            max_new_tokens=options.max_new_tokens,
            timed_prompts=options.timed_prompts,
            timed_tokens=options.timed_tokens,
            rounds_path=f"{options.output}.rounds.jsonl",
        )
        profile = calibrate(pair.target, pair.drafter, plan)
    except ValueError as error:
        raise CommandError(str(error)) from error
    profile.save(options.output)
    print(summary_lines(profile, options.output))


def summary_lines(profile: CalibrationProfile, path: Path) -> str:
    """What was found, in a few lines."""
    quality, costs = profile.quality, profile.costs
    kind = "held-out prompts" if quality.held_out else "the rounds of the fit"
    lines = [
        f"{path}: {profile.num_rounds} rounds of {len(profile.prompt_keys)} prompts",
        f"acceptance model: calibration error {quality.calibration_error:.4f}, Brier score {quality.brier_score:.4f} "
        f"on {kind}",
        f"a round takes {1e3 * costs.fitted[0]:.2f} ms at length 2 and {1e3 * costs.fitted[-1]:.2f} ms at "
        f"{len(costs.fitted) + 1} (R2 {quality.cost_r2:.3f}), a token without drafts "
        f"{1e3 * costs.autoregressive:.2f} ms",
        f"rho {profile.rho:.1f} tokens/s, best static length {profile.static_length}",
    ]
    return "\n".join([*lines, *(f"note: {note}" for note in profile.notes)])
