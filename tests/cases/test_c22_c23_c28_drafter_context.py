"""C22, C23, C28: what a drafter is shown of the sequence: its window, text positions, the layers it names."""

import pytest
import torch

from hf_hybridspec.modeling.dflash.modeling_dflash import DFlashDrafter
from tests.scenarios import LOOPS, assisted, image_inputs, plain, scripted
from tests.support import drafter_config, random_prompt

WINDOW = 12


class Watching(DFlashDrafter):
    """Keeps the features and positions it observed, the blocks it proposed and the bytes of its context."""

    def watch(self) -> "Watching":
        self.features, self.positions, self.drafts, self.num_bytes = [], [], [], []
        return self

    def observe(self, context, features, positions):
        super().observe(context, features, positions)
        self.features.append(features.clone())
        self.positions.append(positions.clone())
        self.num_bytes.append(context.num_bytes)

    def propose(self, context, anchor, position, recurrent_states=None):
        draft = super().propose(context, anchor, position, recurrent_states)
        self.drafts.append((anchor.clone(), int(position), draft.tokens.clone()))
        return draft


def watching(**overrides) -> Watching:
    torch.manual_seed(1)
    return Watching(drafter_config(block_size=8, **overrides)).eval().watch()


@pytest.mark.parametrize("loop", LOOPS)
def test_c22_a_window_smaller_than_the_prompt(target_pairs, loop):
    pair = target_pairs["qwen3_5_moe"]
    prompt = random_prompt(5 * WINDOW, seed=4)
    drafter = watching(layer_types=["sliding_attention"] * 2, sliding_window=WINDOW)
    expected = pair.generate_plainly(prompt, max_new_tokens=40)
    assert torch.equal(assisted(pair.attached, prompt, drafter, loop, max_new_tokens=40), expected)
    assert drafter.drafts[-1][1] > 6 * WINDOW
    # Memory is bounded by the window: twice its rows of keys, values and positions a layer.
    bytes_per_row = 2 * drafter.config.num_key_value_heads * drafter.config.head_dim * 4 + 8
    assert max(drafter.num_bytes) <= 2 * 2 * WINDOW * bytes_per_row
    # The same drafts come from a context that was shown every row at once.
    features, positions = torch.cat(drafter.features), torch.cat(drafter.positions)
    for anchor, position, tokens in drafter.drafts[::4]:
        context = drafter.new_context()
        DFlashDrafter.observe(drafter, context, features[:position], positions[:position])
        assert torch.equal(DFlashDrafter.propose(drafter, context, anchor, position).tokens, tokens)


@pytest.mark.parametrize("num_images", [1, 2])
@pytest.mark.parametrize("loop", LOOPS)
def test_c23_the_drafter_of_an_image_prompt_takes_the_text_row(target_pairs, loop, num_images):
    pair, inputs = target_pairs["qwen3_5_moe_vl"], image_inputs(num_images)
    expected = plain(pair.stock, inputs, max_new_tokens=24)
    output = assisted(pair.attached, inputs, watched := watching(), loop, max_new_tokens=24)
    assert torch.equal(output, expected)
    positions = torch.cat(watched.positions)
    # One position a token, without the gap that an image leaves in the target's three rows.
    assert torch.equal(positions, torch.arange(positions.shape[0]))
    assert watched.drafts[0][1] == inputs["input_ids"].shape[1]


@pytest.mark.parametrize("target_layer_ids", [[0, 2], [1], [2, 0, 1]])
@pytest.mark.parametrize("loop", LOOPS)
def test_c28_taps_are_the_outputs_of_the_named_layers(pair, loop, target_layer_ids):
    drafter = watching(target_layer_ids=target_layer_ids)
    output = assisted(pair.attached, pair.prompt, drafter, loop, max_new_tokens=12)
    states = pair.stock(output[:, :-1], output_hidden_states=True).hidden_states
    # hidden_states[i + 1] is the output of layer i.
    expected = torch.cat([states[layer_idx + 1][0] for layer_idx in target_layer_ids], dim=-1)
    torch.testing.assert_close(torch.cat(drafter.features), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("perturbed", [0, 1, 2])
@pytest.mark.parametrize("loop", LOOPS)
def test_c28_a_perturbed_layer_shows_in_its_own_tap_first(target_pairs, loop, perturbed):
    pair = target_pairs["qwen3_5"]
    base = pair.attached.model
    features = []
    for shift in (0.0, 0.5):
        handle = base.layers[perturbed].register_forward_hook(lambda module, args, output, shift=shift: output + shift)
        drafter = watching(target_layer_ids=[0, 1, 2])
        try:
            # The prefill's rows are the same tokens in both runs.
            assisted(pair.attached, pair.prompt, drafter, loop, max_new_tokens=4)
        finally:
            handle.remove()
        features.append(drafter.features[0].unflatten(-1, (3, -1)))
    difference = (features[1] - features[0]).abs().amax(dim=(0, 2))
    assert torch.equal(difference[:perturbed], torch.zeros(perturbed))
    torch.testing.assert_close(features[1][:, perturbed], features[0][:, perturbed] + 0.5)


@pytest.mark.parametrize("loop", LOOPS)
def test_c23_drafts_of_an_image_prompt_are_accepted(target_pairs, loop):
    pair, inputs = target_pairs["qwen3_5_moe_vl"], image_inputs()
    expected = plain(pair.stock, inputs, max_new_tokens=33)
    assisted(pair.attached, inputs, scripted(expected, [15]), loop, max_new_tokens=33)
    assert pair.attached.generation_statistics.acceptance_length == 16
