"""A user's cache into the fixed buffers of an engine, and what was decoded there back out."""

from torch import nn
from transformers.cache_utils import Cache, LinearAttentionLayer, StaticLayer

from ..modeling.block_state import AttentionState, BlockState


def copy_in(block: BlockState, cache: Cache) -> None:
    """Starts the block state from a prefilled cache of one sequence, which is read only."""
    length = int(cache.get_seq_length())
    for layer_idx, state in block.layers.items():
        layer = cache.layers[layer_idx]
        if isinstance(state, AttentionState):
            state.keys[:, :length].copy_(layer.keys[0, :, :length])
            state.values[:, :length].copy_(layer.values[0, :, :length])
        else:
            state.conv_state.copy_(layer.conv_states[0][0])
            state.recurrent_state.copy_(layer.recurrent_states[0])
    block.committed.fill_(length)


def copy_out(block: BlockState, cache: Cache) -> int:
    """Brings a cache, as given to `copy_in`, up to the block state; returns the rows added. Reads the length here."""
    start, stop = int(cache.get_seq_length()), int(block.committed)
    for layer_idx, state in block.layers.items():
        layer = cache.layers[layer_idx]
        if isinstance(layer, LinearAttentionLayer):
            # In place: a layer's states may be views of a stack.
            layer.conv_states[0].copy_(state.conv_state[None])
            layer.recurrent_states[0].copy_(state.recurrent_state)
            continue
        keys, values = state.keys[None, :, start:stop], state.values[None, :, start:stop]
        if isinstance(layer, StaticLayer):
            layer.keys[:, :, start:stop].copy_(keys)
            layer.values[:, :, start:stop].copy_(values)
            layer.cumulative_length.fill_(stop)
        else:
            layer.update(keys, values)
    return stop - start


def weights_signature(module: nn.Module) -> tuple:
    """Changes when a parameter is replaced, moved or written to."""
    return tuple(
        (parameter.data_ptr(), 0 if parameter.is_inference() else parameter._version)
        for parameter in module.parameters()
    )
