"""Equation 5 against the formula written out, and what chunks and checkpoints must not change."""

import math

import pytest
import torch

from tests.support import random_prompt
from tests.training.helpers import make_dspark, make_pair
from training.objective import DraftingObjective, LossWeights, TrainingBatch
from training.target_features import FrozenTarget

ANCHORS = [[7, 12, 40], [8, 20, 30]]


def make_batch(length=50, answer=slice(6, None)):
    tokens = torch.cat((random_prompt(length), random_prompt(length, seed=1)))
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    mask[:, answer] = True
    return TrainingBatch(tokens, mask, torch.tensor(ANCHORS), torch.tensor([[True] * 3, [True, True, False]]))


def run(drafter, target, batch, weights=None, **options):
    weights = weights or LossWeights()
    return DraftingObjective(drafter, weights, **options)(
        batch, FrozenTarget(target, drafter).run(batch.tokens, batch.anchors)
    )


@torch.no_grad()
def written_out(drafter, target, batch, weights):
    """Mean over sequences of equation 5, with one proposal context for each anchor."""
    outputs = target.model(batch.tokens, output_hidden_states=True)
    target_logits = target.lm_head(outputs.last_hidden_state)
    taps = torch.cat([outputs.hidden_states[layer + 1] for layer in drafter.target_layer_ids], dim=-1)
    record = FrozenTarget(target, drafter).run(batch.tokens, batch.anchors)
    losses = []
    for row in range(batch.tokens.shape[0]):
        total, norm = 0.0, 0.0
        for index, position in enumerate(batch.anchors[row].tolist()):
            if not batch.valid[row, index]:
                continue
            tokens = batch.tokens[row]
            positions = position + torch.arange(drafter.block_size)
            where = row * batch.anchors.shape[1] + index
            states = {layer: state[where : where + 1] for layer, state in record.recurrent_states.items()}
            context = drafter.project_context(taps[row, :position], torch.arange(position))
            masks = drafter.block_masks(positions, torch.arange(position), drafter.block_size)
            anchor = tokens[position : position + 1]
            hidden = drafter(
                drafter.embed_block(anchor, drafter.block_size), positions, context, masks, recurrent_states=states
            )[0]
            previous = anchor[0]
            for j in range(drafter.block_size):
                place = position + j + 1
                if place >= len(tokens) or not batch.answer_mask[row, place]:
                    break
                logits = drafter.logits(hidden[j]) + drafter.markov_head.step(previous, hidden[j], None).bias
                draft, wanted = logits.softmax(-1), target_logits[row, place - 1].softmax(-1)
                loss = -weights.ce * draft[tokens[place]].log() + weights.l1 * (draft - wanted).abs().sum()
                total += math.exp(-j / weights.decay) * loss
                norm += math.exp(-j / weights.decay)
                previous = tokens[place]
        losses.append(total / norm)
    return sum(losses) / len(losses)


@pytest.mark.parametrize("family", ["dspark", "ready"])
@pytest.mark.parametrize("weights", [LossWeights(), LossWeights(ce=1.0, l1=0.0, decay=2.0)])
def test_the_loss_is_equation_5(family, weights):
    target, drafter = make_pair(family)
    batch = make_batch()
    output = run(drafter, target, batch, weights)
    torch.testing.assert_close(output.loss, written_out(drafter, target, batch, weights), rtol=1e-4, atol=1e-5)


def test_supervision_ends_at_the_first_token_that_the_target_did_not_write():
    target, drafter = make_pair("dspark")
    batch = make_batch()
    batch.answer_mask[:, 42:45] = False
    output = run(drafter, target, batch)
    torch.testing.assert_close(output.loss, written_out(drafter, target, batch, LossWeights()), rtol=1e-4, atol=1e-5)
    assert int(output.observable) == 4


