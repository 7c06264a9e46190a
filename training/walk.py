"""Real acceptance length without decoding: along a text that the target wrote greedily, every round is known.

Speculative decoding emits the target's own greedy text whatever the drafter. So the proposals at all positions of that
text can be made at once, by the training forward; the rounds are then walked: from the anchor at p, whose first A
draft tokens agree with the text, to p + A + 1. What comes out are the rounds that `generate` would have run, to
rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_hybridspec.generation.statistics import GenerationStatistics
from hf_hybridspec.modeling.dspark.modeling_dspark import DSparkDrafter
from training.anchors import lay_out_blocks
from training.drafting import draft_hidden
from training.target_features import FrozenTarget

ANCHORS_PER_FORWARD = 256


@torch.no_grad()
def proposals(drafter: DSparkDrafter, hidden: Tensor, anchors: Tensor) -> Tensor:
    """Draft tokens [N, D] of N blocks at once, as `DSparkDrafter.choose` takes them: hidden [N, D, H], anchors [N]."""
    logits = drafter.proposal_logits(hidden)
    previous, state, tokens = anchors, None, []
    for row in range(hidden.shape[1]):
        scores = logits[:, row]
        if drafter.markov_head is not None:
            step = drafter.markov_head.step(previous, hidden[:, row], state)
            scores, state = scores + step.bias.float(), step.state
        previous = drafter.target_ids(scores.argmax(-1))
        tokens.append(previous)
    return torch.stack(tokens, dim=1)


@torch.no_grad()
def walk(
    drafter: DSparkDrafter, target: FrozenTarget, tokens: Tensor, prompt_length: int, ended: bool
) -> GenerationStatistics:
    """The rounds of greedy decoding with every draft verified.

    Args:
        drafter: bound, in eval mode.
        tokens: [S] int64, the prompt and the target's greedy answer, at least two tokens of it.
        ended: whether the answer ends with an end token; drafts after it would then not have been judged.
    """
    positions = torch.arange(prompt_length, tokens.shape[0] - 1, device=tokens.device)
    accepted = []
    for anchors in positions.split(ANCHORS_PER_FORWARD):
        record = target.run(tokens[None], anchors[None])
        valid = torch.ones_like(anchors, dtype=torch.bool)[None]
        answer = torch.ones_like(tokens, dtype=torch.bool)[None]
        layout = lay_out_blocks(tokens[None], answer, anchors[None], valid, drafter.block_size, drafter.alignment)
        hidden = draft_hidden(drafter, tokens[None], record.features, layout, record.recurrent_states)[0]
        first = drafter.alignment.first_draft_row
        drafts = proposals(drafter, hidden[:, first:], tokens[anchors])
        right = (drafts == layout.labels[0, :, first:]) & layout.supervised[0, :, first:]
        accepted += right.long().cumprod(-1).sum(-1).tolist()
    return _rounds(accepted, drafter.num_draft_tokens, ended)


def _rounds(accepted: list[int], num_draft_tokens: int, ended: bool) -> GenerationStatistics:
    """accepted: of the block at each position of the answer but the last."""
    statistics = GenerationStatistics("walk", "full")
    place, remaining = 0, len(accepted)
    while remaining:
        # Without an end token the length limit ended the text: it also bounds the rows of a round.
        length = num_draft_tokens + 1 if ended else min(num_draft_tokens + 1, max(2, remaining))
        emitted = min(accepted[place] + 1, length, remaining)
        statistics.add_round(length, emitted)
        place, remaining = place + emitted, remaining - emitted
    return statistics
