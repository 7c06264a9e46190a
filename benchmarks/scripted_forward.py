"""A fused forward whose experts follow a script that moves on with every round, all on the device."""

from dataclasses import replace

import numpy as np
import torch

from benchmarks.tile_pieces import count_distinct, scripted_rows
from hf_hybridspec.bench.scripted_routing import RoutingScript
from hf_hybridspec.kernels.moe_experts import MAX_ROWS, RoutedRows
from hf_hybridspec.modeling.fused_forward import FusedForward

# What the router chooses; the weights of its choice stay its own.
FIELDS = ("top_k_index", "slots")


class ExpertScript:
    """Experts of every layer for the rows of a block, in a number of variants of which one is current.

    Args:
        config: of the target's text model.
        num_variants: rounds that differ; round r uses variant r modulo this.
    """

    def __init__(self, config, num_variants: int, device: torch.device):
        script = RoutingScript(config.num_hidden_layers, config.num_experts, config.num_experts_per_tok)
        variants = []
        for variant in range(num_variants):
            generator = np.random.default_rng(variant)
            index = torch.from_numpy(script.assignments(script.draw(MAX_ROWS, generator), generator))
            variants.append([scripted_rows(rows, config.num_experts) for rows in index])
        # `[variants, layers, 16, ...]`.
        self._tables = {
            name: torch.stack([torch.stack([getattr(rows, name) for rows in layers]) for layers in variants]).to(
                device
            )
            for name in FIELDS
        }
        self._current = {name: table[0].clone() for name, table in self._tables.items()}

    def advance(self, round_index: torch.Tensor) -> None:
        """Makes the variant of a round, `[1]` int64, the current one."""
        for name, table in self._tables.items():
            self._current[name].copy_(table.index_select(0, round_index % table.shape[0])[0])

    def rows(self, layer_idx: int, num_rows: int) -> dict[str, torch.Tensor]:
        """The choice for the first rows of a block in one layer, views of what is current."""
        return {name: current[layer_idx, :num_rows] for name, current in self._current.items()}


class ScriptedForward(FusedForward):
    """A fused forward that counts its distinct experts, and takes them from a script if it is given one.

    The router runs all the same. Only Layer 0's choice costs anything more: it is copied to where Stage 1 reads it.
    """

    script: ExpertScript | None = None

    def __init__(self, model, target_layer_ids: tuple[int, ...] = ()):
        super().__init__(model, target_layer_ids)
        self._layer_of = {id(layer.feed_forward): layer_idx for layer_idx, layer in enumerate(self.weights.layers)}
        self._newest: dict[int, dict[int, RoutedRows]] = {}

    def distinct_experts(self, length: int) -> float:
        """Distinct experts of a layer in the newest forward of so many rows; the mean over all layers but Layer 0."""
        return float(np.mean([count_distinct(routed) for routed in self._newest[length].values()]))

    def _route(self, block, hidden, room=None):
        routed = super()._route(block, hidden, room)
        layer_idx, num_rows = self._layer_of[id(block)], routed.top_k_index.shape[0]
        if self.script is not None:
            chosen = self.script.rows(layer_idx, num_rows)
            if room is None:
                routed = replace(routed, **chosen)
            else:
                for name, rows in chosen.items():
                    getattr(routed, name).copy_(rows)
        if room is None:
            self._newest.setdefault(num_rows, {})[layer_idx] = routed
        return routed
