"""Logits processors: greedy output equals plain decoding with them; sampling is reproducible and obeys them."""

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, SynthIDTextWatermarkingConfig, set_seed

from tests.scenarios import LOOPS, assisted, plain, scripted

GREEDY = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram": {"no_repeat_ngram_size": 1},
    "bad_words": {"bad_words_ids": [[n] for n in range(3, 60, 3)] + [[1, 2]]},
    "suppress": {"suppress_tokens": list(range(20, 60))},
    "begin_suppress": {"begin_suppress_tokens": list(range(1, 90))},
    "prefix_allowed": {
        "prefix_allowed_tokens_fn": lambda batch, ids: [(int(ids[-1]) * 7 + k) % 120 for k in range(5)]
    },
    "sequence_bias": {"sequence_bias": [[[7], 3.0], [[8, 9], -4.0]]},
    "forced_eos": {"forced_eos_token_id": 11},
    "exponential_decay": {"exponential_decay_length_penalty": (5, 1.2), "eos_token_id": 12},
    "renormalize": {"renormalize_logits": True, "repetition_penalty": 1.1},
}
SAMPLING = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.5, "top_k": 0},
    "min_p": {"min_p": 0.3, "top_k": 0},
    "typical_p": {"typical_p": 0.4, "top_k": 0},
    "penalty": {"repetition_penalty": 1.5, "top_k": 5},
}


class Recording(LogitsProcessor):
    """Changes nothing; keeps the sequences it was asked about."""

    def __init__(self):
        self.prefixes = []

    def __call__(self, input_ids, scores):
        self.prefixes.append(tuple(input_ids[0].tolist()))
        return scores


@pytest.fixture
def moe(target_pairs):
    return target_pairs["qwen3_5_moe"]


@pytest.mark.parametrize("name", GREEDY)
@pytest.mark.parametrize("loop", LOOPS)
def test_greedy_output_equals_plain_decoding(moe, loop, name):
    expected = plain(moe.stock, moe.prompt, max_new_tokens=32, **GREEDY[name])
    without = moe.reference[:, : expected.shape[1]]
    assert name == "renormalize" or not torch.equal(expected, without)
    output = assisted(moe.attached, moe.prompt, scripted(expected), loop, max_new_tokens=32, **GREEDY[name])
    assert torch.equal(output, expected)
    assert moe.attached.generation_statistics.rounds > 1


def test_the_round_loop_shows_a_processor_the_prefixes_of_plain_decoding(moe):
    asked, expected = Recording(), Recording()
    plain(moe.stock, moe.prompt, max_new_tokens=30, logits_processor=LogitsProcessorList([expected]))
    assisted(
        moe.attached,
        moe.prompt,
        scripted(moe.reference),
        "round",
        max_new_tokens=30,
        logits_processor=LogitsProcessorList([asked]),
    )
    # The last round may verify a row beyond the length limit.
    assert asked.prefixes[: len(expected.prefixes)] == expected.prefixes


@pytest.mark.parametrize("name", SAMPLING)
@pytest.mark.parametrize("loop", LOOPS)
def test_sampling_is_reproducible_and_never_leaves_what_the_processors_allow(moe, loop, name):
    options = {"max_new_tokens": 12, "do_sample": True, **SAMPLING[name]}
    drafter = scripted(moe.reference, [15])
    outputs = []
    for seed in (5, 5, 6):
        set_seed(seed)
        outputs.append(
            assisted(
                moe.attached,
                moe.prompt,
                drafter,
                loop,
                length_policy="static:4",
                return_dict_in_generate=True,
                output_scores=True,
                **options,
            )
        )
    first, again, other = outputs
    assert torch.equal(first.sequences, again.sequences)
    assert not torch.equal(first.sequences, other.sequences)
    for token, scores in zip(first.sequences[0, moe.prompt.shape[1] :], first.scores, strict=True):
        assert scores[0, token] > -torch.inf


@pytest.mark.parametrize("scale", [1.5, 0.5])
@pytest.mark.parametrize("assistant", ["drafter", "prompt_lookup"])
def test_guidance_is_refused_with_the_reason(moe, assistant, scale):
    options = {"assistant_model": scripted(moe.reference)}
    if assistant == "prompt_lookup":
        options = {"prompt_lookup_num_tokens": 3}
    with pytest.raises(ValueError, match=r"guidance_scale=.*state of its own.*Leave out"):
        moe.attached.generate(moe.prompt, max_new_tokens=4, do_sample=False, guidance_scale=scale, **options)


def test_guidance_without_an_assistant_stays_transformers_own(moe):
    options = {"max_new_tokens": 6, "guidance_scale": 1.5}
    assert torch.equal(plain(moe.attached, moe.prompt, **options), plain(moe.stock, moe.prompt, **options))


def watermark() -> SynthIDTextWatermarkingConfig:
    return SynthIDTextWatermarkingConfig(keys=[654, 400, 836, 123], ngram_len=3, context_history_size=64)


def test_a_stateful_watermark_follows_accepted_tokens_in_the_round_loop(moe):
    options = {"max_new_tokens": 24, "do_sample": True, "top_k": 1, "watermarking_config": watermark()}
    # One candidate a token: the same text, whatever is drawn.
    output = assisted(moe.attached, moe.prompt, scripted(moe.reference), "round", **options)
    assert torch.equal(output, moe.reference[:, : output.shape[1]])


@pytest.mark.parametrize("options", [{"decoding_path": "host"}, {"prompt_lookup_num_tokens": 3}])
def test_a_stateful_watermark_is_refused_in_the_host_loop(moe, options):
    if "decoding_path" in options:
        options = {**options, "assistant_model": scripted(moe.reference)}
    with pytest.raises(ValueError, match=r"SynthID.*state"):
        moe.attached.generate(moe.prompt, max_new_tokens=4, do_sample=True, watermarking_config=watermark(), **options)
