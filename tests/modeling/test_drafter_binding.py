"""Which target a drafter accepts, what it borrows, and what it refuses (cases C28, C31)."""

import pytest
import torch
from torch import nn

from .drafter_helpers import (
    FULL,
    HIDDEN,
    LAYERS,
    MASK,
    TAPS,
    VOCABULARY,
    bind,
    features,
    make_drafter,
    observed,
    target_config,
)


def test_bind_copies_ids_and_owns_nothing():
    drafter = make_drafter("dflash")
    before = set(drafter.state_dict())
    assert bind(drafter) is drafter
    assert (drafter.config.eos_token_id, drafter.config.pad_token_id, drafter.config.bos_token_id) == (7, 8, 9)
    assert drafter.config.vocab_size == VOCABULARY
    assert set(drafter.state_dict()) == before
    assert drafter.target.head not in list(drafter.modules())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 64}, "hidden_size is 64, the drafter expects 32"),
        ({"vocab_size": 99}, "vocab_size is 99, the drafter expects 53"),
        ({"num_hidden_layers": 12, "layer_types": ["linear_attention"] * 12}, "num_hidden_layers is 12.*expects 8"),
    ],
)
def test_a_target_that_does_not_fit_is_refused_by_name(change, message):
    drafter = make_drafter("dflash")
    with pytest.raises(ValueError, match=message):
        drafter.check_fit(target_config(**change))
    drafter.check_fit(target_config())


def test_all_mismatches_are_named_at_once():
    with pytest.raises(ValueError, match=r"(?s)hidden_size is 64.*vocab_size is 99"):
        make_drafter("dflash").check_fit(target_config(hidden_size=64, vocab_size=99))


def test_taps_must_lie_before_the_last_layer():
    drafter = make_drafter("dflash", num_target_layers=None, target_layer_ids=[1, 7])
    with pytest.raises(ValueError, match=r"taps \[7\] must be at most 6, for the target has 8 layers"):
        drafter.check_fit(target_config())


def test_an_embedding_without_the_mask_row_is_refused():
    drafter = make_drafter("dflash")
    with pytest.raises(ValueError, match=r"embedding is \[50, 32\].*mask token 50"):
        drafter.bind(nn.Embedding(MASK, HIDDEN), nn.Linear(HIDDEN, VOCABULARY), target_config())


def test_taps_are_recorded_in_listed_order():
    drafter = make_drafter("dflash")
    assert drafter.target_layer_ids == TAPS and max(TAPS) < LAYERS
    assert drafter.fc.in_features == len(TAPS) * HIDDEN
    # Features of the second tap meet the second slice of fc's columns.
    rows = torch.zeros(1, len(TAPS) * HIDDEN)
    rows[0, HIDDEN : 2 * HIDDEN] = torch.randn(HIDDEN)
    expected = drafter.hidden_norm(rows[:, HIDDEN : 2 * HIDDEN] @ drafter.fc.weight[:, HIDDEN : 2 * HIDDEN].T)
    torch.testing.assert_close(drafter.fuse(rows)[0], expected)


def test_an_unbound_drafter_says_so():
    drafter = make_drafter("dflash")
    with pytest.raises(ValueError, match="not bound to a target"):
        drafter.propose(observed(drafter, 3), torch.tensor([1]), 3)


def test_an_empty_context_says_so():
    drafter = bind(make_drafter("dflash"))
    with pytest.raises(ValueError, match="context is empty"):
        drafter.propose(drafter.new_context(), torch.tensor([1]), 0)


def test_batches_and_wrong_widths_are_refused():
    drafter = bind(make_drafter("dflash"))
    context = observed(drafter, 3)
    with pytest.raises(ValueError, match=r"one sequence at a time.*got \(2,\)"):
        drafter.propose(context, torch.tensor([1, 2]), 3)
    with pytest.raises(ValueError, match=r"features must be \[positions, 96\].*got \(2, 95\)"):
        drafter.observe(context, torch.zeros(2, 95), torch.arange(2))
    with pytest.raises(ValueError, match=r"of one sequence .*got \(2, 3, 96\)"):
        drafter.observe(context, torch.zeros(2, 3, 96), torch.arange(2))
    with pytest.raises(ValueError, match=r"positions must be \[2\]"):
        drafter.observe(context, features(2), torch.arange(3))
    assert context.length == 3


def test_describe_reports_the_facts():
    facts = make_drafter("dflash").describe()
    expected = {
        "family": "dflash",
        "block_size": 5,
        "draft_tokens": 4,
        "alignment": "same_position",
        "taps": list(TAPS),
        "window": 6,
        "sliding_layers": 2,
        "dtype": "float32",
    }
    assert {key: facts[key] for key in expected} == expected
    drafter = make_drafter("dflash", layer_types=[FULL] * 3, sliding_window=None)
    assert drafter.describe()["window"] is None
    assert facts["parameters"] == sum(tensor.numel() for tensor in drafter.state_dict().values())
