"""Turn 2 with the cache of turn 1: only new tokens are fed, and text equals that of a fresh call."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from tests.scenarios import LOOPS, MIXED, assisted, plain, scripted
from tests.support import random_prompt

FIRST, SECOND = 14, 24


class Conversation:
    """Two turns of one pair: prompt, plain answer, question, plain second answer."""

    def __init__(self, pair, question_length: int = 5):
        self.pair = pair
        self.first = pair.generate_plainly(pair.prompt, max_new_tokens=FIRST)
        self.question = random_prompt(question_length, seed=8)
        self.whole = torch.cat([self.first, self.question], dim=1)
        self.second = pair.generate_plainly(self.whole, max_new_tokens=SECOND)

    def turn_one(self, loop, drafter, **options):
        drafter.script(self.first[0], MIXED)
        output = assisted(
            self.pair.attached,
            self.pair.prompt,
            drafter,
            loop,
            max_new_tokens=FIRST,
            return_dict_in_generate=True,
            **options,
        )
        assert torch.equal(output.sequences, self.first)
        return output.cache

    def turn_two(self, loop, drafter, cache, **options):
        drafter.script(self.second[0], MIXED)
        return assisted(self.pair.attached, self.whole, drafter, loop, max_new_tokens=SECOND, cache=cache, **options)


class FedRows:
    """Counts the rows that reach the target's decoder."""

    def __init__(self, model):
        base = model.model
        self._decoder = base.language_model if hasattr(base, "language_model") else base

    def __enter__(self):
        self.rows = []
        self._handle = self._decoder.register_forward_pre_hook(self._count, with_kwargs=True)
        return self

    def __exit__(self, *exception):
        self._handle.remove()

    def _count(self, module, args, kwargs):
        rows = kwargs.get("inputs_embeds")
        self.rows.append((kwargs["input_ids"] if rows is None else rows).shape[1])


@pytest.mark.parametrize("question_length", [1, 5])
@pytest.mark.parametrize("loop", LOOPS)
def test_the_whole_conversation_continues_the_cache(pair, loop, question_length):
    talk = Conversation(pair, question_length)
    drafter = scripted(talk.first)
    cache = talk.turn_one(loop, drafter)
    with FedRows(pair.attached) as fed:
        output = talk.turn_two(loop, drafter, cache)
    assert torch.equal(output, talk.second)
    # The last token of turn 1 is in no cache yet.
    assert fed.rows[0] == question_length + 1


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("loop", LOOPS)
def test_new_tokens_alone_continue_under_a_longer_mask(pair, loop, chunk):
    talk = Conversation(pair)
    drafter = scripted(talk.first)
    cache = talk.turn_one(loop, drafter)
    new = talk.whole[:, cache.get_seq_length() :]
    drafter.script(talk.second[0], MIXED)
    output = assisted(
        pair.attached,
        {"input_ids": new, "attention_mask": torch.ones_like(talk.whole)},
        drafter,
        loop,
        max_new_tokens=SECOND,
        cache=cache,
        prefill_chunk_size=chunk,
    )
    assert torch.equal(output, talk.second[:, -output.shape[1] :])
    assert output.shape[1] == new.shape[1] + SECOND
    assert torch.equal(cache.token_ids, talk.second[:, :-1])


@pytest.mark.parametrize("loop", LOOPS)
def test_the_whole_conversation_in_chunks(pair, loop):
    talk = Conversation(pair)
    drafter = scripted(talk.first)
    cache = talk.turn_one(loop, drafter)
    assert torch.equal(talk.turn_two(loop, drafter, cache, prefill_chunk_size=2), talk.second)


@pytest.mark.parametrize("loop", LOOPS)
def test_three_turns_through_changing_loops(target_pairs, loop):
    talk = Conversation(target_pairs["qwen3_5_moe"])
    drafter = scripted(talk.first)
    cache = talk.turn_one(loop, drafter)
    other = "host" if loop == "round" else "round"
    assert torch.equal(talk.turn_two(other, drafter, cache), talk.second)
    third_prompt = torch.cat([talk.second, random_prompt(3, seed=11)], dim=1)
    expected = talk.pair.generate_plainly(third_prompt, max_new_tokens=16)
    drafter.script(expected[0], MIXED)
    output = assisted(talk.pair.attached, third_prompt, drafter, loop, max_new_tokens=16, cache=cache)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("make", [lambda c: DynamicCache(config=c), lambda c: StaticCache(config=c, max_cache_len=80)])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_cache_filled_by_plain_generate(pair, loop, make):
    talk = Conversation(pair)
    cache = make(pair.stock.config)
    plain(pair.stock, pair.prompt, max_new_tokens=FIRST, cache=cache)
    drafter = scripted(talk.second)
    drafter_output = pair.attached.generate(
        talk.whole,
        assistant_model=_forgetful(drafter),
        max_new_tokens=SECOND,
        do_sample=False,
        cache=cache,
        decoding_path=loop,
    )
    assert torch.equal(drafter_output, talk.second)


