"""What rows see, and what the context keeps of a long prompt (case C22)."""

import pytest
import torch

from hf_hybridspec.modeling.drafter_config import AttentionSpan
from hf_hybridspec.modeling.drafter_layers import block_mask

from .drafter_helpers import SLIDING, bind, features, make_drafter, observed

ANCHOR = torch.tensor([11])


def brute_mask(span, positions, context_positions, rows_per_block):
    size, keys = len(positions), [*context_positions, *positions]
    visible = torch.zeros(size, len(keys), dtype=torch.bool)
    for row in range(size):
        anchor = positions[row - row % rows_per_block]
        for column, key in enumerate(keys):
            other = column - len(context_positions)
            in_context = other < 0
            if in_context:
                sees = key < anchor
            else:
                sees = other // rows_per_block == row // rows_per_block and (not span.causal or key <= positions[row])
            if span.window is not None and span.window_from_anchor and in_context:
                sees = sees and anchor - key <= span.window
            elif span.window is not None and not span.window_from_anchor:
                sees = sees and abs(positions[row] - key) < span.window
            visible[row, column] = sees
    return visible


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 2, 4, 9, 100])
@pytest.mark.parametrize("from_anchor", [True, False])
@pytest.mark.parametrize("starts", [[7], [0, 7, 30]])
def test_block_mask_equals_brute_force(causal, window, from_anchor, starts):
    span = AttentionSpan(causal, window, from_anchor)
    positions = [start + j for start in starts for j in range(5)]
    context = list(range(30))
    mask = block_mask(span, torch.tensor(positions), torch.tensor(context), 5)
    assert torch.equal(mask, brute_mask(span, positions, context, 5))


@pytest.mark.parametrize("window", [1, 2, 6, 40])
@pytest.mark.parametrize("from_anchor", [True, False])
@pytest.mark.parametrize("is_causal", [None, False])
def test_kept_context_loses_nothing_of_a_prompt_of_several_windows(window, from_anchor, is_causal):
    # A full-length context under a mask is the truth; the kept context has dropped what no row can see.
    drafter = make_drafter(
        "dflash", layer_types=[SLIDING] * 3, sliding_window=window, window_from_anchor=from_anchor, is_causal=is_causal
    )
    bind(drafter)
    rows, positions = features(33), torch.arange(33, 38)
    context = drafter.project_context(rows, torch.arange(33))
    masks = drafter.block_masks(positions, torch.arange(33), 5)
    whole = drafter.choose(drafter(drafter.embed_block(ANCHOR, 5), positions, context, masks)[0, 1:], ANCHOR)
    kept = drafter.propose(observed(drafter, 33), ANCHOR, 33)
    torch.testing.assert_close(kept.confidence, whole.confidence, rtol=1e-5, atol=1e-6)
    assert torch.equal(kept.tokens, whole.tokens)


def test_memory_is_bounded_by_the_window_where_all_layers_slide():
    drafter = make_drafter("dflash", layer_types=[SLIDING] * 3, sliding_window=6)
    context = drafter.new_context()
    drafter.observe(context, features(40), torch.arange(40))
    after_prompt = context.num_bytes
    for position in range(40, 400):
        drafter.observe(context, features(1, seed=position), torch.tensor([position]))
    row_bytes = 2 * 2 * 16 * 4 + 8  # keys and values of two heads of 16 in fp32, and one position
    assert context.num_bytes == after_prompt <= 3 * 2 * 5 * row_bytes
    assert context.length == 400
    assert context.positions_of(drafter.spans[0]).tolist() == list(range(395, 400))


def test_full_layers_keep_all_positions_and_sliding_layers_their_window():
    drafter = make_drafter("dflash", sliding_window=6)
    context = observed(drafter, 700)
    assert [layer.positions.shape[0] for layer in context.layers] == [5, 5, 700]


def test_reset_forgets_the_sequence():
    drafter = bind(make_drafter("dflash"))
    context = observed(drafter, 30, seed=5)
    context.reset()
    assert context.length == 0 and context.num_bytes == 0
    drafter.observe(context, features(9), torch.arange(9))
    expected = drafter.propose(observed(drafter, 9), ANCHOR, 9)
    assert torch.equal(drafter.propose(context, ANCHOR, 9).confidence, expected.confidence)
