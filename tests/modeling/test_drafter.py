"""What all drafters share: binding, context, masks, proposals."""

import copy

import pytest
import torch
from torch import nn

from hf_hybridspec.modeling.draft_context import DraftContext

from .drafter_helpers import (
    HIDDEN,
    MASK,
    VOCABULARY,
    bind,
    features,
    make_drafter,
    observed,
    recurrent_states,
    states_for,
    target_config,
)

FAMILIES = ["dflash", "dflash2", "dspark", "ready"]
ANCHOR = torch.tensor([11])


def propose(drafter, context, position, anchor=ANCHOR):
    return drafter.propose(context, anchor, position, recurrent_states=states_for(drafter))


@pytest.mark.parametrize("family", FAMILIES)
def test_proposal_has_one_entry_per_draft_token(family):
    drafter = bind(make_drafter(family))
    draft = propose(drafter, observed(drafter, 9), 9)
    expected = 5 if family in ("dspark", "ready") else 4
    assert drafter.num_draft_tokens == expected
    assert draft.tokens.shape == draft.confidence.shape == draft.entropy.shape == (expected,)
    assert draft.tokens.dtype == torch.int64
    assert draft.confidence.dtype == draft.entropy.dtype == torch.float32
    assert torch.all((draft.confidence > 0) & (draft.confidence <= 1) & (draft.entropy > 0))


