"""Greedy prefix, point-mass rule, and the distributions that the latter must leave unchanged."""

import pytest
import torch
from scipy.stats import chisquare

from hf_hybridspec.kernels.acceptance import greedy_acceptance, point_mass_acceptance

# Probability that a right implementation fails one of the distribution tests, had the seed not been fixed.
SIGNIFICANCE = 1e-3


def fits(counts, probs):
    """Whether the counts may have been drawn from `probs` (chi-square)."""
    probs = probs.double()
    return chisquare(counts, probs / probs.sum() * counts.sum()).pvalue > SIGNIFICANCE


def outcome(acceptance):
    assert acceptance.num_accepted.shape == acceptance.next_token.shape == ()
    assert acceptance.num_accepted.dtype == acceptance.next_token.dtype == torch.int64
    return acceptance.num_accepted.item(), acceptance.next_token.item()


@pytest.mark.parametrize(
    ("draft", "target", "expected"),
    [
        ([4, 5, 6], [4, 5, 6, 7], (3, 7)),
        ([4, 5, 6], [4, 5, 9, 7], (2, 9)),
        ([4, 5, 6], [9, 5, 6, 7], (0, 9)),
        ([4, 5, 6], [4, 9, 6, 7], (1, 9)),
        ([], [3], (0, 3)),
    ],
)
def test_greedy_takes_the_longest_equal_prefix(draft, target, expected):
    acceptance = greedy_acceptance(torch.tensor(draft, dtype=torch.long), torch.tensor(target))
    assert outcome(acceptance) == expected


def test_point_mass_rule_follows_the_given_uniforms():
    probs = torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.1, 0.8], [0.25, 0.25, 0.5]])
    draft = torch.tensor([1, 2])
    cases = [
        ([0.49, 0.79, 0.0], (2, 0)),
        ([0.49, 0.79, 0.3], (2, 1)),
        ([0.49, 0.79, 0.51], (2, 2)),
        ([0.49, 0.81, 0.49], (1, 0)),
        ([0.49, 0.81, 0.51], (1, 1)),
        # A later draft is not accepted past a rejected one; the rest is {0: 0.4, 2: 0.6}.
        ([0.51, 0.0, 0.39], (0, 0)),
        ([0.51, 0.0, 0.41], (0, 2)),
    ]
    for uniforms, expected in cases:
        assert outcome(point_mass_acceptance(draft, probs, torch.tensor(uniforms))) == expected


def test_impossible_drafts_are_never_accepted_and_impossible_tokens_never_drawn():
    probs = torch.tensor([[0.0, 0.5, 0.5, 0.0], [0.0, 1.0, 0.0, 0.0]])
    almost_one = 1.0 - 2.0**-24
    assert outcome(point_mass_acceptance(torch.tensor([0]), probs, torch.tensor([0.0, almost_one]))) == (0, 2)
    assert outcome(point_mass_acceptance(torch.tensor([3]), probs, torch.tensor([0.0, 0.0]))) == (0, 1)
    assert outcome(point_mass_acceptance(torch.tensor([1]), probs.flip(0), torch.tensor([almost_one, 0.0]))) == (1, 1)
    double = torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64)
    assert outcome(point_mass_acceptance(torch.tensor([3]), probs, double)) == (0, 2)


def test_a_draft_that_is_all_the_target_can_say_survives_its_rejection():
    probs = torch.tensor([[0.0, 1.0 - 2.0**-20, 0.0], [0.3, 0.3, 0.4]])
    assert outcome(point_mass_acceptance(torch.tensor([1]), probs, torch.tensor([1.0 - 2.0**-24, 0.5]))) == (0, 1)


def test_without_drafts_the_rule_is_plain_sampling():
    probs = torch.tensor([[0.25, 0.5, 0.25]])
    draws = [
        outcome(point_mass_acceptance(torch.empty(0, dtype=torch.long), probs, torch.tensor([u])))
        for u in (0.2, 0.7, 0.8)
    ]
    assert draws == [(0, 0), (0, 1), (0, 2)]


