"""Adaptive policies: the lengths that the definitions give, exact output under every policy, refusals."""

import logging

import pytest
import torch

import hf_hybridspec
from hf_hybridspec.generation.adaptive_policies import (
    CALIBRATED_POLICIES,
    ConfidenceScheduler,
    DCut,
    Evict,
    HybridSpec,
    NominalOnly,
)
from hf_hybridspec.generation.length_policies import LengthPolicy, default_policy, parse_policy
from hf_hybridspec.generation.policy_tables import correction_costs
from hf_hybridspec.modeling.draft import Draft
from tests.profiles import make_profile, noisy_drafter, profile_of, with_costs
from tests.support import random_prompt, random_target

NUM_TOKENS = 60


def draft_of(confidence, acceptance=None) -> Draft:
    confidence = torch.tensor(confidence)
    return Draft(torch.arange(confidence.shape[0]), confidence, torch.full_like(confidence, 0.5), acceptance)


# --- The definitions ----------------------------------------------------------------------------------------------


def expected_length(profile, draft: Draft) -> int:
    """Equation 5 with the made-up model, c = sigmoid(-4 + 8 confidence)."""
    probs = torch.sigmoid(8 * draft.confidence.double() - 4).cumprod(0)
    scores = [float(probs[: w - 1].sum()) - profile.rho * profile.costs.target_seconds(w) for w in range(2, 17)]
    return 2 + scores.index(max(scores))


@pytest.mark.parametrize("seed", range(6))
def test_the_nominal_length_is_equation_5(seed):
    confidence = 0.4 + 0.6 * torch.rand(15, generator=torch.Generator().manual_seed(seed))
    draft, profile = draft_of(confidence.tolist()), make_profile()
    assert HybridSpec(profile).select(draft) == NominalOnly(profile).select(draft) == expected_length(profile, draft)


def test_the_rate_is_pooled_and_not_the_ratio_of_the_round():
    # Certain drafts at a linear cost: the ratio of the round rises with every draft, so the ratio rule takes them all.
    # Elsewhere in the text a token costs less than a draft costs here, so equation 5 takes none.
    profile = make_profile(rho=3000.0)
    draft = draft_of([0.999] * 15)
    assert Evict(profile).select(draft) == 16
    assert HybridSpec(profile).select(draft) == 2
    # At the rate that this round alone would reach, both agree.
    assert HybridSpec(make_profile(rho=16 / profile.costs.round_seconds(16))).select(draft) == 16


def test_the_correction_follows_the_experts_of_the_extra_row():
    profile = with_costs(make_profile(), expert=0.2e-3)
    policy = HybridSpec(profile)
    draft = draft_of([0.9, 0.85, 0.72, 0.62, 0.5, *[0.3] * 10])
    nominal = policy.select(draft)
    probability = float(torch.sigmoid(8 * draft.confidence - 4).cumprod(0)[nominal - 1])
    thresholds = correction_costs(profile)[nominal - 1]
    lengths = [policy.correct(nominal, count) for count in range(3)]
    assert lengths == [nominal + (probability > thresholds[count]) for count in range(3)]
    # Cheap experts add the row, dear ones do not: no constant does both.
    assert lengths[0] == nominal + 1 and lengths[2] == nominal


def test_the_correction_is_the_difference_of_stage_1_alone():
    profile = make_profile()
    nominal, costs, routing = 5, profile.costs, profile.routing
    seconds = costs.fitted[4] - costs.fitted[3] - costs.stage0_row
    expected = [seconds + costs.expert * (pairs - routing.new_pairs[4]) for pairs in routing.new_pairs_given[4]]
    torch.testing.assert_close(correction_costs(profile)[nominal - 1], [profile.rho * value for value in expected])


def test_nominal_only_processes_no_extra_row():
    assert HybridSpec(make_profile()).lookahead == 1 and NominalOnly(make_profile()).lookahead == 0


