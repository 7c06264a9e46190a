"""States at many anchors of one forward equal a prefill up to each anchor."""

import pytest
import torch

from hf_hybridspec.modeling.hybrid_cache import HybridCache
from tests.support import TARGETS, random_prompt, random_target
from tests.training.helpers import READER, make_ready
from training.states import delta_rule_inputs, run_chunks, states_at
from training.target_features import FrozenTarget, checksum

# fp32, sums in another order than the host's chunks.
TOLERANCE = 1e-5
ANCHORS = [1, 2, 3, 15, 63, 64, 65, 100, 128, 149]


def prefilled_states(target, tokens, position, layers):
    cache = HybridCache(target.config)
    with torch.no_grad():
        target(tokens[:, :position], cache=cache)
    return {layer: cache.layers[layer].recurrent_states[0] for layer in layers}


@pytest.mark.parametrize("kind", TARGETS)
def test_states_equal_a_prefill_up_to_each_anchor(kind):
    target = random_target(kind)
    frozen = FrozenTarget(target, make_ready())
    tokens = torch.cat((random_prompt(150), random_prompt(150, seed=1)))
    record = frozen.run(tokens, torch.tensor([ANCHORS, ANCHORS]))
    for layer in READER["reader_state_layers"]:
        states = record.recurrent_states[layer].unflatten(0, (2, -1))
        assert states.abs().mean() > 1e-3
        for row in range(2):
            for index, position in enumerate(ANCHORS):
                expected = prefilled_states(target, tokens[row : row + 1], position, [layer])[layer][0]
                torch.testing.assert_close(states[row, index], expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_taps_and_last_hidden_rows_are_the_targets():
    target = random_target()
    drafter = make_ready()
    tokens = random_prompt(20)
    record = FrozenTarget(target, drafter).run(tokens, torch.tensor([[5]]))
    with torch.no_grad():
        outputs = target.model(tokens, output_hidden_states=True)
    taps = torch.cat([outputs.hidden_states[layer + 1] for layer in drafter.target_layer_ids], dim=-1)
    assert torch.equal(record.features, taps)
    assert torch.equal(record.last_hidden, outputs.last_hidden_state)


def test_padding_on_the_right_changes_no_earlier_state():
    frozen = FrozenTarget(random_target(), make_ready())
    tokens = random_prompt(70)
    padded = torch.cat((tokens, torch.zeros(1, 80, dtype=torch.int64)), dim=1)
    anchors = torch.tensor([[10, 69]])
    short, long = frozen.run(tokens, anchors), frozen.run(padded, anchors)
    for layer in READER["reader_state_layers"]:
        torch.testing.assert_close(
            short.recurrent_states[layer], long.recurrent_states[layer], rtol=TOLERANCE, atol=TOLERANCE
        )


@pytest.mark.parametrize("chunk", [4, 16, 64])
def test_the_result_does_not_depend_on_the_chunk(chunk):
    target = random_target()
    FrozenTarget(target, make_ready())
    layer = target.model.layers[1].linear_attn
    hidden = torch.randn(1, 50, target.config.hidden_size, generator=torch.Generator().manual_seed(0))
    inputs = delta_rule_inputs(layer, hidden)
    anchors = torch.arange(51).unsqueeze(0)
    expected = recurrent_states(inputs)
    # The reference is fp64; a chunk of 64 solves a system of 64 rows in fp32.
    torch.testing.assert_close(states_at(run_chunks(inputs, chunk), anchors)[0], expected, rtol=1e-4, atol=3e-5)


def recurrent_states(inputs):
    """Equation 1, token by token, in fp64: the state before every position and after the last."""
    key, value = inputs.key[0].double(), inputs.value[0].double()
    key = key / (key.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    key = key.repeat_interleave(value.shape[1] // key.shape[1], dim=1)
    state = key.new_zeros(value.shape[1], key.shape[2], value.shape[2])
    states = [state]
    for t in range(key.shape[0]):
        state = state * inputs.log_decay[0, t].double().exp()[:, None, None]
        z = inputs.beta[0, t].double()[:, None] * (value[t] - torch.einsum("hkv,hk->hv", state, key[t]))
        state = state + key[t].unsqueeze(-1) * z.unsqueeze(1)
        states.append(state)
    return torch.stack(states).float()


def test_a_layer_that_is_not_prepared_is_refused():
    target = random_target()
    with pytest.raises(TypeError, match="swap_gated_delta_nets"):
        delta_rule_inputs(target.model.layers[0].linear_attn, torch.zeros(1, 4, 32))


def test_the_checksum_sees_one_changed_bit_and_a_swap():
    target = random_target()
    before = checksum(target)
    assert before == checksum(random_target())
    weight = target.lm_head.weight
    with torch.no_grad():
        weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(10.0))
    assert checksum(target) != before
    target = random_target()
    with torch.no_grad():
        target.lm_head.weight[:2] = target.lm_head.weight[:2].flip(0)
    assert checksum(target) != before
