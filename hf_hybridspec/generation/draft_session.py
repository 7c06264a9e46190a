"""A drafter at work beside one cache: which positions it has seen, and what it reads of the target."""

import copy
import weakref
from dataclasses import dataclass

import torch

from ..modeling.draft_context import DraftContext
from ..modeling.drafter import Draft, Drafter
from ..modeling.hybrid_cache import HybridCache


@dataclass(frozen=True)
class KeptContext:
    """A drafter's context left in a cache for the next call with the same drafter."""

    drafter: weakref.ref
    context: DraftContext

    def fork(self) -> "KeptContext":
        """The context as it is now. Rows are only ever appended, so the buffers are shared, not copied."""
        context = copy.copy(self.context)
        context.layers = [copy.copy(layer) for layer in self.context.layers]
        return KeptContext(self.drafter, context)


class DraftSession:
    """Feeds committed taps to a drafter and asks it for proposal blocks.

    Args:
        drafter: bound to the target.
        cache: the target's cache. The drafter's context is kept in it, so that a later call continues.
        num_padding: left-padding tokens of the sequence; positions do not count them.
    """

    def __init__(self, drafter: Drafter, cache: HybridCache, num_padding: int):
        self.drafter = drafter
        self._cache = cache
        # Absolute position of the next row to be observed; negative within the padding.
        self._next_position = cache.committed_length - num_padding
        kept = cache.drafter_context
        if kept is None or kept.drafter() is not drafter:
            kept = KeptContext(weakref.ref(drafter), drafter.new_context())
            cache.drafter_context = kept
        self._context = kept.context

    @property
    def context(self) -> DraftContext:
        """The drafter's own state over the rows observed so far."""
        return self._context

    def skip(self, num_rows: int) -> None:
        """Counts rows that have reached the context by another way."""
        self._next_position += num_rows

    def observe(self, features: torch.Tensor) -> None:
        """Takes the taps `[m, taps * hidden]` of the next m committed rows."""
        start, stop = self._next_position, self._next_position + features.shape[0]
        self._next_position = stop
        features = features[max(0, -start) :]
        if features.shape[0]:
            positions = torch.arange(max(0, start), stop, device=features.device)
            self.drafter.observe(self._context, features, positions)

    def propose(self, anchor: torch.Tensor) -> Draft:
        """The proposal block after `anchor` `[1]`, the token that follows all observed rows."""
        if self.drafter.recurrent_layer_ids:
            self._cache.settle()
        recurrent_states = {
            layer_idx: self._cache.layers[layer_idx].recurrent_states[0]
            for layer_idx in self.drafter.recurrent_layer_ids
        }
        return self.drafter.propose(self._context, anchor, self._next_position, recurrent_states)
