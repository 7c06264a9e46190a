r"""Length selection in plain torch: the CPU path and the oracle of the Triton kernel.

With confidence q_i and entropy h_i of draft token i, and the running average hb_i = (h_i + hb_{i-1}) / 2, hb_0 = h_1:

    a_i  = isotonic_i(q_i)                              linear between knots, constant outside
    c_i  = sigmoid(b + w . [a_i, i, i a_i, log(1 + h_i), log(h_i / hb_{i-1})])
    p_i  = c_1 ... c_i
    w0   = argmax_w  sum_{i < w} p_i - rho C_tgt(w)     w = 2..D + 1, the shorter of equals      (HybridSpec, eq. 5)
    w_c  = w0 + 1 if p_{w0} > rho dL(w0 | n) else w0                                             (eq. 6)

Unrolled, hb_{i-1} is a fixed linear map of h_1..h_{i-1} (and h_1), which the tables hold as a matrix.
"""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .length_selection import LengthTables, Selection

# Entropies in nats below this are equal for the logarithm of their ratio.
ENTROPY_FLOOR = 1e-4


def select_length(
    confidence: torch.Tensor, entropy: torch.Tensor, tables: "LengthTables", selection: "Selection"
) -> None:
    """As `length_selection.select_length`."""
    drafts = confidence.shape[0]
    features = acceptance_features(confidence, entropy, tables)
    conditional = torch.sigmoid(features @ tables.weights[:-1] + tables.weights[-1])
    torch.cumprod(conditional, dim=0, out=selection.prefix_probs)
    scores = selection.prefix_probs.cumsum(dim=0) - tables.token_costs[:drafts]
    # torch.argmax returns the first of equal maxima.
    selection.nominal_length.copy_(scores.argmax() + 2)
    selection.length.copy_(selection.nominal_length)


def correct_length(new_experts: torch.Tensor, tables: "LengthTables", selection: "Selection") -> None:
    """As `length_selection.correct_length`."""
    drafts = selection.prefix_probs.shape[0]
    # Row w0 - 1 of both tables is position w0; at w0 = D + 1 there is no further draft.
    position = (selection.nominal_length.long() - 1).clamp(max=drafts - 1)
    count = new_experts.long().view(1).clamp(0, tables.correction_costs.shape[1] - 1)
    is_worth = selection.prefix_probs[position] > tables.correction_costs[position, count]
    has_draft = selection.nominal_length <= drafts
    selection.length.copy_(selection.nominal_length + (is_worth & has_draft).int())


def count_new_experts(top_k_index: torch.Tensor, nominal_length: torch.Tensor) -> torch.Tensor:
    """As `length_selection.count_new_experts`."""
    row = nominal_length.long().view(1)
    newest = top_k_index.index_select(0, row)
    earlier = torch.arange(top_k_index.shape[0], device=top_k_index.device) < row
    is_known = ((top_k_index.unsqueeze(-1) == newest.unsqueeze(1)) & earlier[:, None, None]).any(dim=0).any(dim=0)
    return (~is_known).sum(dtype=torch.int32).view(1)


def acceptance_features(confidence: torch.Tensor, entropy: torch.Tensor, tables: "LengthTables") -> torch.Tensor:
    """`[D, 5]` inputs of the logistic model."""
    drafts = confidence.shape[0]
    calibrated = _interpolate(confidence, tables.confidence_knots[:drafts], tables.acceptance_knots[:drafts])
    average = (tables.entropy_average[:drafts, :drafts] @ entropy).clamp_(min=ENTROPY_FLOOR)
    position = torch.arange(1, drafts + 1, device=confidence.device, dtype=torch.float32)
    change = torch.log(entropy.clamp(min=ENTROPY_FLOOR) / average)
    return torch.stack([calibrated, position, calibrated * position, torch.log1p(entropy), change], dim=1)


def _interpolate(x: torch.Tensor, knots: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`[D]` values at `x` `[D]` between knots `[D, K]`, constant beyond the first and last."""
    x = x.unsqueeze(1)
    upper = torch.searchsorted(knots, x, right=True).clamp_(max=knots.shape[1] - 1)
    lower = (upper - 1).clamp_(min=0)
    x0, x1 = knots.gather(1, lower), knots.gather(1, upper)
    y0, y1 = values.gather(1, lower), values.gather(1, upper)
    # Equal knots are padding, or the last knot itself.
    share = torch.where(x1 > x0, (x - x0) / (x1 - x0).clamp(min=1e-12), torch.ones_like(x))
    return (y0 + share.clamp(0, 1) * (y1 - y0)).squeeze(1)
