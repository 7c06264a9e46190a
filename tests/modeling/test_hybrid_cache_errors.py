"""HybridCache: what is refused, and that nothing is half-committed after a failure."""

import copy

import pytest

from hf_hybridspec import HybridCache
from tests.support import random_prompt

from .cache_helpers import ROWS, STATIC_LENGTH, assert_close, assert_same_content, prefilled, run, run_block


def test_commit_and_crop_without_a_block(pair, decoded):
    cache = copy.deepcopy(decoded(pair, False)[0])
    with pytest.raises(RuntimeError, match="begin_block"):
        cache.commit(1)
    with pytest.raises(RuntimeError, match="2 tokens were to be removed, but no block is open"):
        cache.crop(-2)
    cache.crop(0)
    assert_same_content(cache, decoded(pair, False)[0], tolerance=0)


def test_lengths_out_of_range_change_nothing(target_pairs, decoded):
    pair = target_pairs["qwen3_5_moe"]
    start, steps = decoded(pair, False)
    cache = copy.deepcopy(start)
    with pytest.raises(ValueError, match="at least one row, got 0"):
        cache.begin_block(0)
    run_block(pair.attached, cache, ROWS[:, :4])
    with pytest.raises(ValueError, match=r"in \[0, 4\], got 5"):
        cache.commit(5)
    with pytest.raises(ValueError, match=r"in \[0, 4\], got -1"):
        cache.crop(-5)
    with pytest.raises(ValueError, match="zero or minus"):
        cache.crop(1)
    with pytest.raises(ValueError, match=r"1\.\.4, got 5"):
        cache.shorten_block(5)
    cache.commit(3)
    assert_same_content(cache, steps[3].cache)


@pytest.mark.parametrize("is_static", [False, True], ids=["dynamic", "static"])
def test_begin_block_needs_a_prefill(target_pairs, is_static):
    cache = HybridCache(target_pairs["qwen3_5_moe"].attached.config, STATIC_LENGTH if is_static else None)
    with pytest.raises(RuntimeError, match="run the prompt through the target first"):
        cache.begin_block(2)
    assert cache.block_length == 0


def test_a_static_cache_says_when_it_is_full(pair):
    cache = HybridCache(pair.attached.config, 20)
    run(pair.attached, cache, random_prompt(9, seed=5))
    with pytest.raises(ValueError, match="block of 12 rows after 9 tokens does not fit a static cache of 20"):
        cache.begin_block(12)
    logits = run_block(pair.attached, cache, ROWS[:, :11])
    expected = prefilled(pair.attached, random_prompt(9, seed=5))
    assert_close(logits, run_block(pair.attached, expected, ROWS[:, :11]))


@pytest.mark.parametrize("num_rows", [5, 16, 21])
def test_more_rows_than_the_block_was_opened_for(pair, decoded, num_rows):
    """Refused before a layer has run, so that the block is still open and the next forward right."""
    start, steps = decoded(pair, False)
    cache = copy.deepcopy(start)
    cache.begin_block(4)
    with pytest.raises(
        ValueError, match=rf"feeds {num_rows} rows, the open block of 4 has room for 4.*begin_block\({num_rows}\)"
    ):
        run(pair.attached, cache, ROWS[:, :num_rows])
    assert cache.block_length == 4 and int(cache.get_seq_length()) == int(start.get_seq_length())
    assert_close(run(pair.attached, cache, ROWS[:, :4]), steps[4].logits)
    # A second forward without a block of its own.
    with pytest.raises(ValueError, match="feeds 1 rows, the open block of 4 has room for 0"):
        run(pair.attached, cache, ROWS[:, 4:5])
    cache.commit(3)
    assert_same_content(cache, steps[3].cache)


@pytest.mark.parametrize("is_static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("failing", ["layers.0.mlp", "layers.2", "layers.3.self_attn", "norm"])
def test_a_forward_that_fails_leaves_no_trace(pair, failing, is_static, decoded):
    """Nothing half-committed: some layers have run the block and others have not."""
    start, steps = decoded(pair, is_static)
    cache = copy.deepcopy(start)
    module = pair.attached.get_decoder()
    module = getattr(module, "language_model", module).get_submodule(failing)

    def fail(*_):
        raise InterruptedError

    handle = module.register_forward_pre_hook(fail)
    try:
        with pytest.raises(InterruptedError):
            run_block(pair.attached, cache, ROWS[:, :8])
    finally:
        handle.remove()
    if failing != "norm":
        with pytest.raises(RuntimeError, match="of the block, 3 were to be committed"):
            cache.commit(3)
    cache.discard_block()
    assert cache.block_length == 0
    assert_same_content(cache, start, tolerance=0)
    # And the next block begins without one being told that the last one failed.
    run_block(pair.attached, cache, ROWS[:, :5])
    cache.begin_block(7)
    assert_close(run(pair.attached, cache, ROWS[:, :7]), steps[7].logits)
    cache.commit(6)
    assert_same_content(cache, steps[6].cache)
