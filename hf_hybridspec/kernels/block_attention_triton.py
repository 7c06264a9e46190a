"""Block attention in Triton: one launch for the inputs, two for the attention (split over keys, then combined).

Keys are cut into chunks at fixed absolute positions; chunk j belongs to program j mod P of its head. P depends on the
device alone, so the launch never depends on the length, a long context uses every multiprocessor, and a row's result
does not depend on the number of rows in its block. All query heads of one key head and all rows share one tile.

Each of the three lets the next one start when it has itself waited. What was written before `attention_inputs` is
therefore there when the attention starts, and it asks for committed keys and values while `attention_inputs` runs.
"""

from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl

from .block_attention import HeadNorms
from .common_triton import launch_device, launch_options, let_next_start, prefetch_rows, wait_for_previous
from .tiles import Tile, tile_of

# What the interpreter assumes; few enough for chunks to wrap around in tests.
INTERPRETED_PROGRAMS = 4

LOG2_E = 1.4426950408889634
# Stands for the maximum of no scores: finite, so that differences of it are numbers.
LOWEST = tl.constexpr(-1e30)
# Rows of a cache whose callers keep to its length.
EVERY_ROW = tl.constexpr(2**31 - 1)


def _attention_tile(num_rows: int, size: int, dtype: torch.dtype) -> tuple[Tile, int]:
    """The tile for `num_rows` rows (of all query heads) of one key head of `size` entries, and its rows.

    Both 16-bit tiles give a warp 16 rows and all keys of a step, so that a row is summed alike in both; a smaller tile
    for few rows would use another instruction of the tensor cores, with another order.
    """
    tile = tile_of("block_attention")
    if dtype == torch.float32:
        return replace(tile, block_n=16, num_stages=1), 16
    if size <= 128:
        tile = replace(tile, block_n=2 * tile.block_n, block_k=2 * tile.block_k)
    return (tile, 64) if num_rows <= 64 else (replace(tile, num_warps=2 * tile.num_warps), 128)


