"""hf-hybridspec bench: decodes test prompts with several systems and writes tables and plots."""

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from ..bench.records import RecordFile
from ..bench.report import markdown, write_report
from ..bench.sessions import BenchPlan, run_sessions
from ..bench.summary import summarise, summarise_alike
from ..bench.systems import NAMES, choose_systems
from ..calibration.profile import CalibrationProfile
from ..calibration.prompts import load_prompts, prompts_hash, render, split_prompts, take_per_kind
from ..calibration.timed_decode import DecodeSettings
from ..generation.pair_identity import pair_identity
from .errors import CommandError
from .pair_arguments import add_pair_arguments, add_prompt_arguments, load_pair

HELP = "compare decoding systems on a pair: tables and plots"
DESCRIPTION = f"""\
Decodes prompts with every system in turn and writes results.json, results.md and PNG plots into a folder. An
interrupted run continues where it stopped. Systems: {NAMES}.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the subcommand."""
    add_pair_arguments(parser)
    add_prompt_arguments(parser, split="test", limit=2)
    parser.add_argument("--profile", type=Path, metavar="FILE", help="of `hf-hybridspec calibrate`")
    parser.add_argument(
        "--systems", nargs="+", metavar="NAME", help="default: all but static:W that the profile and the drafter allow"
    )
    parser.add_argument("--output", required=True, type=Path, metavar="FOLDER", help="for the results")
    parser.add_argument("--sessions", type=int, default=1, metavar="N", help="repetitions (default: 1)")
    parser.add_argument("--max-new-tokens", type=int, default=48, metavar="N", help="of an answer (default: 48)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 (default) decodes greedily")


def run(options: argparse.Namespace) -> None:
    """Measures what is missing, writes the report and prints its tables; raises CommandError."""
    for name in ("max_new_tokens", "sessions", "limit_per_kind"):
        if getattr(options, name) < 1:
            raise CommandError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}.")
    try:
        texts = take_per_kind(
            split_prompts(load_prompts(options.prompts), options.split, options.seed), options.limit_per_kind
        )
        profile = None if options.profile is None else CalibrationProfile.load(options.profile)
        pair = load_pair(options)
        target, drafter = pair.target, pair.drafter
        if profile is not None:
            profile.check_pair(pair_identity(target, drafter))
        prompts = render(texts, pair.tokenizer, target.device, options.thinking)
        plan = BenchPlan(
            prompts,
            choose_systems(options.systems, profile, drafter),
            options.sessions,
            DecodeSettings(options.max_new_tokens, options.temperature),
        )
        settings = _settings(options, plan, profile, target, drafter)
        file = RecordFile(options.output / "records.jsonl", settings)
        run_sessions(target, drafter, profile, plan, file)
        summary = summarise(file)
    except ValueError as error:
        raise CommandError(str(error)) from error
    is_greedy = options.temperature == 0
    alike = summarise_alike(file) if is_greedy else None
    write_report(options.output, summary, settings, profile, is_greedy, alike)
    print(markdown(summary, settings, profile, is_greedy, alike))
    _plot(options.output, summary, profile)
    if profile is not None and (shared := len({text.key for text in texts} & set(profile.prompt_keys))):
        print(
            f"note: {shared} of {len(texts)} prompts were calibrated on; results flatter the profile", file=sys.stderr
        )


def _plot(folder: Path, summary, profile: CalibrationProfile | None) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        print("note: no plots, for matplotlib is missing: pip install hf-hybridspec[bench]", file=sys.stderr)
        return
    # An optional package, which the tables do without.
    from ..bench.plots import write_plots

    write_plots(folder, summary, profile)


def _settings(options: argparse.Namespace, plan: BenchPlan, profile, target, drafter) -> dict[str, Any]:
    """What all records share; records of other settings are not mixed with them."""
    pair = pair_identity(target, drafter)
    return {
        "target": options.target,
        "drafter": options.drafter,
        "fingerprints": [pair.target_fingerprint, pair.drafter_fingerprint],
        "prompts": f"{options.prompts}, {options.split} split, seed {options.seed}",
        "prompts_hash": prompts_hash(prompt.key for prompt in plan.prompts),
        "num_prompts": len(plan.prompts),
        "thinking": options.thinking,
        "sessions": plan.sessions,
        "max_new_tokens": plan.settings.max_new_tokens,
        "temperature": plan.settings.temperature,
        "systems": list(plan.systems),
        "profile": None if profile is None else {"rho": profile.rho, "prompts_hash": profile.prompts_hash},
        "environment": {
            "device": pair.device,
            "dtype": pair.dtype,
            "engine": pair.engine,
            "threads": torch.get_num_threads() if pair.device == "cpu" else None,
            "software": f"torch {torch.__version__}, transformers {transformers.__version__}",
        },
    }
