"""Block attention in plain torch. Each query and key head x, with s its scale and (c, t) cos and sin of its position:

    y = x / rms(x) * s          rotated: y c + (-y_second half, y_first half) t on the first R entries
    o_i = sum_j softmax_j(scale <q_i, k_j>) v_j          over the visible j

Heads are rounded after the norm and after each product and sum of the rotation, as the host rounds them; the
attention itself is fp32 and rounded once.
"""

import torch

from .block_attention import HeadNorms


def attention_inputs(projected, norms: HeadNorms, cos, sin, key_cache, value_cache, committed, eps) -> torch.Tensor:
    """As `block_attention.attention_inputs`; returns the queries alone."""
    heads, _, size = key_cache.shape
    queries = projected.shape[1] - 2 * heads * size
    query, key, value = projected.split([queries, heads * size, heads * size], dim=1)
    width = 2 * size if norms.is_gated else size
    query = query.unflatten(1, (queries // width, width))[..., :size]
    key, value = (rows.unflatten(1, (heads, size)) for rows in (key, value))
    positions = committed.long() + torch.arange(projected.shape[0], device=projected.device)
    key = _rotated(_normalised(key, norms.key_scale, eps), cos, sin)
    key_cache.index_copy_(1, positions, key.transpose(0, 1))
    value_cache.index_copy_(1, positions, value.transpose(0, 1))
    return _rotated(_normalised(query, norms.query_scale, eps), cos, sin)


def block_attention(
    query, key_cache, value_cache, committed, scale, causal, window, window_from_anchor
) -> torch.Tensor:
    """As `block_attention.block_attention`."""
    (num_rows, _, size), (heads, length, _) = query.shape, key_cache.shape
    keys = torch.arange(length, device=query.device)
    rows = committed.long() + torch.arange(num_rows, device=query.device)[:, None]
    visible = keys < committed + num_rows
    if causal:
        visible = visible & (keys <= rows)
    if window is not None and window_from_anchor:
        visible = visible & (keys >= committed - window)
    elif window is not None:
        visible = visible & ((rows - keys).abs() < window)
    grouped = query.float().unflatten(1, (heads, -1))
    scores = torch.einsum("nhgd,hsd->hgns", grouped, key_cache.float()) * scale
    probabilities = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    # What lies beyond the block may hold anything, and zero times it need not be zero.
    values = value_cache.float().masked_fill((keys >= committed + num_rows)[:, None], 0.0)
    output = torch.einsum("hgns,hsd->nhgd", probabilities, values)
    return output.reshape(num_rows, -1, size).to(query.dtype)


def _normalised(heads: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    wide = heads.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * scale).to(heads.dtype)


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """heads `[n, H, D]`; the first R entries of each are rotated."""
    rotary = cos.shape[1]
    turned, kept = heads[..., :rotary], heads[..., rotary:]
    first, second = turned.chunk(2, dim=-1)
    swapped = torch.cat((-second, first), dim=-1)
    return torch.cat((turned * cos[:, None] + swapped * sin[:, None], kept), dim=-1)
