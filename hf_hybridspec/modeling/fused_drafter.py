"""A drafter on fixed buffers: the maths of `Drafter.propose` and `Drafter.observe` in few launches, ready for capture.

Weights that read the same rows are joined, and the drafter's parameters become views of the joined ones. Keys and
values of all positions lie in static buffers whose length is a device tensor, so nothing is read on the CPU and every
shape stays the same from round to round.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..kernels.block_attention import MAX_ROWS, HeadNorms, attention_inputs, block_attention
from ..kernels.context_inputs import context_inputs
from ..kernels.dense_mlp import dense_down, dense_gate_up
from ..kernels.draft_choice import MarkovWeights, ProposalRules, choose_tokens
from ..kernels.linear import norm_linear
from ..kernels.residual_rows import ResidualRows, residual_rows
from .block_state import SelectedStates
from .draft import Draft
from .draft_context import DraftContext
from .drafter import Drafter
from .drafter_config import AttentionSpan
from .drafter_layers import DrafterLayer, KeyValues
from .dspark.markov_head import MarkovHead
from .fused_weights import joined

FUSED_FAMILIES = ("dflash", "dspark", "ready")
# Others compute their frequencies from the length, on the CPU.
STATIC_ROPE_TYPES = ("default", "linear", "yarn", "llama3")


def fused_drafter_obstacle(drafter: Drafter) -> str | None:
    """Why a bound drafter cannot be a `FusedDrafter`, or None."""
    config, target = drafter.config, drafter.target
    head = drafter.lm_head if config.draft_vocab_size is not None else target.head
    if config.family not in FUSED_FAMILIES:
        return f"{config.family} drafters have sublayers that are not fused"
    if drafter.block_size > MAX_ROWS:
        return f"the block has {drafter.block_size} rows, at most {MAX_ROWS} are fused"
    if config.attention_bias:
        return "the attention projections have biases"
    if config.rope_parameters["rope_type"] not in STATIC_ROPE_TYPES:
        return f"the rope type {config.rope_parameters['rope_type']} depends on the length"
    if type(getattr(drafter, "markov_head", None)) not in (type(None), MarkovHead):
        return f"Markov heads of type {config.markov_head_type} are not fused"
    linears = [head, drafter.fc, *(module for module in drafter.layers.modules() if hasattr(module, "in_features"))]
    if any(type(module) is not nn.Linear or module.bias is not None for module in linears):
        return "a projection or the head is no plain linear layer"
    places = {(weight.dtype, weight.device) for weight in (target.embedding.weight, head.weight, drafter.fc.weight)}
    if len(places) > 1:
        return "drafter and target differ in dtype or device"
    return None


@dataclass(frozen=True)
class FusedLayer:
    """A drafter layer re-laid. Scales are fp32 `[H]`; keys and values `[KVH, S, head_dim]` are written in place.

    Attributes:
        projection: `[(Hq + 2 KVH) head_dim, H]`, q|k|v.
        norms: of the heads.
        gate_up: `[2 I, H]`.
        module: the layer itself, for what is not fused.
    """

    input_scale: Tensor
    projection: Tensor
    norms: HeadNorms
    output: Tensor
    mlp_scale: Tensor
    gate_up: Tensor
    down: Tensor
    span: AttentionSpan
    keys: Tensor
    values: Tensor
    module: DrafterLayer


class FusedDrafter:
    """A bound drafter of which one sequence's context lives in fixed buffers.

    Args:
        drafter: bound to its target; its parameters become views of joined ones (values and names stay).
        max_context: positions that the sequence may reach.

    Attributes:
        committed: `[1]` int32, rows of the context; on the device, as is all else.
        num_draft_tokens: D.

    Raises:
        ValueError: `fused_drafter_obstacle` names a reason.
    """

    @torch.no_grad()
    def __init__(self, drafter: Drafter, max_context: int):
        if obstacle := fused_drafter_obstacle(drafter):
            raise ValueError(f"This drafter cannot run fused: {obstacle}. Use Drafter.propose and Drafter.observe.")
        self.drafter, self.max_context = drafter, max_context
        self.num_draft_tokens = drafter.num_draft_tokens
        config, device, dtype = drafter.config, drafter.compute_device, drafter.compute_dtype
        # A proposal block and the rows of a verification stand after the context until they are committed.
        buffers = (2, config.num_hidden_layers, config.num_key_value_heads, max_context + MAX_ROWS, config.head_dim)
        self._caches = torch.zeros(buffers, dtype=dtype, device=device)
        projections = _joined_projections(drafter)
        self.layers = [
            _fuse(layer, span, projection, keys, values)
            for layer, span, projection, keys, values in zip(
                drafter.layers, drafter.spans, projections, *self._caches, strict=True
            )
        ]
        # Of keys and values, of all layers: what a context row passes through.
        self._context_weights = projections[:, config.num_attention_heads * config.head_dim :]
        self._context_key_scales = torch.stack([layer.norms.key_scale for layer in self.layers])
        self.committed = torch.zeros(1, dtype=torch.int32, device=device)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self._steps = torch.arange(MAX_ROWS, device=device)
        rotation = drafter.rotation(torch.arange(max_context + MAX_ROWS, device=device))
        self._rotations = torch.cat((rotation.cos, rotation.sin), dim=-1)[0, 0]
        self._token_ids = torch.full((drafter.block_size,), config.mask_token_id, device=device)
        self._zeros = torch.zeros(MAX_ROWS, config.hidden_size, dtype=dtype, device=device)
        self._counters = torch.zeros(max(MAX_ROWS, config.hidden_size // 16 + 1), dtype=torch.int32, device=device)
        self._context_scale, self._final_scale = drafter.hidden_norm.weight.float(), drafter.norm.weight.float()
        is_reduced = config.draft_vocab_size is not None
        self._head = drafter.lm_head.weight if is_reduced else drafter.target.head.weight
        self._rules = ProposalRules(
            drafter.target.forbidden.to(device),
            config.output_multiplier,
            config.final_logit_softcapping,
            drafter.d2t if is_reduced else None,
        )
        markov = getattr(drafter, "markov_head", None)
        self._markov = None if markov is None else MarkovWeights(markov.markov_w1.weight, markov.markov_w2.weight)

    # ------------------------------------------------------------------------------------------------ one round

    @torch.no_grad()
    def propose(self, anchor: Tensor, recurrent_states: Mapping[int, Tensor] | None = None) -> Draft:
        """The proposal block after `anchor` `[1]` int64; what lies after the context is overwritten.

        recurrent_states: as for `Drafter.propose`; tensors that stay in place if the call is captured.
        """
        config, rows = self.drafter.config, self._token_ids.shape[0]
        self._token_ids[:1].copy_(anchor)
        hidden = self.drafter.target.embedding.weight.index_select(0, self._token_ids)
        if config.input_embedding_scale != 1.0:
            hidden = hidden * config.input_embedding_scale
        hidden = residual_rows(hidden, self.layers[0].input_scale)
        cos, sin = self._rotation(rows)
        states = self._gather(recurrent_states)
        next_scales = [*(layer.input_scale for layer in self.layers[1:]), self._final_scale]
        for layer, next_scale in zip(self.layers, next_scales, strict=True):
            hidden = self._layer(layer, hidden, cos, sin, states, next_scale)
        hidden = hidden.between(self.drafter.alignment.first_draft_row, rows)
        logits = norm_linear(hidden, self._head, config.rms_norm_eps)
        choice = choose_tokens(logits, anchor, self._rules, self._markov, self._counters)
        return Draft(
            choice.tokens, choice.confidence, choice.entropy, self._acceptance(hidden.values, anchor, choice.tokens)
        )

    def _gather(self, recurrent_states: Mapping[int, Tensor] | None) -> Tensor | None:
        layer_ids = self.drafter.recurrent_layer_ids
        if layer_ids and isinstance(recurrent_states, SelectedStates) and tuple(recurrent_states) == layer_ids:
            return recurrent_states.gather()
        return self.drafter.gather_states(recurrent_states)

    @torch.no_grad()
    def observe(self, features: Tensor, commit_length: Tensor) -> None:
        """Makes the first rows of a verification context.

        Args:
            features: `[w, K * H]`, the taps of w rows that follow the context, 1 <= w <= 16.
            commit_length: `[1]` int32, how many of them were committed; the others leave nothing behind.
        """
        rows = features.shape[0]
        fused = dense_down(
            features.to(self._zeros.dtype), self.drafter.fc.weight, self._zeros[:rows],
            self._room(rows, self._context_scale), self._counters,
        )  # fmt: skip
        context_inputs(
            fused, self._context_weights, self._context_key_scales,
            *self._rotation(rows), *self._caches, self.committed, self.drafter.config.rms_norm_eps,
        )  # fmt: skip
        self.committed.add_(commit_length)
        self._position.add_(commit_length)

    def _rotation(self, rows: int) -> tuple[Tensor, ...]:
        """cos and sin `[rows, head_dim]` of the positions after the context."""
        return self._rotations.index_select(0, self._steps[:rows] + self._position).chunk(2, dim=1)

    def _room(self, num_rows: int, norm_scale: Tensor) -> ResidualRows:
        return ResidualRows.empty(num_rows, norm_scale, self._zeros.dtype)

    def _layer(
        self,
        layer: FusedLayer,
        hidden: ResidualRows,
        cos: Tensor,
        sin: Tensor,
        states: Tensor | None,
        next_scale: Tensor,
    ) -> ResidualRows:
        """One layer, whose rows the norm with `next_scale` follows."""
        eps, span, rows = self.drafter.config.rms_norm_eps, layer.span, hidden.shape[0]
        reader = getattr(layer.module, "state_reader", None)
        if reader is not None and not layer.module.reads_after_attention:
            hidden = residual_rows(reader(hidden.values[None], states, rows)[0], layer.input_scale)
        projected = norm_linear(hidden, layer.projection, eps)
        inputs = attention_inputs(projected, layer.norms, cos, sin, layer.keys, layer.values, self.committed, eps)
        attended = block_attention(
            inputs.query, layer.keys, layer.values, self.committed, inputs.query.shape[2] ** -0.5,
            span.causal, span.window, span.window_from_anchor,
        )  # fmt: skip
        room = self._room(rows, layer.mlp_scale)
        hidden = dense_down(attended.flatten(1), layer.output, hidden.values, room, self._counters)
        if reader is not None and layer.module.reads_after_attention:
            hidden = residual_rows(reader(hidden.values[None], states, rows)[0], layer.mlp_scale)
        activated = dense_gate_up(hidden, layer.gate_up, eps)
        return dense_down(activated, layer.down, hidden.values, self._room(rows, next_scale), self._counters)

    def _acceptance(self, hidden: Tensor, anchor: Tensor, tokens: Tensor) -> Tensor | None:
        """The confidence head's estimates `[D]`, None without one."""
        if getattr(self.drafter, "confidence_head", None) is None:
            return None
        previous = torch.cat((anchor, tokens[:-1]))
        return torch.sigmoid(self.drafter.confidence_logits(self.drafter.norm(hidden), previous))

    # ------------------------------------------------------------------------------------------------ one call

    def context_obstacle(self, context: DraftContext) -> str | None:
        """Why `begin` would refuse a context, or None."""
        if not context.length:
            return "the context is empty"
        for layer in context.layers:
            positions = layer.positions
            if int(positions[-1]) >= self.max_context:
                return f"the context reaches position {int(positions[-1])}, the buffers hold {self.max_context}"
            # A window counts positions, the buffers count rows.
            if layer.max_rows is not None and int(positions[-1] - positions[0]) != positions.shape[0] - 1:
                return "positions of a layer with a window have a gap"
        return None

    @torch.no_grad()
    def begin(self, context: DraftContext) -> None:
        """Starts a sequence from what `Drafter.observe` gathered, which is read only; reads lengths on the CPU.

        Raises ValueError where `context_obstacle` names a reason.
        """
        if obstacle := self.context_obstacle(context):
            raise ValueError(f"This context cannot be continued fused: {obstacle}. Use Drafter.propose.")
        for layer, kept in zip(self.layers, context.layers, strict=True):
            known = kept.key_values
            rows = slice(context.length - known.keys.shape[2], context.length)
            layer.keys[:, rows], layer.values[:, rows] = known.keys[0], known.values[0]
        self.committed.fill_(context.length)
        self._position.fill_(int(context.layers[0].positions[-1]) + 1)

    @torch.no_grad()
    def end(self, context: DraftContext) -> None:
        """Appends to a context, as given to `begin`, the rows observed since; reads lengths on the CPU."""
        stop, position = int(self.committed), int(self._position)
        for layer, kept in zip(self.layers, context.layers, strict=True):
            count = stop - context.length if kept.max_rows is None else min(stop - context.length, kept.max_rows)
            if count:
                rows = slice(stop - count, stop)
                positions = torch.arange(position - count, position, device=layer.keys.device)
                kept.append(KeyValues(layer.keys[None, :, rows], layer.values[None, :, rows]), positions)
        context.length = stop


def _joined_projections(drafter: Drafter) -> Tensor:
    """`[L, (Hq + 2 KVH) head_dim, H]`, q|k|v of every layer."""
    attentions = [layer.self_attn for layer in drafter.layers]
    weights = [linear.weight for module in attentions for linear in (module.q_proj, module.k_proj, module.v_proj)]
    return joined(*weights).unflatten(0, (len(attentions), -1))


def _fuse(layer: DrafterLayer, span: AttentionSpan, projection: Tensor, keys: Tensor, values: Tensor) -> FusedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    return FusedLayer(
        input_scale=layer.input_layernorm.weight.float(),
        projection=projection,
        norms=HeadNorms(attention.q_norm.weight.float(), attention.k_norm.weight.float(), is_gated=False),
        output=attention.o_proj.weight,
        mlp_scale=layer.post_attention_layernorm.weight.float(),
        gate_up=joined(mlp.gate_proj.weight, mlp.up_proj.weight),
        down=mlp.down_proj.weight,
        span=span,
        keys=keys,
        values=values,
        module=layer,
    )
