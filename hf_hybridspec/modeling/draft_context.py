"""A drafter's own cache: keys and values of the committed positions, one growing buffer per layer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .drafter_config import AttentionSpan
from .drafter_layers import KeyValues


class LayerContext:
    """Context of one layer. Only the newest `max_rows` rows are kept (all of them where it is None).

    The buffers grow by doubling, and hold at most twice `max_rows` rows, so that appending stays cheap and memory
    stays bounded however long the sequence is.
    """

    def __init__(self, max_rows: int | None):
        self.max_rows = max_rows
        self.reset()

    def reset(self) -> None:
        self._keys = self._values = self._positions = None
        self._stop = 0

    @property
    def _start(self) -> int:
        return 0 if self.max_rows is None else max(0, self._stop - self.max_rows)

    @property
    def key_values(self) -> KeyValues | None:
        """The rows a block can still see, as views; None before the first append."""
        if self._keys is None:
            return None
        kept = slice(self._start, self._stop)
        return KeyValues(self._keys[:, :, kept], self._values[:, :, kept])

    @property
    def positions(self) -> Tensor | None:
        """[S] int64, the positions of `key_values`."""
        return None if self._positions is None else self._positions[self._start : self._stop]

    @property
    def num_bytes(self) -> int:
        buffers = (self._keys, self._values, self._positions)
        return sum(buffer.nbytes for buffer in buffers if buffer is not None)

    def append(self, new: KeyValues, positions: Tensor) -> None:
        """Adds n <= max_rows rows: keys and values [1, KVH, n, head_dim], positions [n]."""
        n = positions.shape[0]
        if self._keys is None or self._stop + n > self._keys.shape[2]:
            self._make_room(new, n)
        rows = slice(self._stop, self._stop + n)
        self._keys[:, :, rows] = new.keys
        self._values[:, :, rows] = new.values
        self._positions[rows] = positions
        self._stop += n

    def _make_room(self, new: KeyValues, n: int) -> None:
        old, old_positions = self.key_values, self.positions
        kept = 0 if old_positions is None else old_positions.shape[0]
        if self.max_rows is not None:
            kept = min(kept, self.max_rows - n)
        capacity = max(2 * (kept + n), 256)
        if self.max_rows is not None:
            capacity = min(capacity, 2 * self.max_rows)
        _, heads, _, head_dim = new.keys.shape
        self._keys = new.keys.new_empty(1, heads, capacity, head_dim)
        self._values = new.values.new_empty(1, heads, capacity, head_dim)
        self._positions = torch.empty(capacity, dtype=torch.int64, device=new.keys.device)
        if kept:
            self._keys[:, :, :kept] = old.keys[:, :, -kept:]
            self._values[:, :, :kept] = old.values[:, :, -kept:]
            self._positions[:kept] = old_positions[-kept:]
        self._stop = kept


class DraftContext:
    """What a drafter knows of one sequence: its keys and values at the committed positions, in position order.

    A layer with a window keeps only what its window can still reach; a full layer keeps all. Only committed rows are
    ever appended (`Drafter.observe`), so nothing is ever rolled back; `reset` forgets the sequence.
    """

    def __init__(self, spans: Sequence[AttentionSpan]):
        self.spans = tuple(spans)
        self.layers = [LayerContext(span.context_rows) for span in self.spans]
        self.length = 0

    def reset(self) -> None:
        """Forgets every position."""
        self.length = 0
        for layer in self.layers:
            layer.reset()

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(layer.num_bytes for layer in self.layers)

    def positions_of(self, span: AttentionSpan) -> Tensor | None:
        """[S] int64 positions that the layers of this span keep; None while there are none."""
        return self.layers[self.spans.index(span)].positions
