"""Where training blocks stand in a sequence, what their rows see, and what they are to predict.

A `BlockLayout` holds this for both row alignments (DFlash: row k predicts the token at its own position; DSpark: the
one after it), so that the property "the training forward of a block equals drafting at the same anchor" can be tested
once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_hybridspec.modeling.drafter_config import Alignment, AttentionSpan


@dataclass(frozen=True)
class BlockLayout:
    """N blocks of R rows in each of B sequences of S tokens.

    anchors: [B, N] int64, positions of the blocks' first rows. valid: [B, N] bool, False for blocks that only fill up.
    positions: [B, N * R] int64, anchor + row. labels: [B, N, R] int64, the token each row is to predict (0 where there
    is none). supervised: [B, N, R] bool, rows that have a label of the answer.
    """

    anchors: Tensor
    valid: Tensor
    positions: Tensor
    labels: Tensor
    supervised: Tensor

    @property
    def rows_per_block(self) -> int:
        return self.labels.shape[-1]

    def mask(self, span: AttentionSpan, sequence_length: int) -> Tensor:
        """[B, 1, N * R, S + N * R] bool, True where visible: the rule of `drafter_layers.block_mask`, for B sequences.

        Rows of blocks that are not valid see their own block alone, so that no softmax is empty.
        """
        rows_per_block = self.rows_per_block
        rows, anchors = self.positions, self.anchors.repeat_interleave(rows_per_block, dim=1)
        context = torch.arange(sequence_length, device=rows.device)
        seen = (context < anchors.unsqueeze(-1)) & self.valid.repeat_interleave(rows_per_block, dim=1).unsqueeze(-1)
        blocks = torch.arange(rows.shape[1], device=rows.device) // rows_per_block
        block = (blocks.unsqueeze(1) == blocks).expand(len(rows), -1, -1)
        distance = rows.unsqueeze(-1) - rows.unsqueeze(-2)
        if span.causal:
            block = block & (distance >= 0)
        if span.window is not None and span.window_from_anchor:
            seen = seen & (context >= anchors.unsqueeze(-1) - span.window)
        elif span.window is not None:
            seen = seen & (rows.unsqueeze(-1) - context < span.window)
            block = block & (distance.abs() < span.window)
        return torch.cat((seen, block), dim=-1).unsqueeze(1)


def sample_anchors(answer_mask: Tensor, count: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Draws up to `count` anchors in each sequence, without replacement, in rising order.

    answer_mask: [B, S] bool, True on the tokens that the target wrote. An anchor is an answer token whose next token
    is one too. Returns anchors [B, count] int64 and valid [B, count] bool; where a sequence has fewer, the rest stand
    at its last position and are not valid. Nothing is read back from the device, so a sequence without any anchor is
    for the caller to leave out.
    """
    possible = answer_mask.clone()
    possible[:, -1] = False
    possible[:, :-1] &= answer_mask[:, 1:]
    noise = torch.rand(possible.shape, generator=generator, device=possible.device)
    count = min(count, possible.shape[1])
    score, anchors = noise.masked_fill(~possible, 2.0).topk(count, dim=1, largest=False)
    valid = score < 2.0
    anchors = anchors.masked_fill(~valid, possible.shape[1] - 1)
    anchors, order = anchors.sort(dim=1)
    return anchors, valid.gather(1, order)


def lay_out_blocks(
    tokens: Tensor, answer_mask: Tensor, anchors: Tensor, valid: Tensor, rows_per_block: int, alignment: Alignment
) -> BlockLayout:
    """The layout of blocks at `anchors`, with the labels that `alignment` asks for.

    tokens: [B, S] int64. answer_mask: [B, S] bool. A row is supervised when it is a draft row of a valid block and its
    label lies inside the sequence and the answer.
    """
    length = tokens.shape[1]
    rows = torch.arange(rows_per_block, device=tokens.device)
    positions = anchors.unsqueeze(-1) + rows
    wanted = positions + alignment.label_offset
    inside = wanted.clamp(max=length - 1).flatten(1)
    labels = tokens.gather(1, inside).view_as(wanted)
    supervised = answer_mask.gather(1, inside).view_as(wanted)
    supervised = supervised & (wanted < length) & (rows >= alignment.first_draft_row) & valid.unsqueeze(-1)
    labels = labels.masked_fill(~supervised, 0)
    return BlockLayout(anchors, valid, positions.flatten(1), labels, supervised)
