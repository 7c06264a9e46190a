"""C19, C34: whatever a call did or however it ended, the next one on the same objects is right."""

from contextlib import contextmanager

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from hf_hybridspec.generation import mixin
from tests.scenarios import LOOPS, MIXED, assisted, scripted
from tests.support import random_prompt


class ConsumerGoneError(Exception):
    """What the test's own callback raises."""


class Countdown:
    """Raises at its n-th call."""

    def __init__(self, calls: int, error: type[BaseException]):
        self.calls, self.error = calls, error

    def tick(self):
        self.calls -= 1
        if self.calls == 0:
            raise self.error


class DyingStreamer(BaseStreamer):
    def __init__(self, countdown):
        self.countdown = countdown

    def put(self, value):
        self.countdown.tick()

    def end(self):
        pass


class DyingCriterion(StoppingCriteria):
    def __init__(self, countdown):
        self.countdown = countdown

    def __call__(self, input_ids, scores, **kwargs):
        self.countdown.tick()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class DyingProcessor(LogitsProcessor):
    def __init__(self, countdown):
        self.countdown = countdown

    def __call__(self, input_ids, scores):
        self.countdown.tick()
        return scores


@contextmanager
def dying_layer(pair, countdown):
    """The third layer of the target raises: the layers before it have run, those after it have not."""
    base = pair.attached.model
    decoder = base.language_model if hasattr(base, "language_model") else base
    handle = decoder.layers[2].register_forward_pre_hook(lambda *arguments: countdown.tick())
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def no_layer(pair, countdown):
    yield


FAULTS = {
    "streamer, first token": (lambda c: {"streamer": DyingStreamer(c)}, no_layer, 2, ConsumerGoneError),
    "streamer, later round": (lambda c: {"streamer": DyingStreamer(c)}, no_layer, 4, ConsumerGoneError),
    "criterion, first token": (
        lambda c: {"stopping_criteria": StoppingCriteriaList([DyingCriterion(c)])},
        no_layer,
        1,
        ConsumerGoneError,
    ),
    "criterion, in a block": (
        lambda c: {"stopping_criteria": StoppingCriteriaList([DyingCriterion(c)])},
        no_layer,
        9,
        ConsumerGoneError,
    ),
    "interrupt, first token": (
        lambda c: {"logits_processor": LogitsProcessorList([DyingProcessor(c)])},
        no_layer,
        1,
        KeyboardInterrupt,
    ),
    "interrupt, in a block": (
        lambda c: {"logits_processor": LogitsProcessorList([DyingProcessor(c)])},
        no_layer,
        8,
        KeyboardInterrupt,
    ),
    "interrupt within the prefill": (lambda c: {}, dying_layer, 1, KeyboardInterrupt),
    "interrupt within a verification": (lambda c: {}, dying_layer, 3, KeyboardInterrupt),
}
CACHES = {
    "none": lambda config: None,
    "dynamic": lambda config: DynamicCache(),
    "static": lambda config: StaticCache(config=config, max_cache_len=90),
}


def fail(pair, prompt, drafter, loop, fault, **options):
    """A call that ends in the fault."""
    make_options, break_layer, calls, error = FAULTS[fault]
    countdown = Countdown(calls, error)
    with pytest.raises(error), break_layer(pair, countdown):
        assisted(pair.attached, prompt, drafter, loop, max_new_tokens=24, **make_options(countdown), **options)


@pytest.mark.parametrize("loop", LOOPS)
def test_c19_turn_two_with_the_returned_cache_and_then_a_shorter_prompt(pair, loop):
    drafter = scripted(pair.reference)
    cache = assisted(pair.attached, pair.prompt, drafter, loop, max_new_tokens=30, return_dict_in_generate=True).cache
    whole = torch.cat([pair.reference[:, :39], random_prompt(6, seed=2)], dim=1)
    expected = pair.generate_plainly(whole, max_new_tokens=24)
    second = assisted(pair.attached, whole, drafter.script(expected[0], MIXED), loop, max_new_tokens=24, cache=cache)
    # Fed twice, the prompt would give another text.
    assert torch.equal(second, expected)
    shorter = random_prompt(4, seed=5)
    expected = pair.generate_plainly(shorter, max_new_tokens=24)
    drafter.script(expected[0], MIXED)
    assert torch.equal(assisted(pair.attached, shorter, drafter, loop, max_new_tokens=24), expected)
    # The drafter counts positions from the new prompt.
    assert drafter.proposals[0] == 4


@pytest.mark.parametrize(
    "kind_of_cache, fault",
    [("dynamic", fault) for fault in FAULTS]
    + [("static", fault) for fault in FAULTS if "within" in fault]
    + [("none", "streamer, later round")],
)
@pytest.mark.parametrize("loop", LOOPS)
def test_c34_a_failed_first_turn(target_pairs, loop, kind_of_cache, fault):
    pair = target_pairs["qwen3_5_moe"]
    cache = CACHES[kind_of_cache](pair.attached.config)
    given = {} if cache is None else {"cache": cache}
    drafter = scripted(pair.reference)
    fail(pair, pair.prompt, drafter, loop, fault, **given)
    drafter.script(pair.reference[0], MIXED)
    output = assisted(pair.attached, pair.prompt, drafter, loop, max_new_tokens=24, **given)
    assert torch.equal(output, pair.reference[:, :33])


def two_turns_with_a_fault(pair, loop, fault):
    drafter = scripted(pair.reference)
    cache = assisted(pair.attached, pair.prompt, drafter, loop, max_new_tokens=12, return_dict_in_generate=True).cache
    whole = torch.cat([pair.reference[:, :21], random_prompt(5, seed=2)], dim=1)
    expected = pair.generate_plainly(whole, max_new_tokens=24)
    fail(pair, whole, drafter.script(expected[0], MIXED), loop, fault, cache=cache)
    drafter.script(expected[0], MIXED)
    output = assisted(pair.attached, whole, drafter, loop, max_new_tokens=24, cache=cache)
    return output, expected, cache


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("loop", LOOPS)
def test_c34_a_failed_second_turn(target_pairs, loop, fault):
    output, expected, cache = two_turns_with_a_fault(target_pairs["qwen3_5_moe"], loop, fault)
    assert torch.equal(output, expected)
    context = cache.drafter_context.context
    assert torch.equal(context.layers[0].positions, torch.arange(expected.shape[1] - 1))


@pytest.mark.parametrize("loop", LOOPS)
def test_c34_a_failed_turn_of_every_class(pair, loop):
    output, expected, _ = two_turns_with_a_fault(pair, loop, "interrupt within a verification")
    assert torch.equal(output, expected)


@pytest.mark.parametrize("loop", LOOPS)
def test_c34_fails_if_the_cache_is_left_as_it_broke(target_pairs, loop, monkeypatch):
    @contextmanager
    def left_as_it_broke(cache):
        yield

    monkeypatch.setattr(mixin, "restored_on_failure", left_as_it_broke)
    try:
        output, expected, _ = two_turns_with_a_fault(target_pairs["qwen3_5_moe"], loop, "interrupt, in a block")
    except (ValueError, AssertionError):
        return
    assert not torch.equal(output, expected)
