"""The backbone equals an independent row-by-row implementation."""

import pytest
import torch

from .drafter_helpers import FULL, PLAIN_ROPE, SLIDING, YARN, bind, features, make_drafter
from .naive_drafter import naive_hidden

LAYOUTS = {
    "all full": {"layer_types": [FULL] * 3},
    "sliding then full": {"layer_types": [SLIDING, SLIDING, FULL], "sliding_window": 4},
    "window shorter than the block": {"layer_types": [SLIDING] * 3, "sliding_window": 2},
    "all sliding, bidirectional": {"layer_types": [SLIDING] * 3, "sliding_window": 4, "is_causal": False},
    "all causal": {"layer_types": [SLIDING, FULL, FULL], "sliding_window": 4, "is_causal": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rope", [PLAIN_ROPE, YARN], ids=["plain", "yarn"])
@pytest.mark.parametrize("length", [1, 13])
def test_block_forward_equals_the_naive_one(layout, rope, length):
    drafter = bind(make_drafter("dflash", rope_parameters=dict(rope), **LAYOUTS[layout]))
    context, rows = features(length), drafter.embed_block(torch.tensor([11]), 5)
    observed = drafter.new_context()
    drafter.observe(observed, context, torch.arange(length))
    positions = torch.arange(length, length + 5)
    with torch.no_grad():
        masks = {span: drafter._mask_after(observed, span, positions) for span in set(drafter.spans)}
        hidden = drafter(rows, positions, [layer.key_values for layer in observed.layers], masks)[0]
        expected = naive_hidden(drafter.config, drafter.state_dict(), context, rows[0])
    torch.testing.assert_close(hidden.double(), expected, rtol=1e-4, atol=1e-5)


def test_the_layouts_differ():
    # Otherwise the test above could not tell one span from another.
    results = []
    for layout in LAYOUTS.values():
        drafter = bind(make_drafter("dflash", **layout))
        rows = drafter.embed_block(torch.tensor([11]), 5)
        results.append(naive_hidden(drafter.config, drafter.state_dict(), features(13), rows[0]))
    for i, first in enumerate(results):
        assert all((first - other).abs().max() > 1e-3 for other in results[i + 1 :])