def test_ratio_policies_choose_among_their_lengths():
    profile, draft = make_profile(), draft_of([0.95, 0.9, 0.6, *[0.5] * 12])
    tokens = 1 + draft.confidence.double().cumprod(0).cumsum(0)
    ratios = {w: float(tokens[w - 2]) / profile.costs.round_seconds(w) for w in range(2, 17)}
    assert DCut(profile).candidates(15) == [4, 8, 12, 16] and DCut(profile).candidates(7) == [2, 4, 6, 8]
    assert DCut(profile).select(draft) == max((4, 8, 12, 16), key=ratios.get)
    assert Evict(profile).select(draft) == max(ratios, key=ratios.get)


def test_the_confidence_scheduler_stops_at_the_first_loss_and_scales():
    # Length 3 is worth it, 4 is not, later ones would be again: the scheduler has stopped by then.
    acceptance = torch.tensor([0.95, 0.9, 0.05, *[1.0] * 12])
    profile, draft = make_profile(), draft_of([0.5] * 15, acceptance)
    assert ConfidenceScheduler(profile).select(draft) == 3
    hot = make_profile(
        acceptance=type(profile.acceptance)(
            profile.acceptance.confidence_knots,
            profile.acceptance.acceptance_knots,
            profile.acceptance.weights,
            (0.1, *[10.0] * 14),
        )
    )
    assert ConfidenceScheduler(hot).select(draft_of([0.5] * 15, torch.full((15,), 0.9))) < 16


def test_a_block_shorter_than_the_profile_and_a_paused_drafter():
    for name, policy in CALIBRATED_POLICIES.items():
        acceptance = torch.full((4,), 0.99) if name == "confidence" else None
        assert 2 <= policy(make_profile()).select(draft_of([0.99] * 4, acceptance)) <= 5
        assert policy(make_profile()).select(draft_of([])) == 1


# --- Exactness ----------------------------------------------------------------------------------------------------


class ByDrafts(LengthPolicy):
    """Adversarial: the length is read off the proposed tokens, and the extra row is kept if its token is even."""

    name, lookahead = "by-drafts", 1

    def select(self, draft):
        self.tokens = draft.tokens
        return 2 + int(draft.tokens.sum()) % draft.tokens.shape[0]

    def correct(self, nominal_length, new_experts):
        return nominal_length + int(self.tokens[nominal_length - 1]) % 2


class ByExperts(LengthPolicy):
    """Adversarial: three rows of lookahead, kept as the experts say."""

    name, lookahead = "by-experts", 3

    def select(self, draft):
        return 5

    def correct(self, nominal_length, new_experts):
        return nominal_length + new_experts % 4


class AtRandom(LengthPolicy):
    """Adversarial: any length at all, from a generator of its own."""

    name, lookahead = "at-random", 2

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def draw(self, count):
        return int(torch.randint(count, (), generator=self.generator))

    def select(self, draft):
        return 2 + self.draw(draft.tokens.shape[0])

    def correct(self, nominal_length, new_experts):
        return nominal_length + self.draw(3)


@pytest.fixture(scope="module")
def pair():
    target = hf_hybridspec.attach(random_target())
    sequence = target.generate(random_prompt(9, seed=1), max_new_tokens=NUM_TOKENS + 16, do_sample=False)
    return target, sequence


ADVERSARIES = {policy.name: policy for policy in (ByDrafts, ByExperts, AtRandom)}
POLICIES = ["hybridspec", "nominal", "dcut", "evict", "static:7", "full", *ADVERSARIES]


