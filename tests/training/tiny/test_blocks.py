import pytest
import torch

from hf_hybridspec.modeling.drafter_config import SAME_POSITION, SHIFTED, AttentionSpan
from hf_hybridspec.modeling.drafter_layers import block_mask
from training.anchors import lay_out_blocks, sample_anchors
from training.losses import decay_weights, survival_weights, weighted_cross_entropy


def test_anchors_are_answer_tokens_followed_by_answer_tokens():
    mask = torch.zeros(3, 20, dtype=torch.bool)
    mask[0, 5:12] = True
    mask[1, [3, 4, 9, 18, 19]] = True
    anchors, valid = sample_anchors(mask, 8, torch.Generator().manual_seed(0))
    assert sorted(anchors[0, valid[0]].tolist()) == list(range(5, 11))
    assert anchors[1, valid[1]].tolist() == [3, 18]
    assert not valid[2].any()
    assert (anchors.diff(dim=1) >= 0).all()
    few, _ = sample_anchors(mask[:1], 3, torch.Generator().manual_seed(1))
    assert len(set(few[0].tolist())) == 3


def test_a_late_answer_in_a_long_row_has_anchors():
    mask = torch.zeros(1, 4000, dtype=torch.bool)
    mask[0, 3990:] = True
    anchors, valid = sample_anchors(mask, 4, torch.Generator().manual_seed(0))
    assert valid.all() and (anchors >= 3990).all()


@pytest.mark.parametrize(("alignment", "expected"), [(SAME_POSITION, [0, 13, 14, 15]), (SHIFTED, [13, 14, 15, 16])])
def test_labels_follow_the_alignment(alignment, expected):
    tokens = torch.arange(10, 30)[None]
    mask = torch.ones(1, 20, dtype=torch.bool)
    anchors, valid = torch.tensor([[2, 18]]), torch.tensor([[True, True]])
    layout = lay_out_blocks(tokens, mask, anchors, valid, 4, alignment)
    assert layout.labels[0, 0].tolist() == expected
    assert layout.positions[0].tolist() == [2, 3, 4, 5, 18, 19, 20, 21]
    # Only position 19 lies inside the sequence after the second anchor.
    assert layout.labels[0, 1][layout.supervised[0, 1]].tolist() == [29]


def test_rows_outside_the_answer_or_in_invalid_blocks_are_not_supervised():
    tokens, mask = torch.arange(20)[None], torch.zeros(1, 20, dtype=torch.bool)
    mask[0, 4:7] = True
    anchors, valid = torch.tensor([[5, 19]]), torch.tensor([[True, False]])
    layout = lay_out_blocks(tokens, mask, anchors, valid, 4, SAME_POSITION)
    assert layout.supervised[0].tolist() == [[False, True, False, False], [False] * 4]


@pytest.mark.parametrize(
    "span", [AttentionSpan(False), AttentionSpan(True, 5), AttentionSpan(False, 3), AttentionSpan(True, 4, True)]
)
def test_masks_of_a_batch_are_the_drafters_own(span):
    tokens, mask = torch.zeros(2, 12, dtype=torch.int64), torch.ones(2, 12, dtype=torch.bool)
    anchors, valid = torch.tensor([[3, 8], [1, 11]]), torch.tensor([[True, True], [True, False]])
    layout = lay_out_blocks(tokens, mask, anchors, valid, 4, SAME_POSITION)
    found = layout.mask(span, 12)
    for i in range(2):
        expected = block_mask(span, layout.positions[i], torch.arange(12), 4)
        expected[4 * int(valid[i].sum()) :, :12] = False
        assert torch.equal(found[i, 0], expected)


def test_decay_weights_start_at_the_first_draft_row():
    supervised = torch.tensor([[False, True, True, False]])
    weights = decay_weights(supervised, first_draft_row=1, gamma=2.0)
    torch.testing.assert_close(weights, torch.tensor([[0.0, 1.0, 0.6065, 0.0]]), atol=1e-4, rtol=0)


def test_survival_weights_count_the_rows_that_are_reached():
    supervised = torch.tensor([[False, True, True, True]])
    weights = survival_weights(torch.tensor([[0.9, 0.5, 0.5, 1.0]]), supervised, alpha=0.0)
    torch.testing.assert_close(weights, torch.tensor([[0.0, 1.0, 0.5, 0.25]]))


def test_weighted_cross_entropy_ignores_rows_without_weight():
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    labels, weights = torch.randint(0, 7, (2, 3)), torch.tensor([[0.0, 1.0, 0.5], [0.0, 0.0, 2.0]])
    picked = logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    expected = -(picked * weights).sum() / 3.5
    torch.testing.assert_close(weighted_cross_entropy(logits, labels, weights), expected)
    assert weighted_cross_entropy(logits, labels, torch.zeros(2, 3)) == 0
