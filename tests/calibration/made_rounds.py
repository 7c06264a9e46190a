"""Captured rounds made up from known probabilities."""

import numpy as np

from hf_hybridspec.calibration.rounds import RoundArrays


def made_rounds(num_rounds=1500, num_drafts=7, num_prompts=20, seed=0, confidence=None) -> RoundArrays:
    """Each draft is accepted with the probability conf^1.5 that its confidence hides; experts follow a shared draw."""
    generator = np.random.default_rng(seed)
    level = generator.beta(3, 1.2, (num_rounds, 1))
    if confidence is None:
        confidence = np.clip(level + 0.15 * generator.standard_normal((num_rounds, num_drafts)), 0.02, 0.99)
    is_accepted = generator.random((num_rounds, num_drafts)) < confidence**1.5
    layer0 = np.clip(generator.poisson(2, (num_rounds, num_drafts)), 0, 4)
    return RoundArrays(
        confidence=confidence,
        entropy=-np.log(confidence) + 0.1 * generator.random((num_rounds, num_drafts)),
        acceptance=None,
        num_accepted=is_accepted.cumprod(axis=1).sum(axis=1),
        new_layer0=layer0,
        new_pairs=layer0 + 5 * layer0 + generator.poisson(10, (num_rounds, num_drafts)),
        prompt=np.arange(num_rounds) % num_prompts,
        kind=np.array(["a", "b"])[np.arange(num_rounds) % 2],
    )
