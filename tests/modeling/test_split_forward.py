"""The forward split at the router boundary: equal to the unsplit one, and blind to rows it was not told to run."""

import copy
from types import SimpleNamespace

import pytest
import torch

from hf_hybridspec import HybridCache
from hf_hybridspec.modeling.split_forward import RouterBoundary, SplitForward
from hf_hybridspec.modeling.taps import Taps
from hf_hybridspec.modeling.target import split_obstacle, text_model
from tests.support import random_prompt

from .cache_helpers import NEXT, ROWS, assert_close, assert_same_content, held_tensors, prefilled, run, run_block

PROMPT = random_prompt(9, seed=5)
TAPS = (2, 0)


def split_forward(pair) -> SplitForward:
    return SplitForward(text_model(pair.attached), pair.attached.get_output_embeddings(), TAPS)


def positions(length: int, start: int = 9) -> torch.Tensor:
    return torch.arange(start, start + length)[None]


@torch.no_grad()
def run_split(pair, cache, num_stage0: int, length: int, between=lambda boundary: boundary, position_ids=None):
    """Stage 0 on `num_stage0` rows and Stage 1 on `length` of them, in a block that is left open."""
    split = split_forward(pair)
    cache.begin_block(num_stage0)
    position_ids = positions(num_stage0) if position_ids is None else position_ids
    boundary = split.stage0(ROWS[:, :num_stage0], position_ids, cache)
    return split.stage1(between(boundary), length, cache, None)


