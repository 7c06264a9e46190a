"""What knowing a round's experts could win at most: a rule that knows all of them before it chooses, for nothing.

The routing correction (HybridSpec, section on the verification split) sees the experts of Layer 0 and is paid for by
the rows that wait for it. This rule sees those of every layer, for every length, and pays nothing. It trusts the same
acceptance model as the policies, so that both differ by what they know of costs alone.
"""

import numpy as np

from hf_hybridspec.bench.trace import ExecutedRound, ModelledCosts, TraceResult
from hf_hybridspec.calibration.acceptance_model import predict_prefix
from hf_hybridspec.calibration.profile import CalibrationProfile
from hf_hybridspec.calibration.rounds import RoundArrays

STEPS = 50


def trace_with_known_experts(profile: CalibrationProfile, rounds: RoundArrays) -> TraceResult:
    """The rule on some rounds, under the costs of the profile and its best price of a second on these rounds."""
    prefix = predict_prefix(profile.acceptance, rounds)
    expected = 1.0 + np.cumsum(prefix, axis=1)
    lengths = np.arange(2, rounds.num_drafts + 2)
    curve = np.array([profile.costs.round_seconds(length) for length in lengths])
    surplus = np.cumsum(rounds.new_pairs, axis=1) - np.cumsum(profile.routing.new_pairs)
    seconds = curve + profile.costs.expert * surplus
    chosen = _most_tokens_a_second(expected, seconds)
    emitted = np.minimum(rounds.num_accepted, chosen + 1) + 1
    executed = [
        ExecutedRound(index, int(length), int(length), int(tokens))
        for index, (length, tokens) in enumerate(zip(lengths[chosen], emitted, strict=True))
    ]
    return TraceResult.of(executed, ModelledCosts(profile.costs, profile.routing, "").seconds(rounds, executed))


def _most_tokens_a_second(expected: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """`[rounds]` columns of `[rounds, lengths]` whose sums have the greatest ratio (Dinkelbach)."""
    rows, price = np.arange(len(expected)), 0.0
    for _ in range(STEPS):
        chosen = np.argmax(expected - price * seconds, axis=1)
        better = expected[rows, chosen].sum() / seconds[rows, chosen].sum()
        if better <= price:
            break
        price = better
    return chosen
