"""Taps see every forward, in the drafter's order, and leave nothing behind."""

import pytest
import torch

from hf_hybridspec.modeling.taps import Taps
from hf_hybridspec.modeling.target import text_model
from tests.support import random_prompt

PROMPT = random_prompt(7, seed=2)


@torch.no_grad()
def test_taps_are_the_layers_outputs(pair):
    """`hidden_states[i + 1]` of the host is the output of layer i; the listed order is kept."""
    expected = pair.attached(input_ids=PROMPT, output_hidden_states=True).hidden_states
    seen = []
    with Taps(text_model(pair.attached), (2, 0), seen.append):
        pair.attached(input_ids=PROMPT)
        pair.attached(input_ids=PROMPT[:, :3])
    assert [tuple(features.shape) for features in seen] == [(7, 64), (3, 64)]
    assert torch.equal(seen[0], torch.cat([expected[3][0], expected[1][0]], dim=-1))
    pair.attached(input_ids=PROMPT)
    assert len(seen) == 2


@torch.no_grad()
def test_hooks_are_removed_after_a_failure(target_pairs):
    model = text_model(target_pairs["qwen3_5_moe"].attached)
    before = [len(layer._forward_hooks) for layer in model.layers]

    def fail(features):
        raise InterruptedError

    with pytest.raises(InterruptedError), Taps(model, (0, 2), fail):
        model(input_ids=PROMPT)
    assert [len(layer._forward_hooks) for layer in model.layers] == before
