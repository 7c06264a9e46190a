"""C6, C20, C21: the first token after the prefill, prompts shorter than the convolution, a padded row."""

import pytest
import torch

import hf_hybridspec
from tests.scenarios import LOOPS, assisted, plain, scripted
from tests.support import random_prompt, random_target


@pytest.mark.parametrize("loop", LOOPS)
def test_c06_a_near_tie_at_the_first_token_does_not_flip(loop):
    """The prefill must run the same rows in the same shape with and without a drafter: a flip is one rounding away."""
    for seed in range(6):
        stock, prompt = random_target(), random_prompt(23, seed=seed)
        head = stock.get_output_embeddings().weight
        with torch.no_grad():
            first = int(stock(prompt).logits[0, -1].argmax())
            # Two tokens whose logits differ by rounding alone.
            twin = (first + 1) % 120
            head[twin] = head[first] * (1 + 1e-7 * torch.randn_like(head[first]))
        attached = hf_hybridspec.attach(random_target())
        attached.load_state_dict(stock.state_dict())
        options = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}
        expected = plain(stock, prompt, **options)
        output = assisted(attached, prompt, scripted(expected.sequences), loop, **options)
        gap = expected.logits[0][0, [first, twin]]
        assert (gap[0] - gap[1]).abs() < 1e-5
        assert torch.equal(output.sequences, expected.sequences)
        assert torch.equal(output.logits[0], expected.logits[0])


@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("loop", LOOPS)
def test_c20_prompts_shorter_than_the_convolution(pair, loop, length):
    prompt = random_prompt(length, seed=5)
    expected = pair.generate_plainly(prompt, max_new_tokens=24)
    output = assisted(
        pair.attached,
        prompt,
        scripted(expected, [0, 1, 2, 15]),
        loop,
        max_new_tokens=24,
        # Both kinds of cache see an even and an odd length in every loop.
        cache_implementation="static" if (length > 2) == (loop == "round") else "dynamic",
    )
    assert torch.equal(output, expected)


@pytest.mark.parametrize("num_padding", [1, 7])
@pytest.mark.parametrize("length", [2, 9])
@pytest.mark.parametrize("loop", LOOPS)
def test_c21_pads_reach_neither_convolution_nor_state(pair, loop, length, num_padding):
    prompt = random_prompt(length, seed=5)
    expected = pair.generate_plainly(prompt, max_new_tokens=24)
    # Pads that would show: no zero token.
    padded = torch.cat([torch.full((1, num_padding), 77), prompt], dim=1)
    mask = (torch.arange(padded.shape[1]) >= num_padding).long()[None]
    inputs = {"input_ids": padded, "attention_mask": mask}
    output = assisted(pair.attached, inputs, scripted(expected), loop, max_new_tokens=24)
    assert torch.equal(output[:, num_padding:], expected)
    unmasked = plain(pair.stock, padded, max_new_tokens=24)
    assert not torch.equal(unmasked[:, num_padding:], expected)