@pytest.mark.parametrize("is_static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("length", [1, 2, 5, 16])
def test_split_equals_unsplit(pair, length, is_static):
    """Bit by bit: the same modules on the same rows. Features are the taps of the unsplit forward."""
    one, other = (prefilled(pair.attached, PROMPT, is_static) for _ in range(2))
    features = []
    with Taps(text_model(pair.attached), TAPS, features.append):
        expected = run_block(pair.attached, one, ROWS[:, :length])
    verified = run_split(pair, other, length, length)
    torch.testing.assert_close(verified.logits, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(verified.features, features[0], rtol=1e-5, atol=1e-5)
    for cache in (one, other):
        cache.commit(length // 2)
    assert_same_content(other, one, tolerance=1e-5)
    assert_close(run(pair.attached, other, NEXT), run(pair.attached, one, NEXT))


def poison(boundary: RouterBoundary, cache: HybridCache, length: int) -> RouterBoundary:
    """Overwrites all that Stage 0 has left of the rows from `length` on."""
    tensors = [boundary.residual, boundary.normed]
    if boundary.routing is not None:
        tensors += [boundary.routing.router_logits[None], boundary.routing.top_k_weights[None]]
        boundary.routing.top_k_index[length:] = 10**9
    buffers, index = cache.buffers_of(0)
    tensors += [buffers.rows[index], buffers.factors.z[index], buffers.factors.k[index], buffers.factors.g[index]]
    for tensor in tensors:
        tensor[:, length:] = float("nan")
    boundary.position_ids[..., length:] = 10**6
    return boundary


@pytest.mark.parametrize(("num_stage0", "length"), [(2, 1), (3, 2), (7, 4), (16, 15), (16, 2)])
def test_no_value_of_a_later_row_is_read(pair, num_stage0, length):
    """C12: with every Stage-0 value beyond row w overwritten, logits, features and every commit stay bit by bit."""
    one, other = prefilled(pair.attached, PROMPT), prefilled(pair.attached, PROMPT)
    expected = run_split(pair, one, num_stage0, length)
    actual = run_split(pair, other, num_stage0, length, lambda boundary: poison(boundary, other, length))
    assert other.block_length == length
    assert torch.equal(actual.logits, expected.logits) and torch.equal(actual.features, expected.features)
    for commit_length in {0, 1, length}:
        committed = [copy.deepcopy(cache) for cache in (one, other)]
        for cache in committed:
            cache.commit(commit_length)
        for tensor, same in zip(*map(held_tensors, committed), strict=True):
            assert torch.equal(tensor, same) and tensor.isfinite().all()


def test_a_shortened_block_is_the_shorter_block(pair, decoded):
    """Rows that Stage 0 ran in vain leave no trace in what follows."""
    start, steps = decoded(pair, False)
    cache = copy.deepcopy(start)
    assert_close(run_split(pair, cache, 8, 5).logits, steps[5].logits)
    with pytest.raises(ValueError, match=r"in \[0, 5\], got 6"):
        cache.commit(6)
    cache.commit(5)
    assert_same_content(cache, steps[5].cache)
    assert_close(run_block(pair.attached, cache, ROWS[:, 5:8]), steps[8].logits[5:])


def test_stage1_runs_nothing_of_stage0(pair):
    """Embedding, Layer 0's mixer and router run once, on the Stage-0 rows; everything else on the executed rows."""
    model = text_model(pair.attached)
    layer = model.layers[0]
    rows = {}
    watched = {"embedding": model.embed_tokens, "mixer": layer.linear_attn, "norm": layer.post_attention_layernorm}
    if hasattr(layer.mlp, "gate"):
        watched["router"] = layer.mlp.gate
    watched["next layer"] = model.layers[1].linear_attn
    handles = [
        module.register_forward_hook(
            lambda _, args, kwargs, output, name=name: rows.setdefault(name, []).append(_num_rows(args, kwargs)),
            with_kwargs=True,
        )
        for name, module in watched.items()
    ]
    cache = prefilled(pair.attached, PROMPT)
    rows.clear()
    run_split(pair, cache, 6, 4)
    for handle in handles:
        handle.remove()
    assert rows == {name: [4 if name == "next layer" else 6] for name in watched}


def _num_rows(args, kwargs) -> int:
    given = kwargs["hidden_states"] if not args else args[0]
    return given.shape[0] if given.shape[0] > 1 else given.shape[1]


@pytest.mark.parametrize("kind", ["qwen3_5_moe", "qwen3_5_moe_vl"])
@pytest.mark.parametrize("offsets", [(0, 0, 0, 0), (0, 3, 4, 5), (3, 0, 0)])
def test_position_ids_of_the_vision_language_class(kind, offsets, target_pairs):
    """`[4, 1, n]` (text, time, height, width) and `[3, 1, n]` reach mask and rotary embedding as in the unsplit."""
    pair = target_pairs[kind]
    position_ids = torch.stack([positions(5) + offset for offset in offsets])
    one, other = prefilled(pair.attached, PROMPT), prefilled(pair.attached, PROMPT)
    one.begin_block(5)
    with torch.no_grad():
        hidden_states = text_model(pair.attached)(
            input_ids=ROWS[:, :5], position_ids=position_ids, cache=one
        ).last_hidden_state
        expected = pair.attached.get_output_embeddings()(hidden_states)[0]
    verified = run_split(pair, other, 5, 5, position_ids=position_ids)
    assert_close(verified.logits, expected)
    if len(set(offsets[-3:])) > 1:
        assert not torch.allclose(verified.logits, run_split(pair, other, 5, 5).logits, atol=1e-2)


def test_left_padding_stays_masked(pair):
    """A padded sequence gives what the bare one gives; without its mask it would not."""
    bare = prefilled(pair.attached, PROMPT)
    expected = run_split(pair, bare, 6, 4).logits
    padding = 3
    mask = torch.ones(1, padding + 9, dtype=torch.long)
    mask[:, :padding] = 0
    padded_prompt = torch.nn.functional.pad(PROMPT, (padding, 0))
    cache = HybridCache(pair.attached.config)
    split = split_forward(pair)
    with torch.no_grad():
        position_ids = (mask.cumsum(-1) - 1).clamp_min(0)
        pair.attached(input_ids=padded_prompt, attention_mask=mask, position_ids=position_ids, cache=cache)
        cache.begin_block(6)
        boundary = split.stage0(ROWS[:, :6], positions(6), cache)
        unmasked = copy.deepcopy(cache)
        mask = torch.nn.functional.pad(mask, (0, 6), value=1)
        assert_close(split.stage1(boundary, 4, cache, mask).logits, expected)
        assert not torch.allclose(split.stage1(boundary, 4, unmasked, None).logits, expected, atol=1e-2)


def test_what_cannot_be_split_is_named(target_pairs):
    target = target_pairs["qwen3_5_moe"].attached
    assert split_obstacle(target) is None
    config = copy.deepcopy(target.config)
    config.layer_types = ["full_attention", *config.layer_types[1:]]
    assert "Layer 0" in split_obstacle(SimpleNamespace(config=config))
    for device_map in ({"model": 0, "lm_head": 1}, {"model": "cuda:0", "lm_head": "cpu"}):
        spread = SimpleNamespace(config=target.config, hf_device_map=device_map, device=torch.device("cuda:0"))
        assert "several devices" in split_obstacle(spread)
    whole = SimpleNamespace(config=target.config, hf_device_map={"": "cpu"}, device=torch.device("cpu"))
    assert split_obstacle(whole) is None
