"""Rounds of a drafter that cannot be run here: signals and outcomes drawn to meet a published profile.

    python -m benchmarks.simulated_rounds --output benchmarks/simulated

Every round has a difficulty, every draft a probability of acceptance around it, which the drafter's confidence knows
with an error. Difficulty and the price of a row are set so that HybridSpec verifies 6.2 rows a round and emits 4.57
tokens, as published for Qwen3.6-35B-A3B on average. Nothing here was recorded from a model.
"""

import argparse
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.trace_policies import Costs, calibrate
from hf_hybridspec.bench.scripted_routing import RoutingScript, with_scripted_routing
from hf_hybridspec.bench.trace import execute
from hf_hybridspec.calibration.profile import CalibrationProfile, PairIdentity
from hf_hybridspec.calibration.rounds import CapturedRound, CaptureSettings, PromptRounds, RoundArrays, RoundFile
from hf_hybridspec.generation.adaptive_policies import HybridSpec

ACCEPTANCE_LENGTH, MEAN_LENGTH = 4.57, 6.2
NUM_DRAFTS = 15
NUM_PROMPTS, ROUNDS_EACH = 16, 48
SIMULATED = PairIdentity(
    "simulated", "0" * 16, "simulated", "1" * 16, NUM_DRAFTS, "simulated", "bfloat16", "simulated"
)
STEPS = 9


@dataclass(frozen=True)
class Drawing:
    """Statistics of the draws, in units of the logit.

    Attributes:
        level: of the acceptance probability of a round of average difficulty.
        spread, noise: standard deviations between rounds, and between the drafts of one.
        error: of what the confidence knows.
    """

    level: float
    spread: float = 1.6
    noise: float = 1.0
    error: float = 0.7

    def rounds(self, seed: int) -> RoundArrays:
        """NUM_PROMPTS times ROUNDS_EACH rounds; their expert counts are scripted."""
        generator = np.random.default_rng(seed)
        count = NUM_PROMPTS * ROUNDS_EACH
        shape = (count, NUM_DRAFTS)
        logits = self.level + self.spread * generator.standard_normal((count, 1))
        logits = logits + self.noise * generator.standard_normal(shape)
        is_accepted = generator.random(shape) < _sigmoid(logits)
        known = _sigmoid(logits + self.error * generator.standard_normal(shape)).clip(0.02, 0.9995)
        # As if what the draft leaves were spread over twenty tokens.
        rest = 1 - known
        entropy = -known * np.log(known) - rest * np.log(rest / 20)
        empty = np.zeros(shape, dtype=int)
        arrays = RoundArrays(
            confidence=known.round(4),
            entropy=entropy.round(4),
            acceptance=None,
            num_accepted=is_accepted.cumprod(axis=1).sum(axis=1),
            new_layer0=empty,
            new_pairs=empty,
            prompt=np.repeat(np.arange(NUM_PROMPTS), ROUNDS_EACH),
            kind=np.full(count, "simulated"),
        )
        return with_scripted_routing(arrays, RoutingScript(), seed)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def means(profile: CalibrationProfile, rounds: RoundArrays) -> tuple[float, float]:
    """Acceptance length and verification length of HybridSpec on the rounds."""
    policy = HybridSpec(profile)
    executed = [execute(policy, rounds, index) for index in range(rounds.num_rounds)]
    emitted, lengths = zip(*((run.num_emitted, run.length) for run in executed), strict=True)
    return float(np.mean(emitted)), float(np.mean(lengths))


def profile_of(rounds: RoundArrays, price: float) -> CalibrationProfile:
    """A profile with simulated costs; `price` multiplies what a unit of time is worth."""
    prompts = to_prompts(rounds)
    script = RoutingScript()
    profile = calibrate(prompts, rounds, SIMULATED, script, Costs.of_bytes(rounds.num_drafts, script))
    return replace(profile, rho=profile.rho * price)


def fit(seed: int) -> tuple[CalibrationProfile, RoundArrays, tuple[float, float]]:
    """Level and price by bisection within each other; the rounds are others than those of the profile."""
    low, high = -1.0, 3.0
    for _ in range(STEPS):
        level = (low + high) / 2
        known, rounds = Drawing(level).rounds(seed), Drawing(level).rounds(seed + 1)
        base = profile_of(known, 1.0)
        cheap, dear = 0.1, 3.0
        for _ in range(STEPS):
            price = (cheap * dear) ** 0.5
            profile = replace(base, rho=base.rho * price)
            found = means(profile, rounds)
            cheap, dear = (price, dear) if found[1] > MEAN_LENGTH else (cheap, price)
        low, high = (level, high) if found[0] < ACCEPTANCE_LENGTH else (low, level)
    return profile, rounds, found


def to_prompts(rounds: RoundArrays) -> list[PromptRounds]:
    """The rounds as the format of captured rounds has them."""
    prompts = []
    for prompt in range(NUM_PROMPTS):
        captured = [
            CapturedRound(
                confidence=tuple(rounds.confidence[index].tolist()),
                entropy=tuple(rounds.entropy[index].tolist()),
                acceptance=None,
                num_accepted=int(rounds.num_accepted[index]),
                new_layer0=tuple(rounds.new_layer0[index].tolist()),
                new_pairs=tuple(rounds.new_pairs[index].tolist()),
            )
            for index in np.flatnonzero(rounds.prompt == prompt)
        ]
        prompts.append(PromptRounds(f"{prompt:016x}", "simulated", 0, tuple(captured)))
    return prompts


def main() -> None:
    """Draws, fits and writes `profile.json` and `rounds.jsonl`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder; its rounds.jsonl must not exist yet")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    profile, rounds, found = fit(options.seed)
    file = RoundFile(options.output / "rounds.jsonl", CaptureSettings(SIMULATED, 0))
    for prompt in to_prompts(rounds):
        file.append(prompt)
    profile.save(options.output / "profile.json")
    print(f"HybridSpec on these rounds: acceptance length {found[0]:.2f}, mean verification length {found[1]:.2f}.")
    print(asdict(Drawing(0.0)))


if __name__ == "__main__":
    main()
