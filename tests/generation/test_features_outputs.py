"""What a call gives back: scores, logits, hidden states, attentions, streamed tokens and statistics."""

import threading
import warnings

import pytest
import torch
from transformers import GenerationConfig, TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

from tests.conftest import character_tokenizer
from tests.scenarios import LOOPS, assisted, plain, scripted

# fp32: the block's GDN factors sum in another order than the recurrence, over a few layers.
TOLERANCE = {"atol": 2e-4, "rtol": 1e-4}


class Collecting(BaseStreamer):
    """Keeps the tokens of every put."""

    def __init__(self):
        self.puts, self.has_ended = [], False

    def put(self, value):
        self.puts.append(value.flatten().tolist())

    def end(self):
        self.has_ended = True


@pytest.fixture
def moe(target_pairs):
    return target_pairs["qwen3_5_moe"]


@pytest.mark.parametrize("loop", LOOPS)
def test_scores_logits_and_transition_scores_equal_plain_decoding(pair, loop):
    options = {
        "max_new_tokens": 40,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "repetition_penalty": 1.2,
    }
    expected = plain(pair.stock, pair.prompt, **options)
    output = assisted(pair.attached, pair.prompt, scripted(expected.sequences), loop, **options)
    assert torch.equal(output.sequences, expected.sequences)
    assert len(output.scores) == len(output.logits) == 40
    for name in ("scores", "logits"):
        ours, theirs = torch.cat(getattr(output, name)), torch.cat(getattr(expected, name))
        torch.testing.assert_close(ours, theirs, **TOLERANCE)
    transitions = [
        pair.stock.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
        for out in (output, expected)
    ]
    torch.testing.assert_close(*transitions, **TOLERANCE)


@pytest.mark.parametrize("kind", ["hidden_states", "attentions"])
def test_hidden_states_and_attentions_come_through_the_host_loop(target_pairs, kind):
    pair = target_pairs["qwen3_5"]
    options = {"max_new_tokens": 12, "return_dict_in_generate": True, f"output_{kind}": True}
    attention = pair.stock.config._attn_implementation
    for model in (pair.stock, pair.attached):
        model.set_attn_implementation("eager")
    try:
        expected = plain(pair.stock, pair.prompt, **options)
        # The default path chooses the host's loop and says why.
        output = pair.attached.generate(
            pair.prompt, assistant_model=scripted(expected.sequences), do_sample=False, length_policy="full", **options
        )
    finally:
        for model in (pair.stock, pair.attached):
            model.set_attn_implementation(attention)
    assert torch.equal(output.sequences, expected.sequences)
    assert output.statistics.path == "host"
    assert "hidden states or attentions" in output.statistics.reason
    assert output.statistics.acceptance_length > 1
    ours, theirs = getattr(output, kind), getattr(expected, kind)
    assert len(ours) == len(theirs) == 12
    for step_ours, step_theirs in zip(ours, theirs, strict=True):
        assert len(step_ours) == len(step_theirs)
        for layer_ours, layer_theirs in zip(step_ours, step_theirs, strict=True):
            torch.testing.assert_close(layer_ours, layer_theirs, **TOLERANCE)


def test_the_round_loop_refuses_hidden_states_by_name(moe):
    with pytest.raises(ValueError, match=r"decoding_path='round' cannot serve this call: hidden states.*'host'"):
        assisted(
            moe.attached,
            moe.prompt,
            scripted(moe.reference),
            "round",
            max_new_tokens=4,
            return_dict_in_generate=True,
            output_hidden_states=True,
        )


@pytest.mark.parametrize("loop", LOOPS)
def test_a_streamer_gets_every_token_once_and_in_order(moe, loop):
    streamer = Collecting()
    output = assisted(moe.attached, moe.prompt, scripted(moe.reference), loop, max_new_tokens=40, streamer=streamer)
    assert streamer.puts[0] == moe.prompt[0].tolist()
    assert [token for put in streamer.puts for token in put] == output[0].tolist()
    assert streamer.has_ended
    # Round by round, not in the end.
    assert len(streamer.puts) == 2 + moe.attached.generation_statistics.rounds


@pytest.mark.parametrize("loop", LOOPS)
def test_text_streams_from_another_thread(moe, loop):
    tokenizer = character_tokenizer()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    options = {"max_new_tokens": 30, "streamer": streamer}
    arguments = (moe.attached, moe.prompt, scripted(moe.reference), loop)
    thread = threading.Thread(target=assisted, args=arguments, kwargs=options)
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == tokenizer.decode(moe.reference[0, 9:39])


@pytest.mark.parametrize("loop", LOOPS)
def test_statistics_tell_path_rounds_and_lengths(moe, loop):
    drafter = scripted(moe.reference, [3, 0])
    output = assisted(
        moe.attached,
        moe.prompt,
        drafter,
        loop,
        max_new_tokens=11,
        length_policy="static:6",
        return_dict_in_generate=True,
    )
    statistics = output.statistics
    assert statistics is moe.attached.generation_statistics
    assert (statistics.path, statistics.policy) == (loop, "static:6")
    # The prefill gives one token; then 3 right drafts and the target's own, none and its own, and so on.
    assert statistics.emitted == [4, 1, 4, 1]
    assert statistics.verification_lengths[:2] == [6, 6]
    assert statistics.rounds == 4
    assert statistics.acceptance_length == 10 / 4
    assert statistics.to_dict()["rounds"] == 4


@pytest.mark.parametrize("loop", LOOPS)
def test_options_may_come_as_a_generation_config(moe, loop):
    config = GenerationConfig(
        max_new_tokens=20, do_sample=False, return_dict_in_generate=True, repetition_penalty=1.2, eos_token_id=None
    )
    before = config.to_dict()
    expected = moe.stock.generate(moe.prompt, generation_config=config)
    output = moe.attached.generate(
        moe.prompt,
        generation_config=config,
        assistant_model=scripted(expected.sequences),
        decoding_path=loop,
        length_policy="full",
    )
    assert torch.equal(output.sequences, expected.sequences)
    assert output.statistics.path == loop
    assert config.to_dict() == before
    assert not any(name.startswith("_hybridspec") for name in vars(config))


@pytest.mark.parametrize("loop", LOOPS)
def test_no_call_of_ours_is_deprecated(moe, loop):
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning, PendingDeprecationWarning):
            warnings.filterwarnings("error", category=category, module=r"hf_hybridspec\..*")
        output = assisted(
            moe.attached, moe.prompt, scripted(moe.reference), loop, max_new_tokens=8, return_dict_in_generate=True
        )
    assert output.statistics.rounds