def test_sequences_weigh_the_same_however_many_anchors_they_have():
    target, drafter = make_pair("dspark")
    batch = make_batch()

    def part(row):
        fields = (getattr(batch, name)[row : row + 1] for name in ("tokens", "answer_mask", "anchors", "valid"))
        return run(drafter, target, TrainingBatch(*fields)).loss

    torch.testing.assert_close(run(drafter, target, batch).loss, (part(0) + part(1)) / 2, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{"blocks_per_chunk": 1}, {"blocks_per_chunk": 2, "activation_checkpointing": True}]
)
def test_chunks_and_checkpoints_change_neither_loss_nor_gradient(options):
    target, drafter = make_pair("ready")
    batch = make_batch()
    results = []
    for settings in ({"blocks_per_chunk": 100}, options):
        drafter.zero_grad()
        loss = run(drafter, target, batch, **settings).loss
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
        results.append((loss.detach(), gradients))
    (loss, gradients), (other, others) = results
    torch.testing.assert_close(loss, other)
    assert any("state_reader" in name for name in gradients) and gradients.keys() == others.keys()
    for name in gradients:
        torch.testing.assert_close(gradients[name], others[name], rtol=1e-4, atol=1e-6)


def test_logits_of_few_blocks_exist_at_one_time():
    target, drafter = make_pair("dspark")
    seen = []
    corrected = drafter.corrected_logits
    drafter.corrected_logits = lambda hidden, previous: seen.append(hidden.shape[0]) or corrected(hidden, previous)
    run(drafter, target, make_batch(), blocks_per_chunk=2).loss.backward()
    # Five used blocks, and each chunk once more in the backward pass.
    assert max(seen) == 2 and sum(seen) == 10


def test_the_target_gets_no_gradient():
    target, drafter = make_pair("ready")
    run(drafter, target, make_batch()).loss.backward()
    assert all(parameter.grad is None for parameter in target.parameters())


def test_estimates_count_blocks_that_agree_with_the_target():
    target, drafter = make_pair("dspark")
    with torch.no_grad():
        tokens = target.generate(random_prompt(6), max_new_tokens=44, do_sample=False)
    batch = TrainingBatch(
        tokens, torch.arange(50)[None] >= 6, torch.tensor([[10, 20, 46]]), torch.ones(1, 3, dtype=torch.bool)
    )
    record = FrozenTarget(target, drafter).run(batch.tokens, batch.anchors)
    expected = torch.nn.functional.one_hot(tokens, 128).float() * 50

    def scripted(hidden, previous):
        # Rows agree but for the third of the block at 20.
        wanted = torch.stack([expected[0, a + 1 : a + 8] for a in (10, 20)])
        wanted[1, 2] = wanted[1, 2].roll(1)
        whole = torch.nn.functional.pad(wanted, (0, 0, 0, 0, 0, hidden.shape[0] - 2))
        return whole + 0 * hidden.sum()

    drafter.corrected_logits = scripted
    output = DraftingObjective(drafter, LossWeights())(batch, record)
    # The block at 46 ends with the sequence: it is not observable.
    assert int(output.observable) == 2
    assert output.survived.tolist() == [2, 2, 1, 1, 1, 1, 1]


def test_the_confidence_head_learns_only_where_it_is_asked_to():
    target, drafter = make_pair("dspark")
    run(drafter, target, make_batch()).loss.backward()
    assert drafter.confidence_head.proj.weight.grad is None
    run(drafter, target, make_batch(), LossWeights(confidence=1.0)).loss.backward()
    assert drafter.confidence_head.proj.weight.grad.any()


def test_a_batch_without_supervision_has_a_loss_of_zero():
    target, drafter = make_pair("dspark")
    batch = make_batch()
    output = run(drafter, target, TrainingBatch(batch.tokens, batch.answer_mask, batch.anchors, batch.valid & False))
    output.loss.backward()
    assert output.loss == 0 and output.observable == 0


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(ValueError, match="DSpark or ReaDy drafter, got DFlashDrafter"):
        DraftingObjective(make_pair("dflash")[1], LossWeights())
    with pytest.raises(ValueError, match="output_multiplier=2"):
        DraftingObjective(make_dspark(output_multiplier=2.0), LossWeights())
    with pytest.raises(ValueError, match="must not be negative"):
        LossWeights(ce=-1)
