"""What knowing a round's experts could win at most: a rule that knows all of them before it chooses, for nothing.

The routing correction (HybridSpec, section on the verification split) sees the experts of Layer 0 and is paid for by
the rows that wait for it. This rule sees those of every layer, for every length, and pays nothing. It trusts the same
acceptance model as the policies, so that both differ by what they know of costs alone.
"""

import numpy as np

from hf_hybridspec.bench.trace import ExecutedRound, ModelledCosts, TraceResult, static_lengths
from hf_hybridspec.calibration.acceptance_model import AcceptanceModel, predict_prefix
from hf_hybridspec.calibration.rate import best_rate
from hf_hybridspec.calibration.rounds import RoundArrays


def trace_with_known_experts(model: AcceptanceModel, rounds: RoundArrays, costs: ModelledCosts) -> TraceResult:
    """The rule on some rounds, with the rho that is best for it on these rounds."""
    expected = 1 + predict_prefix(model, rounds).cumsum(axis=1)
    seconds = costs.by_length(rounds)
    chosen = np.array(static_lengths(rounds))[(expected - best_rate(expected, seconds) * seconds).argmax(axis=1)]
    emitted = np.minimum(rounds.num_accepted, chosen - 1) + 1
    executed = [
        ExecutedRound(index, int(length), int(length), int(tokens))
        for index, (length, tokens) in enumerate(zip(chosen, emitted, strict=True))
    ]
    return TraceResult.of(executed, costs.seconds(rounds, executed))
