"""HybridCache: 'verify a block of n, commit m, continue' equals 'decode those m one by one, continue'."""

import copy

import pytest
import torch

from hf_hybridspec.kernels.dispatch import use_kernels
from tests.support import random_prompt

from .cache_helpers import (
    NEXT,
    ROWS,
    assert_close,
    assert_same_content,
    decoded_one_by_one,
    held_tensors,
    run,
    run_block,
)

MAX_ROWS = 16


def check_every_commit(target, start, steps, length, commits):
    block = copy.deepcopy(start)
    logits = run_block(target, block, ROWS[:, :length])
    assert_close(logits, steps[length].logits)
    for commit_length in commits:
        cache = copy.deepcopy(block)
        cache.commit(commit_length)
        assert_same_content(cache, steps[commit_length].cache)
        assert_close(run(target, cache, NEXT), steps[commit_length].next_logits)


@pytest.mark.parametrize("length", range(1, MAX_ROWS + 1))
@pytest.mark.parametrize("is_static", [False, True], ids=["dynamic", "static"])
def test_commit_of_every_prefix_of_every_block(pair, is_static, length, decoded):
    """C1, for ever: every n <= 16 and every 0 <= m <= n, all layers and the logits before and after."""
    start, steps = decoded(pair, is_static)
    # Layers of a static cache differ in the KV alone, and the vision-language class has the text model of qwen3_5_moe.
    is_sample = is_static or pair.kind == "qwen3_5_moe_vl"
    commits = sorted({0, 1, length // 2, length - 1, length}) if is_sample else range(length + 1)
    check_every_commit(pair.attached, start, steps, length, commits)


@pytest.mark.parametrize("length", [1, 5, 16])
@pytest.mark.parametrize("kind", ["qwen3_5_moe", "qwen3_next"])
def test_triton_kernels_commit_the_same(kind, length, target_pairs, decoded):
    start, steps = decoded(target_pairs[kind], False)
    with use_kernels("triton"):
        check_every_commit(target_pairs[kind].attached, start, steps, length, sorted({0, 1, length}))


@pytest.mark.parametrize("prompt_length", [1, 2, 3])
def test_prompts_shorter_than_the_convolution(pair, prompt_length, decoded):
    start, steps = decoded(pair, False, prompt_length)
    for length in (1, 2, 7):
        check_every_commit(pair.attached, start, steps, length, sorted({0, 1, min(2, length), length}))


@pytest.mark.parametrize("length", [17, 32, 40])
def test_blocks_longer_than_one_kernel_call(pair, length, decoded):
    start, steps = decoded(pair, False)
    check_every_commit(pair.attached, start, steps, length, [0, 1, 15, 16, 17, length - 1, length])


@pytest.mark.parametrize("forwards", [[1] * 18, [3, 1, 7], [16, 4], [5, 20, 1]])
def test_a_block_may_take_several_forwards(pair, forwards, decoded):
    """How a causal assistant drafts: one row at a time, all of them to be taken back."""
    start, steps = decoded(pair, False)
    block, total = copy.deepcopy(start), 0
    for length in forwards:
        block.extend_block(length)
        logits = run(pair.attached, block, ROWS[:, total : total + length])
        total += length
        assert_close(logits, steps[total].logits[total - length :])
    for commit_length in (0, 1, total // 2, total):
        cache = copy.deepcopy(block)
        cache.commit(commit_length)
        assert_same_content(cache, steps[commit_length].cache)


@pytest.mark.parametrize("is_static", [False, True], ids=["dynamic", "static"])
def test_blocks_one_after_the_other(pair, is_static, decoded):
    """A block begins where the last commit left off, and stale rows of the last one are never read."""
    start, steps = decoded(pair, is_static)
    cache, position = copy.deepcopy(start), 0
    for length, commit_length in [(16, 1), (4, 4), (9, 0), (2, 1), (16, 7), (1, 1)]:
        logits = run_block(pair.attached, cache, ROWS[:, position : position + length])
        assert_close(logits, steps[position + length].logits[position:])
        cache.commit(commit_length)
        position += commit_length
        assert_same_content(cache, steps[position].cache)


@pytest.mark.parametrize("removed", range(6))
def test_crop_is_the_host_spelling_of_commit(pair, removed, decoded):
    start, steps = decoded(pair, False)
    cache = copy.deepcopy(start)
    run_block(pair.attached, cache, ROWS[:, :5])
    cache.crop(-removed)
    assert cache.block_length == 0
    assert_same_content(cache, steps[5 - removed].cache)


def test_a_block_leaves_the_states_alone_until_commit(pair, decoded):
    start, _ = decoded(pair, False)
    cache = copy.deepcopy(start)
    run_block(pair.attached, cache, ROWS[:, :6])
    for layer, untouched in zip(cache.layers, start.layers, strict=True):
        if hasattr(layer, "recurrent_states"):
            assert torch.equal(layer.recurrent_states[0], untouched.recurrent_states[0])
            assert torch.equal(layer.conv_states[0], untouched.conv_states[0])
    assert cache.committed_length == 9
    assert int(cache.get_seq_length()) == 15


def test_a_reference_is_not_a_snapshot(pair, decoded):
    """`update_recurrent_state` and commit write in place: what a test or drafter keeps must be cloned."""
    cache = copy.deepcopy(decoded(pair, False)[0])
    run_block(pair.attached, cache, ROWS[:, :2])
    cache.commit(2)
    reference = cache.layers[0].recurrent_states[0]
    snapshot = reference.clone()
    run(pair.attached, cache, NEXT[:, :1])
    assert cache.layers[0].recurrent_states[0] is reference
    assert not torch.equal(reference, snapshot)
    snapshot = reference.clone()
    run_block(pair.attached, cache, ROWS[:, :2])
    cache.commit(1)
    assert cache.layers[0].recurrent_states[0] is reference
    assert not torch.equal(reference, snapshot)


@pytest.mark.parametrize("is_static", [False, True], ids=["dynamic", "static"])
def test_reset(pair, is_static, decoded):
    start, steps = decoded(pair, is_static)
    cache = copy.deepcopy(start)
    cache.token_ids, cache.drafter_context = ROWS, object()
    run_block(pair.attached, cache, ROWS[:, :5])
    cache.reset()
    assert int(cache.get_seq_length()) == cache.committed_length == cache.block_length == 0
    assert cache.token_ids is None and cache.drafter_context is None
    run(pair.attached, cache, random_prompt(9, seed=5))
    run_block(pair.attached, cache, ROWS[:, :5])
    cache.commit(2)
    assert_same_content(cache, steps[2].cache)


def test_changes_of_the_batch_are_followed_by_blocks(pair, decoded):
    """Repeat, reorder and select replace the layers' tensors; a block after each sees the new ones."""
    start, steps = decoded(pair, False)
    cache = copy.deepcopy(start)
    run_block(pair.attached, cache, ROWS[:, :3])
    cache.commit(1)
    cache.batch_repeat_interleave(2)
    two = torch.cat([ROWS[:, 1:5], ROWS[:, 11:15]])
    other = decoded_one_by_one(pair.attached, steps[1].cache, two[1:])
    run_two(pair.attached, cache, two)
    cache.commit(2)
    cache.reorder_cache(torch.tensor([1, 0]))
    run_two(pair.attached, cache, two.flip(0)[:, 2:])
    cache.commit(1)
    cache.batch_select_indices(torch.tensor([0]))
    assert_same_content(cache, other[3].cache)
    run_block(pair.attached, cache, two[1:, 3:])
    cache.commit(1)
    assert_same_content(cache, other[4].cache)


@torch.no_grad()
def run_two(target, cache, token_ids):
    cache.begin_block(token_ids.shape[1])
    target(input_ids=token_ids, cache=cache)


@pytest.mark.parametrize("is_open", [False, True], ids=["between blocks", "within a block"])
def test_copies_go_on_independently(pair, is_open, decoded):
    start, steps = decoded(pair, False)
    one = copy.deepcopy(start)
    run_block(pair.attached, one, ROWS[:, :6])
    if not is_open:
        one.commit(2)
    other = copy.deepcopy(one)
    if is_open:
        one.commit(2)
        other.commit(4)
    else:
        run_block(pair.attached, other, ROWS[:, 2:6])
        other.commit(2)
    assert_same_content(one, steps[2].cache)
    assert_same_content(other, steps[4].cache)
    run_block(pair.attached, one, ROWS[:, 2:9])
    one.commit(5)
    assert_same_content(one, steps[7].cache)
    assert_same_content(other, steps[4].cache)


def test_a_plain_forward_between_blocks_is_seen(pair, decoded):
    """The states are views of the block buffers' stack; the host's own writes must reach it."""
    start, steps = decoded(pair, False)
    cache = copy.deepcopy(start)
    run_block(pair.attached, cache, ROWS[:, :2])
    cache.commit(1)
    run(pair.attached, cache, ROWS[:, 1:2])
    run(pair.attached, cache, ROWS[:, 2:6])
    assert_close(run_block(pair.attached, cache, ROWS[:, 6:9]), steps[9].logits[6:])
    cache.commit(3)
    assert_same_content(cache, steps[9].cache)


def test_every_layer_reports_what_the_host_asks(pair, decoded):
    """Croppable, or assisted decoding is refused; compileable, or the mask of static one-row steps is skipped."""
    static = decoded(pair, True)[0]
    static.activate_past_recording()
    assert static.is_croppable and static.is_compileable and static.is_recording
    assert len(held_tensors(static)) == 8
    static.stop_recording()
    assert not static.is_recording
    assert decoded(pair, False)[0].is_croppable
