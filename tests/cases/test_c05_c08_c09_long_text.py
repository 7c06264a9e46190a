"""C5, C8, C9: long answers are, to the end, what plain decoding gives."""

import pytest
import torch

from hf_hybridspec.modeling.block_buffers import BlockBuffers
from tests.conftest import character_tokenizer
from tests.scenarios import LOOPS, assisted, scripted

COUNTING = "Count from 1 to 20, one number per line"
CODE_EDIT = """<code>
def area(width, height):
    return width * height

def volume(width, height, depth):
    return area(width, height) * depth
</code>
Rename height to length.
<update>
"""


def ids_of(text: str) -> torch.Tensor:
    return character_tokenizer()(text, return_tensors="pt").input_ids


@pytest.mark.parametrize("loop", LOOPS)
def test_c05_five_drafts_skip_nothing(pair, loop):
    prompt = ids_of(COUNTING)
    expected = pair.generate_plainly(prompt, max_new_tokens=60)
    drafter = scripted(expected, [5, 2, 0, 4])
    output = assisted(pair.attached, prompt, drafter, loop, max_new_tokens=60, length_policy="static:6")
    tokenizer = character_tokenizer()
    assert tokenizer.decode(output[0]) == tokenizer.decode(expected[0])
    assert max(pair.attached.generation_statistics.emitted) == 6


def test_c08_prompt_lookup_on_a_code_edit(target_pairs):
    pair = target_pairs["qwen3_5_moe"]
    prompt = ids_of(CODE_EDIT)
    expected = pair.generate_plainly(prompt, max_new_tokens=300)
    rows = []
    handle = pair.attached.model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        output = pair.attached.generate(prompt, prompt_lookup_num_tokens=5, max_new_tokens=300, do_sample=False)
    finally:
        handle.remove()
    assert torch.equal(output, expected)
    # Drafts were verified, and most of them rejected: the case in which a state could be left advanced.
    assert sum(count > 1 for count in rows[1:]) > 20


@pytest.mark.parametrize("loop", LOOPS)
def test_c08_a_drafter_on_a_code_edit(target_pairs, loop):
    pair = target_pairs["qwen3_5_moe"]
    prompt = ids_of(CODE_EDIT)
    expected = pair.generate_plainly(prompt, max_new_tokens=300)
    output = assisted(pair.attached, prompt, scripted(expected), loop, max_new_tokens=120)
    assert torch.equal(output, expected[:, : output.shape[1]])


@pytest.mark.parametrize("loop", LOOPS)
def test_c09_five_hundred_tokens(target_pairs, loop):
    pair = target_pairs["qwen3_5_moe"]
    assert pair.reference.shape[1] == 509
    output = assisted(pair.attached, pair.prompt, scripted(pair.reference), loop, max_new_tokens=500)
    assert torch.equal(output, pair.reference)


@pytest.mark.parametrize("loop", LOOPS)
def test_c09_fails_if_nothing_is_committed_to_the_states(target_pairs, loop, monkeypatch):
    pair = target_pairs["qwen3_5_moe"]
    monkeypatch.setattr(BlockBuffers, "commit", lambda self, length: self.discard())
    output = assisted(pair.attached, pair.prompt, scripted(pair.reference), loop, max_new_tokens=60)
    assert not torch.equal(output, pair.reference[:, :69])
