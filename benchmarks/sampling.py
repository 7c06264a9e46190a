"""What choosing the tokens of a round takes: greedy, by temperature alone, and by filters, with and without sorting.

    python -m benchmarks.sampling --output benchmarks/results/sampling_h200.json
    python -m benchmarks.sampling --tiny                                                  (no GPU: a dry run)

From bf16 logits of a whole vocabulary to the accepted drafts and the next token, in replayed graphs. The reference
works out all probabilities with torch, for which it sorts the vocabulary; the kernels sort nothing. First both have to
choose the same tokens for the same uniforms.
"""

import argparse
import json
from pathlib import Path

import torch

from benchmarks.environment import describe_environment, require_gpu
from benchmarks.replay import Captured, medians, times_in_turn
from hf_hybridspec.calibration.profile import write_atomically
from hf_hybridspec.kernels.dispatch import use_kernels
from hf_hybridspec.kernels.round_steps import RoundState, accept_greedily
from hf_hybridspec.kernels.sampled_acceptance import accept_sampled
from hf_hybridspec.kernels.sampling import SamplingSettings

ROWS = (1, 4, 6, 8, 12, 16)
# Temperature, top-k, top-p and min-p: none, what Qwen's checkpoints suggest, transformers' default, top-p alone, and
# top-p of logits so even that it keeps most of the vocabulary.
NO_TOP_K = 1 << 31
SETTINGS = {
    "temperature": (0.7, NO_TOP_K, 1.0, 0.0),
    "qwen": (0.7, 20, 0.8, 0.0),
    "top_k": (1.0, 50, 1.0, 0.0),
    "top_p": (1.0, NO_TOP_K, 0.95, 0.0),
    "top_p_of_even": (2.0, NO_TOP_K, 0.95, 0.0),
}
KINDS = ("reference", "triton")
CHECKED = 64


def logits_of(rows: int, vocabulary: int, device: str) -> torch.Tensor:
    """bf16 logits with ties, as a head gives them; a few tokens hold most of the mass."""
    generator = torch.Generator().manual_seed(rows)
    logits = 2.0 * torch.randn(rows, vocabulary, generator=generator)
    likely = torch.randint(vocabulary, (rows, 12), generator=generator)
    logits.scatter_(1, likely, 14 + 6 * torch.rand(rows, 12, generator=generator))
    return logits.to(device, torch.bfloat16)


class Choice:
    """One way of choosing on its own state, from logits whose drafts are their best tokens.

    Attributes:
        uniforms: `[w]` fp64, which `run` reads.
    """

    def __init__(self, logits: torch.Tensor, values: tuple | None, kind: str):
        rows, device = logits.shape[0], logits.device
        self._logits, self._kind, self._values = logits, kind, values
        self.state, self._settings = RoundState.new(2, 2, device), SamplingSettings.new(device)
        self.state.block_tokens[1:rows] = logits[:-1].argmax(-1)
        self.uniforms = torch.full((rows,), 0.5, dtype=torch.float64, device=device)
        if values is not None:
            self._settings.set(*values)

    def run(self) -> None:
        """Accepts and chooses; greedily where no settings were given."""
        if self._values is None:
            accept_greedily(self._logits.argmax(dim=-1), self.state)
            return
        with use_kernels(self._kind):
            accept_sampled(
                self._logits, self.uniforms, self._settings, self._values[1:] != (NO_TOP_K, 1.0, 0.0), self.state
            )

    def outcome(self, uniforms: torch.Tensor) -> tuple[int, int]:
        """Accepted drafts and the next token for given uniforms."""
        self.uniforms.copy_(uniforms)
        self.run()
        return int(self.state.num_accepted), int(self.state.next_token)


def check(choices: dict[str, Choice], rows: int) -> None:
    """Both kinds choose the same tokens.

    Raises:
        SystemExit: for some uniforms they do not.
    """
    generator = torch.Generator().manual_seed(0)
    for uniforms in torch.rand(CHECKED, rows, dtype=torch.float64, generator=generator):
        found = {kind: choice.outcome(uniforms) for kind, choice in choices.items()}
        if len(set(found.values())) > 1:
            raise SystemExit(f"{rows} rows, uniforms {uniforms.tolist()}: accepted drafts and next token are {found}.")


def measure(rows: int, vocabulary: int, replays: int, device: str, kinds: tuple[str, ...]) -> dict:
    """Microseconds of each way."""
    logits = logits_of(rows, vocabulary, device)
    ways = {"greedy": Choice(logits, None, "auto")}
    for name, values in SETTINGS.items():
        choices = {kind: Choice(logits, values, kind) for kind in kinds}
        check(choices, rows)
        ways |= {f"{name}_{kind}": choice for kind, choice in choices.items()}
    works = {name: Captured(way.run) for name, way in ways.items()}
    times_in_turn(works, 3)
    found = medians(times_in_turn(works, replays))
    return {"rows": rows} | {f"{name}_us": round(1e3 * ms, 1) for name, ms in found.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--tiny", action="store_true", help="a small vocabulary, for a dry run without a GPU")
    parser.add_argument("--commit", help="the commit measured, where the files have no git history")
    options = parser.parse_args(arguments)
    require_gpu(parser, options.tiny)
    device, vocabulary = ("cuda" if torch.cuda.is_available() else "cpu"), (500 if options.tiny else 248_320)
    # Without a GPU the kernels run under Triton's interpreter alone, which a dry run does not ask for.
    kinds, records = (KINDS if device == "cuda" else KINDS[:1]), []
    for rows in ROWS:
        records.append(measure(rows, vocabulary, options.replays, device, kinds))
        print(json.dumps(records[-1]), flush=True)
    if options.output:
        fields = ("temperature", "top_k", "top_p", "min_p")
        report = {
            "environment": describe_environment(options.commit),
            "vocabulary": vocabulary,
            "settings": {name: dict(zip(fields, values, strict=True)) for name, values in SETTINGS.items()},
            "records": records,
        }
        write_atomically(options.output, json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
