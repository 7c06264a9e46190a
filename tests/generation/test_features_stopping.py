"""Where a call ends: EOS lists, lengths, stopping criteria and stop strings, exactly as in plain decoding."""

import time

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from tests.conftest import character_tokenizer
from tests.scenarios import LOOPS, assisted, plain, scripted

PROMPT_LENGTH = 9


class Recording(StoppingCriteria):
    """Stops at a length; keeps the sequences it was asked about."""

    def __init__(self, length: int):
        self.length, self.prefixes = length, []

    def __call__(self, input_ids, scores, **kwargs):
        self.prefixes.append(tuple(input_ids[0].tolist()))
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length, device=input_ids.device)


@pytest.fixture
def moe(target_pairs):
    return target_pairs["qwen3_5_moe"]


@pytest.mark.parametrize("loop", LOOPS)
def test_the_first_of_several_eos_ids_ends_the_call(moe, loop):
    reference = moe.reference
    eos = [int(reference[0, PROMPT_LENGTH + 30]), int(reference[0, PROMPT_LENGTH + 17])]
    expected = plain(moe.stock, moe.prompt, max_new_tokens=60, eos_token_id=eos)
    assert expected.shape[1] < PROMPT_LENGTH + 60
    output = assisted(moe.attached, moe.prompt, scripted(reference), loop, max_new_tokens=60, eos_token_id=eos)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("loop", LOOPS)
def test_min_new_tokens_holds_eos_back(moe, loop):
    options = {"max_new_tokens": 40, "min_new_tokens": 24, "eos_token_id": int(moe.reference[0, PROMPT_LENGTH + 17])}
    expected = plain(moe.stock, moe.prompt, **options)
    assert expected.shape[1] > PROMPT_LENGTH + 18
    output = assisted(moe.attached, moe.prompt, scripted(expected), loop, **options)
    assert torch.equal(output, expected)
    assert moe.attached.generation_statistics.acceptance_length > 2


@pytest.mark.parametrize("length", [1, 2, 5, 13])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_criterion_ends_the_call_at_its_token(moe, loop, length):
    criteria = StoppingCriteriaList([Recording(PROMPT_LENGTH + length)])
    output = assisted(
        moe.attached, moe.prompt, scripted(moe.reference), loop, max_new_tokens=40, stopping_criteria=criteria
    )
    assert torch.equal(output, moe.reference[:, : PROMPT_LENGTH + length])


def test_the_round_loop_asks_a_criterion_about_the_prefixes_of_plain_decoding(moe):
    asked, expected = Recording(PROMPT_LENGTH + 29), Recording(PROMPT_LENGTH + 29)
    plain(moe.stock, moe.prompt, max_new_tokens=40, stopping_criteria=StoppingCriteriaList([expected]))
    assisted(
        moe.attached,
        moe.prompt,
        scripted(moe.reference),
        "round",
        max_new_tokens=40,
        stopping_criteria=StoppingCriteriaList([asked]),
    )
    assert asked.prefixes == expected.prefixes


def test_the_round_loop_shows_a_criterion_the_scores_of_plain_decoding(moe):
    class CountsScores(StoppingCriteria):
        def __init__(self):
            self.counts = []

        def __call__(self, input_ids, scores, **kwargs):
            self.counts.append(len(scores))
            return torch.zeros(1, dtype=torch.bool)

    criterion = CountsScores()
    assisted(
        moe.attached,
        moe.prompt,
        scripted(moe.reference),
        "round",
        max_new_tokens=20,
        stopping_criteria=StoppingCriteriaList([criterion]),
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert criterion.counts == list(range(1, 21))


@pytest.mark.parametrize("loop", LOOPS)
def test_a_stop_string_ends_ids_scores_text_and_cache_together(moe, loop):
    tokenizer = character_tokenizer()
    text = tokenizer.decode(moe.reference[0, PROMPT_LENGTH:])
    options = {
        "max_new_tokens": 60,
        "stop_strings": [text[20:23]],
        "tokenizer": tokenizer,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    expected = plain(moe.stock, moe.prompt, **options)
    output = assisted(moe.attached, moe.prompt, scripted(moe.reference), loop, **options)
    assert torch.equal(output.sequences, expected.sequences)
    assert output.sequences.shape[1] == PROMPT_LENGTH + 23
    assert len(output.scores) == 23
    assert tokenizer.decode(output.sequences[0, PROMPT_LENGTH:]) == text[:23]
    # The newest token is in no cache yet, as in plain decoding.
    assert output.cache.get_seq_length() == expected.cache.get_seq_length() == PROMPT_LENGTH + 22
    assert torch.equal(output.cache.token_ids, output.sequences[:, :-1])


@pytest.mark.parametrize("loop", LOOPS)
def test_max_time_ends_the_call_after_the_round_under_way(moe, loop):
    drafter = scripted(moe.reference, [15])
    propose = drafter.propose

    def slow_propose(*args):
        time.sleep(0.3)
        return propose(*args)

    drafter.propose = slow_propose
    output = assisted(moe.attached, moe.prompt, drafter, loop, max_new_tokens=200, max_time=0.2)
    # The prefill's token, and one round of sixteen.
    assert output.shape[1] == PROMPT_LENGTH + 17
    assert torch.equal(output, moe.reference[:, : output.shape[1]])
