"""Trace-driven runs: lengths and tokens of a round, and policies that lose where they should."""

from dataclasses import replace

import numpy as np
import pytest

from hf_hybridspec.bench.floor_costs import TargetBytes, floor_costs
from hf_hybridspec.bench.scripted_routing import RoutingScript, with_scripted_routing
from hf_hybridspec.bench.trace import ModelledCosts, execute, run_trace, static_lengths
from hf_hybridspec.calibration.calibrate import MeasuredCosts, PromptSet, assemble
from hf_hybridspec.generation.length_policies import Evict, HybridSpec, LengthPolicy, NominalOnly, Static
from tests.calibration.made_rounds import made_rounds
from tests.profiles import NOBODY

SCRIPT = RoutingScript(num_layers=40)
# Experts in place of attention and head: what a row costs is decided by its experts, as on a bandwidth-bound device.
SIZES = TargetBytes(shared=2e9, stage0_row=1e6, overhead=0.0)


@pytest.fixture(scope="module")
def world():
    """Profile of calibration rounds, other rounds to measure, and what they cost."""
    known = with_scripted_routing(made_rounds(1500, num_drafts=15, seed=0), SCRIPT, seed=0)
    unseen = with_scripted_routing(made_rounds(700, num_drafts=15, seed=1), SCRIPT, seed=1)
    costs = MeasuredCosts(floor_costs(15, SCRIPT, SIZES), 1.0, ())
    profile = assemble(known, costs, NOBODY, PromptSet("made up", ("a",)), SCRIPT.top_k)
    return profile, unseen, ModelledCosts(profile.costs, profile.routing, "test")


class Constantly(HybridSpec):
    """HybridSpec with a constant in place of the correction."""

    def __init__(self, profile, extra):
        super().__init__(profile)
        self.extra = extra

    def correct(self, nominal_length, new_experts):
        return nominal_length + self.extra


def speed(policy: LengthPolicy, world) -> float:
    return run_trace(policy, world[1], world[2]).tokens_per_second


def test_the_correction_beats_every_constant(world):
    profile = world[0]
    corrected = speed(HybridSpec(profile), world)
    assert corrected > speed(Constantly(profile, 0), world)
    assert corrected > 1.01 * speed(Constantly(profile, 1), world)
    assert corrected > speed(NominalOnly(profile), world)


def test_the_pooled_rate_beats_the_ratio_of_the_round(world):
    profile = world[0]

    class Ratio(NominalOnly):
        """The same acceptance model, with the ratio of the round in place of rho."""

        def choose(self, draft):
            super().choose(draft)
            tokens = 1 + self._selection.prefix_probs.double().cumsum(0)
            ratios = [float(tokens[w - 2]) / profile.costs.round_seconds(w) for w in range(2, 17)]
            return 2 + ratios.index(max(ratios))

    assert speed(NominalOnly(profile), world) > 1.002 * speed(Ratio(profile), world)


def test_adaptive_lengths_beat_every_fixed_one_and_raw_confidence(world):
    ours = speed(HybridSpec(world[0]), world)
    assert ours > 1.05 * max(speed(Static(length), world) for length in static_lengths(world[1]))
    assert ours > speed(Evict(world[0]), world)
    assert "simulated" in world[2].description


def test_the_profiles_rate_is_what_the_trace_reaches(world):
    assert speed(NominalOnly(world[0]), world) == pytest.approx(world[0].rho, rel=0.05)


class Scripted(LengthPolicy):
    name, lookahead = "scripted", 1

    def select(self, draft):
        return 4

    def correct(self, nominal_length, new_experts):
        self.seen = new_experts
        return nominal_length + 1


def test_a_round_emits_what_its_length_lets_through(world):
    rounds = replace(world[1], num_accepted=np.full(world[1].num_rounds, 3))
    policy = Scripted()
    run = execute(policy, rounds, 5)
    assert (run.stage0_length, run.length, run.num_emitted) == (5, 5, 4)
    # Draft 4 is the row beyond four verified ones.
    assert policy.seen == rounds.new_layer0[5, 3]
    assert execute(Static(3), rounds, 5).num_emitted == 3 and execute(Static(16), rounds, 5).num_emitted == 4
    result = run_trace(Static(3), rounds, world[2])
    assert result.acceptance_length == 3 and result.mean_length == 3 and result.lengths == {3: rounds.num_rounds}


def test_costs_count_the_experts_that_the_rows_select(world):
    profile, rounds, costs = world
    cheap = replace(rounds, new_pairs=np.zeros_like(rounds.new_pairs))
    dear = run_trace(Static(6), rounds, costs).seconds - run_trace(Static(6), cheap, costs).seconds
    assert dear == pytest.approx(profile.costs.expert * rounds.new_pairs[:, :5].sum())
    # The row that only Stage 0 saw is paid for.
    assert costs.seconds(rounds, [execute(Constantly(profile, 0), rounds, 0)]) == pytest.approx(
        costs.seconds(rounds, [execute(NominalOnly(profile), rounds, 0)]) + profile.costs.stage0_row
    )


def test_scripted_routing_has_the_stated_statistics():
    generator = np.random.default_rng(0)
    counts = np.stack([SCRIPT.draw(16, generator) for _ in range(600)])
    distinct = counts.cumsum(axis=2).mean(axis=(0, 1))
    for length in (1, 2, 4, 8, 16):
        assert distinct[length - 1] == pytest.approx(8 * length**0.66, rel=0.08)
    n0, later = counts[:, 0, 1:].astype(float), counts[:, 1:, 1:].sum(axis=1).astype(float)
    n0, later = (x - x.mean(axis=0) for x in (n0, later))
    correlation = (n0 * later).mean() / np.sqrt((n0**2).mean() * (later**2).mean())
    assert correlation == pytest.approx(0.49, abs=0.05)


def test_assignments_realise_the_counts():
    generator = np.random.default_rng(1)
    script = RoutingScript(num_layers=3, num_experts=64)
    counts = script.draw(16, generator)
    index = script.assignments(counts, generator)
    for layer in range(3):
        seen: set[int] = set()
        for row in range(16):
            experts = set(index[layer, row].tolist())
            assert len(experts) == 8 and len(experts - seen) == min(counts[layer, row], 64 - len(seen))
            seen |= experts


def test_the_floor_is_that_of_the_documented_shape():
    costs = floor_costs(15, RoutingScript(), TargetBytes())
    assert costs.autoregressive == pytest.approx(1.40e-3, rel=0.01)
    assert costs.target_seconds(8) == pytest.approx(2.80e-3, rel=0.02)
    assert costs.target_seconds(16) == pytest.approx(3.87e-3, rel=0.02)
