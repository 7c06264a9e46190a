"""Sequential temperature scaling of a DSpark drafter's confidence head.

One divisor of the head's logit for each position, in order: the k-th makes the survival of k drafts, with the earlier
divisors fixed, agree with how often k drafts were accepted.
"""

import numpy as np

from .acceptance_model import accepted, reliability
from .rounds import RoundArrays

GRID = np.logspace(-1, 1, 41)


def fit_temperatures(rounds: RoundArrays) -> tuple[float, ...] | None:
    """D temperatures, or None for a drafter without a confidence head."""
    if rounds.acceptance is None:
        return None
    head = np.clip(rounds.acceptance, 1e-9, 1 - 1e-9)
    logits = np.log(head / (1 - head))
    is_accepted = accepted(rounds)
    survival, temperatures = np.ones(rounds.num_rounds), []
    for position in range(rounds.num_drafts):
        candidates = [survival / (1 + np.exp(-logits[:, position] / temperature)) for temperature in GRID]
        errors = [calibration_error(candidate, is_accepted[:, position]) for candidate in candidates]
        best = int(np.argmin(errors))
        temperatures.append(float(GRID[best]))
        survival = candidates[best]
    return tuple(temperatures)


def calibration_error(predicted: np.ndarray, observed: np.ndarray) -> float:
    """Expected calibration error over 15 bins."""
    bins = reliability(predicted, observed)
    return sum(entry.count * abs(entry.predicted - entry.observed) for entry in bins) / predicted.shape[0]
