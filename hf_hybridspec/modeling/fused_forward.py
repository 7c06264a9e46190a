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
from ..kernels.moe_experts import RoutedRows, expert_down, expert_gate_up, route_rows
from ..kernels.rotary import Rotation, rotary_rows
from .block_state import AttentionState, BlockState, GatedDeltaState
from .fused_obstacle import fused_obstacle
from .fused_weights import AttentionWeights, DenseWeights, GatedDeltaWeights, SparseWeights, fuse_weights
from .split_forward import VerifiedRows


@dataclass(frozen=True)
class FusedBoundary:
    """What Stage 0 leaves for Stage 1: views of buffers that the next Stage 0 overwrites, whatever its length.

    Attributes:
        residual: `[u, H]`, residual stream after Layer 0's token mixer.
        routed: assignment of Layer 0's experts, None if Layer 0 is dense.
        position_offset: `[1]`, as given to Stage 0.
    """

    residual: Tensor
    routed: RoutedRows | None
    position_offset: Tensor


class FusedForward:
    """The two stages of one target.

    Args:
        model: an attached target; its parameters become views of joined weights (`fuse_weights`).
        target_layer_ids: layers whose output is tapped for the drafter, in its order; none without a drafter.

    Raises:
        ValueError: `fused_obstacle` names a reason.
    """

    def __init__(self, model: PreTrainedModel, target_layer_ids: tuple[int, ...] = ()):
        if obstacle := fused_obstacle(model):
            raise ValueError(f"This target cannot run fused: {obstacle}. Use SplitForward.")
        self.weights = fuse_weights(model)
        self.target_layer_ids = target_layer_ids
        embedding = self.weights.embedding
        hidden = embedding.shape[1]
        # What Stage 0 leaves lies in one place for all u: stages of different lengths are captured apart.
        self._residual = embedding.new_empty(MAX_ROWS, hidden)
        first = self.weights.layers[0].feed_forward
        self._routed = None
        if isinstance(first, SparseWeights):
            self._routed = RoutedRows.empty(self._residual, first.top_k, first.router.shape[0] - 1)
        self._counters = torch.zeros(hidden // 16 + 1, dtype=torch.int32, device=embedding.device)

    @torch.no_grad()
    def stage0(self, token_ids: Tensor, position_offset: Tensor, state: BlockState) -> FusedBoundary:
        """Runs tokens to the router boundary, as rows that follow the committed ones of `state`.

        Args:
            token_ids: `[u]` int64, 1 <= u <= 16.
            position_offset: `[1]` int32 or int64: row i is at position committed + offset + i, in text as in time,
                height and width.
        """
        layer, num_rows = self.weights.layers[0], token_ids.shape[0]
        hidden = self.weights.embedding.index_select(0, token_ids)
        residual = self._gated_delta(layer.mixer, hidden, state.layers[0], self._residual[:num_rows])
        routed = None
        if self._routed is not None:
            self._route(layer.feed_forward, residual, self._routed)
            # The list of experts as a whole: a captured Stage 1 serves every Stage 0 that may come before it.
            routed = self._routed.first(num_rows)
        return FusedBoundary(residual, routed, position_offset)

    @torch.no_grad()
    def stage1(self, boundary: FusedBoundary, length: int, state: BlockState) -> VerifiedRows:
        """Runs the first `length` rows from the boundary to the logits; no value of a later row changes them."""
        hidden = boundary.residual[:length]
        routed = None if boundary.routed is None else boundary.routed.first(length)
        rotation = self._rotation(boundary.position_offset, hidden, state)
        taps = {}
        for layer_idx, layer in enumerate(self.weights.layers):
            if layer_idx:
                hidden = self._mix(layer.mixer, hidden, state.layers[layer_idx], rotation, state.committed)
            hidden = self._feed_forward(layer.feed_forward, hidden, routed if layer_idx == 0 else None)
            if layer_idx in self.target_layer_ids:
                taps[layer_idx] = hidden
        logits = norm_linear(hidden, self.weights.final_scale, self.weights.head, self.weights.eps)
        features = hidden[:, :0]
        if taps:
            features = torch.cat([taps[layer_idx] for layer_idx in self.target_layer_ids], dim=-1)
        return VerifiedRows(logits, features)

    def _rotation(self, position_offset: Tensor, hidden: Tensor, state: BlockState) -> Rotation:
        weights = self.weights
        frequencies, scaling = weights.frequencies, weights.rope_scaling
        return rotary_rows(state.committed, position_offset, frequencies, scaling, hidden.shape[0], hidden.dtype)

    def _mix(self, mixer, hidden: Tensor, state, rotation: Rotation, committed: Tensor) -> Tensor:
        if isinstance(mixer, GatedDeltaWeights):
            return self._gated_delta(mixer, hidden, state)
        return self._attention(mixer, hidden, state, rotation, committed)

    def _gated_delta(
        self, mixer: GatedDeltaWeights, hidden: Tensor, state: GatedDeltaState, output: Tensor | None = None
    ) -> Tensor:
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
            attended, gate, mixer.norm_weight, mixer.output, hidden, self.weights.eps, self._counters, output
        )

    def _attention(
        self, mixer: AttentionWeights, hidden: Tensor, state: AttentionState, rotation: Rotation, committed: Tensor
    ) -> Tensor:
        """The residual stream after an attention layer; the block's keys and values follow the committed ones."""
        eps = self.weights.eps
        projected = norm_linear(hidden, mixer.norm_scale, mixer.projection, eps)
        keys, values = state.keys, state.values
        inputs = attention_inputs(projected, mixer.norms, rotation.cos, rotation.sin, keys, values, committed, eps)
        attended = block_attention(inputs.query, keys, values, committed, keys.shape[2] ** -0.5)
        return gated_linear(attended, inputs.gate, mixer.output, hidden, self._counters)

    def _route(self, block: SparseWeights, hidden: Tensor, room: RoutedRows | None = None) -> RoutedRows:
        return route_rows(hidden, block.norm_scale, block.router, block.top_k, self.weights.eps, self._counters, room)

    def _feed_forward(self, block: SparseWeights | DenseWeights, hidden: Tensor, routed: RoutedRows | None) -> Tensor:
        """The residual stream after the rest of a layer; `routed` where the router has run already."""
        eps = self.weights.eps
        if isinstance(block, DenseWeights):
            activated = dense_gate_up(hidden, block.norm_scale, block.gate_up, eps)
            return dense_down(activated, block.down, hidden, self._counters)
        if routed is None:
            routed = self._route(block, hidden)
        activated = expert_gate_up(hidden, block.norm_scale, routed, block.experts, eps)
        return expert_down(activated, routed, block.experts, hidden, self._counters)
