"""The training forward of a drafter: many blocks of many sequences at once, recurrent states included.

The layers, masks and embeddings are those of drafting; `tests/training/test_equals_drafting.py` holds the two equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_hybridspec.modeling.drafter import Drafter
from hf_hybridspec.modeling.drafter_config import AttentionSpan
from hf_hybridspec.modeling.drafter_layers import BlockInput, KeyValues, Rotation
from training.anchors import BlockLayout


def draft_hidden(
    drafter: Drafter,
    tokens: Tensor,
    features: Tensor,
    layout: BlockLayout,
    recurrent_states: Mapping[int, Tensor] | None = None,
    activation_checkpointing: bool = False,
) -> Tensor:
    """Hidden rows [B, N, R, H], after the final norm, of the N blocks of each of B sequences; differentiable.

    Args:
        tokens: [B, S] int64, read at the anchors.
        features: [B, C, taps * hidden] of positions 0..C-1, the context; C = S, or less where no anchor lies beyond.
        recurrent_states: target layer -> [B * N, HV, K, V]; needed where the drafter reads states.
        activation_checkpointing: keep a layer's input only and run the layer again in the backward pass.
    """
    context = project_features(drafter, features)
    return block_forward(drafter, tokens, context, layout, recurrent_states, activation_checkpointing)


def project_features(drafter: Drafter, features: Tensor) -> list[KeyValues]:
    """Every layer's context of whole sequences: features [B, C, taps * hidden] of positions 0..C-1."""
    fused = drafter.hidden_norm(drafter.fc(features.to(drafter.fc.weight.dtype)))
    rotation = _rotation(drafter, torch.arange(features.shape[1], device=features.device).unsqueeze(0))
    return [layer.self_attn.keys_values(fused, rotation) for layer in drafter.layers]


def block_forward(
    drafter: Drafter,
    tokens: Tensor,
    context: Sequence[KeyValues],
    layout: BlockLayout,
    recurrent_states: Mapping[int, Tensor] | None = None,
    activation_checkpointing: bool = False,
) -> Tensor:
    """As `draft_hidden`, from a context that `project_features` made before, for several layouts over one text.

    The anchors of blocks that are not valid may lie beyond the sequence.
    """
    rows = layout.rows_per_block
    anchors = tokens.gather(1, layout.anchors.clamp(max=tokens.shape[1] - 1))
    hidden = drafter.embed_block(anchors.flatten(), rows).view(len(tokens), -1, drafter.config.hidden_size)
    rotation = _rotation(drafter, layout.positions)
    masks = {span: _mask(layout, span, context[0].keys.shape[-2]) for span in set(drafter.spans)}
    states = drafter.gather_states(recurrent_states)
    for layer, span, key_values in zip(drafter.layers, drafter.spans, context, strict=True):
        block = BlockInput(rotation, key_values, masks[span], rows, states)
        if activation_checkpointing and torch.is_grad_enabled():
            hidden = checkpoint(layer, hidden, block, use_reentrant=False)
        else:
            hidden = layer(hidden, block)
    return drafter.norm(hidden).unflatten(1, (-1, rows))


def _rotation(drafter: Drafter, positions: Tensor) -> Rotation:
    """cos and sin of positions [B, R], in the drafter's dtype."""
    cos, sin = drafter.rotary_emb(drafter.fc.weight, positions)
    return Rotation(cos.unsqueeze(1), sin.unsqueeze(1))


def _mask(layout: BlockLayout, span: AttentionSpan, length: int) -> Tensor | None:
    """None where every row sees everything, as when drafting: the kernel without a mask is then the same one."""
    mask = layout.mask(span, length)
    is_alone = layout.anchors.numel() == 1 and span == AttentionSpan(causal=False)
    return None if is_alone and bool(mask.all()) else mask
