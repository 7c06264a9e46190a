"""C35: the training forward of a block equals drafting at the same anchor.

One block after a context that ends at its anchor runs the same operations on the same shapes as drafting: bitwise
equal in fp32. Many blocks at once run larger products, whose sums have another order: equal to rounding, same draft
tokens, and bitwise independent of everything a block must not see.
"""

import pytest
import torch

from hf_hybridspec.modeling.drafter import Drafter
from tests.support import random_prompt
from tests.training.helpers import make_pair
from training.anchors import BlockLayout, lay_out_blocks
from training.drafting import draft_hidden
from training.target_features import FrozenTarget, TargetRecord

FAMILIES = ["dflash", "dspark", "ready"]
LENGTH = 90
ANCHORS = [2, 9, 10, 40, 63, 64, 65, 80]


def drafted(drafter: Drafter, record: TargetRecord, tokens, position: int, states):
    """Hidden rows [D, H] and draft tokens of drafting at `position`, as the loops do it."""
    context = drafter.new_context()
    drafter.observe(context, record.features[0, :position], torch.arange(position))
    rows = []
    choose = drafter.choose

    def keep(hidden, anchor):
        rows.append(hidden)
        return choose(hidden, anchor)

    drafter.choose = keep
    draft = drafter.propose(context, tokens[0, position : position + 1], position, recurrent_states=states)
    del drafter.choose
    return rows[0], draft.tokens


def laid_out(drafter: Drafter, tokens, anchors) -> BlockLayout:
    answer = torch.ones_like(tokens, dtype=torch.bool)
    anchors = torch.tensor([anchors])
    return lay_out_blocks(
        tokens, answer, anchors, torch.ones_like(anchors, dtype=torch.bool), drafter.block_size, drafter.alignment
    )


def states_of(record, index=slice(None)):
    return {layer: states[index] for layer, states in record.recurrent_states.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_one_block_is_bitwise_the_drafted_one(family):
    target, drafter = make_pair(family)
    tokens = random_prompt(LENGTH)
    record = FrozenTarget(target, drafter).run(tokens, torch.tensor([ANCHORS]))
    first = drafter.alignment.first_draft_row
    for index, position in enumerate(ANCHORS):
        states = states_of(record, slice(index, index + 1))
        expected, draft_tokens = drafted(drafter, record, tokens, position, states)
        # The training context holds the positions before the anchor; the token there is read from the sequence.
        layout = laid_out(drafter, tokens, [position])
        before = record.features[:, :position]
        with torch.no_grad():
            hidden = draft_hidden(drafter, tokens[:, : position + 1], before, layout, states)[0, 0, first:]
        assert torch.equal(hidden, expected), position
        assert torch.equal(drafter.choose(hidden, tokens[0, position : position + 1]).tokens, draft_tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_many_blocks_equal_drafting_to_rounding(family):
    target, drafter = make_pair(family)
    tokens = random_prompt(LENGTH)
    record = FrozenTarget(target, drafter).run(tokens, torch.tensor([ANCHORS]))
    with torch.no_grad():
        hidden = draft_hidden(drafter, tokens, record.features, laid_out(drafter, tokens, ANCHORS), states_of(record))
    for index, position in enumerate(ANCHORS):
        expected, draft_tokens = drafted(drafter, record, tokens, position, states_of(record, slice(index, index + 1)))
        rows = hidden[0, index, drafter.alignment.first_draft_row :]
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(drafter.choose(rows, tokens[0, position : position + 1]).tokens, draft_tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_reads_nothing_at_or_after_its_anchor_and_no_other_block(family):
    target, drafter = make_pair(family)
    tokens = random_prompt(LENGTH)
    record = FrozenTarget(target, drafter).run(tokens, torch.tensor([ANCHORS]))
    layout = laid_out(drafter, tokens, ANCHORS)
    chosen, position = 3, ANCHORS[3]
    with torch.no_grad():
        hidden = draft_hidden(drafter, tokens, record.features, layout, states_of(record))[0, chosen]
        features = record.features.clone()
        features[:, position:] = 7.0
        changed_tokens = tokens.clone()
        changed_tokens[:, ANCHORS[4] :] = 5
        states = {layer: value.clone() for layer, value in record.recurrent_states.items()}
        for value in states.values():
            value[torch.arange(len(ANCHORS)) != chosen] = 3.0
        again = draft_hidden(drafter, changed_tokens, features, layout, states)[0, chosen]
        assert torch.equal(hidden, again)
        features[:, position - 1] = 7.0
        assert not torch.equal(hidden, draft_hidden(drafter, changed_tokens, features, layout, states)[0, chosen])


def test_the_label_of_a_draft_row_is_the_token_it_is_verified_against():
    """The off-by-one that C35 names: a drafter that proposes the labels is accepted whole by the target."""
    for family in FAMILIES:
        target, drafter = make_pair(family)
        with torch.no_grad():
            tokens = target.generate(random_prompt(12), max_new_tokens=30, do_sample=False)
        layout = laid_out(drafter, tokens, [12, 15])
        first = drafter.alignment.first_draft_row
        for index, position in enumerate((12, 15)):
            count = drafter.num_draft_tokens
            assert torch.equal(layout.labels[0, index, first:], tokens[0, position + 1 : position + 1 + count])
