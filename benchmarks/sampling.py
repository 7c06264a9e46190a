"""What choosing the tokens of a round takes: greedy, by temperature alone, by a top-k of a few, by any filter.

    python -m benchmarks.sampling --output benchmarks/results/sampling_h200.json
    python -m benchmarks.sampling --tiny                                                  (no GPU: a dry run)

From bf16 logits of a whole vocabulary to the accepted drafts and the next token, in replayed graphs. First the two
ways of filtering have to give one distribution.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.environment import describe_environment, require_gpu
from benchmarks.replay import Captured, medians, times_in_turn
from hf_hybridspec.calibration.profile import write_atomically
from hf_hybridspec.kernels.acceptance import greedy_acceptance, point_mass_acceptance
from hf_hybridspec.kernels.sampling import Filtering, SamplingSettings, sampling_probs

ROWS = (1, 4, 6, 8, 12, 16)
# Temperature, top-k, top-p and min-p that Qwen's checkpoints suggest.
SETTINGS = (0.7, 20, 0.8, 0.0)
# Largest difference of a probability: other orders of summation.
TOLERANCE = 1e-6


def logits_of(rows: int, vocabulary: int, device: str) -> torch.Tensor:
    """bf16 logits with ties, as a head gives them."""
    generator = torch.Generator().manual_seed(rows)
    return (2.5 * torch.randn(rows, vocabulary, generator=generator)).to(device, torch.bfloat16)


def check(logits: torch.Tensor, settings: SamplingSettings) -> float:
    """The largest difference between the sorted distributions of the two filters.

    Raises:
        SystemExit: they differ by more than roundings.
    """
    few, every = (sampling_probs(logits, settings, filtering) for filtering in (Filtering.FEW, Filtering.ANY))
    difference = float((few.sort().values - every.sort().values).abs().max())
    if not difference <= TOLERANCE:
        raise SystemExit(f"{tuple(logits.shape)}: probabilities of the two filters differ by {difference}.")
    return difference


def choices(logits: torch.Tensor, settings: SamplingSettings) -> dict[str, Callable[[], object]]:
    """Name -> what accepts drafts and chooses the next token."""
    rows, vocabulary = logits.shape
    generator = torch.Generator().manual_seed(0)
    drafts = torch.randint(vocabulary, (rows - 1,), generator=generator).to(logits.device)
    uniforms = torch.rand(rows, dtype=torch.float64, generator=generator).to(logits.device)

    def sampled(filtering: Filtering) -> Callable[[], object]:
        return lambda: point_mass_acceptance(drafts, sampling_probs(logits, settings, filtering), uniforms)

    return {"greedy": lambda: greedy_acceptance(drafts, logits.argmax(dim=-1))} | {
        filtering.value: sampled(filtering) for filtering in Filtering
    }


def measure(rows: int, vocabulary: int, replays: int, device: str) -> dict:
    """Microseconds of each choice, and the largest difference between filters."""
    settings = SamplingSettings.new(device)
    settings.set(*SETTINGS)
    logits = logits_of(rows, vocabulary, device)
    difference = check(logits, settings)
    works = {name: Captured(work) for name, work in choices(logits, settings).items()}
    times_in_turn(works, 3)
    found = medians(times_in_turn(works, replays))
    return {"rows": rows, "difference": difference} | {f"{name}_us": round(1e3 * ms, 1) for name, ms in found.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--tiny", action="store_true", help="a small vocabulary, for a dry run without a GPU")
    parser.add_argument("--commit", help="the commit measured, where the files have no git history")
    options = parser.parse_args(arguments)
    require_gpu(parser, options.tiny)
    device, vocabulary = ("cuda" if torch.cuda.is_available() else "cpu"), (500 if options.tiny else 248_320)
    records = []
    for rows in ROWS:
        records.append(measure(rows, vocabulary, options.replays, device))
        print(json.dumps(records[-1]), flush=True)
    if options.output:
        temperature, top_k, top_p, min_p = SETTINGS
        report = {
            "environment": describe_environment(options.commit),
            "vocabulary": vocabulary,
            "settings": {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p},
            "records": records,
        }
        write_atomically(options.output, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
