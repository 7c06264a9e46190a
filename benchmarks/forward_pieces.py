"""The launches of a target's forward by kind: each kind over all its layers, as a graph of its own."""

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.tile_pieces import scripted_rows
from hf_hybridspec.kernels.block_attention import attention_inputs, block_attention
from hf_hybridspec.kernels.gated_delta_inputs import gated_delta_inputs
from hf_hybridspec.kernels.gated_delta_rule import verify_gated_delta_rule
from hf_hybridspec.kernels.linear import gated_linear, gated_norm_linear, norm_linear
from hf_hybridspec.kernels.moe_experts import add_experts, num_counters, route_rows
from hf_hybridspec.kernels.residual_rows import ResidualRows, residual_rows
from hf_hybridspec.kernels.rotary import rotary_rows
from hf_hybridspec.modeling.block_state import AttentionState, BlockState, GatedDeltaState
from hf_hybridspec.modeling.fused_weights import (
    AttentionWeights,
    DenseWeights,
    FusedWeights,
    GatedDeltaWeights,
    SparseWeights,
)


class Pieces:
    """Calls of every kind of launch at one number of rows.

    Args:
        assignments: layer -> `[w, k]` experts.
    """

    def __init__(self, weights: FusedWeights, state: BlockState, length: int, assignments: list[torch.Tensor] | None):
        self.weights, self.state = weights, state
        # What precedes every launch, and room for what any of them leaves.
        self.rows = residual_rows(torch.randn_like(weights.embedding[:length]), weights.final_scale)
        self.room = ResidualRows.empty(length, weights.final_scale, weights.embedding.dtype)
        self.device = weights.embedding.device
        self.counters = torch.zeros(self.rows.shape[1] // 16 + 1, dtype=torch.int32, device=self.device)
        self.offset = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.assignments = assignments
        self.calls: dict[str, list[Callable[[], object]]] = {}
        for layer_idx, layer in enumerate(weights.layers):
            part = state.layers[layer_idx]
            if isinstance(layer.mixer, GatedDeltaWeights):
                self._add_gated_delta(layer.mixer, part)
            else:
                self._add_attention(layer.mixer, part)
            if isinstance(layer.feed_forward, SparseWeights):
                self._add_experts(layer_idx, layer.feed_forward)
        token_ids = torch.arange(length, device=self.device)
        self._add("embedding", partial(residual_rows, weights.embedding, weights.final_scale, token_ids))
        self._add("output head", partial(norm_linear, self.rows, weights.head, weights.eps))
        commit_length = torch.ones(1, dtype=torch.int32, device=self.device)
        self._add("commit of one row", lambda: (state.commit(commit_length), state.committed.sub_(commit_length)))

    def works(self) -> dict[str, Callable[[], object]]:
        """Each kind's launches, one after another."""
        return {name: partial(self._run, calls) for name, calls in self.calls.items()}

    @staticmethod
    def _run(calls: list[Callable[[], object]]) -> object:
        result = None
        for call in calls:
            result = call()
        return result

    def _add(self, name: str, call: Callable[[], object]) -> None:
        self.calls.setdefault(name, []).append(call)

    def _add_gated_delta(self, mixer: GatedDeltaWeights, part: GatedDeltaState) -> None:
        rows, eps, key_dim = self.rows, self.weights.eps, mixer.num_k_heads * mixer.k_dim
        produce = partial(gated_delta_inputs, rows, mixer.producer, part.conv_state, part.conv_rows, eps)
        produced = produce()
        query, key, value = produced.mixed.split([key_dim, key_dim, produced.mixed.shape[1] - 2 * key_dim], dim=1)
        heads = [
            x.unflatten(1, (-1, d))[None] for x, d in ((query, mixer.k_dim), (key, mixer.k_dim), (value, mixer.v_dim))
        ]
        gates = (produced.log_decay[None], produced.beta[None])
        verify = partial(verify_gated_delta_rule, *heads, *gates, part.recurrent_state, part.factors, True)
        attended, gate = verify()[0], produced.z.unflatten(1, (-1, mixer.v_dim))
        self._add("GDN inputs", produce)
        self._add("GDN verify", verify)
        ended = (attended, gate, mixer.norm_weight, mixer.output, rows.values, self.room, eps, self.counters)
        self._add("GDN output", partial(gated_norm_linear, *ended))

    def _add_attention(self, mixer: AttentionWeights, part: AttentionState) -> None:
        rows, weights, committed = self.rows, self.weights, self.state.committed
        project = partial(norm_linear, rows, mixer.projection, weights.eps)
        rotation = rotary_rows(
            committed, self.offset, weights.frequencies, weights.rope_scaling, rows.shape[0], rows.values.dtype
        )
        turned = (rotation.cos, rotation.sin, part.keys, part.values, committed, weights.eps)
        prepare = partial(attention_inputs, project(), mixer.norms, *turned)
        inputs = prepare()
        attend = partial(block_attention, inputs.query, part.keys, part.values, committed, part.keys.shape[2] ** -0.5)
        self._add("attention q|k|v", project)
        self._add("attention norms and RoPE", prepare)
        self._add("attention", attend)
        ended = (attend(), inputs.gate, mixer.output, rows.values, self.room, self.counters)
        self._add("attention output", partial(gated_linear, *ended))

    def _add_experts(self, layer_idx: int, block: SparseWeights) -> None:
        rows, eps = self.rows, self.weights.eps
        self._add("router", partial(route_rows, rows, block.router, block.top_k, eps))
        routed = route_rows(rows, block.router, block.top_k, eps)
        if self.assignments is not None:
            routed = scripted_rows(self.assignments[layer_idx], block.router.shape[0] - 1)
        size = num_counters(rows.shape[1], routed.top_k_index.numel())
        counters = torch.zeros(size, dtype=torch.int32, device=self.device)
        self._add("experts", partial(add_experts, rows, routed, block.experts, self.room, eps, counters))


def forward_bytes(weights: FusedWeights, state: BlockState, context: int) -> dict[str, int]:
    """Bytes that a forward reads: `fixed` whatever the routing, and those of one `expert` of one layer."""
    fixed, expert = weights.head.nbytes, 0
    for layer_idx, layer in enumerate(weights.layers):
        part, mixer, block = state.layers[layer_idx], layer.mixer, layer.feed_forward
        if isinstance(mixer, GatedDeltaWeights):
            fixed += mixer.producer.projection.nbytes + mixer.producer.conv_weight.nbytes + part.recurrent_state.nbytes
        else:
            fixed += mixer.projection.nbytes + 2 * part.keys[:, :context].nbytes
        fixed += mixer.output.nbytes
        if isinstance(block, DenseWeights):
            fixed += block.gate_up.nbytes + block.down.nbytes
            continue
        fixed += block.router.nbytes + block.experts.shared_gate_up.nbytes + block.experts.shared_down.nbytes
        expert = block.experts.gate_up[0].nbytes + block.experts.down[0].nbytes
    return {"fixed": fixed, "expert": expert}
