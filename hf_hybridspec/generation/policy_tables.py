"""A calibration profile as tensors on a device."""

import torch

from ..calibration.profile import AcceptanceModel, CalibrationProfile
from ..kernels.length_selection import LengthTables


def length_tables(profile: CalibrationProfile, device: torch.device | str) -> LengthTables:
    """The tables that the length-selection kernels read, for the profile's D draft tokens."""
    drafts = profile.pair.num_draft_tokens
    costs = profile.costs
    token_costs = [profile.rho * costs.target_seconds(length) for length in range(2, drafts + 2)]
    tables = {
        "confidence_knots": _padded(profile.acceptance.confidence_knots),
        "acceptance_knots": _padded(profile.acceptance.acceptance_knots),
        "entropy_average": entropy_average(drafts).tolist(),
        "weights": list(profile.acceptance.weights),
        "token_costs": token_costs,
        "correction_costs": _padded(correction_costs(profile)),
    }
    return LengthTables(**{name: torch.tensor(rows, device=device) for name, rows in tables.items()})


def acceptance_tables(model: AcceptanceModel, device: torch.device | str = "cpu") -> LengthTables:
    """Tables with the acceptance model alone; every cost is zero."""
    drafts = len(model.confidence_knots)
    return LengthTables(
        torch.tensor(_padded(model.confidence_knots), device=device),
        torch.tensor(_padded(model.acceptance_knots), device=device),
        entropy_average(drafts).to(device),
        torch.tensor(model.weights, device=device),
        torch.zeros(drafts, device=device),
        torch.zeros(drafts, 1, device=device),
    )


def correction_costs(profile: CalibrationProfile) -> list[list[float]]:
    """rho dL(w0 | n) of equation 6, D rows for w0 = 1..D; row 1 is never asked for, since w0 is at least 2."""
    costs, routing = profile.costs, profile.routing
    rows = []
    for nominal in range(1, profile.pair.num_draft_tokens + 1):
        previous = costs.target_seconds(nominal) if nominal > 1 else 0.0
        saved = costs.target_seconds(nominal + 1) - previous - costs.stage0_row
        average = routing.new_pairs[nominal - 1]
        given = routing.new_pairs_given[nominal - 1]
        rows.append([profile.rho * (saved + costs.expert * (pairs - average)) for pairs in given])
    return rows


def entropy_average(drafts: int) -> torch.Tensor:
    """`[D, D]` fp32: row i holds the weights of h_1, h_2, .. in the running average before draft token i + 1.

    The average before the first token is its own entropy; each token then moves it half way to its entropy.
    """
    weights = torch.zeros(drafts, drafts, dtype=torch.float64)
    weights[0, 0] = 1
    for index in range(1, drafts):
        weights[index] = weights[index - 1] / 2
        weights[index, index - 1] += 0.5
    return weights.float()


def _padded(rows) -> list[list[float]]:
    """Rows of one length; the last number of a shorter row is repeated."""
    width = max(map(len, rows))
    return [[*row, *[row[-1]] * (width - len(row))] for row in rows]
