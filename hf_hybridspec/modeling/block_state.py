"""A HybridCache whose lengths live on the device, so that blocks are verified and committed without a CPU read.

States, convolution rows, compact factors, keys and values are the cache's own tensors. While a BlockState is in use
the cache's lengths are stale; `release` brings them up to date, and the cache goes on where the device has stopped.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer

from ..kernels.causal_conv import commit_causal_conv
from ..kernels.gated_delta_rule import MAX_ROWS, CompactFactors, commit_gated_delta_rule
from ..kernels.state_reader import gather_states
from .block_buffers import BlockBuffers
from .cache_layers import GatedDeltaLayer
from .hybrid_cache import HybridCache
from .verification_backends import block_buffers_class


@dataclass(frozen=True)
class GatedDeltaState:
    """One GDN layer's part, views of the stacks.

    Attributes:
        conv_state: `[C, kernel]`, committed.
        recurrent_state: `[1, HV, K, V]` fp32, committed.
        conv_rows: `[16, C]`, the block's rows before the convolution.
        factors: `[1, 16, ...]`, the block's compact factors.
    """

    conv_state: Tensor
    recurrent_state: Tensor
    conv_rows: Tensor
    factors: CompactFactors


@dataclass(frozen=True)
class AttentionState:
    """One attention layer's part: keys and values `[Hkv, S, D]`, of which the first `committed` rows are permanent."""

    keys: Tensor
    values: Tensor


class SelectedStates(Mapping[int, Tensor]):
    """Committed recurrent states of some layers: layer index -> `[N, HV, K, V]`, views of the stack of all.

    Args:
        stack: `[L, N, HV, K, V]` fp32, of all GDN layers.
        places: layer index -> its place in the stack, in the order in which they are gathered.
    """

    def __init__(self, stack: Tensor, places: Mapping[int, int]):
        self._stack, self._places = stack, dict(places)
        self._index = torch.tensor(list(self._places.values()), dtype=torch.int32, device=stack.device)
        _, batch, heads, *sizes = stack.shape
        self._gathered = stack.new_empty(batch, len(self._places) * heads, *sizes)

    def __getitem__(self, layer_idx: int) -> Tensor:
        return self._stack[self._places[layer_idx]]

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def gather(self) -> Tensor:
        """`[N, layers * HV, K, V]`, the heads of all layers in order: a buffer that the next call overwrites."""
        gather_states(self._stack, self._index, self._gathered)
        return self._gathered


class BlockState:
    """The state of one sequence on fixed buffers.

    Args:
        cache: static, prefilled, one sequence; its tensors are shared, not copied. An open block is discarded.

    Attributes:
        committed: `[1]` int32 on the device, tokens that are permanent.
        layers: layer index -> `GatedDeltaState` or `AttentionState`.
        capacity: S, rows of the attention layers.

    Raises:
        ValueError: `state_obstacle` names a reason.
    """

    def __init__(self, cache: HybridCache):
        if obstacle := state_obstacle(cache):
            raise ValueError(f"This cache cannot be driven from the device: {obstacle}. Use HybridCache.begin_block.")
        self._cache = cache
        # Stacks the states, once.
        cache.begin_block(1)
        cache.discard_block()
        gated_delta = [i for i, layer in enumerate(cache.layers) if isinstance(layer, GatedDeltaLayer)]
        self._buffers: BlockBuffers = cache.buffers_of(gated_delta[0])[0]
        self.layers = {i: self._part(i, layer) for i, layer in enumerate(cache.layers)}
        self.capacity = cache.get_max_length()
        self.committed = torch.tensor(
            [cache.committed_length], dtype=torch.int32, device=self._buffers.recurrent_states.device
        )

    def _part(self, layer_idx: int, layer) -> GatedDeltaState | AttentionState:
        if not isinstance(layer, GatedDeltaLayer):
            return AttentionState(layer.keys[0], layer.values[0])
        buffers, index = self._cache.buffers_of(layer_idx)
        return GatedDeltaState(
            conv_state=buffers.conv_states[index, 0],
            recurrent_state=buffers.recurrent_states[index],
            conv_rows=buffers.rows[index, 0, :MAX_ROWS],
            factors=buffers.factors[index, :, :MAX_ROWS],
        )

    def select_states(self, layer_ids: Sequence[int]) -> SelectedStates:
        """The committed recurrent states of GDN layers, which stay in place."""
        places = {layer_idx: self._cache.buffers_of(layer_idx)[1] for layer_idx in layer_ids}
        return SelectedStates(self._buffers.recurrent_states, places)

    def commit(self, commit_length: Tensor) -> None:
        """Makes the first rows of the newest block permanent in every layer, in one launch for each kind of state.

        Args:
            commit_length: `[1]` int32, 0..rows of the block, read on the device only.
        """
        buffers = self._buffers
        commit_causal_conv(buffers.conv_states, buffers.rows[:, :, :MAX_ROWS], commit_length)
        commit_gated_delta_rule(buffers.recurrent_states, buffers.factors[:, :, :MAX_ROWS], commit_length)
        self.committed.add_(commit_length)

    def release(self) -> None:
        """Hands the committed tokens to the cache, which then goes on in the eager loop or in plain `generate`.

        Mutates the cache's lengths, on the device; calling it again, or after more commits, is fine.
        """
        for layer in self._cache.layers:
            if isinstance(layer, StaticLayer):
                layer.cumulative_length.copy_(self.committed[0])


def state_obstacle(cache: HybridCache) -> str | None:
    """Why a cache cannot become a BlockState, or None."""
    if block_buffers_class() is not BlockBuffers:
        return "another verification backend is in use"
    attention = [layer for layer in cache.layers if not isinstance(layer, GatedDeltaLayer)]
    if not all(type(layer) is StaticLayer for layer in attention):
        return "its attention layers are not static"
    states = [layer.recurrent_states[0] for layer in cache.layers if isinstance(layer, GatedDeltaLayer)]
    if any(state is None for state in states) or not all(layer.is_initialized for layer in attention):
        return "no prompt has been run through the target"
    if states[0].shape[0] != 1:
        return f"it holds {states[0].shape[0]} sequences"
    if len({state.device for state in states} | {layer.device for layer in attention}) > 1:
        return "its layers are on several devices"
    return None
