"""Context inputs in plain torch: with x the normalised row, k = W_k x and v = W_v x in every layer.

Keys are then normalised and rotated as in `block_attention_reference.py`, which also names what is rounded.
"""

import torch.nn.functional as F

from .block_attention import HeadNorms
from .block_attention_reference import attention_inputs
from .residual_rows import ResidualRows
from .residual_rows_reference import normalised


def context_inputs(
    rows: ResidualRows, weights, key_scales, cos, sin, key_caches, value_caches, committed, eps
) -> None:
    """As `context_inputs.context_inputs`."""
    normed = normalised(rows, eps)
    for weight, scale, keys, values in zip(weights, key_scales, key_caches, value_caches, strict=True):
        norms = HeadNorms(scale, scale, is_gated=False)
        attention_inputs(F.linear(normed, weight), norms, cos, sin, keys, values, committed, eps)