@pytest.mark.parametrize("loop", LOOPS)
def test_plain_generate_continues_a_drafted_cache(pair, loop):
    talk = Conversation(pair)
    cache = talk.turn_one(loop, scripted(talk.first))
    assert torch.equal(plain(pair.attached, talk.whole, max_new_tokens=SECOND, cache=cache), talk.second)


@pytest.mark.parametrize("loop", LOOPS)
def test_plain_turns_between_drafted_ones(target_pairs, loop):
    talk = Conversation(target_pairs["qwen3_5_moe"])
    drafter = scripted(talk.first)
    cache = talk.turn_one(loop, drafter)
    plain(talk.pair.attached, talk.whole, max_new_tokens=SECOND, cache=cache)
    prompt = torch.cat([talk.second, random_prompt(4, seed=12)], dim=1)
    expected = talk.pair.generate_plainly(prompt, max_new_tokens=12)
    output = assisted(
        talk.pair.attached,
        prompt,
        _forgetful(drafter.script(expected[0], MIXED)),
        loop,
        max_new_tokens=12,
        cache=cache,
    )
    assert torch.equal(output, expected)


@pytest.mark.parametrize("loop", LOOPS)
def test_the_drafters_context_is_kept_in_the_cache(target_pairs, loop):
    talk = Conversation(target_pairs["qwen3_5_moe"])
    drafter = scripted(talk.first)
    cache = talk.turn_one(loop, drafter)
    assert cache.drafter_context.context.length == cache.get_seq_length()
    talk.turn_two(loop, drafter, cache)
    context = cache.drafter_context.context
    assert torch.equal(context.layers[0].positions, torch.arange(talk.second.shape[1] - 1))
    fresh = assisted(
        talk.pair.attached,
        talk.whole,
        drafter.script(talk.second[0], MIXED),
        loop,
        max_new_tokens=SECOND,
        return_dict_in_generate=True,
    ).cache.drafter_context.context
    for ours, theirs in zip(context.layers, fresh.layers, strict=True):
        torch.testing.assert_close(ours.key_values.keys, theirs.key_values.keys, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("loop", LOOPS)
def test_another_drafter_begins_a_context_of_its_own(target_pairs, loop):
    talk = Conversation(target_pairs["qwen3_5_moe"])
    cache = talk.turn_one(loop, scripted(talk.first))
    other = _forgetful(scripted(talk.second))
    assert torch.equal(talk.turn_two(loop, other, cache), talk.second)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_departing_or_shorter_prompt_is_refused_and_the_cache_stays_good(target_pairs, loop):
    talk = Conversation(target_pairs["qwen3_5_moe"])
    drafter = scripted(talk.first)
    cache = talk.turn_one(loop, drafter)
    departing = talk.whole.clone()
    departing[0, 4] += 1
    with pytest.raises(ValueError, match=r"departs from the cache at token 4 of 22\. Pass a prompt that begins"):
        assisted(talk.pair.attached, departing, drafter, loop, max_new_tokens=4, cache=cache)
    for shorter in (talk.first[:, :10], talk.first[:, :-1]):
        with pytest.raises(ValueError, match=r"The cache holds 22 tokens, the prompt has \d+\. Pass the whole"):
            assisted(talk.pair.attached, shorter, drafter, loop, max_new_tokens=4, cache=cache)
    assert torch.equal(talk.turn_two(loop, drafter, cache), talk.second)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_reset_cache_serves_another_conversation(pair, loop):
    talk = Conversation(pair)
    drafter = scripted(talk.first)
    cache = talk.turn_one(loop, drafter)
    cache.reset()
    talk.turn_two(loop, drafter, cache)
    other = random_prompt(6, seed=21)
    cache.reset()
    expected = pair.generate_plainly(other, max_new_tokens=16)
    output = assisted(pair.attached, other, drafter.script(expected[0], MIXED), loop, max_new_tokens=16, cache=cache)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("loop", LOOPS)
def test_left_padding_stays_masked_in_turn_two(pair, loop):
    talk = Conversation(pair)
    pads = torch.zeros(1, 3, dtype=torch.long)
    drafter = scripted(talk.first)
    cache = assisted(
        pair.attached,
        {"input_ids": torch.cat([pads, pair.prompt], 1), "attention_mask": _mask(3, pair.prompt.shape[1])},
        drafter,
        loop,
        max_new_tokens=FIRST,
        return_dict_in_generate=True,
    ).cache
    output = assisted(
        pair.attached,
        {"input_ids": torch.cat([pads, talk.whole], 1), "attention_mask": _mask(3, talk.whole.shape[1])},
        drafter.script(talk.second[0], MIXED),
        loop,
        max_new_tokens=SECOND,
        cache=cache,
    )
    assert torch.equal(output[:, 3:], talk.second)


def _mask(num_padding: int, num_tokens: int) -> torch.Tensor:
    return (torch.arange(num_padding + num_tokens) >= num_padding).long()[None]


def _forgetful(drafter):
    """Allows a context that lacks the rows another call fed."""
    drafter.sees_every_row = False
    return drafter