@cache
def _programs_per_head(heads: int, device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROGRAMS
    return max(1, torch.cuda.get_device_properties(device).multi_processor_count // heads)


@triton.jit
def _normalise(b_head, b_scale, rstd, DTYPE: tl.constexpr):
    """Entries of one head, normalised, scaled and rounded."""
    return (b_head.to(tl.float32) * rstd * b_scale).to(DTYPE)


@triton.jit
def _inputs_kernel(
    projected, query_scale, key_scale, cos, sin, key_cache, value_cache, committed, query, eps,
    length, stride_pn, stride_cn, stride_sn, stride_kh, stride_ks, stride_vh, stride_vs,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    BD: tl.constexpr, OVERLAPS: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    i_r, i_h = tl.program_id(0), tl.program_id(1)
    o_d = tl.arange(0, BD)
    m_d, m_r = o_d < D, o_d < R
    # The other half's entry.
    o_other = tl.where(o_d < R // 2, o_d + R // 2, o_d - R // 2)
    p_scale = query_scale if i_h < QUERIES else key_scale
    b_scale = tl.load(p_scale + o_d, mask=m_d, other=0.0)
    b_other_scale = tl.load(p_scale + o_other, mask=m_r, other=0.0)
    wait_for_previous(OVERLAPS)
    # The attention that follows has old keys to ask for.
    let_next_start(OVERLAPS)
    DTYPE: tl.constexpr = projected.dtype.element_ty
    position = (tl.load(committed) + i_r).to(tl.int64)
    # A caller that left no room loses rows, not memory of others.
    m_cached = o_d < tl.where(position < length, D, 0)
    p_row = projected + i_r.to(tl.int64) * stride_pn
    if i_h < QUERIES + HEADS:
        p_head = p_row + i_h * WIDTH
        p_out = query + (i_r * QUERIES + i_h) * D
        m_out = m_d
        if i_h >= QUERIES:
            i_k = i_h - QUERIES
            p_head = p_row + QUERIES * WIDTH + i_k * D
            p_out = key_cache + i_k.to(tl.int64) * stride_kh + position * stride_ks
            m_out = m_cached
        # All loads before the first use.
        b_head = tl.load(p_head + o_d, mask=m_d, other=0.0)
        b_other = tl.load(p_head + o_other, mask=m_r, other=0.0)
        b_cos = tl.load(cos + i_r * stride_cn + o_d, mask=m_r, other=0.0)
        b_sin = tl.load(sin + i_r * stride_sn + o_d, mask=m_r, other=0.0)
        b_wide = b_head.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(b_wide * b_wide, axis=0) / D + eps)
        b_head = _normalise(b_head, b_scale, rstd, DTYPE)
        b_other = _normalise(b_other, b_other_scale, rstd, DTYPE)
        # With the sign of the rotation.
        b_other = tl.where(o_d < R // 2, -b_other, b_other)
        b_turned = (b_head * b_cos).to(tl.float32) + (b_other * b_sin).to(tl.float32)
        tl.store(p_out + o_d, tl.where(m_r, b_turned.to(DTYPE), b_head), mask=m_out)
    else:
        i_k = i_h - QUERIES - HEADS
        b_value = tl.load(p_row + QUERIES * WIDTH + (HEADS + i_k) * D + o_d, mask=m_d)
        tl.store(value_cache + i_k.to(tl.int64) * stride_vh + position * stride_vs + o_d, b_value, mask=m_cached)


@triton.jit
def _chunks(committed, num_rows, WINDOW: tl.constexpr, FROM_ANCHOR: tl.constexpr, CHUNK: tl.constexpr):
    """First and last chunk that any row sees; WINDOW 0 means no window."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(committed - WINDOW + (0 if FROM_ANCHOR else 1), 0)
    return first // CHUNK, (committed + num_rows - 1) // CHUNK


@triton.jit
def _visible(o_k, o_i, committed, num_rows, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, FROM_ANCHOR: tl.constexpr):
    """`[rows, keys]`, whether block row o_i sees key o_k."""
    b_back = committed + o_i[:, None] - o_k[None, :]
    m_seen = (o_k < committed + num_rows)[None, :] & (o_i < num_rows)[:, None]
    if CAUSAL:
        m_seen = m_seen & (b_back >= 0)
    if WINDOW > 0:
        if FROM_ANCHOR:
            m_seen = m_seen & (o_k >= committed - WINDOW)[None, :]
        else:
            m_seen = m_seen & (b_back < WINDOW) & (b_back > -WINDOW)
    return m_seen


@triton.jit
def _attend(b_query, b_keys, b_values, m_seen, scale, b_max, b_total, b_sum, PRECISION: tl.constexpr):
    """One step of a running softmax: its maximum, its total and its sum of values after some more keys."""
    b_scores = tl.dot(b_query, tl.trans(b_keys), input_precision=PRECISION) * scale
    b_scores = tl.where(m_seen, b_scores, float("-inf"))
    b_new_max = tl.maximum(b_max, tl.max(b_scores, axis=1))
    b_probs = tl.exp2(b_scores - b_new_max[:, None])
    b_kept = tl.exp2(b_max - b_new_max)
    b_total = b_total * b_kept + tl.sum(b_probs, axis=1)
    b_sum = tl.dot(b_probs.to(b_values.dtype), b_values, acc=b_sum * b_kept[:, None], input_precision=PRECISION)
    return b_new_max, b_total, b_sum


@triton.jit
def _prefetch_chunk(cache, o_k, stride, BD: tl.constexpr, PREFETCH: tl.constexpr, OVERLAPS: tl.constexpr):
    """Asks for rows of one head's cache, which all exist."""
    COLUMNS: tl.constexpr = BD if PREFETCH > 0 and BD >= 64 else 0
    prefetch_rows(cache, o_k, 0, stride, 1, EVERY_ROW, BD, COLUMNS, OVERLAPS)


@triton.jit(do_not_specialize=["num_rows"])
def _attention_kernel(
    query, key_cache, value_cache, committed_length, partial, statistics, scale, num_rows,
    stride_qn, stride_qh, stride_kh, stride_ks, stride_vh, stride_vs,
    QUERIES: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    FROM_ANCHOR: tl.constexpr, CHUNK: tl.constexpr, PROGRAMS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    i_p, i_h, i_m = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    committed = tl.load(committed_length)
    first, last = _chunks(committed, num_rows, WINDOW, FROM_ANCHOR, CHUNK)
    # First chunk of this program that is not before `first`.
    start = first + (i_p + PROGRAMS - first % PROGRAMS) % PROGRAMS
    STEPS: tl.constexpr = CHUNK // BN
    num_steps = ((last - start + PROGRAMS) // PROGRAMS) * STEPS
    o_m, o_d, o_n = i_m * BM + tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BN)
    o_i, o_h = o_m // GROUP, i_h * GROUP + o_m % GROUP
    m_m, m_d = o_i < num_rows, o_d < D
    p_keys, p_values = key_cache + i_h.to(tl.int64) * stride_kh, value_cache + i_h.to(tl.int64) * stride_vh

    # 1. What the first step reads of the committed rows, before the kernel that writes the block's rows has ended.
    o_k = start * CHUNK + o_n
    p_first_keys = p_keys + o_k[:, None].to(tl.int64) * stride_ks + o_d[None, :]
    p_first_values = p_values + o_k[:, None].to(tl.int64) * stride_vs + o_d[None, :]
    m_old, m_new = o_k < committed, (o_k >= committed) & (o_k < committed + num_rows)
    b_keys = tl.load(p_first_keys, mask=m_old[:, None] & m_d[None, :], other=0.0)
    b_values = tl.load(p_first_values, mask=m_old[:, None] & m_d[None, :], other=0.0)
    if start + PROGRAMS <= last:
        # In a long context, also the next chunk.
        o_next = tl.minimum((start + PROGRAMS) * CHUNK + tl.arange(0, CHUNK), committed)
        _prefetch_chunk(p_keys, o_next, stride_ks, BD, PREFETCH, OVERLAPS)
        _prefetch_chunk(p_values, o_next, stride_vs, BD, PREFETCH, OVERLAPS)
    wait_for_previous(OVERLAPS)
    let_next_start(OVERLAPS)

    if start <= last:
        # 2. The block's own rows take their places in the same step: its sums do not depend on who committed what.
        p_query = query + o_i[:, None].to(tl.int64) * stride_qn + o_h[:, None] * stride_qh + o_d[None, :]
        b_query = tl.load(p_query, mask=m_m[:, None] & m_d[None, :], other=0.0)
        b_keys = tl.load(p_first_keys, mask=m_new[:, None] & m_d[None, :], other=b_keys)
        b_values = tl.load(p_first_values, mask=m_new[:, None] & m_d[None, :], other=b_values)
        b_max = tl.full([BM], LOWEST, tl.float32)
        b_total = tl.zeros([BM], tl.float32)
        b_sum = tl.zeros([BM, BD], tl.float32)
        m_seen = _visible(o_k, o_i, committed, num_rows, CAUSAL, WINDOW, FROM_ANCHOR)
        b_max, b_total, b_sum = _attend(b_query, b_keys, b_values, m_seen, scale, b_max, b_total, b_sum, PRECISION)

        # 3. All other steps of a long context.
        for step in range(1, num_steps):
            o_k = (start + step // STEPS * PROGRAMS) * CHUNK + step % STEPS * BN + o_n
            m_kd = (o_k < committed + num_rows)[:, None] & m_d[None, :]
            b_keys = tl.load(p_keys + o_k[:, None].to(tl.int64) * stride_ks + o_d[None, :], mask=m_kd, other=0.0)
            b_values = tl.load(p_values + o_k[:, None].to(tl.int64) * stride_vs + o_d[None, :], mask=m_kd, other=0.0)
            m_seen = _visible(o_k, o_i, committed, num_rows, CAUSAL, WINDOW, FROM_ANCHOR)
            b_max, b_total, b_sum = _attend(b_query, b_keys, b_values, m_seen, scale, b_max, b_total, b_sum, PRECISION)
        o_part = (o_i * QUERIES + o_h).to(tl.int64) * PROGRAMS + i_p
        tl.store(partial + o_part[:, None] * D + o_d[None, :], b_sum, mask=m_m[:, None] & m_d[None, :])
        p_statistics = statistics + o_part[:, None] * 2 + tl.arange(0, 2)[None, :]
        tl.store(p_statistics, tl.join(b_max, b_total), mask=m_m[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def _combine_kernel(
    partial, statistics, committed_length, output, num_rows,
    D: tl.constexpr, WINDOW: tl.constexpr, FROM_ANCHOR: tl.constexpr, CHUNK: tl.constexpr, PROGRAMS: tl.constexpr,
    BP: tl.constexpr, BD: tl.constexpr, OVERLAPS: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    i_row = tl.program_id(0).to(tl.int64)
    o_p, o_d = tl.arange(0, BP), tl.program_id(1) * BD + tl.arange(0, BD)
    m_d = o_d < D
    first, last = _chunks(tl.load(committed_length), num_rows, WINDOW, FROM_ANCHOR, CHUNK)
    m_p = (o_p < PROGRAMS) & ((o_p + PROGRAMS - first % PROGRAMS) % PROGRAMS <= last - first)
    p_part = partial + (i_row * PROGRAMS + o_p[:, None]) * D + o_d[None, :]
    p_statistics = statistics + (i_row * PROGRAMS + o_p) * 2
    # Before the wait: what follows reads nothing but weights before its own, and has time to ask for them.
    let_next_start(OVERLAPS)
    wait_for_previous(OVERLAPS)
    # All parts that exist at once.
    b_part = tl.load(p_part, mask=m_p[:, None] & m_d[None, :], other=0.0)
    b_max = tl.load(p_statistics, mask=m_p, other=LOWEST)
    b_total = tl.load(p_statistics + 1, mask=m_p, other=0.0)
    b_weight = tl.exp2(b_max - tl.max(b_max, axis=0))
    total = tl.sum(b_weight * b_total, axis=0)
    b_out = (tl.sum(b_part * b_weight[:, None], axis=0) / total).to(output.dtype.element_ty)
    # The warp's lanes hold copies of the sums. As a tile of copies, of which one is stored, none has to move.
    COPIES: tl.constexpr = 128 // BD if BD < 128 else 1
    o_copy = tl.arange(0, COPIES)
    p_out = output + i_row * D + o_d[None, :] + 0 * o_copy[:, None]
    tl.store(p_out, tl.broadcast_to(b_out[None, :], (COPIES, BD)), mask=(o_copy == 0)[:, None] & m_d[None, :])


def attention_inputs(projected, norms: HeadNorms, cos, sin, key_cache, value_cache, committed, eps) -> torch.Tensor:
    """As `block_attention.attention_inputs`; returns the queries alone."""
    tile, num_rows, (heads, length, size) = tile_of("attention_inputs"), projected.shape[0], key_cache.shape
    width = 2 * size if norms.is_gated else size
    num_queries = (projected.shape[1] - 2 * heads * size) // width
    query = projected.new_empty(num_rows, num_queries, size)
    projected, cos, sin = (
        tensor if tensor.stride(1) == 1 else tensor.contiguous() for tensor in (projected, cos, sin)
    )
    with launch_device(projected):
        _inputs_kernel[(num_rows, num_queries + 2 * heads)](
            projected, norms.query_scale, norms.key_scale, cos, sin, key_cache, value_cache, committed, query, eps,
            length, projected.stride(0), cos.stride(0), sin.stride(0),
            *key_cache.stride()[:2], *value_cache.stride()[:2],
            QUERIES=num_queries, HEADS=heads, WIDTH=width, D=size, R=cos.shape[1], BD=triton.next_power_of_2(size),
            **launch_options(tile, projected),
        )  # fmt: skip
    return query


def block_attention(
    query, key_cache, value_cache, committed, scale, causal, window, window_from_anchor
) -> torch.Tensor:
    """As `block_attention.block_attention`."""
    (num_rows, num_queries, size), heads = query.shape, key_cache.shape[0]
    group = num_queries // heads
    programs = _programs_per_head(heads, query.device)
    tile, block_m = _attention_tile(num_rows * group, size, query.dtype)
    combine_tile = tile_of("combine_attention")
    span = {"WINDOW": window or 0, "FROM_ANCHOR": window_from_anchor, "CHUNK": tile.block_k, "PROGRAMS": programs}
    padded = max(16, triton.next_power_of_2(size))
    part_size = min(combine_tile.block_n, padded)
    query = query if query.stride(2) == 1 else query.contiguous()
    partial = query.new_empty(num_rows, num_queries, programs, size, dtype=torch.float32)
    statistics = query.new_empty(num_rows, num_queries, programs, 2, dtype=torch.float32)
    output = query.new_empty(num_rows, num_queries, size)
    with launch_device(query):
        _attention_kernel[(programs, heads, triton.cdiv(num_rows * group, block_m))](
            query, key_cache, value_cache, committed, partial, statistics, scale * LOG2_E, num_rows,
            *query.stride()[:2], *key_cache.stride()[:2], *value_cache.stride()[:2],
            QUERIES=num_queries, GROUP=group, D=size, CAUSAL=causal, BM=block_m, BN=tile.block_n, BD=padded,
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32", **span, **launch_options(tile, query),
        )  # fmt: skip
        _combine_kernel[(num_rows * num_queries, triton.cdiv(size, part_size))](
            partial, statistics, committed, output, num_rows,
            D=size, BP=triton.next_power_of_2(programs), BD=part_size, **span, **launch_options(combine_tile, query),
        )  # fmt: skip
    return output
