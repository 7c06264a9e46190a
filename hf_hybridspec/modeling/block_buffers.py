"""What a block leaves behind in the GDN layers of one device: convolution rows and compact factors, and their commit.

The states of all GDN layers are stacked, so that one launch commits every layer; a layer's state is a view of the
stack. A block longer than one kernel call is kept in segments of 16 rows: the log-decay of a segment starts at the
segment's first row, and segments are committed one after the other.
"""

from dataclasses import dataclass

import torch

from ..kernels.causal_conv import block_causal_conv, commit_causal_conv
from ..kernels.gated_delta_rule import (
    MAX_ROWS,
    CompactFactors,
    commit_gated_delta_rule,
    verify_gated_delta_rule,
)


@dataclass(frozen=True)
class GatedDeltaInputs:
    """What the projections of a GDN layer give for n rows.

    Attributes:
        rows: `[B, n, C]`, query, key and value channels before the convolution.
        z: `[B, n, HV, V]`, output gate.
        log_decay: `[B, n, HV]` fp32.
        beta: `[B, n, HV]`, write strength, rounded to the activation dtype as the host rounds it.
    """

    rows: torch.Tensor
    z: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor


@dataclass(frozen=True)
class GatedDeltaWeights:
    """The constants of a GDN layer that a block needs: `conv_weight` `[C, kernel]`, `conv_bias` `[C]` or None."""

    conv_weight: torch.Tensor
    conv_bias: torch.Tensor | None
    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int


class BlockBuffers:
    """Stacked states and block records of the L GDN layers that live on one device.

    Args:
        conv_states: L tensors `[B, C, kernel]`; copied into the stack `conv_states` `[L, B, C, kernel]`.
        recurrent_states: L tensors `[B, HV, K, V]` fp32; copied into `recurrent_states` `[L, B, HV, K, V]`.
        num_k_heads: H, which the states do not tell.
        num_rows: rows that a block may have at first; rounded up to whole segments.
    """

    def __init__(
        self,
        conv_states: list[torch.Tensor],
        recurrent_states: list[torch.Tensor],
        num_k_heads: int,
        num_rows: int,
    ):
        self.conv_states = torch.stack(conv_states)
        self.recurrent_states = torch.stack(recurrent_states)
        self.num_k_heads = num_k_heads
        self.num_recorded = [0] * len(conv_states)
        self._allocate(num_rows)

    @property
    def num_rows(self) -> int:
        """Rows that the buffers hold."""
        return self.rows.shape[2]

    @property
    def num_bytes(self) -> int:
        """Bytes of what a block records: convolution rows and compact factors, states excluded."""
        tensors = (self.rows, self.factors.z, self.factors.k, self.factors.g)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def grow(self, num_rows: int) -> None:
        """Makes room for `num_rows` rows; recorded rows are kept."""
        if num_rows <= self.num_rows:
            return
        rows, factors = self.rows, self.factors
        self._allocate(num_rows)
        kept = rows.shape[2]
        self.rows[:, :, :kept] = rows
        for name in ("z", "k", "g"):
            getattr(self.factors, name)[:, :, :kept] = getattr(factors, name)

    def verify(self, index: int, inputs: GatedDeltaInputs, weights: GatedDeltaWeights) -> torch.Tensor:
        """Outputs `[B, n, HV, V]` of the next n rows of the block in layer `index` of the stack.

        Records the rows' convolution inputs and compact factors; no state changes.
        """
        outputs = []
        num_new = inputs.rows.shape[1]
        offset = 0
        while offset < num_new:
            start = self.num_recorded[index]
            length = min(num_new - offset, MAX_ROWS - start % MAX_ROWS)
            outputs.append(self._verify_segment(index, start, inputs, slice(offset, offset + length), weights))
            self.num_recorded[index] = start + length
            offset += length
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def commit(self, commit_length: int) -> None:
        """Advances every layer's states by the first `commit_length` rows of the block and forgets the block."""
        if commit_length:
            commit_causal_conv(self.conv_states, self.rows, commit_length)
            for segment in range(0, commit_length, MAX_ROWS):
                factors = self.factors[:, :, segment : segment + MAX_ROWS]
                commit_gated_delta_rule(self.recurrent_states, factors, min(commit_length - segment, MAX_ROWS))
        self.discard()

    def settle(self) -> None:
        """Nothing to do: a commit leaves no state behind."""

    def discard(self) -> None:
        """Forgets the block; states stay as they are."""
        self.num_recorded = [0] * len(self.num_recorded)

    def _allocate(self, num_rows: int) -> None:
        num_rows = -(-num_rows // MAX_ROWS) * MAX_ROWS
        layers, batch, num_v_heads, k_dim, v_dim = self.recurrent_states.shape
        channels = self.conv_states.shape[2]
        self.rows = self.conv_states.new_empty(layers, batch, num_rows, channels)
        self.factors = CompactFactors.empty(
            layers,
            batch,
            num_rows,
            num_k_heads=self.num_k_heads,
            num_v_heads=num_v_heads,
            k_dim=k_dim,
            v_dim=v_dim,
            device=self.recurrent_states.device,
        )

    def _verify_segment(self, index, start, inputs, new, weights) -> torch.Tensor:
        """The rows `new` of the inputs become rows `start`.. of the block, within one segment."""
        conv_state, recurrent_state = self._states_at(index, start)
        rows = inputs.rows[:, new]
        stop = start + rows.shape[1]
        self.rows[index, :, start:stop] = rows
        mixed = block_causal_conv(rows, conv_state, weights.conv_weight, weights.conv_bias)
        key_dim = weights.num_k_heads * weights.k_dim
        query, key, value = mixed.split([key_dim, key_dim, weights.num_v_heads * weights.v_dim], dim=-1)
        output = verify_gated_delta_rule(
            query.unflatten(-1, (weights.num_k_heads, weights.k_dim)),
            key.unflatten(-1, (weights.num_k_heads, weights.k_dim)),
            value.unflatten(-1, (weights.num_v_heads, weights.v_dim)),
            inputs.log_decay[:, new],
            inputs.beta[:, new],
            recurrent_state,
            self.factors[index, :, start:stop],
        )
        if start % MAX_ROWS:
            # The kernel sums the log-decay from its own first row; the segment's sum starts earlier.
            self.factors.g[index, :, start:stop] += self.factors.g[index, :, start - 1 : start]
        return output

    def _states_at(self, index: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Convolution and recurrent state before block row `row`: the committed ones, or rebuilt from the factors."""
        if row == 0:
            return self.conv_states[index], self.recurrent_states[index]
        layer = slice(index, index + 1)
        conv_states, recurrent_states = self.conv_states[layer].clone(), self.recurrent_states[layer].clone()
        commit_causal_conv(conv_states, self.rows[layer], row)
        for segment in range(0, row, MAX_ROWS):
            factors = self.factors[layer, :, segment : segment + MAX_ROWS]
            commit_gated_delta_rule(recurrent_states, factors, min(row - segment, MAX_ROWS))
        return conv_states[0], recurrent_states[0]
