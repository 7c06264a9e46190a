"""C15 to C18, C26: a call ends at its exact token, wherever in a block that token stands."""

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from tests.conftest import character_tokenizer
from tests.scenarios import LOOPS, assisted, scripted

# A round of sixteen tokens follows the prefill's: these positions cover a whole block, its ends, and the next block's.
POSITIONS = range(18)


@pytest.fixture
def moe(target_pairs):
    return target_pairs["qwen3_5_moe"]


def end_of(pair, token: int) -> int:
    """Length of the sequence that ends with the first generated `token`."""
    return 9 + pair.reference[0, 9:].tolist().index(token) + 1


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("loop", LOOPS)
def test_c15_eos_at_every_position_of_the_block(moe, loop, position):
    eos = int(moe.reference[0, 9 + position])
    expected = moe.reference[:, : end_of(moe, eos)]
    drafter = scripted(moe.reference, [15])
    output = assisted(moe.attached, moe.prompt, drafter, loop, max_new_tokens=24, eos_token_id=eos)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("loop", LOOPS)
def test_c16_a_two_token_stop_string_at_every_position(moe, loop, position):
    tokenizer = character_tokenizer()
    text = tokenizer.decode(moe.reference[0, 9:])
    stop = text[position : position + 2]
    expected = moe.reference[:, : 9 + text.index(stop) + 2]
    output = assisted(
        moe.attached,
        moe.prompt,
        scripted(moe.reference, [15]),
        loop,
        max_new_tokens=24,
        stop_strings=[stop],
        tokenizer=tokenizer,
    )
    assert torch.equal(output, expected)


@pytest.mark.parametrize("loop", LOOPS)
def test_c17_eos_as_the_first_token(pair, loop):
    eos = int(pair.reference[0, 9])
    drafter = scripted(pair.reference)
    output = assisted(pair.attached, pair.prompt, drafter, loop, max_new_tokens=24, eos_token_id=eos)
    assert torch.equal(output, pair.reference[:, :10])
    assert not drafter.proposals


@pytest.mark.parametrize("num_new", [1, 2, 3, 7, 8, 15, 16, 17])
@pytest.mark.parametrize("cache_implementation", ["dynamic", "static"])
@pytest.mark.parametrize("loop", LOOPS)
def test_c18_exactly_as_many_tokens_as_asked(moe, loop, cache_implementation, num_new):
    for num_right in ([15], [0], [3]):
        output = assisted(
            moe.attached,
            moe.prompt,
            scripted(moe.reference, num_right),
            loop,
            max_new_tokens=num_new,
            cache_implementation=cache_implementation,
        )
        assert torch.equal(output, moe.reference[:, : 9 + num_new])


class LastTokenIs(StoppingCriteria):
    def __init__(self, token: int):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


@pytest.mark.parametrize("position", [0, 1, 2, 8, 15, 16, 17])
@pytest.mark.parametrize("loop", LOOPS)
def test_c26_a_criterion_on_the_last_token(moe, loop, position):
    token = int(moe.reference[0, 9 + position])
    criteria = StoppingCriteriaList([LastTokenIs(token)])
    output = assisted(
        moe.attached,
        moe.prompt,
        scripted(moe.reference, [15]),
        loop,
        max_new_tokens=24,
        stopping_criteria=criteria,
        return_dict_in_generate=True,
        output_scores=True,
    )
    expected = moe.reference[:, : end_of(moe, token)]
    assert torch.equal(output.sequences, expected)
    assert len(output.scores) == expected.shape[1] - 9
    # Cache and sequence agree: the next turn continues from here.
    assert output.cache.get_seq_length() == expected.shape[1] - 1
