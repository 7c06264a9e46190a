"""HybridCache.convert: a user's cache becomes ours in place, or is refused."""

import copy

import pytest
import torch
from transformers import DynamicCache, QuantizedCache, StaticCache

from hf_hybridspec import HybridCache
from tests.support import random_prompt

from .cache_helpers import ROWS, STATIC_LENGTH, assert_close, assert_same_content, run, run_block

PROMPT = random_prompt(9, seed=5)


def make_dynamic(config):
    return DynamicCache(config=config)


def make_bare_dynamic(config):
    """Without a config, its layers do not exist yet."""
    return DynamicCache()


def make_static(config):
    return StaticCache(config=config, max_cache_len=STATIC_LENGTH)


MAKERS = (make_dynamic, make_static)


def check_blocks(pair, cache, start, steps):
    """From the prefilled state on, blocks of a converted cache are as those of one that was ours from the start."""
    assert_same_content(cache, start)
    assert_close(run_block(pair.attached, cache, ROWS[:, :6]), steps[6].logits)
    cache.commit(4)
    assert_same_content(cache, steps[4].cache)
    run_block(pair.attached, cache, ROWS[:, 4:7])
    cache.crop(-2)
    assert_same_content(cache, steps[5].cache)


@pytest.mark.parametrize("make", [*MAKERS, make_bare_dynamic])
def test_an_empty_cache(pair, make, decoded):
    given = make(pair.stock.config)
    cache = HybridCache.convert(given, pair.attached.config)
    assert cache is given and isinstance(cache, HybridCache)
    run(pair.attached, cache, PROMPT)
    check_blocks(pair, cache, *decoded(pair, make is make_static))


@pytest.mark.parametrize("prompt_length", [1, 9])
@pytest.mark.parametrize("make", MAKERS)
def test_a_cache_that_the_stock_model_filled(pair, make, prompt_length, decoded):
    start, steps = decoded(pair, make is make_static, prompt_length)
    cache = make(pair.stock.config)
    run(pair.stock, cache, random_prompt(prompt_length, seed=5))
    check_blocks(pair, HybridCache.convert(cache, pair.attached.config), start, steps)


@pytest.mark.parametrize("prompt_length", [1, 2, 9])
@pytest.mark.parametrize("make", MAKERS)
def test_a_cache_that_records_its_past(pair, make, prompt_length, decoded):
    """Its convolution columns have grown beyond the kernel, or, after a short prompt, not reached it yet."""
    start, steps = decoded(pair, make is make_static, prompt_length)
    cache = make(pair.stock.config)
    cache.activate_past_recording()
    run(pair.stock, cache, random_prompt(prompt_length, seed=5))
    check_blocks(pair, HybridCache.convert(cache, pair.attached.config), start, steps)


def test_a_converted_cache_goes_on_as_the_hosts_own(pair):
    """Plain steps over a converted cache are those of the stock cache, bit by bit: its states were adopted."""
    stock = make_dynamic(pair.stock.config)
    run(pair.stock, stock, PROMPT)
    cache = HybridCache.convert(copy.deepcopy(stock), pair.attached.config)
    for row in range(3):
        token = ROWS[:, row : row + 1]
        assert torch.equal(run(pair.attached, cache, token), run(pair.stock, stock, token))


def test_converting_again_changes_nothing(pair, decoded):
    cache = copy.deepcopy(decoded(pair, False)[0])
    layers = list(cache.layers)
    assert HybridCache.convert(cache, pair.attached.config) is cache
    assert all(one is other for one, other in zip(cache.layers, layers, strict=True))


def other_config(config, **changes):
    config = copy.deepcopy(config)
    for name, value in changes.items():
        setattr(config.get_text_config(decoder=True), name, value)
    return config


@pytest.mark.parametrize("make", [*MAKERS, HybridCache])
@pytest.mark.parametrize("layer_types", [["linear_attention", "full_attention"], ["full_attention"] * 4])
def test_a_cache_of_another_model_is_refused(target_pairs, make, layer_types):
    config = target_pairs["qwen3_5_moe"].stock.config
    cache = make(other_config(config, layer_types=layer_types, num_hidden_layers=len(layer_types)))
    before, layers = type(cache), list(cache.layers)
    with pytest.raises(
        ValueError, match=f"it has {len(layer_types)} layers .* the model 4 .3 GDN.* Pass a cache made"
    ):
        HybridCache.convert(cache, config)
    assert type(cache) is before and cache.layers == layers


def test_caches_that_cannot_be_rolled_back_are_refused(target_pairs):
    config = target_pairs["qwen3_5_moe"].stock.config
    with pytest.raises(ValueError, match="offloaded cache cannot be rolled back"):
        HybridCache.convert(DynamicCache(config=config, offloading=True), config)
    quantized = QuantizedCache.__new__(QuantizedCache)
    quantized.layers = []
    with pytest.raises(TypeError, match="DynamicCache, a StaticCache or a HybridCache, got QuantizedCache"):
        HybridCache.convert(quantized, config)
    with pytest.raises(TypeError, match="got tuple"):
        HybridCache.convert((), config)


def test_layers_that_are_not_gdn_or_full_attention_are_refused(target_pairs):
    config = other_config(
        target_pairs["qwen3_5_moe"].stock.config, layer_types=["sliding_attention"] * 4, sliding_window=8
    )
    with pytest.raises(ValueError, match="linear_attention, full_attention, got sliding_attention"):
        HybridCache(config)
