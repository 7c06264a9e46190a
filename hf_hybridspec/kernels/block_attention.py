"""Attention of at most 16 block rows over a key/value cache whose length lives on the device.

Two steps: `attention_inputs` turns the fused q|k|v projection into queries and cache rows, `block_attention` reads the
cache. The number of programs does not depend on the length, so both can be captured. A row's sums run in an order set
by the absolute positions of the keys alone. The arithmetic is in `block_attention_reference.py`.
"""

from dataclasses import dataclass

import torch

from .dispatch import implementation

MAX_ROWS = 16


@dataclass(frozen=True)
class HeadNorms:
    """What an attention layer does to its projected heads before RoPE.

    Attributes:
        query_scale, key_scale: `[D]` fp32, factors after the RMSNorm of each head (1 + w where it is zero-centred).
        is_gated: whether each query head is followed by its gate.
    """

    query_scale: torch.Tensor
    key_scale: torch.Tensor
    is_gated: bool


@dataclass(frozen=True)
class BlockQueries:
    """Queries `[n, Hq, D]`, normalised and rotated; gate `[n, Hq, D]` before the sigmoid, a view, or None."""

    query: torch.Tensor
    gate: torch.Tensor | None


def attention_inputs(
    projected: torch.Tensor,
    norms: HeadNorms,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    committed: torch.Tensor,
    eps: float,
) -> BlockQueries:
    """Norms and RoPE of projected heads; keys and values go to the cache.

    Args:
        projected: `[n, C]` fp32, bf16 or fp16, 1 <= n <= 16, rows q|k|v: C = Hq (D or, gated, 2 D) + 2 Hkv D, each
            query head followed by its gate. Hq may be 0: context rows only leave keys and values.
        norms: see there.
        cos, sin: `[n, R]` in the dtype of `projected`, both halves of a rotated head; the first R of D are rotated.
        key_cache, value_cache: `[Hkv, S, D]`, dimension D contiguous; rows committed..committed + n - 1 are written.
        committed: `[1]` int32, rows of the cache that are in use; committed + n <= S is up to the caller.
        eps: of the norms.

    Raises:
        ValueError: a shape or dtype differs from the above.
    """
    _check_rows("projected", projected, dims=2)
    _check_caches(projected, key_cache, value_cache, committed)
    heads, _, size = key_cache.shape
    width = 2 * size if norms.is_gated else size
    if projected.shape[1] < 2 * heads * size or (projected.shape[1] - 2 * heads * size) % width:
        raise ValueError(
            f"projected must hold whole query heads of {width} and 2 x {heads} heads of {size}, got "
            f"{projected.shape[1]} columns."
        )
    for name, scale in (("query_scale", norms.query_scale), ("key_scale", norms.key_scale)):
        _check_shape(name, scale, (size,))
    _check_shape("sin", sin, tuple(cos.shape))
    if cos.dim() != 2 or cos.shape[0] != projected.shape[0] or cos.shape[1] > size or cos.shape[1] % 2:
        raise ValueError(
            f"cos must be [{projected.shape[0]}, R] with R even and at most {size}, got {tuple(cos.shape)}."
        )
    kernels = implementation("block_attention", projected.device)
    query = kernels.attention_inputs(projected, norms, cos, sin, key_cache, value_cache, committed, eps)
    gate = query_columns(projected, norms, query)[..., size:] if norms.is_gated else None
    return BlockQueries(query, gate)


def query_columns(projected: torch.Tensor, norms: HeadNorms, query: torch.Tensor) -> torch.Tensor:
    """The part of `projected` that queries (and gates) come from, `[n, Hq, D or 2 D]`, a view."""
    _, heads, size = query.shape
    width = 2 * size if norms.is_gated else size
    return projected[:, : heads * width].unflatten(1, (heads, width))


def block_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    committed: torch.Tensor,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    window_from_anchor: bool = False,
) -> torch.Tensor:
    """Softmax attention of block rows, row i at position committed + i, over rows 0..committed + n - 1 of the cache.

    Args:
        query: `[n, Hq, D]`, 1 <= n <= 16; Hq is a multiple of Hkv, query head h reads head h // (Hq / Hkv).
        key_cache, value_cache: `[Hkv, S, D]` in the dtype of `query`, dimension D contiguous. Rows from committed + n
            on are not read.
        committed: `[1]` int32. It and the rows before it must not come from the kernel launched last: they are read
            while that one ends.
        scale: factor of the scores.
        causal: whether a row sees no later row of its block.
        window: None, or how many positions a row sees in either direction, itself counted.
        window_from_anchor: the window limits only what precedes the block, to the `window` positions before row 0.

    Returns:
        `[n, Hq, D]` in the dtype of `query`.

    Raises:
        ValueError: a shape or dtype differs from the above.
    """
    _check_rows("query", query, dims=3)
    _check_caches(query, key_cache, value_cache, committed)
    heads, _, size = key_cache.shape
    if query.shape[2] != size or query.shape[1] % heads:
        raise ValueError(
            f"query must be [n, Hq, {size}] with Hq a multiple of {heads}, as the cache is "
            f"{tuple(key_cache.shape)}, got {tuple(query.shape)}."
        )
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, or None for no limit, got {window}.")
    kernels = implementation("block_attention", query.device)
    return kernels.block_attention(query, key_cache, value_cache, committed, scale, causal, window, window_from_anchor)


def _check_rows(name: str, rows: torch.Tensor, dims: int) -> None:
    if rows.dim() != dims or not 1 <= rows.shape[0] <= MAX_ROWS:
        raise ValueError(f"{name} must have {dims} dimensions and 1 to {MAX_ROWS} rows, got {tuple(rows.shape)}.")


def _check_caches(rows: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, committed) -> None:
    _check_shape("value_cache", value_cache, tuple(key_cache.shape))
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.dim() != 3 or cache.dtype != rows.dtype or cache.stride(2) != 1:
            raise ValueError(
                f"{name} must be [Hkv, S, D] of {rows.dtype} with D contiguous, got {cache.dtype} "
                f"{tuple(cache.shape)} with strides {cache.stride()}."
            )
    if committed.shape != (1,) or committed.dtype != torch.int32:
        raise ValueError(f"committed must be [1] of int32, got {committed.dtype} {tuple(committed.shape)}.")


def _check_shape(name: str, tensor: torch.Tensor, shape: tuple) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must be {shape}, got {tuple(tensor.shape)}.")
