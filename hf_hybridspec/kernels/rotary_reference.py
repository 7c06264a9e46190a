"""Rotary embedding of a block in plain torch: angles position times frequency in fp32, the same for both halves."""

import torch


def rotary_rows(committed, offset, frequencies, scaling, cos, sin) -> None:
    """As `rotary.rotary_rows`, into `cos` and `sin`."""
    positions = torch.arange(cos.shape[0], device=cos.device) + committed.long() + offset.long()
    angles = positions[:, None].float() * frequencies
    cos.copy_((angles.cos() * scaling).repeat(1, 2))
    sin.copy_((angles.sin() * scaling).repeat(1, 2))
