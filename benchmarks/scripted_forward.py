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
        # The rows of an expert lie side by side, as the router leaves them.
        self._current["slots"] = self._current["slots"].mT.contiguous().mT

    def mean_distinct(self, num_rows: int) -> float:
        """Distinct experts of the first rows of a block: the mean over all variants and all layers but Layer 0."""
        is_selected = (self._tables["slots"][:, 1:, :num_rows] >= 0).any(dim=2)
        return float(is_selected.sum(dim=-1).float().mean())

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
        # By number of rows and layer. Graphs that share a pool write over what another one has allocated, so what is
        # looked at after a run must not be allocated while its graph is captured.
        self._routings: dict[int, dict[int, RoutedRows]] = {
            num_rows: {layer_idx: self._room_for_routing(layer_idx, num_rows) for layer_idx in self._later_layers}
            for num_rows in range(1, MAX_ROWS + 1)
        }

    @property
    def _later_layers(self) -> range:
        return range(1, len(self.weights.layers))

    def _room_for_routing(self, layer_idx: int, num_rows: int) -> RoutedRows:
        block = self.weights.layers[layer_idx].feed_forward
        routed = RoutedRows.empty(num_rows, block.top_k, block.router.shape[0] - 1, self.weights.embedding.device)
        # Nothing is selected until a forward of so many rows has run.
        routed.slots.fill_(-1)
        return routed

    def distinct_experts(self, length: int) -> float:
        """Distinct experts of a layer: of the script, or in the newest forward of so many rows; Layer 0 left out."""
        if self.script is not None:
            return self.script.mean_distinct(length)
        return float(np.mean([count_distinct(routed) for routed in self._routings[length].values()]))

    def _route(self, block, hidden, room=None):
        layer_idx, num_rows = self._layer_of[id(block)], hidden.shape[0]
        routed = super()._route(block, hidden, room or self._routings[num_rows][layer_idx])
        if self.script is not None:
            chosen = self.script.rows(layer_idx, num_rows)
            if room is None:
                routed = replace(routed, **chosen)
            else:
                for name, rows in chosen.items():
                    getattr(routed, name).copy_(rows)
        return routed
