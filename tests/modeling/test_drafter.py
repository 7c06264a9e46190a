"""What all drafters share: binding, context, masks, proposals."""

import copy

import pytest
import torch
from torch import nn

from hf_hybridspec.modeling.draft_context import DraftContext
from hf_hybridspec.modeling.drafter_config import AttentionSpan
from hf_hybridspec.modeling.drafter_layers import block_mask

from .drafter_helpers import (
    FULL,
    HIDDEN,
    LAYERS,
    MASK,
    SLIDING,
    TAPS,
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


# -------------------------------------------------------------------------------------------------------- windows


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
    kept = propose(drafter, observed(drafter, 33), 33)
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
    expected = propose(drafter, observed(drafter, 9), 9)
    assert torch.equal(propose(drafter, context, 9).confidence, expected.confidence)


# -------------------------------------------------------------------------------------------------------- proposals


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


# -------------------------------------------------------------------------------------------------------- binding


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


# -------------------------------------------------------------------------------------------------------- refusals


def test_an_unbound_drafter_says_so():
    drafter = make_drafter("dflash")
    with pytest.raises(ValueError, match="not bound to a target"):
        propose(drafter, observed(drafter, 3), 3)


def test_an_empty_context_says_so():
    drafter = bind(make_drafter("dflash"))
    with pytest.raises(ValueError, match="context is empty"):
        propose(drafter, drafter.new_context(), 0)


def test_batches_and_wrong_widths_are_refused():
    drafter = bind(make_drafter("dflash"))
    context = observed(drafter, 3)
    with pytest.raises(ValueError, match=r"one sequence at a time.*got \(2,\)"):
        propose(drafter, context, 3, torch.tensor([1, 2]))
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


def test_contexts_are_independent():
    drafter = bind(make_drafter("dflash"))
    first = observed(drafter, 9)
    alone = propose(drafter, first, 9)
    second = copy.copy(drafter).new_context()
    assert isinstance(second, DraftContext)
    drafter.observe(second, features(4, seed=8), torch.arange(4))
    assert torch.equal(propose(drafter, first, 9).confidence, alone.confidence)
