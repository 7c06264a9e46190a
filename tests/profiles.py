"""Calibration profiles made up for tests, and a drafter whose drafts are right now and then."""

from dataclasses import replace

import torch

from hf_hybridspec.calibration.profile import (
    AcceptanceModel,
    CalibrationProfile,
    CostModel,
    FitQuality,
    PairIdentity,
    ReliabilityBin,
    RoutingTables,
)
from hf_hybridspec.generation.pair_identity import pair_identity
from hf_hybridspec.modeling.draft import Draft
from tests.support import ScriptedDrafter, drafter_config

NOBODY = PairIdentity("target", "0" * 16, "drafter", "1" * 16, 15, "cpu", "float32", "eager")


def make_profile(pair: PairIdentity = NOBODY, **changes) -> CalibrationProfile:
    """A profile whose model takes the confidence at its word: c_i is close to the confidence."""
    drafts = pair.num_draft_tokens
    knots = ((0.0, 0.25, 0.5, 0.75, 1.0),) * drafts
    costs = CostModel(
        measured=tuple(1e-3 * (3 + 0.4 * length) for length in range(2, drafts + 2)),
        fitted=tuple(1e-3 * (3 + 0.4 * length) for length in range(2, drafts + 2)),
        fixed=1e-3,
        stage0_row=0.05e-3,
        expert=0.02e-3,
        autoregressive=2e-3,
    )
    values = {
        "pair": pair,
        # sigmoid(-4 + 8 a) crosses one half where a does.
        "acceptance": AcceptanceModel(knots, knots, (8.0, 0.0, 0.0, 0.0, 0.0, -4.0), None),
        "costs": costs,
        "routing": RoutingTables((12.0,) * drafts, (tuple(2.0 + 10 * count for count in range(3)),) * drafts),
        "rho": 700.0,
        "static_length": 5,
        "quality": FitQuality((ReliabilityBin(0.5, 0.5, 10),), 0.0, 0.1, True, 0.99, 0.5),
        "prompts": "made up",
        "prompts_hash": "2" * 16,
        "prompt_keys": ("a",),
        "num_rounds": 10,
        "software": "tests",
        "notes": (),
    }
    return CalibrationProfile(**{**values, **changes})


def profile_of(target, drafter, **changes) -> CalibrationProfile:
    """A made-up profile that fits a pair."""
    return make_profile(pair_identity(target, drafter), **changes)


def with_costs(profile: CalibrationProfile, **changes) -> CalibrationProfile:
    """The profile with other latencies."""
    return replace(profile, costs=replace(profile.costs, **changes))


class NoisyDrafter(ScriptedDrafter):
    """Proposes a known continuation with errors that depend on the position alone, and a confidence that knows half.

    Confidence is drawn around 0.9 for drafts before the first error and around 0.5 after, so that it orders rounds
    without giving the error away. Two runs that draft at the same position get the same draft.
    """

    def propose(self, context, anchor, position, recurrent_states=None) -> Draft:
        generator = torch.Generator().manual_seed(1000 + int(position))
        # Every third block is hard.
        right = 0.45 if int(position) % 3 == 0 else 0.9
        num_right = int((torch.rand(self.num_draft_tokens, generator=generator) < right).long().cumprod(0).sum())
        self.num_right = [num_right]
        draft = super().propose(context, anchor, position, recurrent_states)
        center = torch.where(torch.arange(self.num_draft_tokens) < num_right, 0.9, 0.55)
        noise = torch.randn(self.num_draft_tokens, generator=generator)
        confidence = (center + 0.12 * noise).clamp(0.02, 0.999)
        entropy = -(confidence.log() * confidence + (1 - confidence + 1e-4).log() * (1 - confidence))
        return Draft(draft.tokens, confidence, entropy.clamp(min=0))


def noisy_drafter(continuation: torch.Tensor) -> NoisyDrafter:
    """A NoisyDrafter with random weights that knows the whole sequence `[n]`."""
    torch.manual_seed(1)
    return NoisyDrafter(drafter_config()).eval().script(continuation, [0])
