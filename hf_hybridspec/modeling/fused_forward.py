"""Stage 0 and Stage 1 of a target with few launches a layer, on fixed buffers: the twin of `split_forward.py`.

Nothing is read on the CPU, and every shape follows from the number of rows, so that each stage can be captured once
for every number. Plain decoding is Stage 0 and Stage 1 of one row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..kernels.block_attention import attention_inputs, block_attention
from ..kernels.dense_mlp import dense_down, dense_gate_up
from ..kernels.gated_delta_inputs import gated_delta_inputs
from ..kernels.gated_delta_rule import MAX_ROWS, verify_gated_delta_rule
from ..kernels.linear import gated_linear, gated_norm_linear, norm_linear
from ..kernels.moe_experts import RoutedRows, add_experts, num_counters, route_rows
from ..kernels.residual_rows import ResidualRows, residual_rows
from ..kernels.rotary import Rotation, rotary_rows
from .block_state import AttentionState, BlockState, GatedDeltaState
from .fused_obstacle import fused_target_obstacle
from .fused_weights import AttentionWeights, DenseWeights, GatedDeltaWeights, SparseWeights, fuse_weights
from .split_forward import VerifiedRows


@dataclass(frozen=True)
class FusedBoundary:
    """What Stage 0 leaves for Stage 1: views of buffers that the next Stage 0 overwrites, whatever its length.

    Attributes:
        residual: u rows of the residual stream after Layer 0's token mixer.
        routed: assignment of Layer 0's experts, None if Layer 0 is dense.
        position_offset: `[1]`, as given to Stage 0.
    """

    residual: ResidualRows
    routed: RoutedRows | None
    position_offset: Tensor


class FusedForward:
    """The two stages of one target.

    Args:
        model: an attached target; its parameters become views of joined weights (`fuse_weights`).
        target_layer_ids: layers whose output is tapped for the drafter, in its order; none without a drafter.

    Raises:
        ValueError: `fused_target_obstacle` names a reason.
    """

    def __init__(self, model: PreTrainedModel, target_layer_ids: tuple[int, ...] = ()):
        if obstacle := fused_target_obstacle(model):
            raise ValueError(f"This target cannot run fused: {obstacle}. Use SplitForward.")
        self.weights = fuse_weights(model)
        self.target_layer_ids = target_layer_ids
        embedding, first = self.weights.embedding, self.weights.layers[0].feed_forward
        # The norm that follows each half layer; after the last one, the output head's.
        starts = [layer.mixer.norm_scale for layer in self.weights.layers]
        self._scales_after_mixer = [layer.feed_forward.norm_scale for layer in self.weights.layers]
        self._scales_after_layer = [*starts[1:], self.weights.final_scale]
        # What Stage 0 leaves lies in one place for all u: stages of different lengths are captured apart.
        self._residual = ResidualRows.empty(MAX_ROWS, first.norm_scale, embedding.dtype)
        self._routed = None
        if isinstance(first, SparseWeights):
            self._routed = RoutedRows.empty(MAX_ROWS, first.top_k, first.router.shape[0] - 1, embedding.device)
        choices = MAX_ROWS * max(getattr(layer.feed_forward, "top_k", 0) for layer in self.weights.layers)
        size = num_counters(embedding.shape[1], choices)
        self._counters = torch.zeros(size, dtype=torch.int32, device=embedding.device)

    @torch.no_grad()
    def stage0(self, token_ids: Tensor, position_offset: Tensor, state: BlockState) -> FusedBoundary:
        """Runs tokens to the router boundary, as rows that follow the committed ones of `state`.

        Args:
            token_ids: `[u]` int64, 1 <= u <= 16.
            position_offset: `[1]` int32 or int64: row i is at position committed + offset + i, in text as in time,
                height and width.
        """
        layer, num_rows = self.weights.layers[0], token_ids.shape[0]
        hidden = residual_rows(self.weights.embedding, layer.mixer.norm_scale, token_ids)
        room = self._residual.between(0, num_rows)
        residual = self._gated_delta(layer.mixer, hidden, state.layers[0], room)
        routed = None
        if self._routed is not None:
            routed = self._route(layer.feed_forward, residual, self._routed)
        return FusedBoundary(residual, routed, position_offset)

    @torch.no_grad()
    def stage1(self, boundary: FusedBoundary, length: int, state: BlockState) -> VerifiedRows:
        """Runs the first `length` rows from the boundary to the logits; no value of a later row changes them."""
        hidden = boundary.residual.between(0, length)
        routed = None if boundary.routed is None else boundary.routed.first(length)
        rotation = self._rotation(boundary.position_offset, hidden.values, state)
        taps = {}
        for layer_idx, layer in enumerate(self.weights.layers):
            if layer_idx:
                room = self._room(length, self._scales_after_mixer[layer_idx])
                hidden = self._mix(layer.mixer, hidden, state.layers[layer_idx], rotation, state.committed, room)
            room = self._room(length, self._scales_after_layer[layer_idx])
            hidden = self._feed_forward(layer.feed_forward, hidden, routed if layer_idx == 0 else None, room)
            if layer_idx in self.target_layer_ids:
                taps[layer_idx] = hidden.values
        logits = norm_linear(hidden, self.weights.head, self.weights.eps)
        features = hidden.values[:, :0]
        if taps:
            features = torch.cat([taps[layer_idx] for layer_idx in self.target_layer_ids], dim=-1)
        return VerifiedRows(logits, features)

    def _room(self, num_rows: int, norm_scale: Tensor) -> ResidualRows:
        return ResidualRows.empty(num_rows, norm_scale, self.weights.embedding.dtype)

    def _rotation(self, position_offset: Tensor, hidden: Tensor, state: BlockState) -> Rotation:
        weights = self.weights
        frequencies, scaling = weights.frequencies, weights.rope_scaling
        return rotary_rows(state.committed, position_offset, frequencies, scaling, hidden.shape[0], hidden.dtype)

    def _mix(
        self, mixer, hidden: ResidualRows, state, rotation: Rotation, committed: Tensor, room: ResidualRows
    ) -> ResidualRows:
        if isinstance(mixer, GatedDeltaWeights):
            return self._gated_delta(mixer, hidden, state, room)
        return self._attention(mixer, hidden, state, rotation, committed, room)

    def _gated_delta(
        self, mixer: GatedDeltaWeights, hidden: ResidualRows, state: GatedDeltaState, room: ResidualRows
    ) -> ResidualRows:
        """The residual stream after a GDN layer; the block's rows and factors are recorded in `state`."""
        produced = gated_delta_inputs(hidden, mixer.producer, state.conv_state, state.conv_rows, self.weights.eps)
        key_dim = mixer.num_k_heads * mixer.k_dim
        query, key, value = produced.mixed.split([key_dim, key_dim, produced.mixed.shape[1] - 2 * key_dim], dim=1)
        by_key_head, by_value_head = (-1, mixer.k_dim), (-1, mixer.v_dim)
        attended = verify_gated_delta_rule(
            query.unflatten(1, by_key_head)[None],
            key.unflatten(1, by_key_head)[None],
            value.unflatten(1, by_value_head)[None],
            produced.log_decay[None],
            produced.beta[None],
            state.recurrent_state,
            state.factors,
            # The producer, launched just before, leaves it alone.
            state_is_settled=True,
        )[0]
        gate = produced.z.unflatten(1, by_value_head)
        return gated_norm_linear(
            attended, gate, mixer.norm_weight, mixer.output, hidden.values, room, self.weights.eps, self._counters
        )

    def _attention(
        self,
        mixer: AttentionWeights,
        hidden: ResidualRows,
        state: AttentionState,
        rotation: Rotation,
        committed: Tensor,
        room: ResidualRows,
    ) -> ResidualRows:
        """The residual stream after an attention layer; the block's keys and values follow the committed ones."""
        eps = self.weights.eps
        projected = norm_linear(hidden, mixer.projection, eps)
        keys, values = state.keys, state.values
        inputs = attention_inputs(projected, mixer.norms, rotation.cos, rotation.sin, keys, values, committed, eps)
        attended = block_attention(inputs.query, keys, values, committed, keys.shape[2] ** -0.5)
        return gated_linear(attended, inputs.gate, mixer.output, hidden.values, room, self._counters)

    def _route(self, block: SparseWeights, hidden: ResidualRows, room: RoutedRows | None = None) -> RoutedRows:
        return route_rows(hidden, block.router, block.top_k, self.weights.eps, room)

    def _feed_forward(
        self, block: SparseWeights | DenseWeights, hidden: ResidualRows, routed: RoutedRows | None, room: ResidualRows
    ) -> ResidualRows:
        """The residual stream after the rest of a layer; `routed` where the router has run already."""
        eps = self.weights.eps
        if isinstance(block, DenseWeights):
            activated = dense_gate_up(hidden, block.gate_up, eps)
            return dense_down(activated, block.down, hidden.values, room, self._counters)
        if routed is None:
            routed = self._route(block, hidden)
        return add_experts(hidden, routed, block.experts, room, eps, self._counters)
