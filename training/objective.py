"""ReaDy's training objective (equation 5), and the module that the Trainer trains.

    L_i = sum_{(a, j) in V_i} w_j (c_ce CE + c_l1 |softmax(draft) - softmax(target)|_1) / sum_{(a, j) in V_i} w_j

with w_j = exp(-j / 4) for draft row j of anchor a in sequence i, normalised inside each sequence and then averaged
over sequences (not over tokens). Logits exist for a few blocks at a time and are computed again in the backward pass,
so that the peak is `blocks_per_chunk * rows * vocabulary` numbers whatever the number of anchors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_hybridspec.modeling.dspark.modeling_dspark import DSparkDrafter
from training.anchors import lay_out_blocks
from training.drafting import draft_hidden
from training.target_features import TargetRecord


@dataclass(frozen=True)
class LossWeights:
    """Weights of the objective. decay: rows over which a row's weight falls by e. confidence: of the confidence head's
    binary cross entropy against 1 - L1 / 2 (DSpark's own training only)."""

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 0.0
    decay: float = 4.0

    def __post_init__(self):
        if min(self.ce, self.l1, self.confidence) < 0 or self.ce + self.l1 <= 0 or self.decay <= 0:
            raise ValueError(
                f"ce, l1 and confidence must not be negative, ce + l1 and decay must be positive, got {self}."
            )


@dataclass(frozen=True)
class TrainingBatch:
    """B sequences of S tokens with N anchors each.

    tokens: [B, S] int64, padded on the right. answer_mask: [B, S] bool, tokens that the target wrote.
    anchors: [B, N] int64. valid: [B, N] bool, False for anchors that only fill up.
    """

    tokens: Tensor
    answer_mask: Tensor
    anchors: Tensor
    valid: Tensor


@dataclass(frozen=True)
class ObjectiveOutput:
    """loss: fp32 scalar. survived: [R] int64, blocks among `observable` whose first j + 1 draft tokens equal the
    target's own choice. observable: int64 scalar, blocks with every row supervised."""

    loss: Tensor
    survived: Tensor
    observable: Tensor


class DraftingObjective(nn.Module):
    """Wraps a DSpark or ReaDy drafter (or its PeftModel); `forward` gives the loss of a batch.

    The target's head and embedding are borrowed by the drafter and never parameters of this module.
    """

    # A per-batch mean: the Trainer divides it by the accumulation steps.
    accepts_loss_kwargs = False

    def __init__(
        self,
        trained: nn.Module,
        weights: LossWeights,
        blocks_per_chunk: int = 32,
        activation_checkpointing: bool = False,
    ):
        super().__init__()
        self.trained = trained
        self.weights = weights
        self.blocks_per_chunk = blocks_per_chunk
        self.activation_checkpointing = activation_checkpointing
        _check_trainable(self.drafter)

    @property
    def drafter(self) -> DSparkDrafter:
        """The drafter itself, inside PEFT or not."""
        return self.trained.get_base_model() if hasattr(self.trained, "get_base_model") else self.trained

    def forward(self, batch: TrainingBatch, record: TargetRecord) -> ObjectiveOutput:
        """Loss over the batch; differentiable in the trained parameters alone."""
        drafter = self.drafter
        layout = lay_out_blocks(
            batch.tokens, batch.answer_mask, batch.anchors, batch.valid, drafter.block_size, drafter.alignment
        )
        hidden = draft_hidden(
            drafter, batch.tokens, record.features, layout, record.recurrent_states, self.activation_checkpointing
        )
        first = drafter.alignment.first_draft_row
        # Supervision ends at the first row without a label: what follows is no continuation of the block.
        supervised = layout.supervised[..., first:].long().cumprod(-1).bool()
        labels = layout.labels[..., first:]
        anchors = batch.tokens.gather(1, batch.anchors).unsqueeze(-1)
        previous = torch.cat((anchors, labels[..., :-1]), dim=-1)
        # The target chooses the token of position q at row q - 1.
        wanted = layout.positions.view_as(layout.labels)[..., first:] + drafter.alignment.label_offset
        rows = _flat_rows((wanted - 1).clamp(max=batch.tokens.shape[1] - 1), batch.tokens.shape[1])
        used = supervised.any(-1).flatten()
        per_row = _Rows(
            hidden[..., first:, :].flatten(0, 1)[used],
            previous.flatten(0, 1)[used],
            labels.flatten(0, 1)[used],
            rows.flatten(0, 1)[used],
        )
        losses, right = self._row_losses(per_row, record.last_hidden.flatten(0, 1))
        return self._reduce(losses, right, supervised, used)

    def _row_losses(self, rows: _Rows, last_hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Loss [M, D] fp32 and agreement with the target's choice [M, D] bool of M blocks."""
        losses, agreement = [], []
        for start in range(0, rows.hidden.shape[0], self.blocks_per_chunk):
            part = rows.part(slice(start, start + self.blocks_per_chunk))
            teacher = last_hidden[part.teacher_rows]
            arguments = (part.hidden, part.previous, part.labels, teacher)
            if torch.is_grad_enabled():
                loss, right = checkpoint(self._chunk_losses, *arguments, use_reentrant=False)
            else:
                loss, right = self._chunk_losses(*arguments)
            losses.append(loss)
            agreement.append(right)
        if not losses:
            empty = rows.hidden.sum(-1)
            return empty, torch.zeros_like(empty, dtype=torch.bool)
        return torch.cat(losses), torch.cat(agreement)

    def _chunk_losses(
        self, hidden: Tensor, previous: Tensor, labels: Tensor, teacher: Tensor
    ) -> tuple[Tensor, Tensor]:
        drafter, weights = self.drafter, self.weights
        with torch.no_grad():
            target_logits = drafter.logits(teacher)
        logits = drafter.corrected_logits(hidden, previous)
        log_probabilities = logits.log_softmax(-1)
        distance = (log_probabilities.exp() - target_logits.softmax(-1)).abs().sum(-1)
        ce = F.nll_loss(log_probabilities.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
        loss = weights.ce * ce + weights.l1 * distance
        if weights.confidence:
            confidence = drafter.confidence_logits(hidden, previous)
            chance = (1 - 0.5 * distance.detach()).clamp(0, 1)
            loss = loss + weights.confidence * F.binary_cross_entropy_with_logits(confidence, chance, reduction="none")
        return loss, logits.argmax(-1) == target_logits.argmax(-1)

    def _reduce(self, losses: Tensor, right: Tensor, supervised: Tensor, used: Tensor) -> ObjectiveOutput:
        """losses, right: [M, D] of the used blocks; supervised [B, N, D] bool; used [B * N] bool."""
        sequences, blocks, width = supervised.shape
        decay = torch.exp(-torch.arange(width, device=losses.device) / self.weights.decay)
        row_weights = decay * supervised
        totals = row_weights.sum((1, 2))
        owner = torch.arange(sequences, device=losses.device).repeat_interleave(blocks)[used]
        weighted = (losses * row_weights.flatten(0, 1)[used]).sum(-1)
        per_sequence = torch.zeros_like(totals).index_add(0, owner, weighted) / totals.clamp(min=1e-12)
        loss = per_sequence.sum() / (totals > 0).sum().clamp(min=1)
        whole = supervised.flatten(0, 1)[used].all(-1)
        survived = right[whole].long().cumprod(-1).sum(0)
        return ObjectiveOutput(loss, survived, whole.sum())


def _check_trainable(drafter: nn.Module) -> None:
    if not isinstance(drafter, DSparkDrafter):
        raise ValueError(f"Training takes a DSpark or ReaDy drafter, got {type(drafter).__name__}.")
    config = drafter.config
    if config.draft_vocab_size is not None or config.output_multiplier != 1 or config.final_logit_softcapping:
        # The loss compares the drafter's distribution with the target's, both from the target's head as it is.
        raise ValueError(
            "Training takes a drafter that uses the target's head as it is, got draft_vocab_size="
            f"{config.draft_vocab_size}, output_multiplier={config.output_multiplier}, "
            f"final_logit_softcapping={config.final_logit_softcapping}."
        )


@dataclass(frozen=True)
class _Rows:
    """M blocks: hidden [M, D, H], previous and labels [M, D] tokens, teacher_rows [M, D] rows of the flat target."""

    hidden: Tensor
    previous: Tensor
    labels: Tensor
    teacher_rows: Tensor

    def part(self, index: slice) -> _Rows:
        return _Rows(self.hidden[index], self.previous[index], self.labels[index], self.teacher_rows[index])


def _flat_rows(positions: Tensor, length: int) -> Tensor:
    """positions [B, N, D] -> rows of [B * S, hidden]."""
    offsets = torch.arange(positions.shape[0], device=positions.device) * length
    return positions + offsets[:, None, None]