@pytest.mark.parametrize("path", ["round", "host"])
@pytest.mark.parametrize("name", POLICIES)
def test_greedy_output_is_the_targets_own(pair, name, path):
    target, sequence = pair
    drafter = noisy_drafter(sequence[0])
    policy = ADVERSARIES[name]() if name in ADVERSARIES else parse_policy(name, profile_of(target, drafter))
    output = target.generate(
        sequence[:, :9],
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        assistant_model=drafter,
        length_policy=policy,
        decoding_path=path,
    )
    statistics = target.generation_statistics
    assert torch.equal(output, sequence[:, : 9 + NUM_TOKENS])
    assert statistics.policy == name and statistics.path == path and statistics.acceptance_length > 1.3
    # The host's loop has no router boundary to correct at.
    if name not in ("static:7", "full") and (name, path) != ("by-experts", "host"):
        assert len(set(statistics.verification_lengths[:-4])) > 1


def test_the_executed_length_is_the_corrected_one(pair):
    target, sequence = pair
    drafter = noisy_drafter(sequence[0])
    profile = with_costs(profile_of(target, drafter), expert=0.3e-3)
    policy, seen = HybridSpec(profile), []
    correct = policy.correct

    def spy(nominal_length, new_experts):
        seen.append((nominal_length, new_experts, correct(nominal_length, new_experts)))
        return seen[-1][2]

    policy.correct = spy
    target.generate(
        sequence[:, :9], max_new_tokens=NUM_TOKENS, do_sample=False, assistant_model=drafter, length_policy=policy
    )
    lengths = target.generation_statistics.verification_lengths
    assert [length for _, _, length in seen] == lengths[: len(seen)] and len(seen) >= len(lengths) - 4
    assert {length - nominal for nominal, _, length in seen} == {0, 1}
    assert len({new_experts for _, new_experts, _ in seen}) > 1


# --- Refusals and defaults ----------------------------------------------------------------------------------------


def test_a_profile_of_another_pair_is_refused_before_decoding(pair):
    target, sequence = pair
    drafter, other = noisy_drafter(sequence[0]), hf_hybridspec.attach(random_target(seed=5))
    policy = HybridSpec(profile_of(target, drafter))
    options = {"max_new_tokens": 4, "assistant_model": drafter, "length_policy": policy}
    with pytest.raises(ValueError, match=r"measured with the target .* Run `hf-hybridspec calibrate` again"):
        other.generate(sequence[:, :9], **options)
    with pytest.raises(ValueError, match="measured with the drafter"):
        foreign = noisy_drafter(sequence[0])
        foreign.norm.weight.data += 1
        hf_hybridspec.attach(target, foreign, policy)
    target.double()
    with pytest.raises(ValueError, match="its dtype is float32, this call's is float64"):
        HybridSpec(policy.profile).check(target, drafter)
    target.float()
    device = make_profile(policy.profile.pair.__class__(**{**vars(policy.profile.pair), "device": "NVIDIA H200"}))
    with pytest.raises(ValueError, match="its device is NVIDIA H200, this call's is cpu"):
        HybridSpec(device).check(target, drafter)


def test_a_policy_for_confidence_heads_refuses_other_drafters(pair):
    target, sequence = pair
    drafter = noisy_drafter(sequence[0])
    with pytest.raises(ValueError, match=r"needs a drafter with a confidence head, this .* Use 'hybridspec'"):
        parse_policy("confidence", profile_of(target, drafter)).check(target, drafter)


@pytest.mark.parametrize("name", list(CALIBRATED_POLICIES))
def test_a_calibrated_policy_without_a_profile_says_what_to_do(name):
    with pytest.raises(ValueError, match=rf"{name}' needs a calibration profile. Run `hf-hybridspec calibrate`"):
        parse_policy(name)
    assert parse_policy(name, make_profile()).name == name


def test_the_default_without_a_profile_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    logging.Logger.warning_once.cache_clear()
    names = [default_policy(True, 15).name, default_policy(True, 15).name, default_policy(False, 15).name]
    assert names == ["static:6", "static:6", "full"]
    said = [record.getMessage() for record in caplog.records if "no calibration profile" in record.getMessage()]
    assert len(said) == 2 and "static:6" in said[0] and "full" in said[1]
