"""Sampled acceptance in Triton, without sorting: every row is read once, and what may be kept of it a few times more.

A row is cut into groups of GROUP tokens, of which BLOCK // GROUP make a tile. Three launches:

1. `_group_kernel`: the best score of every group; masses e^(score - best) of every block of tokens.
2. `_filter_kernel`, one program a row: lists the groups that hold a token which may be kept, in the order of tokens.
   Fewer than k of them lie above the k-th best of all groups, so top-k leaves few. Top-p leaves out what lies below
   the score from which on the best of all groups have its mass, if they have it, and otherwise tokens so improbable
   that all of them together are within its tail. The score at which the kept tokens end is found by cutting an
   interval of floats again and again, on the first tile of the list in registers and on the others from memory.
3. `_draw_kernel`: the point-mass rule, then the tile and in it the token in which the uniform falls.

Masses of a row add up in one fixed order, so equal logits and uniforms give equal tokens.
"""

import torch
import triton
import triton.language as tl

from .common_triton import launch_device
from .round_steps import RoundState
from .sampling import SamplingSettings

GROUP, BLOCK = 64, 4096

# The key of a score of minus infinity.
LOWEST_KEY = tl.constexpr(-2139095041)


@triton.jit
def _key(b_score):
    """int32 in the order of the scores; zeros of both signs are one."""
    b_bits = (b_score + 0.0).to(tl.int32, bitcast=True)
    return b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _score_of_key(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _scores(p_logits, o_n, m_n, temperature):
    """Scores at the given columns, minus infinity where masked."""
    b_logit = tl.load(p_logits + o_n, mask=m_n, other=float("-inf")).to(tl.float32)
    return tl.where(m_n, tl.div_rn(b_logit, temperature), float("-inf"))


@triton.jit
def _tile(listed, i_tile, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Columns and scores of a tile of listed groups; scores of minus infinity past its end.

    `listed`: a row's logits and listed groups, how many groups these are, the temperature, the vocabulary's size.
    """
    p_logits, p_groups, num_listed, temperature, V = listed
    o_place = i_tile * BLOCK + tl.arange(0, BLOCK)
    m_n = o_place // GROUP < num_listed
    o_n = tl.load(p_groups + o_place // GROUP, mask=m_n, other=0) * GROUP + o_place % GROUP
    return o_n, _scores(p_logits, o_n, m_n & (o_n < V), temperature)


@triton.jit
def _weights_above(
    b_probe, b_key, b_weight, best, listed,
    IS_COUNT: tl.constexpr, HAS_MORE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """How much weight lies above each of a few keys: of `b_key`, and of the listed tokens after the first tile.

    A token's weight is its mass, or one. Rounding keeps a sum from growing with its key.
    """
    b_sum = tl.where(b_key[None, :] > b_probe[:, None], b_weight[None, :], 0.0)
    if HAS_MORE:
        for i_tile in range(1, tl.cdiv(listed[2] * GROUP, BLOCK)):
            _, b_score = _tile(listed, i_tile, GROUP, BLOCK)
            b_tile_weight = tl.full([BLOCK], 1.0, tl.float32) if IS_COUNT else tl.exp(b_score - best)
            b_sum += tl.where(_key(b_score)[None, :] > b_probe[:, None], b_tile_weight[None, :], 0.0)
    return tl.sum(b_sum, axis=1)


@triton.jit
def _end_key(
    wanted, enough, low, high, b_key, b_weight, best, listed,
    IS_COUNT: tl.constexpr, HAS_MORE: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The lowest key from `low` to `high` above which less weight than `wanted` lies; of counts the wanted-th best.

    Any lower key will do, if no more than `enough` lies from there on.
    """
    PROBES: tl.constexpr = 4
    o_probe = tl.arange(0, PROBES)
    while low < high:
        # They cut what is left into five; differences may exceed int32.
        b_probe = (low + (high.to(tl.int64) - low) * (o_probe + 1) // (PROBES + 1)).to(tl.int32)
        b_above = _weights_above(b_probe, b_key, b_weight, best, listed, IS_COUNT, HAS_MORE, GROUP, BLOCK)
        m_less = b_above < wanted
        high = tl.min(tl.where(m_less, b_probe, high), axis=0)
        low = tl.max(tl.where(m_less, low, b_probe + 1), axis=0)
        if tl.min(tl.where(m_less, float("inf"), b_above), axis=0) <= enough:
            high = low
    return low


@triton.jit
def _first_of(b_pair):
    return tl.sum(tl.where(tl.arange(0, 2) == 0, b_pair, 0.0), axis=0)


@triton.jit
def _second_of(b_pair):
    return tl.sum(tl.where(tl.arange(0, 2) == 1, b_pair, 0.0), axis=0)


@triton.jit
def _kept_masses(b_score, best, end_key, num_skipped, ties_before, min_p):
    """Masses of a tile's kept tokens, 0 of the others; how many tokens have the key at which the kept ones end."""
    b_key = _key(b_score)
    b_is_end = (b_key == end_key).to(tl.int32)
    b_mass = tl.exp(b_score - best)
    m_end = (b_is_end > 0) & (ties_before + tl.cumsum(b_is_end, axis=0) > num_skipped)
    m_kept = ((b_key > end_key) | m_end) & (b_mass >= min_p)
    return tl.where(m_kept, b_mass, 0.0), tl.sum(b_is_end, axis=0)


@triton.jit
def _group_kernel(
    logits, block_tokens, temperatures, group_best, block_best, block_mass,
    rows, V, stride_ln, num_groups, num_blocks,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid `[blocks, rows]`. `block_mass` leaves the row's draft out, which is not drawn once it was rejected."""
    i_b, i_r = tl.program_id(0), tl.program_id(1)
    GROUPS: tl.constexpr = BLOCK // GROUP
    o_g = i_b * GROUPS + tl.arange(0, GROUPS)
    o_n = o_g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    draft = tl.load(block_tokens + i_r + 1, mask=i_r + 1 < rows, other=-1)
    b_score = _scores(logits + i_r.to(tl.int64) * stride_ln, o_n, o_n < V, tl.load(temperatures))
    b_best = tl.max(b_score, axis=1)
    best = tl.max(b_best, axis=0)
    b_mass = tl.where((o_n != draft) & (b_score > float("-inf")), tl.exp(b_score - best), 0.0)
    tl.store(group_best + i_r * num_groups + o_g, b_best, mask=o_g < num_groups)
    tl.store(block_best + i_r * num_blocks + i_b, best)
    tl.store(block_mass + i_r * num_blocks + i_b, tl.sum(tl.sum(b_mass, axis=1), axis=0))


@triton.jit
def _filter_kernel(
    logits, block_tokens, temperatures, top_ks, tail_masses, min_ps, group_best, block_best, block_mass,
    groups, tile_mass, tile_ties, row_best, row_ends, draft_probs,
    rows, V, stride_ln, num_groups, num_blocks,
    IS_FILTERED: tl.constexpr, BG: tl.constexpr, BB: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row: what the row keeps, the masses of its tiles without the draft, the draft's probability.

    `row_ends` `[rows, 3]`: the key at which the kept tokens end, how many of those that have it go, listed groups.
    `tile_ties`: how many of those that have it come before a tile.
    """
    i_r = tl.program_id(0)
    p_logits = logits + i_r.to(tl.int64) * stride_ln
    temperature = tl.load(temperatures)
    has_draft = i_r + 1 < rows
    draft = tl.load(block_tokens + i_r + 1, mask=has_draft, other=0)
    draft_score = tl.div_rn(tl.load(p_logits + draft).to(tl.float32), temperature)
    o_b = tl.arange(0, BB)
    b_best = tl.load(block_best + i_r * num_blocks + o_b, mask=o_b < num_blocks, other=float("-inf"))
    best = tl.max(b_best, axis=0)
    b_mass = tl.load(block_mass + i_r * num_blocks + o_b, mask=o_b < num_blocks, other=0.0)
    b_mass = tl.where(b_best > float("-inf"), b_mass * tl.exp(b_best - best), 0.0)
    draft_mass = tl.where(has_draft, tl.exp(draft_score - best), 0.0)
    total = tl.sum(b_mass, axis=0) + draft_mass
    tl.store(row_best + i_r, best)
    if IS_FILTERED:
        top_k = tl.minimum(tl.load(top_ks), V.to(tl.int64)).to(tl.int32)
        tail, min_p = tl.load(tail_masses), tl.load(min_ps)

        # Groups whose best token has a key from `end_key` on hold all that may be kept.
        o_g = tl.arange(0, BG)
        m_g = o_g < num_groups
        b_group = tl.load(group_best + i_r * num_groups + o_g, mask=m_g, other=float("-inf"))
        b_key = _key(b_group)
        best_key = tl.max(b_key, axis=0)
        nothing = (p_logits, groups, 0, temperature, V)
        # A group may hold several of the k best.
        end_key = tl.min(tl.where(m_g & (top_k <= num_groups), b_key, best_key), axis=0)
        end_key = tl.where(top_k <= num_groups, end_key, LOWEST_KEY)
        wanted, enough, b_weight = top_k.to(tl.float32), BLOCK // GROUP, tl.where(m_g, 1.0, 0.0)
        if top_k == V:
            # Tokens of less than this are within the tail, all of them together, or below min_p; and the best of the
            # groups may have the mass that top-p asks for.
            end_key = tl.minimum(_key(best + tl.log(tl.maximum(0.5 * tail * total / V, 0.999 * min_p))), best_key)
            wanted, enough = tl.where(tail > 0.0, total - tail * total, float("inf")), 0
            b_weight = tl.where(m_g, tl.exp(b_group - best), 0.0)
        end_key = _end_key(
            wanted, enough, end_key, best_key, b_key, b_weight, best, nothing, False, False, GROUP, BLOCK
        )
        m_g = m_g & (b_key >= end_key)
        num_listed = tl.sum(m_g.to(tl.int32), axis=0)
        p_groups = groups + i_r * num_groups
        tl.store(p_groups + tl.cumsum(m_g.to(tl.int32), axis=0) - 1, o_g, mask=m_g)
        tl.debug_barrier()

        # The key at which the kept tokens end, and how many of those that have it go.
        listed = (p_logits, p_groups, num_listed, temperature, V)
        _, b_first = _tile(listed, 0, GROUP, BLOCK)
        b_key, b_mass = _key(b_first), tl.exp(b_first - best)
        b_one = tl.full([BLOCK], 1.0, tl.float32)
        num_skipped = tl.zeros([], tl.int32)
        if top_k < V:
            end_key = _end_key(wanted, 0, end_key, best_key, b_key, b_one, best, listed, True, True, GROUP, BLOCK)
        if tail > 0.0:
            o_pair = tl.arange(0, 2)
            if top_k < V:
                b_pair = end_key - 1 + o_pair
                total = _first_of(_weights_above(b_pair, b_key, b_mass, best, listed, False, True, GROUP, BLOCK))
                wanted = total - tail * total
            end_key = _end_key(wanted, 0, end_key, best_key, b_key, b_mass, best, listed, False, True, GROUP, BLOCK)
            b_pair = end_key - 1 + o_pair
            b_counts = _weights_above(b_pair, b_key, b_one, best, listed, True, True, GROUP, BLOCK)
            above = _second_of(_weights_above(b_pair, b_key, b_mass, best, listed, False, True, GROUP, BLOCK))
            stay = tl.maximum(tl.ceil((wanted - above) / tl.exp(_score_of_key(end_key) - best)), 1.0)
            num_skipped = tl.maximum(_first_of(b_counts) - _second_of(b_counts) - stay, 0.0).to(tl.int32)

        ties = tl.zeros([], tl.int32)
        total, draft_mass = 0.0, 0.0
        for i_tile in range(tl.cdiv(num_listed * GROUP, BLOCK)):
            o_n, b_score = _tile(listed, i_tile, GROUP, BLOCK)
            b_kept, num_ties = _kept_masses(b_score, best, end_key, num_skipped, ties, min_p)
            m_draft = has_draft & (o_n == draft)
            others = tl.sum(tl.where(m_draft, 0.0, b_kept), axis=0)
            draft_mass += tl.sum(tl.where(m_draft, b_kept, 0.0), axis=0)
            total += others
            tl.store(tile_mass + i_r * num_blocks + i_tile, others)
            tl.store(tile_ties + i_r * num_blocks + i_tile, ties)
            ties += num_ties
        total += draft_mass
        tl.store(row_ends + i_r * 3, end_key)
        tl.store(row_ends + i_r * 3 + 1, num_skipped)
        tl.store(row_ends + i_r * 3 + 2, num_listed)
    else:
        tl.store(tile_mass + i_r * num_blocks + o_b, b_mass, mask=o_b < num_blocks)
    tl.store(draft_probs + i_r, draft_mass / total)


@triton.jit
def _draw_kernel(
    logits, block_tokens, uniforms, temperatures, min_ps, groups, tile_mass, tile_ties, row_best, row_ends,
    draft_probs, num_accepted, next_token,
    rows, V, stride_ln, num_groups, num_blocks,
    IS_FILTERED: tl.constexpr, ROWS: tl.constexpr, BB: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    o_r = tl.arange(0, ROWS)
    m_draft = o_r < rows - 1
    b_uniform = tl.load(uniforms + o_r, mask=m_draft, other=1.0)
    b_prob = tl.load(draft_probs + o_r, mask=m_draft, other=0.0).to(tl.float64)
    # The first row whose draft is rejected, or that has none.
    i_r = tl.min(tl.where(m_draft & (b_uniform < b_prob), ROWS, o_r), axis=0)
    draft = tl.load(block_tokens + i_r + 1, mask=i_r + 1 < rows, other=-1)
    best = tl.load(row_best + i_r)
    num_tiles = num_blocks
    if IS_FILTERED:
        num_listed = tl.load(row_ends + i_r * 3 + 2)
        num_tiles = tl.cdiv(num_listed * GROUP, BLOCK)

    # The tile, by the mass up to its end; rounding may leave the last that has any.
    o_b = tl.arange(0, BB)
    b_mass = tl.load(tile_mass + i_r * num_blocks + o_b, mask=o_b < num_tiles, other=0.0).to(tl.float64)
    b_up_to = tl.cumsum(b_mass, axis=0)
    wanted = tl.load(uniforms + rows - 1) * tl.max(b_up_to, axis=0)
    i_tile = tl.min(tl.where((b_up_to > wanted) & (b_mass > 0.0), o_b, BB), axis=0)
    last = tl.max(tl.where(b_mass > 0.0, o_b, -1), axis=0)
    i_tile = tl.minimum(i_tile, last)
    wanted -= tl.sum(tl.where(o_b < i_tile, b_mass, 0.0), axis=0)

    # The token within it. A draft that is all the target can say survives its rejection.
    token = draft
    if i_tile >= 0:
        o_place = tl.arange(0, BLOCK)
        p_logits = logits + i_r.to(tl.int64) * stride_ln
        temperature = tl.load(temperatures)
        if IS_FILTERED:
            listed = (p_logits, groups + i_r * num_groups, num_listed, temperature, V)
            o_n, b_score = _tile(listed, i_tile, GROUP, BLOCK)
            end_key, num_skipped = tl.load(row_ends + i_r * 3), tl.load(row_ends + i_r * 3 + 1)
            ties = tl.load(tile_ties + i_r * num_blocks + i_tile)
            b_kept, _ = _kept_masses(b_score, best, end_key, num_skipped, ties, tl.load(min_ps))
        else:
            o_n = i_tile * BLOCK + o_place
            b_kept = tl.exp(_scores(p_logits, o_n, o_n < V, temperature) - best)
        b_kept = tl.where(o_n == draft, 0.0, b_kept)
        m_above = tl.cumsum(b_kept.to(tl.float64), axis=0) > wanted
        place = tl.min(tl.where(m_above & (b_kept > 0.0), o_place, BLOCK), axis=0)
        place = tl.minimum(place, tl.max(tl.where(b_kept > 0.0, o_place, -1), axis=0))
        token = tl.sum(tl.where(o_place == place, o_n, 0), axis=0).to(tl.int64)
    tl.store(num_accepted, i_r)
    tl.store(next_token, token)


def accept_sampled(
    logits: torch.Tensor, uniforms: torch.Tensor, settings: SamplingSettings, is_filtered: bool, state: RoundState
) -> None:
    """As `sampled_acceptance.accept_sampled`."""
    rows, vocabulary = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_groups, num_blocks = triton.cdiv(vocabulary, GROUP), triton.cdiv(vocabulary, BLOCK)
    new = logits.new_empty
    group_best = new(rows, num_groups, dtype=torch.float32)
    block_best, block_mass, tile_mass = (new(rows, num_blocks, dtype=torch.float32) for _ in range(3))
    groups, tile_ties = new(rows, num_groups, dtype=torch.int32), new(rows, num_blocks, dtype=torch.int32)
    row_best, draft_probs = new(rows, dtype=torch.float32), new(rows, dtype=torch.float32)
    row_ends = new(rows, 3, dtype=torch.int32)
    sizes = rows, vocabulary, logits.stride(0), num_groups, num_blocks
    cuts = {"GROUP": GROUP, "BLOCK": BLOCK}
    blocks = max(16, triton.next_power_of_2(num_blocks))
    with launch_device(logits):
        _group_kernel[(num_blocks, rows)](
            logits, state.block_tokens, settings.temperature, group_best, block_best, block_mass, *sizes, **cuts,
            num_warps=8,
        )  # fmt: skip
        _filter_kernel[(rows,)](
            logits, state.block_tokens, settings.temperature, settings.top_k, settings.tail_mass, settings.min_p,
            group_best, block_best, block_mass, groups, tile_mass, tile_ties, row_best, row_ends, draft_probs,
            *sizes, IS_FILTERED=is_filtered, BG=max(16, triton.next_power_of_2(num_groups)), BB=blocks, **cuts,
            num_warps=8,
        )  # fmt: skip
        _draw_kernel[(1,)](
            logits, state.block_tokens, uniforms, settings.temperature, settings.min_p, groups, tile_mass, tile_ties,
            row_best, row_ends, draft_probs, state.num_accepted, state.next_token,
            *sizes, IS_FILTERED=is_filtered, ROWS=state.block_tokens.shape[0], BB=blocks, **cuts,
            num_warps=8,
        )  # fmt: skip
