"""HybridCache: the cache of a hybrid target whose newest rows can be taken back.

A block is the rows of the target forwards since `begin_block` (normally one forward). Attention layers append them;
GDN layers record compact factors and leave their states alone. `commit(m)` makes exactly the first m rows permanent in
every layer. Nothing else mutates.
"""

import torch
from transformers.cache_utils import Cache, DynamicCache, StaticCache
from transformers.configuration_utils import PreTrainedConfig

from ..kernels.gated_delta_rule import MAX_ROWS
from .block_buffers import BlockBuffers
from .cache_layers import GatedDeltaLayer, check_layers, convert_layer, new_layers
from .verification_backends import block_buffers_class


class HybridCache(Cache):
    """Cache with block rollback for models of GDN and full attention layers.

    Args:
        config: the target's config (its text config is taken).
        max_length: slots of a static cache; None for one that grows.

    Attributes:
        block_length: rows of the open block, 0 when none is open.
        token_ids: `[1, n]` the committed tokens, or None when they are not known. Kept by the decoding loops.
        drafter_context: a drafter's own state over the same tokens, or None. Opaque here.
        is_recording: whether forwards that generate() prepares after the prefill are blocks.
        prefill_length: rows that the prefill of the call under way feeds, when the cache already holds others.
    """

    def __init__(self, config: PreTrainedConfig, max_length: int | None = None):
        super().__init__(layers=new_layers(config, max_length))
        self._initialize_block_state(config)

    @classmethod
    def convert(cls, cache: Cache, config: PreTrainedConfig) -> "HybridCache":
        """Turns a user's `DynamicCache` or `StaticCache` into a HybridCache in place: the same object, states adopted.

        Raises:
            TypeError: the cache is of another kind.
            ValueError: its layers are not those of `config`.
        """
        if isinstance(cache, cls):
            check_layers(cache, config)
            return cache
        if type(cache) not in (DynamicCache, StaticCache):
            raise TypeError(
                f"cache must be a DynamicCache, a StaticCache or a HybridCache, got {type(cache).__name__}. "
                "Pass one of these, or none."
            )
        if cache.offloading:
            raise ValueError("An offloaded cache cannot be rolled back. Pass a DynamicCache without offloading.")
        if not cache.layers:
            cache.layers = new_layers(config, None)
        check_layers(cache, config)
        cache.layers = [convert_layer(layer) for layer in cache.layers]
        cache.__class__ = cls
        cache._initialize_block_state(config)
        return cache

    def _initialize_block_state(self, config: PreTrainedConfig) -> None:
        self.num_k_heads = config.get_text_config(decoder=True).linear_num_key_heads
        self.block_length = 0
        self.is_recording = False
        self.prefill_length: int | None = None
        self.token_ids: torch.Tensor | None = None
        self.drafter_context = None
        self._block_start = 0
        self._buffers: dict[torch.device, BlockBuffers] = {}
        self._buffer_index: dict[int, tuple[torch.device, int]] = {}

    # --- Blocks -------------------------------------------------------------------------------------------------

    @property
    def committed_length(self) -> int:
        """Tokens that are permanent."""
        return self._block_start if self.block_length else int(self.get_seq_length())

    def begin_block(self, length: int) -> None:
        """Opens a block of `length` rows for the next forward. A block left open by a failed call is discarded.

        Raises:
            ValueError: `length` is not positive, or a static cache has no room for it.
            RuntimeError: no prefill has run, so no layer has a state yet.
        """
        if length < 1:
            raise ValueError(f"A block must have at least one row, got {length}.")
        self.discard_block()
        self._stack_states(length)
        start = int(self.get_seq_length())
        max_length = self.get_max_length()
        if 0 <= max_length < start + length:
            raise ValueError(
                f"A block of {length} rows after {start} tokens does not fit a static cache of {max_length}. "
                "Allocate max_length + block length, or let generate() create the cache."
            )
        self._block_start, self.block_length = start, length

    def extend_block(self, length: int) -> None:
        """Opens a block of `length` rows, or lets the open one continue by as many in the next forward."""
        if not self.block_length:
            self.begin_block(length)
            return
        self.block_length += length
        for buffers in self._buffers.values():
            buffers.grow(self.block_length)

    def shorten_block(self, length: int) -> None:
        """Keeps the first `length` rows of the block that has begun; layers yet to run see these only."""
        if not 1 <= length <= self.block_length:
            raise ValueError(
                f"A block of {self.block_length} rows can be shortened to 1..{self.block_length}, got {length}."
            )
        self.block_length = length

    def commit(self, commit_length: int) -> None:
        """Makes the first `commit_length` rows of the block permanent in every layer, and ends the block.

        Raises:
            RuntimeError: no block is open, or a layer has not run the rows to be committed.
            ValueError: `commit_length` is not in [0, block_length].
        """
        if not self.block_length:
            raise RuntimeError("commit() needs an open block: call begin_block(n) and run the target first.")
        if not 0 <= commit_length <= self.block_length:
            raise ValueError(f"commit_length must be in [0, {self.block_length}], got {commit_length}.")
        attention_layers = [layer for layer in self.layers if not isinstance(layer, GatedDeltaLayer)]
        recorded = [int(layer.get_seq_length()) - self._block_start for layer in attention_layers]
        if (fewest := min(recorded + self._recorded_by_gated_delta_layers())) < commit_length:
            raise RuntimeError(f"A layer has run {fewest} rows of the block, {commit_length} were to be committed.")
        for layer, num_rows in zip(attention_layers, recorded, strict=True):
            layer.crop(commit_length - num_rows)
        for buffers in self._buffers.values():
            buffers.commit(commit_length)
        self.block_length = 0

    def discard_block(self) -> None:
        """Takes back every row of an open block; without one, nothing happens."""
        if self.block_length:
            self.commit(0)

    def settle(self) -> None:
        """Brings every GDN state up to the last committed row, where a verification backend lets commits wait.

        Needed before states are read other than by a block; `stop_recording` does it.
        """
        for buffers in self._buffers.values():
            buffers.settle()

    def buffers_of(self, layer_idx: int) -> tuple[BlockBuffers, int]:
        """The block buffers that hold GDN layer `layer_idx`, and its index in their stack."""
        device, index = self._buffer_index[layer_idx]
        return self._buffers[device], index

    def check_rows(self, layer_idx: int, num_rows: int) -> None:
        """Raises ValueError if `num_rows` more rows of GDN layer `layer_idx` are not within the open block."""
        buffers, index = self.buffers_of(layer_idx)
        room = self.block_length - buffers.num_recorded[index]
        if num_rows > room:
            raise ValueError(
                f"The forward feeds {num_rows} rows, the open block of {self.block_length} has room for {room}. "
                f"Feed at most these, or open a block for all of them with begin_block({num_rows}) before the forward."
            )

    @property
    def block_bytes(self) -> int:
        """Bytes that blocks occupy beside the states, over all layers."""
        return sum(buffers.num_bytes for buffers in self._buffers.values())

    # --- The host's spelling ------------------------------------------------------------------------------------

    def activate_past_recording(self) -> None:
        """From now on the forwards that generate() prepares after the prefill are blocks."""
        self.is_recording = True

    def stop_recording(self) -> None:
        """Ends what `activate_past_recording` began; an open block is discarded."""
        self.discard_block()
        self.settle()
        self.is_recording, self.prefill_length = False, None

    def crop(self, tokens_to_remove: int) -> None:
        """`crop(-k)` is `commit(block_length - k)`; `crop(0)` without an open block does nothing.

        Raises:
            RuntimeError: there is no block to take rows from.
            ValueError: `tokens_to_remove` is positive, or larger than the block.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop() takes zero or minus the number of tokens to remove, got {tokens_to_remove}.")
        if not self.block_length:
            if tokens_to_remove < 0:
                raise RuntimeError(
                    f"{-tokens_to_remove} tokens were to be removed, but no block is open: committed rows of a GDN "
                    "layer cannot be taken back. Call begin_block(n) before the forward."
                )
            return
        self.commit(self.block_length + tokens_to_remove)

    def reset(self) -> None:
        self.discard_block()
        super().reset()
        self.token_ids = self.drafter_context = None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._unstack_states()
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._unstack_states()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._unstack_states()
        super().batch_select_indices(indices)

    # --- Stacks -------------------------------------------------------------------------------------------------

    def _stack_states(self, num_rows: int) -> None:
        """Moves the states of the GDN layers into one stack a device, once; the layers keep views."""
        wanted = block_buffers_class()
        if any(type(buffers) is not wanted for buffers in self._buffers.values()):
            self._unstack_states()
        if self._buffers:
            for buffers in self._buffers.values():
                buffers.grow(num_rows)
            return
        by_device: dict[torch.device, list[int]] = {}
        for layer_idx, layer in enumerate(self.layers):
            if isinstance(layer, GatedDeltaLayer):
                if layer.recurrent_states[0] is None:
                    raise RuntimeError(
                        "begin_block() needs a prefilled cache: run the prompt through the target first."
                    )
                by_device.setdefault(layer.recurrent_states[0].device, []).append(layer_idx)
        for device, layer_indices in by_device.items():
            members = [self.layers[layer_idx] for layer_idx in layer_indices]
            buffers = wanted(
                [layer.conv_states[0] for layer in members],
                [layer.recurrent_states[0].float() for layer in members],
                self.num_k_heads,
                max(num_rows, MAX_ROWS),
            )
            for index, (layer_idx, layer) in enumerate(zip(layer_indices, members, strict=True)):
                layer.conv_states[0], layer.recurrent_states[0] = (
                    buffers.conv_states[index],
                    buffers.recurrent_states[index],
                )
                self._buffer_index[layer_idx] = (device, index)
            self._buffers[device] = buffers

    def _recorded_by_gated_delta_layers(self) -> list[int]:
        return [num_rows for buffers in self._buffers.values() for num_rows in buffers.num_recorded]

    def _unstack_states(self) -> None:
        """Before the batch changes: layers are about to replace their views, so the stacks are made anew later."""
        self.discard_block()
        self.settle()
        self._buffers, self._buffer_index = {}, {}
