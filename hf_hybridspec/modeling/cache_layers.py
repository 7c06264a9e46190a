"""The layers of a HybridCache: which there are, and how those of a user's cache become them."""

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer, StaticLayer
from transformers.configuration_utils import PreTrainedConfig

SUPPORTED_LAYER_TYPES = ("linear_attention", "full_attention")


class GatedDeltaLayer(LinearAttentionLayer):
    """States of one GDN layer: `conv_states[0]` `[B, channels, kernel]`, `recurrent_states[0]` `[B, HV, K, V]` fp32.

    Outside a block it behaves as the host's own layer. Within one it is read, and written only by the cache's commit.
    """

    # Rollback goes through compact factors, so past convolution columns are never kept and every shape stays fixed.
    is_croppable = True
    is_compileable = True

    def activate_past_recording(self) -> None:
        """Nothing to do: a block records, not the layer."""

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: one layer cannot know the block."""
        raise RuntimeError("A GDN layer is rolled back by HybridCache.crop or HybridCache.commit, not on its own.")

    def batch_repeat_interleave(self, repeats: int) -> None:
        for states in (self.conv_states, self.recurrent_states):
            if states[0] is not None:
                states[0] = states[0].repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        for states in (self.conv_states, self.recurrent_states):
            if states[0] is not None:
                states[0] = states[0][indices]


def _layer_types(config: PreTrainedConfig) -> list[str]:
    layer_types = list(config.get_text_config(decoder=True).layer_types)
    unknown = sorted(set(layer_types) - set(SUPPORTED_LAYER_TYPES))
    if unknown:
        raise ValueError(f"HybridCache holds layers of {', '.join(SUPPORTED_LAYER_TYPES)}, got {', '.join(unknown)}.")
    return layer_types


def new_layers(config: PreTrainedConfig, max_length: int | None) -> list:
    """Empty layers as the config lists them; attention layers are static if `max_length` is given."""

    def new_attention_layer():
        return DynamicLayer() if max_length is None else StaticLayer(max_cache_len=max_length)

    return [
        GatedDeltaLayer() if kind == "linear_attention" else new_attention_layer() for kind in _layer_types(config)
    ]


def check_layers(cache: Cache, config: PreTrainedConfig) -> None:
    """Raises ValueError unless the layers of a cache are those of `config`."""
    expected = _layer_types(config)
    given = [
        "linear_attention" if isinstance(layer, LinearAttentionLayer) else "full_attention" for layer in cache.layers
    ]
    if given != expected:
        raise ValueError(
            f"The cache does not match the model: it has {len(given)} layers "
            f"({given.count('linear_attention')} GDN), the "
            f"model {len(expected)} ({expected.count('linear_attention')} GDN). Pass a cache made for "
            "this model, or none."
        )


def convert_layer(layer):
    """The layer itself, or the GatedDeltaLayer that adopts its states."""
    if not isinstance(layer, LinearAttentionLayer) or isinstance(layer, GatedDeltaLayer):
        return layer
    converted = GatedDeltaLayer(number_of_states=layer.number_of_states)
    converted.__dict__.update(layer.__dict__)
    converted.record_past = False
    if layer.record_past and layer.conv_states[0] is not None:
        # A recording layer holds more columns than the kernel needs, or fewer after a prompt that is shorter.
        kernel_size, columns = layer.conv_kernel_size[0], layer.conv_states[0]
        missing = max(0, kernel_size - columns.shape[-1])
        converted.conv_states[0] = F.pad(columns[..., -kernel_size:], (missing, 0)).contiguous()
    return converted
