"""The training forward of a drafter: many blocks of many sequences at once, recurrent states included.

The layers, masks and embeddings are those of drafting; `tests/training/test_equals_drafting.py` holds the two equal.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_hybridspec.modeling.drafter import Drafter
from hf_hybridspec.modeling.drafter_config import AttentionSpan
from hf_hybridspec.modeling.drafter_layers import BlockInput, Rotation
from training.anchors import BlockLayout, project_features


def draft_hidden(
    drafter: Drafter,
    tokens: Tensor,
    features: Tensor,
    layout: BlockLayout,
    recurrent_states: Mapping[int, Tensor] | None = None,
    gradient_checkpointing: bool = False,
) -> Tensor:
    """Hidden rows [B, N, R, H], after the final norm, of the N blocks of each of B sequences; differentiable.

    Args:
        tokens: [B, S] int64, read at the anchors.
        features: [B, C, taps * hidden] of positions 0..C-1, the context; C = S, or less where no anchor lies beyond.
        recurrent_states: target layer -> [B * N, HV, K, V]; needed where the drafter reads states.
        gradient_checkpointing: keep a layer's input only and run the layer again in the backward pass.
    """
    rows = layout.rows_per_block
    length = features.shape[1]
    anchors = tokens.gather(1, layout.anchors)
    hidden = drafter.embed_block(anchors.flatten(), rows).view(len(tokens), -1, drafter.config.hidden_size)
    cos, sin = drafter.rotary_emb(drafter.fc.weight, layout.positions)
    rotation = Rotation(cos.unsqueeze(1), sin.unsqueeze(1))
    masks = {span: _mask(layout, span, length) for span in set(drafter.spans)}
    states = drafter.gather_states(recurrent_states)
    context = project_features(drafter, features)
    for layer, span, key_values in zip(drafter.layers, drafter.spans, context, strict=True):
        block = BlockInput(rotation, key_values, masks[span], rows, states)
        if gradient_checkpointing and torch.is_grad_enabled():
            hidden = checkpoint(layer, hidden, block, use_reentrant=False)
        else:
            hidden = layer(hidden, block)
    return drafter.norm(hidden).unflatten(1, (-1, rows))


def _mask(layout: BlockLayout, span: AttentionSpan, length: int) -> Tensor | None:
    """None where every row sees everything, as when drafting: the kernel without a mask is then the same one."""
    mask = layout.mask(span, length)
    is_alone = layout.anchors.numel() == 1 and span == AttentionSpan(causal=False)
    return None if is_alone and bool(mask.all()) else mask
