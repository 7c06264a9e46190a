"""How GDN layers verify blocks: ours, or one of the two baselines that the paper compares with.

`compact` (default) keeps compact factors. `stored` keeps the state after every row, as SGLang's default verifier.
`replay` lets accepted updates wait in a ring and folds them into the state when the ring is full, as ReplaySSM. All
three give the same tokens; they differ in time and memory. `use_verification` chooses for the caches that begin a
block inside it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from ..kernels.baseline_gated_delta_rule import replay_gated_delta_rule, store_gated_delta_rule
from ..kernels.causal_conv import block_causal_conv, commit_causal_conv
from ..kernels.gated_delta_rule import MAX_ROWS, CompactFactors, commit_gated_delta_rule
from .block_buffers import BlockBuffers

# Rows that a ring holds: twice the longest block, as the paper runs ReplaySSM.
RING_ROWS = 2 * MAX_ROWS


class StoredStates(BlockBuffers):
    """A state for every row of a block: `states` `[L, B, N, HV, K, V]` fp32."""

    def _allocate(self, num_rows: int) -> None:
        layers, batch, *state = self.recurrent_states.shape
        self.rows = self.conv_states.new_empty(layers, batch, num_rows, self.conv_states.shape[2])
        self.states = self.recurrent_states.new_empty(layers, batch, num_rows, *state)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.rows, self.states))

    def grow(self, num_rows: int) -> None:
        if num_rows > self.num_rows:
            rows, states = self.rows, self.states
            self._allocate(num_rows)
            self.rows[:, :, : rows.shape[2]] = rows
            self.states[:, :, : states.shape[2]] = states

    def verify(self, index, inputs, weights) -> torch.Tensor:
        start = self.num_recorded[index]
        stop = start + inputs.rows.shape[1]
        conv_state, recurrent_state = self.conv_states[index], self.recurrent_states[index]
        if start:
            conv_state, recurrent_state = conv_state[None].clone(), self.states[index, :, start - 1]
            commit_causal_conv(conv_state, self.rows[index : index + 1], start)
            conv_state = conv_state[0]
        self.rows[index, :, start:stop] = inputs.rows
        mixed = block_causal_conv(inputs.rows, conv_state, weights.conv_weight, weights.conv_bias)
        states = self.states[index, :, start:stop]
        gates = (inputs.log_decay, inputs.beta)
        output = store_gated_delta_rule(*_split_heads(mixed, weights), *gates, recurrent_state, states)
        self.num_recorded[index] = stop
        return output

    def commit(self, commit_length: int) -> None:
        if commit_length:
            commit_causal_conv(self.conv_states, self.rows, commit_length)
            self.recurrent_states.copy_(self.states[:, :, commit_length - 1])
        self.discard()


class ReplayedUpdates(BlockBuffers):
    """Accepted updates wait in a ring of compact factors; `settle` folds them into the states.

    Attributes:
        num_pending: updates that wait. While there are any, `recurrent_states` is behind by as many rows.
    """

    def __init__(self, conv_states, recurrent_states, num_k_heads, num_rows):
        super().__init__(conv_states, recurrent_states, num_k_heads, num_rows)
        layers, batch, num_v_heads, k_dim, v_dim = self.recurrent_states.shape
        sizes = {"num_k_heads": num_k_heads, "num_v_heads": num_v_heads, "k_dim": k_dim, "v_dim": v_dim}
        self._ring = CompactFactors.empty(layers, batch, RING_ROWS, **sizes, device=self.recurrent_states.device)
        # Lengths of the committed blocks in the ring; a block's own log-decay starts with the block.
        self._waiting: list[int] = []
        self._block_g = torch.empty_like(self._ring.g)

    @property
    def num_pending(self) -> int:
        return sum(self._waiting)

    @property
    def num_bytes(self) -> int:
        ring = (self._ring.z, self._ring.k, self._ring.g, self._block_g)
        return super().num_bytes + sum(tensor.numel() * tensor.element_size() for tensor in ring)

    def verify(self, index, inputs, weights) -> torch.Tensor:
        num_new = inputs.rows.shape[1]
        if self.num_recorded[index] or num_new > MAX_ROWS or not self.num_pending:
            if self.num_pending:
                # Only a block in one forward of at most 16 rows is read through the ring.
                self.settle()
            return super().verify(index, inputs, weights)
        self.rows[index, :, :num_new] = inputs.rows
        conv_state, state = self.conv_states[index], self.recurrent_states[index]
        mixed = block_causal_conv(inputs.rows, conv_state, weights.conv_weight, weights.conv_bias)
        pending = self._ring[index, :, : self.num_pending]
        factors = self.factors[index, :, :num_new]
        gates = (inputs.log_decay, inputs.beta)
        output = replay_gated_delta_rule(*_split_heads(mixed, weights), *gates, state, pending, factors)
        self.num_recorded[index] = num_new
        return output

    def commit(self, commit_length: int) -> None:
        if commit_length > MAX_ROWS:
            self.settle()
            super().commit(commit_length)
            return
        if commit_length:
            commit_causal_conv(self.conv_states, self.rows, commit_length)
            self._append(self.factors[:, :, :commit_length])
            if self.num_pending + MAX_ROWS > RING_ROWS:
                self.settle()
        self.discard()

    def settle(self) -> None:
        """Folds the waiting updates into the states and empties the ring."""
        start = 0
        for length in self._waiting:
            rows = slice(start, start + length)
            block = CompactFactors(self._ring.z[:, :, rows], self._ring.k[:, :, rows], self._block_g[:, :, rows])
            commit_gated_delta_rule(self.recurrent_states, block, length)
            start += length
        self._waiting = []

    def _append(self, accepted: CompactFactors) -> None:
        start = self.num_pending
        rows = slice(start, start + accepted.g.shape[2])
        self._ring.z[:, :, rows], self._ring.k[:, :, rows] = accepted.z, accepted.k
        self._block_g[:, :, rows] = accepted.g
        self._ring.g[:, :, rows] = accepted.g + (self._ring.g[:, :, start - 1 : start] if start else 0.0)
        self._waiting.append(accepted.g.shape[2])


BACKENDS: dict[str, type[BlockBuffers]] = {"compact": BlockBuffers, "stored": StoredStates, "replay": ReplayedUpdates}

_override: ContextVar[str] = ContextVar("hybridspec_verification", default="compact")


@contextmanager
def use_verification(name: str) -> Iterator[None]:
    """Lets caches that begin a block in the enclosed code verify with `compact`, `stored` or `replay`.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in BACKENDS:
        raise ValueError(f"The verification backend must be one of {', '.join(BACKENDS)}, got {name!r}.")
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


def block_buffers_class() -> type[BlockBuffers]:
    """The class of buffers that the innermost `use_verification` names."""
    return BACKENDS[_override.get()]


def _split_heads(mixed: torch.Tensor, weights) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key `[B, n, H, K]` and value `[B, n, HV, V]` of convolved rows."""
    key_dim = weights.num_k_heads * weights.k_dim
    query, key, value = mixed.split([key_dim, key_dim, weights.num_v_heads * weights.v_dim], dim=-1)
    return (
        query.unflatten(-1, (weights.num_k_heads, weights.k_dim)),
        key.unflatten(-1, (weights.num_k_heads, weights.k_dim)),
        value.unflatten(-1, (weights.num_v_heads, weights.v_dim)),
    )
