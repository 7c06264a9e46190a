"""Losses of the block drafters.

DFlash is trained on the tokens that the target wrote, later rows weighing less since they count only if the earlier
ones were accepted: by a fixed decay, or by the drafter's own chance of getting there (`survival_weights`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def decay_weights(supervised: Tensor, first_draft_row: int, gamma: float) -> Tensor:
    """exp(-(k - first_draft_row) / gamma) on supervised rows k, else 0; supervised [.., R] bool -> fp32 [.., R].

    gamma is in rows: 7 for blocks of 16, 4 for blocks of 8.
    """
    rows = torch.arange(supervised.shape[-1], device=supervised.device)
    weights = torch.exp(-(rows - first_draft_row).clamp(min=0) / gamma)
    return weights * supervised


def survival_weights(label_probability: Tensor, supervised: Tensor, alpha: float) -> Tensor:
    """Weight of a row = sum over itself and later rows of the chance that drafting survives to there (detached).

    label_probability: [.., R] fp32, the drafter's probability of each label, smoothed as (1 - alpha) q + alpha, rows
    in draft order. Rows that are not supervised neither stop the survival nor weigh anything.
    """
    smoothed = torch.where(supervised, (1 - alpha) * label_probability + alpha, 1.0).detach()
    survival = smoothed.cumprod(-1) * supervised
    return survival.flip(-1).cumsum(-1).flip(-1) * supervised


def weighted_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """sum(weights * cross entropy) / sum(weights): logits [.., V], labels [..] int64, weights [..] fp32.

    0 when no row weighs anything.
    """
    losses = F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum().clamp(min=1e-6)
