"""DSpark's Markov and confidence heads against their formulas, and its row alignment."""

import pytest
import torch

from ..drafter_helpers import HIDDEN, MASK, bind, features, make_drafter, observed


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def naive_biases(head, kind, previous, hidden):
    """Bias of every row given the token before it, from the formulas."""
    w1, w2 = head.markov_w1.weight, head.markov_w2.weight
    state, biases = torch.zeros(w1.shape[1]), []
    for token, h in zip(previous, hidden, strict=True):
        e = w1[token]
        if kind == "vanilla":
            inner = e
        elif kind == "gated":
            inner = sigmoid(head.gate_proj.weight @ torch.cat((h, e)) + head.gate_proj.bias) * e
        else:
            z = head.joint_proj.weight @ torch.cat((state, e, h)) + head.joint_proj.bias
            gate, candidate, output = z[:8], z[8:16], z[16:]
            state = sigmoid(gate) * state + (1 - sigmoid(gate)) * torch.tanh(candidate)
            inner = torch.tanh(output)
        biases.append(w2 @ inner)
    return torch.stack(biases)


def drafter_with(kind, **changes):
    return bind(make_drafter("dspark", markov_head_type=kind, scale=12.0, **changes))


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_teacher_forced_logits_equal_the_formula(kind):
    drafter = drafter_with(kind)
    generator = torch.Generator().manual_seed(6)
    hidden = torch.randn(2, 5, HIDDEN, generator=generator)
    previous = torch.randint(0, 50, (2, 5), generator=generator)
    with torch.no_grad():
        corrected = drafter.corrected_logits(hidden, previous)
        for block in range(2):
            expected = drafter.logits(hidden[block]) + naive_biases(
                drafter.markov_head, kind, previous[block], hidden[block]
            )
            torch.testing.assert_close(corrected[block], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_each_draft_token_conditions_on_the_one_before(kind):
    drafter = drafter_with(kind)
    hidden = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        draft = drafter.choose(hidden, torch.tensor([11]))
        previous = torch.cat((torch.tensor([11]), draft.tokens[:-1]))
        biases = naive_biases(drafter.markov_head, kind, previous, hidden)
        assert biases.abs().max() > 0.1
        logits = drafter.logits(hidden) + biases
        logits[:, MASK] = -torch.inf
        assert torch.equal(draft.tokens, logits.argmax(-1))
        torch.testing.assert_close(draft.confidence, logits.softmax(-1).max(-1).values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("with_markov", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_confidence_head_equals_its_formula(with_markov, bias):
    drafter = drafter_with("vanilla", confidence_head_with_markov=with_markov, confidence_head_bias=bias)
    hidden = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(8))
    with torch.no_grad():
        draft = drafter.choose(hidden, torch.tensor([11]))
        previous = torch.cat((torch.tensor([11]), draft.tokens[:-1]))
        inputs = torch.cat((hidden, drafter.markov_head.markov_w1.weight[previous]), -1) if with_markov else hidden
        raw = inputs @ drafter.confidence_head.proj.weight[0]
        raw = raw + drafter.confidence_head.proj.bias if bias else raw
    torch.testing.assert_close(draft.acceptance, sigmoid(raw))
    assert drafter.confidence_head.proj.weight.shape == (1, HIDDEN + (8 if with_markov else 0))


def test_heads_are_optional():
    drafter = bind(make_drafter("dspark", markov_rank=0, enable_confidence_head=False))
    assert not any(name.startswith(("markov", "confidence")) for name in drafter.state_dict())
    hidden = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(9))
    draft = drafter.choose(hidden, torch.tensor([11]))
    assert draft.acceptance is None
    logits = drafter.logits(hidden).index_fill(-1, torch.tensor([MASK]), -torch.inf)
    assert torch.equal(draft.tokens, logits.argmax(-1))


@pytest.mark.parametrize(("from_anchor", "first_row"), [(True, 0), (False, 1)])
def test_alignment_decides_which_rows_are_draft_tokens(from_anchor, first_row):
    drafter = drafter_with("vanilla", sample_from_anchor=from_anchor)
    assert drafter.alignment.first_draft_row == first_row
    assert drafter.alignment.label_offset == 1 - first_row
    context = drafter.project_context(features(9), torch.arange(9))
    positions = torch.arange(9, 14)
    masks = drafter.block_masks(positions, torch.arange(9), 5)
    anchor = torch.tensor([11])
    with torch.no_grad():
        hidden = drafter(drafter.embed_block(anchor, 5), positions, context, masks)[0]
        expected = drafter.choose(hidden[first_row:], anchor)
    draft = drafter.propose(observed(drafter, 9), anchor, 9)
    assert torch.equal(draft.tokens, expected.tokens) and len(draft.tokens) == 5 - first_row
