"""Sampled acceptance in plain torch: all probabilities, then the point-mass rule on them."""

import torch

from .acceptance import point_mass_acceptance
from .round_steps import RoundState
from .sampling import SamplingSettings, sampling_probs


def accept_sampled(
    logits: torch.Tensor, uniforms: torch.Tensor, settings: SamplingSettings, is_filtered: bool, state: RoundState
) -> None:
    """As `sampled_acceptance.accept_sampled`."""
    probs = sampling_probs(logits, settings, is_filtered)
    outcome = point_mass_acceptance(state.block_tokens[1 : logits.shape[0]], probs, uniforms)
    state.num_accepted.copy_(outcome.num_accepted.view(1))
    state.next_token.copy_(outcome.next_token.view(1))
