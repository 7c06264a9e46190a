"""What training reads of the frozen target, from one forward over whole sequences: taps, last hidden rows, states."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_hybridspec.modeling.drafter import Drafter
from hf_hybridspec.modeling.target import swap_gated_delta_nets, text_model
from training.states import delta_rule_inputs, run_chunks, states_at


@dataclass(frozen=True)
class TargetRecord:
    """One forward of the target over B sequences of S tokens, nothing of it differentiable.

    features: [B, S, taps * hidden], taps in the drafter's order. last_hidden: [B, S, hidden] after the final norm,
    what the head reads. recurrent_states: target layer -> [B * N, HV, K, V] fp32, the committed states before each
    anchor.
    """

    features: Tensor
    last_hidden: Tensor
    recurrent_states: dict[int, Tensor]


class FrozenTarget:
    """Runs a target for training a drafter; the target's weights and mode are left alone.

    Args:
        model: of a supported family; its GDN layers are prepared in place (as `attach` does).
        drafter: says which layers are tapped and which states are read.
    """

    def __init__(self, model: PreTrainedModel, drafter: Drafter):
        swap_gated_delta_nets(model)
        self.model = model.eval().requires_grad_(False)
        self.target_layer_ids = drafter.target_layer_ids
        self.recurrent_layer_ids = drafter.recurrent_layer_ids
        self._layers = text_model(model).layers

    @torch.no_grad()
    def run(self, tokens: Tensor, anchors: Tensor) -> TargetRecord:
        """tokens [B, S] int64, padded on the right (later tokens change no earlier row, so no mask is needed); anchors
        [B, N] int64 positions."""
        taps: dict[int, Tensor] = {}
        mixer_inputs: dict[int, Tensor] = {}
        handles = [
            self._layers[layer].register_forward_hook(
                lambda module, args, output, layer=layer: taps.update({layer: output})
            )
            for layer in self.target_layer_ids
        ]
        handles += [
            self._layers[layer].input_layernorm.register_forward_hook(
                lambda module, args, output, layer=layer: mixer_inputs.update({layer: output})
            )
            for layer in self.recurrent_layer_ids
        ]
        try:
            with torch.autocast(tokens.device.type, enabled=False):
                last_hidden = text_model(self.model)(input_ids=tokens, use_cache=False).last_hidden_state
                states = {
                    layer: self._states(layer, mixer_inputs.pop(layer), anchors) for layer in self.recurrent_layer_ids
                }
        finally:
            for handle in handles:
                handle.remove()
        return TargetRecord(torch.cat([taps[layer] for layer in self.target_layer_ids], dim=-1), last_hidden, states)

    def _states(self, layer: int, hidden_states: Tensor, anchors: Tensor) -> Tensor:
        inputs = delta_rule_inputs(self._layers[layer].linear_attn, hidden_states)
        return states_at(run_chunks(inputs), anchors).flatten(0, 1)


def checksum(model: PreTrainedModel) -> int:
    """A sum over the bits of every parameter and buffer, weighted by position: changes whenever one of them does."""
    total = 0
    for tensor in [*model.parameters(), *model.buffers()]:
        bits = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
        for part in bits.split(1 << 24):
            weights = torch.arange(1, part.numel() + 1, device=part.device) % 251 + 1
            total = (total * 31 + int((part.long() * weights).sum())) % (1 << 61)
    return total
