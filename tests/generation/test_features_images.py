"""Images in a prompt: prefilled whole or in chunks, and over the turns of a chat that keeps its cache."""

import pytest
import torch

from tests.scenarios import IMAGE, LOOPS, VISION_END, VISION_START, assisted, image_inputs, plain, scripted
from tests.support import random_prompt


@pytest.mark.parametrize("num_images", [1, 2])
@pytest.mark.parametrize("loop", LOOPS)
def test_image_prompts_give_the_plain_text(target_pairs, loop, num_images):
    pair, inputs = target_pairs["qwen3_5_moe_vl"], image_inputs(num_images)
    expected = plain(pair.stock, inputs, max_new_tokens=24)
    without_image = plain(pair.stock, inputs["input_ids"], max_new_tokens=24)
    assert not torch.equal(expected, without_image)
    drafter = scripted(expected)
    output = assisted(pair.attached, inputs, drafter, loop, max_new_tokens=24)
    assert torch.equal(output, expected)
    # Positions of the drafter count text tokens: the anchor's index in the sequence.
    assert drafter.proposals[0] == inputs["input_ids"].shape[1]
    assert pair.attached.generation_statistics.acceptance_length > 3


@pytest.mark.parametrize("loop", LOOPS)
def test_turn_two_of_an_image_chat_continues_the_cache(target_pairs, loop):
    pair, inputs = target_pairs["qwen3_5_moe_vl"], image_inputs()
    drafter = scripted(plain(pair.stock, inputs, max_new_tokens=12))
    first = assisted(
        pair.attached,
        inputs,
        drafter,
        loop,
        max_new_tokens=12,
        return_dict_in_generate=True,
    )
    question = torch.cat([first.sequences, random_prompt(5, seed=9)], dim=1)
    second = {
        **inputs,
        "input_ids": question,
        "attention_mask": torch.ones_like(question),
        "mm_token_type_ids": (question == IMAGE).long(),
    }
    expected = plain(pair.stock, second, max_new_tokens=20)
    without_image = {"input_ids": question, "attention_mask": torch.ones_like(question)}
    drafter.script(expected[0], [3, 0, 15])
    output = assisted(pair.attached, without_image, drafter, loop, max_new_tokens=20, cache=first.cache)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("chunk", [3, 7])
@pytest.mark.parametrize("loop", LOOPS)
def test_chunked_prefill_of_images(target_pairs, loop, chunk):
    """The host encodes images before its prefill: one loop splits them, in the other they stay in one piece."""
    pair, inputs = target_pairs["qwen3_5_moe_vl"], image_inputs(2)
    expected = plain(pair.stock, inputs, max_new_tokens=20)
    output = assisted(pair.attached, inputs, scripted(expected), loop, max_new_tokens=20, prefill_chunk_size=chunk)
    assert torch.equal(output, expected)


def _turns(pair, loop, first_images: int, more_images: int):
    """Turn one and its cache; turn two as a processor gives it, the whole conversation with all its images."""
    one, two = image_inputs(first_images), image_inputs(first_images + more_images)
    drafter = scripted(plain(pair.stock, one, max_new_tokens=12))
    first = assisted(pair.attached, one, drafter, loop, max_new_tokens=12, return_dict_in_generate=True)
    image = [VISION_START, *[IMAGE] * 4, VISION_END]
    question = torch.cat([first.sequences, torch.tensor([[9, *image * more_images, 31, 8]])], dim=1)
    second = {
        **two,
        "input_ids": question,
        "attention_mask": torch.ones_like(question),
        "mm_token_type_ids": (question == IMAGE).long(),
    }
    return first, second, drafter


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("more_images", [0, 1, 2])
@pytest.mark.parametrize("loop", LOOPS)
def test_images_of_the_whole_conversation_beside_a_filled_cache(target_pairs, loop, more_images, chunk):
    """Those that the cache holds are dropped, the new ones are seen."""
    pair = target_pairs["qwen3_5_moe_vl"]
    first, second, drafter = _turns(pair, loop, 1, more_images)
    expected = plain(pair.stock, second, max_new_tokens=20)
    drafter.script(expected[0], [3, 0, 15])
    output = assisted(
        pair.attached, second, drafter, loop, max_new_tokens=20, cache=first.cache, prefill_chunk_size=chunk
    )
    assert torch.equal(output, expected)
    if more_images:
        other = {**second, "pixel_values": second["pixel_values"].flip(0)}
        assert not torch.equal(plain(pair.stock, other, max_new_tokens=20), expected)


@pytest.mark.parametrize("loop", LOOPS)
def test_images_that_do_not_belong_to_the_prompt_are_refused_and_the_cache_stays(target_pairs, loop):
    pair = target_pairs["qwen3_5_moe_vl"]
    first, second, drafter = _turns(pair, loop, 1, 1)
    held = first.cache.get_seq_length()
    new_alone = {name: second[name][:, held:] for name in ("input_ids", "mm_token_type_ids")}
    one_image = {"pixel_values": second["pixel_values"][16:], "image_grid_thw": second["image_grid_thw"][1:]}
    for wrong, message in [
        (one_image, "holds 2 images or video frames, image_grid_thw describes 1. Pass those of the whole sequence"),
        (one_image | new_alone, "new tokens alone, images among them.*Pass input_ids, mm_token_type_ids"),
    ]:
        with pytest.raises(ValueError, match=message):
            assisted(pair.attached, second | wrong, drafter, loop, max_new_tokens=20, cache=first.cache)
        assert first.cache.get_seq_length() == held
    expected = plain(pair.stock, second, max_new_tokens=20)
    output = assisted(
        pair.attached, second, drafter.script(expected[0], [3, 0, 15]), loop, max_new_tokens=20, cache=first.cache
    )
    assert torch.equal(output, expected)
