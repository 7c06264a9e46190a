"""The GDN layer of a target: the host's own forward outside a block, verification with compact factors within one.

The class of a live module is swapped for a subclass of the same name: weights, names and tensor-parallel plans stay.
"""

import functools

import torch
import torch.nn.functional as F
from transformers.integrations.accelerate import force_accelerate_hooks
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from .block_buffers import GatedDeltaInputs, GatedDeltaWeights
from .hybrid_cache import HybridCache


class BlockGatedDeltaNet:
    """Mixin before the host's GDN class. Families differ in their input projections (`_project`) alone."""

    @force_accelerate_hooks("conv1d")
    def forward(self, hidden_states: torch.Tensor, cache=None, attention_mask: torch.Tensor | None = None, **kwargs):
        """Output `[B, n, hidden]` of n rows; within a block of a HybridCache they are recorded, not applied.

        `attention_mask` `[B, n]` marks the left padding of a prefill; a block has none. Raises ValueError, and records
        nothing, if the block is not open for so many rows.
        """
        if not isinstance(cache, HybridCache) or not cache.block_length:
            return super().forward(hidden_states, cache=cache, attention_mask=attention_mask, **kwargs)
        cache.check_rows(self.layer_idx, hidden_states.shape[1])
        inputs = self._project(hidden_states)
        buffers, index = cache.buffers_of(self.layer_idx)
        output = buffers.verify(index, inputs, self._block_weights())
        gated = self.norm(output.reshape(-1, self.head_v_dim), inputs.z.reshape(-1, self.head_v_dim))
        return self.out_proj(gated.reshape(*hidden_states.shape[:2], -1))

    def _gates(self, b: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-decay fp32 and beta `[B, n, HV]`. Beta stays in the activation dtype: the host rounds it there."""
        log_decay = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
        return log_decay, b.sigmoid()

    def _block_weights(self) -> GatedDeltaWeights:
        return GatedDeltaWeights(
            conv_weight=self.conv1d.weight.squeeze(1),
            conv_bias=self.conv1d.bias,
            num_k_heads=self.num_k_heads,
            num_v_heads=self.num_v_heads,
            k_dim=self.head_k_dim,
            v_dim=self.head_v_dim,
        )


class SeparateProjections(BlockGatedDeltaNet):
    """Qwen3.5 and later: one projection each for qkv, z, b and a."""

    def _project(self, hidden_states: torch.Tensor) -> GatedDeltaInputs:
        z = self.in_proj_z(hidden_states).unflatten(-1, (self.num_v_heads, self.head_v_dim))
        log_decay, beta = self._gates(self.in_proj_b(hidden_states), self.in_proj_a(hidden_states))
        return GatedDeltaInputs(self.in_proj_qkv(hidden_states), z, log_decay, beta)


class InterleavedProjections(BlockGatedDeltaNet):
    """Qwen3-Next: qkvz and ba come interleaved by key head; the host's own method takes them apart."""

    def _project(self, hidden_states: torch.Tensor) -> GatedDeltaInputs:
        query, key, value, z, b, a = self.fix_query_key_value_ordering(
            self.in_proj_qkvz(hidden_states), self.in_proj_ba(hidden_states)
        )
        rows = torch.cat([part.flatten(2) for part in (query, key, value)], dim=-1)
        log_decay, beta = self._gates(b, a)
        return GatedDeltaInputs(rows, z, log_decay, beta)


GATED_DELTA_NETS = {
    Qwen3_5MoeGatedDeltaNet: SeparateProjections,
    Qwen3_5GatedDeltaNet: SeparateProjections,
    Qwen3NextGatedDeltaNet: InterleavedProjections,
}


@functools.cache
def block_class(host_class: type) -> type:
    """The subclass of a host GDN class that verifies blocks; it keeps the host's name.

    Raises:
        KeyError: `host_class` is not one of GATED_DELTA_NETS.
    """
    return type(host_class.__name__, (GATED_DELTA_NETS[host_class], host_class), {"__module__": host_class.__module__})