def sampled_rounds(logits, draft, temperature, rounds, seed):
    """Outcomes of many rounds on the same logits `[M + 1, vocabulary]`: (num_accepted, first two tokens or -1)."""
    generator = torch.Generator().manual_seed(seed)
    probs = (logits / temperature).softmax(-1)
    outcomes = []
    for uniforms in torch.rand(rounds, len(draft) + 1, generator=generator):
        accepted, token = outcome(point_mass_acceptance(draft, probs, uniforms))
        emitted = [*draft[:accepted].tolist(), token, -1]
        outcomes.append((accepted, *emitted[:2]))
    return torch.tensor(outcomes), probs


def test_emitted_tokens_have_the_targets_distribution():
    """C24: logits [2, 1.5, 1, 0.5], greedy drafts, T = 1, 20,000 draws."""
    logits = torch.tensor([[2.0, 1.5, 1.0, 0.5], [0.0, 1.0, 2.0, -1.0]])
    outcomes, probs = sampled_rounds(logits, draft=torch.tensor([0]), temperature=1.0, rounds=20_000, seed=24)
    first = outcomes[:, 1].bincount(minlength=4)
    assert fits(first, probs[0])
    second = outcomes[outcomes[:, 0] == 1, 2].bincount(minlength=4)
    assert fits(second, probs[1])


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0])
def test_acceptance_is_the_targets_probability_of_the_draft(temperature):
    """C25: a drafter that is right most of the time is accepted as often as the target would say its token."""
    logits = torch.tensor([[3.0, 1.0, 0.0, 0.0], [0.0, 2.5, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    rounds = 4_000
    outcomes, probs = sampled_rounds(logits, torch.tensor([0, 1]), temperature, rounds, seed=25)
    first, second = probs[0, 0].item(), probs[1, 1].item()
    expected = torch.tensor([1 - first, first * (1 - second), first * second])
    counts = outcomes[:, 0].bincount(minlength=3)
    assert counts[2] > 0.5 * rounds
    assert fits(counts, expected)


def test_a_length_fixed_before_the_draws_changes_no_distribution():
    """Proposition 2: the first token's distribution is the same with one, two or no retained drafts."""
    logits = torch.tensor([[1.0, 0.5, 0.0], [0.0, 1.0, 0.0], [0.5, 0.0, 1.0]])
    for retained in range(3):
        outcomes, probs = sampled_rounds(
            logits[: retained + 1], torch.tensor([0, 1])[:retained], 1.0, 4_000, seed=retained
        )
        counts = outcomes[:, 1].bincount(minlength=3)
        assert fits(counts, probs[0])


def test_refused_shapes():
    draft = torch.tensor([1, 2])
    with pytest.raises(ValueError, match=r"target_tokens must have one row more .* got \(2,\) and \(2,\)"):
        greedy_acceptance(draft, torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"target_probs must have one row more"):
        point_mass_acceptance(draft, torch.ones(2, 4), torch.rand(3))
    with pytest.raises(ValueError, match=r"uniforms must have one row more"):
        point_mass_acceptance(draft, torch.ones(3, 4), torch.rand(2))


@pytest.mark.gpu
def test_no_read_on_the_cpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    generator = torch.Generator().manual_seed(1)
    draft = torch.randint(0, 1000, (7,), generator=generator)
    probs = torch.rand(8, 1000, generator=generator).mul(8).softmax(-1)
    probs[:5].scatter_(1, draft[:5, None], 0.9)
    uniforms = torch.rand(8, generator=generator)
    expected = outcome(point_mass_acceptance(draft, probs, uniforms))
    arguments = draft.cuda(), probs.cuda(), uniforms.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        acceptance = point_mass_acceptance(*arguments)
        greedy = greedy_acceptance(arguments[0], arguments[1].argmax(-1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert outcome(acceptance) == expected
    assert outcome(greedy) == outcome(greedy_acceptance(draft, probs.argmax(-1)))
