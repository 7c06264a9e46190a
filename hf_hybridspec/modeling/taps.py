"""Taps: outputs of the target's layers, taken while the host runs its own forward."""

from collections.abc import Callable

import torch
from torch import nn


class Taps:
    """Context manager that hands over the tapped features of every forward of a text model.

    Args:
        text_model: the target's decoder stack.
        target_layer_ids: layers whose output is tapped (residual stream after the layer), in the drafter's order.
        on_features: called at the end of each forward with `[n, taps * hidden]`, one sequence only.
    """

    def __init__(
        self,
        text_model: nn.Module,
        target_layer_ids: tuple[int, ...],
        on_features: Callable[[torch.Tensor], None],
    ):
        self._layers = {layer_idx: text_model.layers[layer_idx] for layer_idx in target_layer_ids}
        self._order = target_layer_ids
        self._on_features = on_features
        self._outputs: dict[int, torch.Tensor] = {}
        self._handles = []

    def __enter__(self) -> "Taps":
        for layer_idx, layer in self._layers.items():
            self._handles.append(layer.register_forward_hook(self._hook(layer_idx)))
        return self

    def __exit__(self, *exception) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._outputs.clear()

    def _hook(self, layer_idx: int) -> Callable:
        last = max(self._order)

        def record(module, args, output):
            self._outputs[layer_idx] = output[0]
            if layer_idx == last:
                features = torch.cat([self._outputs[tap].to(output.device) for tap in self._order], dim=-1)
                self._outputs.clear()
                self._on_features(features)

        return record
