"""How many new (layer, expert) pairs one more row adds: averages, and averages given its new Layer-0 experts.

HybridSpec, appendices A.2 and D.1.
"""

from dataclasses import dataclass

import numpy as np

from .profile import RoutingTables
from .rounds import RoundArrays

# Cells with fewer tokens take the position's linear fit.
LEAST_TOKENS = 30


@dataclass(frozen=True)
class FittedRouting:
    """The tables, and the correlation of new Layer-0 experts with new later-layer pairs within positions."""

    tables: RoutingTables
    correlation: float


def fit_routing(rounds: RoundArrays, top_k: int) -> FittedRouting:
    """Tables for w0 = 1..D and n = 0..top_k new Layer-0 experts.

    Draft i is row i of the target input (the anchor is row 0), so it is what extends w0 = i. Without an MoE
    (`top_k` 0) all is zero.
    """
    layer0 = rounds.new_layer0.astype(float)
    later = rounds.new_pairs - layer0
    averages, given = [], []
    for position in range(rounds.num_drafts):
        n0, rest = layer0[:, position], later[:, position]
        averages.append(float(n0.mean() + rest.mean()))
        given.append(tuple(count + _later_given(n0, rest, count) for count in range(top_k + 1)))
    tables = RoutingTables(tuple(averages), tuple(given))
    return FittedRouting(tables, _correlation(layer0 - layer0.mean(axis=0), later - later.mean(axis=0)))


def _later_given(layer0: np.ndarray, later: np.ndarray, count: int) -> float:
    """Average later-layer pairs of the tokens with `count` new Layer-0 experts, or the linear fit's value."""
    cell = later[layer0 == count]
    if cell.shape[0] >= LEAST_TOKENS:
        return float(cell.mean())
    spread = layer0.var()
    slope = ((layer0 - layer0.mean()) * (later - later.mean())).mean() / spread if spread > 0 else 0.0
    return max(0.0, float(later.mean() + slope * (count - layer0.mean())))


def _correlation(left: np.ndarray, right: np.ndarray) -> float:
    scale = np.sqrt((left**2).mean() * (right**2).mean())
    return float((left * right).mean() / scale) if scale > 0 else 0.0
