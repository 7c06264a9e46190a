"""The drafters' backbone: Qwen3-style layers whose block rows attend to the target's features and to each other.

Submodules carry the names of the published tensors. A layer's context is given as `KeyValues`, already projected,
normalised and rotated, so that the same code serves one block after a kept context and many training blocks at once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .drafter_config import AttentionSpan, DrafterConfig


@dataclass(frozen=True)
class KeyValues:
    """Keys (rotated) and values of one layer: both [1, KVH, S, head_dim]."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class Rotation:
    """cos and sin of the rows' positions, [1, 1, R, head_dim], scaled as the rope type asks."""

    cos: Tensor
    sin: Tensor

    def __call__(self, heads: Tensor) -> Tensor:
        """Rotates the split halves of heads [1, heads, R, head_dim]."""
        first, second = heads.chunk(2, dim=-1)
        return heads * self.cos + torch.cat((-second, first), dim=-1) * self.sin


class DrafterRMSNorm(nn.Module):
    """x / rms(x) * weight, normalised in fp32; the weight is not offset by one as the targets' is."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return self.weight * (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class DrafterAttention(nn.Module):
    """Attention of block rows over [context ; block]; both sides share the key and value projections."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=config.attention_bias)
        self.q_norm = DrafterRMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = DrafterRMSNorm(config.head_dim, config.rms_norm_eps)

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim))

    def keys_values(self, x: Tensor, rotation: Rotation) -> KeyValues:
        """Keys and values of rows x [1, S, H]: of block rows (normed hidden) or of context rows (fused features)."""
        keys = self.k_norm(self._heads(self.k_proj(x))).transpose(1, 2)
        return KeyValues(rotation(keys), self._heads(self.v_proj(x)).transpose(1, 2))

    def forward(self, x: Tensor, rotation: Rotation, context: KeyValues, mask: Tensor | None) -> Tensor:
        """x [1, R, H]; context of S rows; mask [R, S + R] bool, True where visible, or None where all is."""
        queries = rotation(self.q_norm(self._heads(self.q_proj(x))).transpose(1, 2))
        block = self.keys_values(x, rotation)
        keys = torch.cat((context.keys, block.keys), dim=2)
        values = torch.cat((context.values, block.values), dim=2)
        if mask is not None and self.groups > 1:
            # Fused attention kernels take grouped heads only without a mask.
            keys = keys.repeat_interleave(self.groups, dim=1)
            values = values.repeat_interleave(self.groups, dim=1)
        grouped = mask is None and self.groups > 1
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=grouped)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class DrafterMLP(nn.Module):
    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@dataclass(frozen=True)
class BlockInput:
    """What a layer needs besides the hidden rows.

    rotation: of the block rows. context: this layer's. mask: see `DrafterAttention`. rows_per_block: rows come in
    blocks of this many. states: [blocks, state heads, K, V] recurrent states that a layer may read, or None.
    """

    rotation: Rotation
    context: KeyValues
    mask: Tensor | None
    rows_per_block: int
    states: Tensor | None = None


class DrafterLayer(nn.Module):
    """Pre-norm decoder layer. Families override `attend` and `feed_forward` to wrap a sublayer, or `forward`."""

    def __init__(self, config: DrafterConfig, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.input_layernorm = DrafterRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DrafterAttention(config)
        self.post_attention_layernorm = DrafterRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = DrafterMLP(config)

    def attend(self, x: Tensor, block: BlockInput) -> Tensor:
        return self.self_attn(x, block.rotation, block.context, block.mask)

    def feed_forward(self, x: Tensor, block: BlockInput) -> Tensor:
        return self.mlp(x)

    def forward(self, hidden: Tensor, block: BlockInput) -> Tensor:
        """hidden [1, R, H] -> [1, R, H]."""
        hidden = hidden + self.attend(self.input_layernorm(hidden), block)
        return hidden + self.feed_forward(self.post_attention_layernorm(hidden), block)


def block_mask(span: AttentionSpan, positions: Tensor, context_positions: Tensor, rows_per_block: int) -> Tensor:
    """What the rows of one or many blocks see in a layer, [R, S + R] bool (True = visible), context columns first.

    A row sees the context strictly before its block's anchor (the block's first position) and rows of its own block,
    both limited by the span.

    Args:
        span: the layer's.
        positions: [R] int64, blocks one after another, each with consecutive positions.
        context_positions: [S] int64.
        rows_per_block: R is a multiple of it.
    """
    rows = positions.unsqueeze(1)
    anchors = positions.view(-1, rows_per_block)[:, :1].repeat_interleave(rows_per_block, dim=0)
    context = context_positions < anchors
    blocks = torch.arange(positions.shape[0], device=positions.device) // rows_per_block
    block = blocks.unsqueeze(1) == blocks
    if span.causal:
        block = block & (positions <= rows)
    if span.window is not None and span.window_from_anchor:
        context = context & (context_positions >= anchors - span.window)
    elif span.window is not None:
        context = context & (rows - context_positions < span.window)
        block = block & ((rows - positions).abs() < span.window)
    return torch.cat((context, block), dim=1)
