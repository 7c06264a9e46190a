"""rho: the fixed point of Dinkelbach's iteration over captured rounds, and the best fixed length."""

import numpy as np

from .profile import CostModel

MOST_ITERATIONS = 100


def dinkelbach_rate(prefix_probs: np.ndarray, costs: CostModel) -> float:
    """Tokens per second: the highest pooled throughput that one length for each round can reach.

    Args:
        prefix_probs: `[N, D]`, p_i of each round.
        costs: of lengths 2..D + 1. Numerators sum 1 + p_1 + .. + p_{w0 - 1}, denominators C_tgt(w0) + fixed cost.
    """
    tokens = 1 + prefix_probs.cumsum(axis=1)
    return best_rate(tokens, np.array([costs.round_seconds(length) for length in range(2, tokens.shape[1] + 2)]))


def best_rate(tokens: np.ndarray, seconds: np.ndarray) -> float:
    """The highest ratio of summed tokens to summed seconds that one column for each row can reach.

    Args:
        tokens: `[N, D]`.
        seconds: `[N, D]`, or `[D]` where they are the same in every row.
    """
    seconds = np.broadcast_to(seconds, tokens.shape)
    rows = np.arange(tokens.shape[0])
    rate = 0.0
    for _ in range(MOST_ITERATIONS):
        # argmax takes the first of equals, the shorter length.
        best = (tokens - rate * seconds).argmax(axis=1)
        improved = tokens[rows, best].sum() / seconds[rows, best].sum()
        if improved <= rate * (1 + 1e-12):
            break
        rate = improved
    return float(rate)


def best_static_length(num_accepted: np.ndarray, costs: CostModel) -> int:
    """The fixed length of highest pooled throughput on rounds that accept `num_accepted` `[N]` of all drafts."""
    lengths = range(2, len(costs.fitted) + 2)
    return max(lengths, key=lambda length: static_rate(num_accepted, costs, length))


def static_rate(num_accepted: np.ndarray, costs: CostModel, length: int) -> float:
    """Pooled tokens per second of one fixed length."""
    emitted = np.minimum(num_accepted, length - 1) + 1
    return float(emitted.mean() / costs.round_seconds(length))
