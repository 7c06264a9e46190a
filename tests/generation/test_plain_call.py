"""Plain generate() on fixed buffers: the host's tokens, caches and stops without a drafter."""

import pytest
import torch
from transformers import DynamicCache, StaticCache, set_seed
from transformers.generation.stopping_criteria import StoppingCriteriaList

from hf_hybridspec.generation.round_engine import eager_device_rounds
from tests.generation.device_helpers import PROMPT_LENGTH, StopAt, expected_of, unpadded
from tests.scenarios import plain
from tests.support import random_prompt


@pytest.fixture(autouse=True)
def device_rounds():
    with eager_device_rounds():
        yield


def test_plain_decoding_of_every_class(pair):
    pair.attached._hybridspec.statistics = None
    output = pair.attached.generate(pair.prompt, max_new_tokens=40, do_sample=False)
    assert torch.equal(output, expected_of(pair, 40))
    statistics = pair.attached.generation_statistics
    assert (statistics.path, statistics.policy, statistics.rounds) == ("graphs", "plain", 39)


@pytest.mark.parametrize("make", [lambda c: DynamicCache(config=c), lambda c: StaticCache(config=c, max_cache_len=90)])
def test_plain_turns_on_a_stock_cache(pair, make):
    """Turn by turn with the stock model's own caches, in the host's loop and in ours."""
    cache, prompt = make(pair.attached.config), pair.prompt
    for turn, path in enumerate(("graphs", "host", "graphs")):
        inputs = unpadded(prompt)
        output = pair.attached.generate(
            **inputs, max_new_tokens=12, do_sample=False, cache=cache, decoding_path=path, return_dict_in_generate=True
        )
        assert torch.equal(output.sequences, plain(pair.stock, inputs, max_new_tokens=12))
        assert output.cache is cache and int(cache.get_seq_length()) == output.sequences.shape[1] - 1
        prompt = torch.cat([output.sequences, random_prompt(3, seed=turn)], dim=1)


@pytest.mark.parametrize("place", [0, 5])
def test_plain_decoding_stops_where_the_host_does(target_pairs, place):
    pair = target_pairs["qwen3_5_moe"]
    stop = int(pair.reference[0, PROMPT_LENGTH + place])
    options = [
        {"eos_token_id": [stop]},
        {"stopping_criteria": StoppingCriteriaList([StopAt(PROMPT_LENGTH + place + 1)])},
    ]
    for option in options:
        outputs = [
            model.generate(pair.prompt, max_new_tokens=30, do_sample=False, **option)
            for model in (pair.stock, pair.attached)
        ]
        assert torch.equal(*outputs) and outputs[0].shape[1] <= PROMPT_LENGTH + place + 1


def test_plain_sampling_follows_the_seed(target_pairs):
    pair = target_pairs["qwen3_5_moe"]
    outputs = []
    for seed in (1, 1, 2):
        set_seed(seed)
        outputs.append(pair.attached.generate(pair.prompt, max_new_tokens=30, do_sample=True, top_p=0.9).tolist())
    assert outputs[0] == outputs[1] != outputs[2]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_return_sequences": 2, "do_sample": True}, "several sequences"),
        ({"repetition_penalty": 1.2}, "RepetitionPenaltyLogitsProcessor works on the host's scores"),
        ({"return_dict_in_generate": True, "output_scores": True}, "scores or logits"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "hidden states"),
        ({"use_cache": False}, "there is no cache"),
    ],
)
def test_what_plain_rounds_cannot_do_is_left_to_the_host(target_pairs, options, reason):
    pair = target_pairs["qwen3_5_moe"]
    pair.attached._hybridspec.statistics = None
    with pytest.raises(ValueError, match=f"decoding_path='graphs' cannot serve this call: .*{reason}"):
        pair.attached.generate(
            pair.prompt, max_new_tokens=5, decoding_path="graphs", **{"do_sample": False, **options}
        )
    set_seed(0)
    output = pair.attached.generate(pair.prompt, max_new_tokens=5, **{"do_sample": False, **options})
    set_seed(0)
    expected = pair.stock.generate(pair.prompt, max_new_tokens=5, **{"do_sample": False, **options})
    sequences = [each if isinstance(each, torch.Tensor) else each.sequences for each in (output, expected)]
    assert torch.equal(*sequences)
    assert pair.attached.generation_statistics is None
