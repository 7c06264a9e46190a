"""What a call may be given: embeddings, images, padding, chunks, caches of the user, adapters, devices, pipelines."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache, pipeline

import hf_hybridspec
from hf_hybridspec.modeling.hybrid_cache import HybridCache
from tests.conftest import character_tokenizer
from tests.scenarios import LOOPS, assisted, plain, scripted
from tests.support import random_prompt, random_target


@pytest.fixture
def moe(target_pairs):
    return target_pairs["qwen3_5_moe"]


@pytest.mark.parametrize("loop", LOOPS)
def test_embeddings_alone_give_what_their_ids_give(pair, loop):
    embeds = pair.attached.get_input_embeddings()(pair.prompt).detach()
    new = pair.reference[:, 9:49]
    output = assisted(pair.attached, {"inputs_embeds": embeds}, scripted(pair.reference), loop, max_new_tokens=40)
    assert torch.equal(output, new)
    assert pair.attached.generation_statistics.acceptance_length > 3


@pytest.mark.parametrize("cache_implementation", ["dynamic", "static"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_left_padded_row_gives_what_the_bare_row_gives(pair, loop, cache_implementation):
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), pair.prompt], dim=1)
    mask = (torch.arange(padded.shape[1]) >= 5).long()[None]
    sequence = torch.cat([padded[:, :5], pair.reference], dim=1)
    drafter = scripted(pair.reference)
    output = assisted(
        pair.attached,
        {"input_ids": padded, "attention_mask": mask},
        drafter,
        loop,
        max_new_tokens=40,
        cache_implementation=cache_implementation,
    )
    assert torch.equal(output, sequence[:, : output.shape[1]])
    # Padding has no position: the drafter is asked as for the bare row.
    assert drafter.proposals[0] == pair.prompt.shape[1]


@pytest.mark.parametrize("chunk", [1, 3, 16, 64])
@pytest.mark.parametrize("loop", LOOPS)
def test_chunked_prefill_gives_the_same_text_and_the_whole_context(moe, loop, chunk):
    prompt = random_prompt(40, seed=4)
    expected = moe.generate_plainly(prompt, max_new_tokens=24)
    calls = []
    handle = moe.attached.model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(
            kwargs["inputs_embeds"] if kwargs.get("inputs_embeds") is not None else kwargs["input_ids"]
        ),
        with_kwargs=True,
    )
    drafter = scripted(expected)
    try:
        output = assisted(
            moe.attached,
            prompt,
            drafter,
            loop,
            max_new_tokens=24,
            prefill_chunk_size=chunk,
            return_dict_in_generate=True,
        )
    finally:
        handle.remove()
    assert torch.equal(output.sequences, expected)
    num_chunks = -(-40 // chunk)
    assert [rows.shape[1] for rows in calls[:num_chunks]] == [min(chunk, 40 - chunk * i) for i in range(num_chunks)]
    context = output.cache.drafter_context.context
    assert context.length == output.cache.get_seq_length()
    assert torch.equal(context.layers[0].positions, torch.arange(context.length))


@pytest.mark.parametrize("num_new", [1, 2, 24])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_users_static_cache_may_be_just_large_enough(pair, loop, num_new):
    cache = StaticCache(config=pair.attached.config, max_cache_len=9 + num_new - 1)
    output = assisted(pair.attached, pair.prompt, scripted(pair.reference), loop, max_new_tokens=num_new, cache=cache)
    assert torch.equal(output, pair.reference[:, : 9 + num_new])
    assert int(cache.get_seq_length()) == 9 + num_new - 1


@pytest.mark.parametrize("make_cache", [lambda config: DynamicCache(), lambda config: DynamicCache(config=config)])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_users_dynamic_cache_is_filled(pair, loop, make_cache):
    cache = make_cache(pair.attached.config)
    output = assisted(pair.attached, pair.prompt, scripted(pair.reference), loop, max_new_tokens=30, cache=cache)
    assert torch.equal(output, pair.reference[:, :39])
    assert isinstance(cache, HybridCache)
    assert cache.get_seq_length() == 38


@pytest.mark.parametrize("loop", LOOPS)
def test_static_cache_by_name(pair, loop):
    output = assisted(
        pair.attached,
        pair.prompt,
        scripted(pair.reference),
        loop,
        max_new_tokens=30,
        cache_implementation="static",
    )
    assert torch.equal(output, pair.reference[:, :39])


@pytest.mark.parametrize("loop", LOOPS)
def test_beams_are_searched_plainly_with_a_warning(moe, loop, caplog):
    options = {"max_new_tokens": 8, "num_beams": 2, "do_sample": False}
    expected = moe.stock.generate(moe.prompt, **options)
    with caplog.at_level("WARNING"):
        output = moe.attached.generate(moe.prompt, assistant_model=scripted(moe.reference), **options)
    assert torch.equal(output, expected)
    assert "assisted generate is only supported with Greedy Search and Sample" in caplog.text


@pytest.mark.parametrize("loop", LOOPS)
def test_the_attached_drafter_is_the_default(loop, moe):
    drafter = scripted(moe.reference)
    model = hf_hybridspec.attach(random_target(), drafter=drafter, length_policy="static:8")
    output = model.generate(moe.prompt, max_new_tokens=20, do_sample=False, decoding_path=loop)
    assert torch.equal(output, moe.reference[:, :29])
    assert model.generation_statistics.policy == "static:8"
    assert drafter.proposals


def test_the_attached_drafter_steps_aside_where_it_cannot_serve(moe, caplog):
    drafter = scripted(moe.reference)
    model = hf_hybridspec.attach(random_target(), drafter=drafter)
    batch = torch.cat([moe.prompt, random_prompt(9, seed=5)])
    for inputs, options in ((moe.prompt, {"num_beams": 2}), (batch, {})):
        assert torch.equal(
            model.generate(inputs, max_new_tokens=6, do_sample=False, **options),
            moe.stock.generate(inputs, max_new_tokens=6, do_sample=False, **options),
        )
    # The host's own refusal, not one of a drafter that nobody asked for.
    with pytest.raises(ValueError, match="QuantizedCache"):
        model.generate(moe.prompt, max_new_tokens=6, do_sample=False, cache_implementation="quantized")
    assert not drafter.proposals
    assert "left out of this call: cache_implementation='quantized' cannot be rolled back" in caplog.text


@pytest.mark.parametrize("given_as", ["argument", "default"])
def test_a_text_generation_pipeline_drafts(moe, given_as):
    tokenizer, drafter = character_tokenizer(), scripted(moe.reference)
    model = hf_hybridspec.attach(random_target(), drafter=drafter)
    assistant = {"assistant_model": drafter} if given_as == "argument" else {}
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu", **assistant)
    prompt = tokenizer.decode(moe.prompt[0])
    text = generator(prompt, max_new_tokens=20, do_sample=False)[0]["generated_text"]
    assert text == tokenizer.decode(moe.reference[0, :29])
    assert drafter.proposals
    assert model.generation_statistics.rounds


@pytest.mark.parametrize("loop", LOOPS)
def test_a_target_loaded_with_a_device_map(saved_pair, loop):
    model = AutoModelForCausalLM.from_pretrained(saved_pair.target, device_map={"": "cpu"})
    model = hf_hybridspec.attach(model)
    stock = AutoModelForCausalLM.from_pretrained(saved_pair.target)
    prompt = random_prompt(9, seed=1)
    expected = plain(stock, prompt, max_new_tokens=24)
    output = assisted(model, prompt, scripted(expected), loop, max_new_tokens=24)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("loop", LOOPS)
def test_the_drafter_may_have_another_dtype(moe, loop, dtype):
    drafter = scripted(moe.reference).to(dtype)
    output = assisted(moe.attached, moe.prompt, drafter, loop, max_new_tokens=30)
    assert torch.equal(output, moe.reference[:, :39])


@pytest.mark.parametrize("loop", LOOPS)
def test_a_random_seed_of_numpy_or_python_is_not_drawn_from(moe, loop):
    state = np.random.get_state()[1].tolist()
    assisted(moe.attached, moe.prompt, scripted(moe.reference), loop, max_new_tokens=8, do_sample=True)
    assert np.random.get_state()[1].tolist() == state


@pytest.mark.parametrize("loop", LOOPS)
def test_an_adapted_target_through_its_peft_model(moe, loop):
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["in_proj_qkv", "out_proj", "q_proj", "o_proj"], init_lora_weights=False)
    adapted = get_peft_model(random_target(), config).eval()
    expected = adapted.generate(input_ids=moe.prompt, max_new_tokens=30, do_sample=False)
    assert not torch.equal(expected, moe.reference[:, :39])
    hf_hybridspec.attach(adapted)
    output = assisted(adapted, {"input_ids": moe.prompt}, scripted(expected), loop, max_new_tokens=30)
    assert torch.equal(output, expected)
