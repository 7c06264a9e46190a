"""The target's forward split at the router boundary (HybridSpec, section 3.2).

Stage 0 runs the embedding and Layer 0 through its MoE router on u rows; Stage 1 resumes at Layer 0's experts on the
first w of them. No Stage-0 work is repeated and no value of a later row is read.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers.masking_utils import create_causal_mask

from .hybrid_cache import HybridCache
from .sparse_moe import Routing, route, run_experts


@dataclass(frozen=True)
class RouterBoundary:
    """What Stage 0 leaves for Stage 1, one row per token.

    Attributes:
        residual: `[1, u, hidden]`, residual stream after Layer 0's token mixer.
        normed: `[1, u, hidden]`, the same after the norm before the experts.
        routing: assignment of Layer 0's experts, None if Layer 0 is dense.
        position_ids: `[..., 1, u]`, as given to Stage 0.
    """

    residual: torch.Tensor
    normed: torch.Tensor
    routing: Routing | None
    position_ids: torch.Tensor


@dataclass(frozen=True)
class VerifiedRows:
    """What Stage 1 gives: `logits` `[w, vocabulary]` and `features` `[w, taps * hidden]`, taps in the listed order."""

    logits: torch.Tensor
    features: torch.Tensor


class SplitForward:
    """Stage 0 and Stage 1 of one target.

    Args:
        text_model: the target's decoder stack (`embed_tokens`, `layers`, `norm`, `rotary_emb`), GDN layers swapped.
        lm_head: the output head.
        target_layer_ids: layers whose output is tapped for the drafter.
    """

    def __init__(self, text_model: nn.Module, lm_head: nn.Module, target_layer_ids: tuple[int, ...]):
        self.text_model = text_model
        self.lm_head = lm_head
        self.target_layer_ids = target_layer_ids

    def stage0(self, token_ids: torch.Tensor, position_ids: torch.Tensor, cache: HybridCache) -> RouterBoundary:
        """Runs `[1, u]` tokens to the router boundary within the open block of `cache`, whose Layer 0 records them."""
        layer = self.text_model.layers[0]
        residual = self.text_model.embed_tokens(token_ids)
        residual = residual + layer.linear_attn(hidden_states=layer.input_layernorm(residual), cache=cache)
        normed = layer.post_attention_layernorm(residual)
        return RouterBoundary(residual, normed, route(layer.mlp, normed), position_ids)

    def stage1(
        self, boundary: RouterBoundary, length: int, cache: HybridCache, attention_mask: torch.Tensor | None
    ) -> VerifiedRows:
        """Runs the first `length` rows from the boundary to the logits; the block is shortened to them.

        `attention_mask` is `[1, committed + u]`, or None where nothing is padding.
        """
        cache.shorten_block(length)
        normed = boundary.normed[:, :length]
        routing = None if boundary.routing is None else boundary.routing.first(length)
        layers = self.text_model.layers
        hidden_states = boundary.residual[:, :length] + run_experts(layers[0].mlp, normed, routing)
        taps = {0: hidden_states}
        per_layer = self._layer_inputs(hidden_states, boundary.position_ids[..., :length], cache, attention_mask)
        for layer_idx, layer in enumerate(layers[1 : self.text_model.config.num_hidden_layers], start=1):
            hidden_states = layer(hidden_states, cache=cache, use_cache=True, **per_layer[layer.block_type])
            taps[layer_idx] = hidden_states
        logits = self.lm_head(self.text_model.norm(hidden_states))
        features = torch.cat([taps[layer_idx] for layer_idx in self.target_layer_ids], dim=-1)
        return VerifiedRows(logits[0], features[0])

    def _layer_inputs(self, hidden_states, position_ids, cache, attention_mask) -> dict[str, dict]:
        """What the host's text model gives each layer, by layer type, for rows of a block."""
        text_position_ids, position_ids = _split_position_ids(position_ids)
        if attention_mask is not None:
            attention_mask = attention_mask[:, : cache.committed_length + hidden_states.shape[1]]
        causal_mask = create_causal_mask(
            config=self.text_model.config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
            cache=cache,
            position_ids=text_position_ids,
        )
        common = {
            "position_embeddings": self.text_model.rotary_emb(hidden_states, position_ids),
            "position_ids": text_position_ids,
        }
        return {
            "full_attention": {"attention_mask": causal_mask, **common},
            # Rows of a block are never padding.
            "linear_attention": {"attention_mask": None, **common},
        }


def _split_position_ids(position_ids: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Text positions for the mask, positions for the rotary embedding: as the host's text models take them apart.

    `[1, n]` serves both; of `[4, 1, n]` the first row is text and the others are time, height and width.
    """
    if position_ids.ndim == 2:
        return position_ids, position_ids
    if position_ids.shape[0] == 4:
        return position_ids[0], position_ids[1:]
    return None, position_ids