@pytest.mark.parametrize("family", FAMILIES)
def test_position_may_be_an_int_or_a_tensor(family):
    drafter = bind(make_drafter(family))
    context = observed(drafter, 9)
    assert torch.equal(
        propose(drafter, context, 9).confidence, propose(drafter, context, torch.tensor([9])).confidence
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pieces", [[1] * 23, [20, 3], [2, 9, 1, 11]])
def test_observing_in_pieces_equals_observing_at_once(family, pieces):
    drafter = bind(make_drafter(family))
    whole, rows, start = observed(drafter, 23), features(23), 0
    context = drafter.new_context()
    for size in pieces:
        drafter.observe(context, rows[start : start + size], torch.arange(start, start + size))
        start += size
    assert context.length == whole.length == 23
    a, b = propose(drafter, whole, 23), propose(drafter, context, 23)
    assert torch.equal(a.tokens, b.tokens)
    torch.testing.assert_close(a.confidence, b.confidence, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_proposing_leaves_the_context_alone(family):
    drafter = bind(make_drafter(family))
    context = observed(drafter, 9)
    first, again = propose(drafter, context, 9), propose(drafter, context, 9)
    assert context.length == 9
    assert torch.equal(first.confidence, again.confidence)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_committed_feature_and_the_anchor_matter(family):
    drafter = bind(make_drafter(family))
    base = propose(drafter, observed(drafter, 9), 9).confidence
    assert not torch.equal(base, propose(drafter, observed(drafter, 9), 9, torch.tensor([12])).confidence)
    assert not torch.equal(base, propose(drafter, observed(drafter, 9, seed=5), 9).confidence)
    rows = features(9)
    rows[0] += 1
    context = drafter.new_context()
    drafter.observe(context, rows, torch.arange(9))
    assert not torch.equal(base, propose(drafter, context, 9).confidence)


@pytest.mark.parametrize("family", FAMILIES)
def test_many_blocks_in_one_forward_equal_proposals_one_by_one(family):
    # The training layout: context of all positions, every block masked to what precedes its anchor.
    drafter = bind(make_drafter(family))
    rows, anchors, starts = features(20), torch.tensor([11, 3, 40]), torch.tensor([4, 9, 20])
    positions = (starts[:, None] + torch.arange(5)).flatten()
    states = recurrent_states(blocks=3) if family == "ready" else None
    context = drafter.project_context(rows, torch.arange(20))
    masks = drafter.block_masks(positions, torch.arange(20), rows_per_block=5)
    hidden = drafter(drafter.embed_block(anchors, 5), positions, context, masks, 5, states)
    for block, (anchor, start) in enumerate(zip(anchors, starts, strict=True)):
        kept = drafter.new_context()
        drafter.observe(kept, rows[:start], torch.arange(start))
        own = None if states is None else {layer: state[block : block + 1] for layer, state in states.items()}
        single = drafter.propose(kept, anchor.view(1), int(start), recurrent_states=own)
        draft_rows = hidden[0, 5 * block : 5 * block + 5][drafter.alignment.first_draft_row :]
        chosen = drafter.choose(draft_rows, anchor.view(1))
        assert torch.equal(chosen.tokens, single.tokens)
        torch.testing.assert_close(chosen.confidence, single.confidence, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_reach_every_parameter(family):
    drafter = bind(make_drafter(family)).train()
    positions = torch.arange(6, 11)
    context = drafter.project_context(features(6), torch.arange(6))
    masks = drafter.block_masks(positions, torch.arange(6), rows_per_block=5)
    states = states_for(drafter)
    hidden = drafter(drafter.embed_block(ANCHOR, 5), positions, context, masks, recurrent_states=states)
    drafter.logits(hidden).square().sum().backward()
    heads = ("candidate_selector", "markov_head", "confidence_head")
    without = [n for n, p in drafter.named_parameters() if p.grad is None and not n.startswith(heads)]
    assert without == []
    assert drafter.target.head.weight.grad is not None  # borrowed, and not among the drafter's own
    assert not any("embed" in name or name.startswith("lm_head") for name, _ in drafter.named_parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_mask_token_and_ids_beyond_the_tokenizer_are_never_proposed(family):
    drafter = make_drafter(family)
    bind(drafter)
    with torch.no_grad():
        # Make exactly the forbidden ids the favourites of the head.
        drafter.target.head.weight[MASK] *= 30
        drafter.target.head.weight[45:] *= 30
    seen = set()
    for position in range(1, 12):
        seen |= set(propose(drafter, observed(drafter, position), position).tokens.tolist())
    assert MASK not in seen
    assert any(token >= 45 for token in seen)
    drafter.bind(drafter.target.embedding, drafter.target.head, target_config(), tokenizer_size=45)
    for position in range(1, 12):
        assert max(propose(drafter, observed(drafter, position), position).tokens.tolist()) < 45
    # generate() binds again and knows no tokenizer.
    drafter.bind(drafter.target.embedding, drafter.target.head, target_config())
    assert drafter.target.forbidden[45:].all() and drafter.target.forbidden[:45].sum() == (MASK < 45)
    other_head = copy.deepcopy(drafter.target.head)
    drafter.bind(drafter.target.embedding, other_head, target_config())
    assert drafter.target.forbidden.sum() == 1


def test_a_head_padded_beyond_the_vocabulary_proposes_no_padding():
    drafter = bind(make_drafter("dflash"))
    head = nn.Linear(HIDDEN, VOCABULARY + 11, bias=False)
    with torch.no_grad():
        head.weight[VOCABULARY:] *= 100
    drafter.bind(drafter.target.embedding, head, target_config())
    assert max(propose(drafter, observed(drafter, 9), 9).tokens.tolist()) < VOCABULARY


@pytest.mark.parametrize("family", FAMILIES)
def test_block_size_can_be_lowered(family):
    drafter = bind(make_drafter(family))
    context = observed(drafter, 9)
    full = propose(drafter, context, 9)
    drafter.block_size = 3
    short = propose(drafter, context, 9)
    assert short.tokens.shape[0] == drafter.num_draft_tokens == len(full.tokens) - 2
    for wrong in (1, 6):
        with pytest.raises(ValueError, match=rf"block_size must be in \[2, 5\].*got {wrong}"):
            drafter.block_size = wrong


def test_confidence_and_entropy_are_those_of_the_softmax():
    drafter = bind(make_drafter("dflash"))
    hidden = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(4))
    logits = hidden @ drafter.target.head.weight.T
    logits[:, MASK] = -torch.inf
    probabilities = logits.double().softmax(-1)
    draft = drafter.choose(hidden, ANCHOR)
    assert torch.equal(draft.tokens, logits.argmax(-1))
    torch.testing.assert_close(draft.confidence.double(), probabilities.max(-1).values, rtol=1e-5, atol=1e-7)
    entropy = -(probabilities * probabilities.clamp_min(1e-300).log()).sum(-1)
    torch.testing.assert_close(draft.entropy.double(), entropy, rtol=1e-5, atol=1e-6)


def test_embedding_scale_output_multiplier_and_softcap():
    plain = bind(make_drafter("dflash"))
    changes = {"input_embedding_scale": 3.0, "output_multiplier": 0.5, "final_logit_softcapping": 2.0}
    scaled = bind(make_drafter("dflash", **changes))
    rows = plain.embed_block(ANCHOR, 5)
    torch.testing.assert_close(scaled.embed_block(ANCHOR, 5), 3 * rows)
    torch.testing.assert_close(scaled.logits(rows), 2 * torch.tanh(plain.logits(rows) * 0.5 / 2))
    torch.testing.assert_close(rows[0, 0], plain.target.embedding.weight[11])
    torch.testing.assert_close(rows[0, 4], plain.target.embedding.weight[MASK])


@pytest.mark.parametrize("target_dtype", [torch.float16, torch.float32])
def test_a_bf16_drafter_serves_a_target_of_another_dtype(target_dtype):
    drafter = bind(make_drafter("dflash").to(torch.bfloat16))
    drafter.target.embedding.to(target_dtype)
    drafter.target.head.to(target_dtype)
    context = drafter.new_context()
    drafter.observe(context, features(9).to(target_dtype), torch.arange(9))
    assert context.layers[0].key_values.keys.dtype == torch.bfloat16
    draft = propose(drafter, context, 9)
    assert torch.isfinite(draft.confidence).all() and draft.confidence.dtype == torch.float32


def test_contexts_are_independent():
    drafter = bind(make_drafter("dflash"))
    first = observed(drafter, 9)
    alone = propose(drafter, first, 9)
    second = copy.copy(drafter).new_context()
    assert isinstance(second, DraftContext)
    drafter.observe(second, features(4, seed=8), torch.arange(4))
    assert torch.equal(propose(drafter, first, 9).confidence, alone.confidence)
