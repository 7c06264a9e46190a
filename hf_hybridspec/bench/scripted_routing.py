"""Expert assignments with stated statistics, for a target whose own weights are random.

Random weights route uniformly, which activates more experts than any trained router does. The script draws, for every
layer and row, how many new experts the row selects: on average U(w) - U(w - 1) with U(w) = k w^0.66 distinct experts
after w rows, and such that new Layer-0 experts correlate with new later-layer pairs (0.49 on Qwen3.6-35B-A3B).
"""

from dataclasses import dataclass

import numpy as np

from ..calibration.rounds import RoundArrays


@dataclass(frozen=True)
class RoutingScript:
    """Statistics of the draws.

    Attributes:
        num_layers, num_experts, top_k: of the target.
        growth: exponent of U(w) = top_k w^growth.
        spread: standard deviation of a layer's new experts around the mean of its row.
        shared: share of that variance which all layers of a row have in common.
    """

    num_layers: int = 40
    num_experts: int = 256
    top_k: int = 8
    growth: float = 0.66
    spread: float = 2.0
    shared: float = 0.3

    def mean_distinct(self, length: int) -> float:
        """U(w), distinct experts of one layer over w rows."""
        return self.top_k * length**self.growth

    def draw(self, num_rows: int, generator: np.random.Generator) -> np.ndarray:
        """`[layers, rows]` int: new experts of each row; row 0 selects all of its own."""
        common = generator.standard_normal(num_rows)
        own = generator.standard_normal((self.num_layers, num_rows))
        noise = self.spread * (np.sqrt(self.shared) * common + np.sqrt(1 - self.shared) * own)
        steps = np.diff([0.0, *(self.mean_distinct(length) for length in range(1, num_rows + 1))])
        drawn = steps + noise
        counts = np.floor(drawn + generator.random(drawn.shape)).clip(0, self.top_k).astype(int)
        counts[:, 0] = self.top_k
        return counts

    def assignments(self, counts: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """`[layers, rows, top_k]` int: experts that realise `counts`, distinct within a row."""
        num_layers, num_rows = counts.shape
        index = np.empty((num_layers, num_rows, self.top_k), dtype=np.int64)
        for layer in range(num_layers):
            unused = generator.permutation(self.num_experts)
            used = 0
            for row in range(num_rows):
                # A row beyond the first finds at least top_k used experts to repeat.
                new = min(counts[layer, row], self.num_experts - used)
                old = generator.choice(unused[:used], self.top_k - new, replace=False)
                index[layer, row] = np.concatenate([unused[used : used + new], old])
                used += new
        return index


def with_scripted_routing(rounds: RoundArrays, script: RoutingScript, seed: int) -> RoundArrays:
    """The rounds with drawn expert counts in place of the recorded ones; acceptance and signals stay."""
    generator = np.random.default_rng(seed)
    counts = np.stack([script.draw(rounds.num_drafts + 1, generator) for _ in range(rounds.num_rounds)])
    fields = {**vars(rounds), "new_layer0": counts[:, 0, 1:], "new_pairs": counts[:, :, 1:].sum(axis=1)}
    return RoundArrays(**fields)
