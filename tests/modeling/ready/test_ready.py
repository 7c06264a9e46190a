"""ReaDy: equal to DSpark until its reader is trained, and what the reader then does."""

import pytest
import torch

from hf_hybridspec.modeling.drafter_layers import BlockInput
from hf_hybridspec.modeling.ready import ReadyDrafter

from ..drafter_helpers import (
    FAMILY_VALUES,
    HIDDEN,
    bind,
    features,
    make_config,
    make_drafter,
    observed,
    recurrent_states,
    target_config,
)

READER = {name: value for name, value in FAMILY_VALUES["ready"].items() if name.startswith("reader_")}
ANCHOR = torch.tensor([11])


def proposal(drafter, states=None):
    return drafter.propose(observed(drafter, 9), ANCHOR, 9, recurrent_states=states)


def trained(drafter):
    with torch.no_grad():
        for layer in drafter.layers:
            if layer.state_reader is not None:
                layer.state_reader.up_proj.weight.normal_(generator=torch.Generator().manual_seed(4))
    return drafter


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("changes", [{}, {"reader_injection": "pre_attention", "reader_injection_layers": [0, 1, 2]}])
def test_a_fresh_reader_leaves_dspark_bitwise_as_it_was(kind, changes):
    dspark = bind(make_drafter("dspark", markov_head_type=kind))
    ready = bind(ReadyDrafter.from_dspark(dspark, **READER, **changes))
    before, after = proposal(dspark), proposal(ready, recurrent_states())
    for name in ("tokens", "confidence", "entropy", "acceptance"):
        assert torch.equal(getattr(before, name), getattr(after, name)), name
    after = proposal(trained(ready), recurrent_states())
    assert not torch.equal(before.confidence, after.confidence)


def test_a_trained_reader_reads_every_state():
    drafter = trained(bind(make_drafter("ready")))
    base = proposal(drafter, recurrent_states()).confidence
    for layer in (2, 6):
        for head in range(4):
            states = recurrent_states()
            states[layer][0, head] += 1
            assert not torch.equal(base, proposal(drafter, states).confidence), (layer, head)


@pytest.mark.parametrize("injection", ["post_attention", "pre_attention"])
def test_the_reader_adds_its_update_where_configured(injection):
    drafter = trained(bind(make_drafter("ready", reader_injection=injection)))
    layer, reader = drafter.layers[2], drafter.layers[2].state_reader
    assert [other.state_reader is None for other in drafter.layers] == [True, True, False]
    states = drafter.gather_states(recurrent_states())
    context = drafter.project_context(features(9), torch.arange(9))[2]
    x = torch.randn(1, 5, HIDDEN, generator=torch.Generator().manual_seed(5))
    block = BlockInput(drafter.rotation(torch.arange(9, 14)), context, None, 5, states)
    with torch.no_grad():

        def update(rows):
            pooled = []
            for s in range(8):
                S = states[0, s].T
                rms = torch.sqrt(S.square().mean() + 1e-6)
                T = reader.value_projection[s].T @ (S / rms)
                q = (rows[0] @ reader.query_projection[s].T) @ reader.key_projection[s]
                pooled.append(torch.cat((q @ T.T, rms.log().expand(5, 1)), -1))
            inner = torch.cat(pooled, -1) @ reader.down_proj.weight.T
            return (torch.nn.functional.silu(inner) @ reader.up_proj.weight.T).unsqueeze(0)

        expected = x + update(x) if injection == "pre_attention" else x
        expected = expected + layer.attend(layer.input_layernorm(expected), block)
        expected = expected + update(expected) if injection == "post_attention" else expected
        expected = expected + layer.mlp(layer.post_attention_layernorm(expected))
        torch.testing.assert_close(layer(x, block), expected, rtol=1e-4, atol=1e-4)


def test_default_widths_and_layers():
    config = make_config("ready", reader_rank=8)
    assert config.reader_width == 32 and config.reader_injection_layers == [2]
    assert make_config("ready", reader_rank=5).reader_width == 32
    assert make_config("ready", reader_width=7).reader_width == 7
    reader = make_drafter("ready").layers[2].state_reader
    assert {name: tuple(p.shape) for name, p in reader.named_parameters()} == {
        "query_projection": (8, 4, HIDDEN),
        "key_projection": (8, 4, 8),
        "value_projection": (8, 6, 4),
        "down_proj.weight": (16, 8 * 5),
        "up_proj.weight": (HIDDEN, 16),
    }


def test_missing_and_misshaped_states_are_refused():
    drafter = bind(make_drafter("ready"))
    with pytest.raises(ValueError, match=r"needs the committed recurrent states of target layers \[2, 6\]"):
        proposal(drafter)
    with pytest.raises(ValueError, match=r"target layers \[6\]"):
        proposal(drafter, {2: recurrent_states()[2]})
    with pytest.raises(ValueError, match=r"layer 6 is \(1, 4, 8, 5\); this drafter reads \[N, 4, 8, 6\]"):
        proposal(drafter, recurrent_states() | {6: torch.zeros(1, 4, 8, 5)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_num_value_heads": 8}, "linear_num_value_heads is 8, the state reader expects 4"),
        ({"linear_key_head_dim": 16}, "linear_key_head_dim is 16, the state reader expects 8"),
        ({"layer_types": ["linear_attention"] * 6 + ["full_attention"] * 2}, r"layers \[6\] hold no recurrent state"),
    ],
)
def test_a_target_without_such_states_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        make_drafter("ready").check_fit(target_config(**change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reader_injection": "after"}, "reader_injection must be one of"),
        ({"reader_injection_layers": [3]}, r"reader_injection_layers must lie in \[0, 2\]"),
        ({"reader_state_layers": []}, "reader_state_layers must list target GDN layers"),
        ({"reader_rank": 0}, "reader_rank must be positive"),
    ],
)
def test_unusable_reader_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        make_config("ready", **change)
