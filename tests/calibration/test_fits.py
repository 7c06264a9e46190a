"""Fits: the acceptance model, temperatures, the cost curve, routing tables, and the rate."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from hf_hybridspec.calibration.acceptance_model import (
    accepted,
    assess,
    cross_validated,
    fit_acceptance,
    predict_prefix,
)
from hf_hybridspec.calibration.latency import fit_costs
from hf_hybridspec.calibration.profile import CostModel
from hf_hybridspec.calibration.rate import best_static_length, dinkelbach_rate, static_rate
from hf_hybridspec.calibration.rounds import RoundArrays
from hf_hybridspec.calibration.routing import LEAST_TOKENS, fit_routing
from hf_hybridspec.calibration.temperatures import GRID, fit_temperatures
from tests.calibration.made_rounds import made_rounds


def costs_of(seconds) -> CostModel:
    return CostModel(tuple(seconds), tuple(seconds), 0.0, 0.0, 0.0, 1.0)


# --- Acceptance ---------------------------------------------------------------------------------------------------


def test_the_model_predicts_unseen_rounds():
    fitted, unseen = fit_acceptance(made_rounds(seed=0)), made_rounds(seed=1)
    probs = predict_prefix(fitted.model, unseen)
    quality = assess(probs, unseen, held_out=True)
    assert quality.calibration_error < 0.03 and not fitted.notes
    # Raw confidences would be far off, and a constant would know nothing of the round.
    assert assess(unseen.confidence.cumprod(axis=1), unseen, True).calibration_error > 3 * quality.calibration_error
    constant = np.broadcast_to(accepted(unseen).mean(axis=0), probs.shape)
    assert quality.brier_score < 0.9 * assess(constant, unseen, True).brier_score
    truth = (unseen.confidence**1.5).cumprod(axis=1)
    assert np.abs(probs - truth).mean() < 0.05
    assert (np.diff(probs, axis=1) <= 0).all()


def test_cross_validation_leaves_whole_prompts_out():
    rounds = made_rounds(600)
    assert cross_validated(rounds).held_out
    one = RoundArrays(**{**vars(rounds), "prompt": np.zeros(600, int)})
    assert not cross_validated(one).held_out


@pytest.mark.parametrize("num_accepted", [0, 7])
def test_labels_of_one_kind_give_a_smoothed_rate(num_accepted):
    rounds = replace(made_rounds(40), num_accepted=np.full(40, num_accepted))
    fitted = fit_acceptance(rounds)
    assert "All" in fitted.notes[0]
    probs = predict_prefix(fitted.model, rounds)
    assert (probs[:, 0] > 0.95).all() if num_accepted else (probs[:, 0] < 0.05).all()


def test_a_constant_confidence_is_noted_and_gives_the_rate_by_position():
    rounds = made_rounds(1500, confidence=np.full((1500, 7), 0.8))
    fitted = fit_acceptance(rounds)
    assert any("same everywhere" in note for note in fitted.notes)
    assert assess(predict_prefix(fitted.model, rounds), rounds, False).calibration_error < 0.03


def test_positions_that_few_rounds_reach_share_a_map():
    rounds = replace(made_rounds(200), num_accepted=np.arange(200) % 3)
    knots = fit_acceptance(rounds).model.confidence_knots
    assert knots[3] == knots[6] and knots[0] != knots[3]


def test_temperatures_undo_an_overconfident_head():
    rounds = made_rounds(4000)
    truth = rounds.confidence**1.5
    logits = np.log(truth / (1 - truth))
    # The head's logits are too large by this factor.
    rounds = replace(rounds, acceptance=1 / (1 + np.exp(-logits * 2.5)))
    temperatures = fit_temperatures(rounds)
    assert len(temperatures) == 7 and 1.7 < temperatures[0] < 3.6 and set(temperatures) <= set(map(float, GRID))
    assert fit_temperatures(made_rounds(10)) is None


# --- Costs --------------------------------------------------------------------------------------------------------


def test_a_quadratic_is_found_with_its_fixed_part():
    lengths = np.arange(2, 17)
    fit = fit_costs(tuple(5.0 + 0.4 * lengths - 0.01 * lengths**2))
    np.testing.assert_allclose(fit.fitted, 5.0 + 0.4 * lengths - 0.01 * lengths**2, rtol=1e-9)
    assert fit.fixed == pytest.approx(5.0) and fit.r2 == pytest.approx(1.0) and not fit.notes


@pytest.mark.parametrize("shape", [lambda w: 20 - w, lambda w: (w - 9) ** 2 + 10, lambda w: 0 * w + 3.0])
def test_a_curve_that_falls_gives_way_to_one_that_does_not(shape):
    fit = fit_costs(tuple(map(float, shape(np.arange(2, 17)))))
    assert (np.diff(fit.fitted) >= -1e-12).all() and min(fit.fitted) > fit.fixed >= 0
    assert fit.notes or np.ptp(fit.fitted) < 1e-9


def test_a_block_of_two_lengths_is_fitted_by_a_line():
    assert fit_costs((1.0, 1.5)).fitted == pytest.approx((1.0, 1.5))


# --- Routing ------------------------------------------------------------------------------------------------------


def test_tables_are_averages_and_small_cells_take_the_line():
    rounds = made_rounds(900)
    fit = fit_routing(rounds, top_k=4)
    n0, later = rounds.new_layer0[:, 2], rounds.new_pairs[:, 2] - rounds.new_layer0[:, 2]
    assert fit.tables.new_pairs[2] == pytest.approx(rounds.new_pairs[:, 2].mean())
    assert (n0 == 2).sum() >= LEAST_TOKENS
    assert fit.tables.new_pairs_given[2][2] == pytest.approx(2 + later[n0 == 2].mean())
    # The made-up slope is five later pairs for each new Layer-0 expert.
    few = rounds[n0 < 3]
    assert fit_routing(few, 4).tables.new_pairs_given[2][4] == pytest.approx(4 + 10 + 5 * 4, rel=0.1)
    assert 0.8 < fit.correlation < 1
    assert all(row[4] > row[2] > row[0] for row in fit.tables.new_pairs_given)


def test_a_dense_target_has_tables_of_zeros():
    zeros = np.zeros((50, 7), int)
    fit = fit_routing(replace(made_rounds(50), new_layer0=zeros, new_pairs=zeros), top_k=0)
    assert fit.correlation == 0 and set(fit.tables.new_pairs) == {0.0}
    assert set(fit.tables.new_pairs_given) == {(0.0,)}


# --- The rate -----------------------------------------------------------------------------------------------------


def test_the_rate_is_the_best_pooled_throughput():
    generator = np.random.default_rng(0)
    probs = generator.random((4, 3)).cumprod(axis=1)
    seconds = (1.0, 1.4, 1.7)
    tokens = 1 + probs.cumsum(axis=1)
    pooled = [
        sum(tokens[r, c] for r, c in enumerate(choice)) / sum(seconds[c] for c in choice)
        for choice in product(range(3), repeat=4)
    ]
    rate = dinkelbach_rate(probs, costs_of(seconds))
    assert rate == pytest.approx(max(pooled))
    # Choosing every round's own best ratio is another, slower rule.
    ratios = (tokens / np.array(seconds)).argmax(axis=1)
    assert rate >= tokens[np.arange(4), ratios].sum() / np.array(seconds)[ratios].sum()


def test_the_rate_beats_the_ratio_rule_on_mixed_rounds():
    # Easy rounds are cheap to take whole; in hard ones the ratio rule still asks for drafts that cost more than they
    # bring at the pooled rate.
    probs = np.array([[0.99] * 7, [0.45, 0.36, 0.2, 0.1, 0.05, 0.02, 0.01]]).repeat(10, axis=0)
    seconds = np.array([6.0, 7.2, 8.4, 9.6, 10.8, 12.0, 13.2])
    tokens = 1 + np.vstack([probs[:10].cumprod(axis=1), probs[10:]]).cumsum(axis=1)
    rate = dinkelbach_rate(tokens[:, :] - np.hstack([np.ones((20, 1)), tokens[:, :-1]]), costs_of(seconds))
    chosen = (tokens / seconds).argmax(axis=1)
    assert rate > 1.001 * tokens[np.arange(20), chosen].sum() / seconds[chosen].sum()


def test_the_static_length_is_the_best_of_all():
    num_accepted, costs = np.array([0, 1, 1, 2, 5]), costs_of(1 + 0.3 * np.arange(2, 9))
    rates = {length: np.minimum(num_accepted, length - 1).mean() + 1 for length in range(2, 9)}
    rates = {length: value / costs.round_seconds(length) for length, value in rates.items()}
    assert best_static_length(num_accepted, costs) == max(rates, key=rates.get)
    assert static_rate(num_accepted, costs, 3) == pytest.approx(rates[3])
