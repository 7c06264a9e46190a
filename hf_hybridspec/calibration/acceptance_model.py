"""Fitting P(draft i accepted | its prefix was) on captured rounds, and how well it predicts (HybridSpec, A.2).

scikit-learn fits; what is kept are plain numbers, which the length-selection kernels evaluate. Quality is measured by
evaluating those numbers with the very kernel that decoding uses.
"""

from dataclasses import dataclass

import numpy as np
import torch
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from ..generation.policy_tables import acceptance_tables
from ..kernels.length_selection import Selection, select_length
from ..kernels.length_selection_reference import acceptance_features
from .profile import AcceptanceModel, ReliabilityBin
from .rounds import RoundArrays

NUM_BINS = 15
NUM_FOLDS = 5
# Positions reached by fewer rounds take the isotonic map of all positions.
LEAST_ROUNDS = 50
MOST_KNOTS = 64
# Weak enough to leave a fit on a few hundred rounds alone, strong enough to keep separable ones finite.
INVERSE_REGULARISATION = 100.0


@dataclass(frozen=True)
class FittedAcceptance:
    """An acceptance model and the fallbacks that its fit took, in words."""

    model: AcceptanceModel
    notes: tuple[str, ...]


@dataclass(frozen=True)
class AcceptanceQuality:
    """As in `FitQuality`."""

    reliability: tuple[ReliabilityBin, ...]
    calibration_error: float
    brier_score: float
    held_out: bool


def fit_acceptance(rounds: RoundArrays) -> FittedAcceptance:
    """Fits the model on rounds that verified every draft.

    Labels are 1[A_D >= i] among the rounds with A_D >= i - 1, so that no label is censored.
    """
    is_reached, is_accepted = reached(rounds), accepted(rounds)
    knots = isotonic_knots(rounds.confidence, is_reached, is_accepted)
    placeholder = AcceptanceModel(*knots, weights=(0.0,) * 6, temperatures=None)
    labels = is_accepted[is_reached].astype(int)
    notes = []
    if labels.min() == labels.max():
        # One smoothed rate: there is nothing to tell drafts apart by.
        rate = (labels.sum() + 1) / (labels.shape[0] + 2)
        weights = (0.0,) * 5 + (float(np.log(rate / (1 - rate))),)
        notes.append(
            f"All {labels.shape[0]} labels of the acceptance model are {labels[0]}: it predicts {rate:.3f} throughout."
        )
    else:
        logistic = LogisticRegression(C=INVERSE_REGULARISATION, max_iter=1000)
        features = model_features(placeholder, rounds)[is_reached]
        scale = np.maximum(features.std(axis=0), 1e-6)
        logistic.fit(features / scale, labels)
        weights = (*map(float, logistic.coef_[0] / scale), float(logistic.intercept_[0]))
    if np.ptp(rounds.confidence) < 1e-6:
        notes.append("The drafter's confidence is the same everywhere: it says nothing about acceptance.")
    return FittedAcceptance(AcceptanceModel(*knots, weights=weights, temperatures=None), tuple(notes))


def reached(rounds: RoundArrays) -> np.ndarray:
    """`[N, D]` bool, A_D >= i - 1."""
    return rounds.num_accepted[:, None] >= np.arange(rounds.num_drafts)


def accepted(rounds: RoundArrays) -> np.ndarray:
    """`[N, D]` bool, A_D >= i."""
    return rounds.num_accepted[:, None] >= np.arange(1, rounds.num_drafts + 1)


def isotonic_knots(confidence: np.ndarray, is_reached: np.ndarray, is_accepted: np.ndarray):
    """Knots of every position's map from confidence to acceptance: two tuples of D rows."""
    pooled = _isotonic(confidence[is_reached], is_accepted[is_reached])
    rows = []
    for position in range(confidence.shape[1]):
        mask = is_reached[:, position]
        is_enough = mask.sum() >= LEAST_ROUNDS
        rows.append(_isotonic(confidence[mask, position], is_accepted[mask, position]) if is_enough else pooled)
    return tuple(row[0] for row in rows), tuple(row[1] for row in rows)


def _isotonic(confidence: np.ndarray, labels: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    regression = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip")
    regression.fit(confidence, labels.astype(float))
    x, y = regression.X_thresholds_, regression.y_thresholds_
    if x.shape[0] > MOST_KNOTS:
        kept = np.unique(np.linspace(0, x.shape[0] - 1, MOST_KNOTS).round().astype(int))
        x, y = x[kept], y[kept]
    return tuple(map(float, x)), tuple(map(float, y))


def model_features(model: AcceptanceModel, rounds: RoundArrays) -> np.ndarray:
    """`[N, D, 5]` inputs of the logistic part."""
    tables = acceptance_tables(model)
    signals = zip(rounds.confidence, rounds.entropy, strict=True)
    rows = [acceptance_features(_fp32(confidence), _fp32(entropy), tables) for confidence, entropy in signals]
    return torch.stack(rows).double().numpy()


def predict_prefix(model: AcceptanceModel, rounds: RoundArrays) -> np.ndarray:
    """`[N, D]` prefix-acceptance probabilities p_i, as decoding computes them."""
    tables = acceptance_tables(model)
    selection = Selection.empty(rounds.num_drafts, "cpu")
    probs = np.empty(rounds.confidence.shape)
    for index, (confidence, entropy) in enumerate(zip(rounds.confidence, rounds.entropy, strict=True)):
        select_length(_fp32(confidence), _fp32(entropy), tables, selection)
        probs[index] = selection.prefix_probs.numpy()
    return probs


def cross_validated(rounds: RoundArrays) -> AcceptanceQuality:
    """Quality on prompts left out of the fit, in turn; of the fit itself where there is a single prompt."""
    prompts = np.unique(rounds.prompt)
    folds = min(NUM_FOLDS, prompts.shape[0])
    if folds < 2:
        return assess(predict_prefix(fit_acceptance(rounds).model, rounds), rounds, held_out=False)
    fold_of = rounds.prompt % folds
    probs = np.empty(rounds.confidence.shape)
    for fold in range(folds):
        is_test = fold_of == fold
        if is_test.any():
            probs[is_test] = predict_prefix(fit_acceptance(rounds[~is_test]).model, rounds[is_test])
    return assess(probs, rounds, held_out=True)


def assess(probs: np.ndarray, rounds: RoundArrays, held_out: bool) -> AcceptanceQuality:
    """Reliability, calibration error and Brier score of prefix probabilities `[N, D]` against what was accepted."""
    bins = reliability(probs.ravel(), accepted(rounds).ravel())
    error = sum(entry.count * abs(entry.predicted - entry.observed) for entry in bins) / probs.size
    brier = float(((probs - accepted(rounds)) ** 2).mean())
    return AcceptanceQuality(bins, error, brier, held_out)


def reliability(predicted: np.ndarray, observed: np.ndarray) -> tuple[ReliabilityBin, ...]:
    """Bins of equal width; empty ones are left out."""
    index = np.minimum((predicted * NUM_BINS).astype(int), NUM_BINS - 1)
    return tuple(
        ReliabilityBin(float(predicted[mask].mean()), float(observed[mask].mean()), int(mask.sum()))
        for mask in (index == number for number in range(NUM_BINS))
        if mask.any()
    )


def _fp32(row: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(row).float()
