"""Choosing the verification length: the nominal length from the drafter's signals, then the routing correction.

HybridSpec, equations 5 and 6. The math is in `length_selection_reference.py`. Everything stays on the device: the same
call serves a CPU tensor in the eager loop and a device scalar inside a captured round.
"""

from dataclasses import dataclass

import torch

from .dispatch import implementation

MIN_LENGTH = 2
# Calibrated confidence, position, their product, log(1 + entropy), log(entropy / its running average), intercept.
NUM_WEIGHTS = 6


@dataclass(frozen=True)
class LengthTables:
    """Calibrated numbers for D draft tokens, all fp32 on one device, never changed.

    Attributes:
        confidence_knots: `[D, K]`, confidences at which the isotonic map of each position is known, ascending.
        acceptance_knots: `[D, K]`, the map's values there; rows with fewer knots repeat the last.
        entropy_average: `[D, D]`, row i gives the running average of the entropy before draft token i + 1.
        weights: `[6]`, logistic weights and intercept.
        token_costs: `[D]`, rho C_tgt(w) for w = 2..D + 1, in tokens.
        correction_costs: `[D, N]`, rho dL(w0 | n) for w0 = 1..D and n = 0..N - 1 new Layer-0 experts, in tokens.
    """

    confidence_knots: torch.Tensor
    acceptance_knots: torch.Tensor
    entropy_average: torch.Tensor
    weights: torch.Tensor
    token_costs: torch.Tensor
    correction_costs: torch.Tensor


@dataclass(frozen=True)
class Selection:
    """A round's lengths, preallocated and written in place; see `Selection.empty`.

    Attributes:
        prefix_probs: `[D]` fp32, p_i = P(the first i drafts are accepted).
        nominal_length: `[1]` int32, w0.
        length: `[1]` int32, the length after the routing correction.
    """

    prefix_probs: torch.Tensor
    nominal_length: torch.Tensor
    length: torch.Tensor

    @classmethod
    def empty(cls, num_drafts: int, device: torch.device | str) -> "Selection":
        """An uninitialised selection for `num_drafts` draft tokens."""
        scalar = torch.empty(2, 1, dtype=torch.int32, device=device)
        return cls(torch.empty(num_drafts, dtype=torch.float32, device=device), scalar[0], scalar[1])


def select_length(confidence: torch.Tensor, entropy: torch.Tensor, tables: LengthTables, selection: Selection) -> None:
    """Writes the prefix-acceptance probabilities and the nominal length of a proposal block (equation 5).

    Args:
        confidence: `[D]` fp32, the drafter's probability of each of its tokens.
        entropy: `[D]` fp32, in nats.
        tables: calibrated for at least D draft tokens; the first D positions are used.
        selection: of size D; `prefix_probs`, `nominal_length` and `length` (= w0 until corrected) are written.

    Raises:
        ValueError: a shape differs from the above.
    """
    _check_signals(confidence, entropy, tables, selection)
    kernels = implementation("length_selection", confidence.device)
    kernels.select_length(confidence, entropy, tables, selection)


def correct_length(new_experts: torch.Tensor, tables: LengthTables, selection: Selection) -> None:
    """Writes `selection.length`: one more than the nominal length if that draft is worth its cost (equation 6).

    Only for a round whose Stage 0 covered row w0 + 1; the length never exceeds D + 1.

    Args:
        new_experts: `[1]` int32 or int64, Layer-0 experts that row w0 + 1 alone selects.
        tables: as given to `select_length`; counts beyond the table use its last column.
        selection: as `select_length` left it.

    Raises:
        ValueError: `new_experts` is not one integer.
    """
    if new_experts.numel() != 1 or new_experts.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"new_experts must be one int32 or int64 element, got {new_experts.dtype} {tuple(new_experts.shape)}."
        )
    kernels = implementation("length_selection", new_experts.device)
    kernels.correct_length(new_experts, tables, selection)


def count_new_experts(top_k_index: torch.Tensor, nominal_length: torch.Tensor) -> torch.Tensor:
    """`[1]` int32: U0(w0 + 1) - U0(w0), the experts of row w0 + 1 that no row before it selects.

    Args:
        top_k_index: `[u, k]` int64, Layer-0 experts of the Stage-0 rows, distinct within a row; u > w0.
        nominal_length: `[1]` int32, w0, on the same device.

    Raises:
        ValueError: a shape differs from the above.
    """
    if top_k_index.dim() != 2 or nominal_length.numel() != 1:
        raise ValueError(
            "top_k_index must be [u, k] and nominal_length one element, got "
            f"{tuple(top_k_index.shape)} and {tuple(nominal_length.shape)}."
        )
    kernels = implementation("length_selection", top_k_index.device)
    return kernels.count_new_experts(top_k_index, nominal_length)


def _check_signals(confidence, entropy, tables: LengthTables, selection: Selection) -> None:
    drafts = confidence.shape[0] if confidence.dim() == 1 else 0
    if not drafts or entropy.shape != confidence.shape or selection.prefix_probs.shape != confidence.shape:
        raise ValueError(
            "confidence, entropy and selection.prefix_probs must be [D] with D of at least 1, got "
            f"{tuple(confidence.shape)}, {tuple(entropy.shape)} and {tuple(selection.prefix_probs.shape)}."
        )
    if tables.token_costs.shape[0] < drafts:
        raise ValueError(
            f"The tables are calibrated for {tables.token_costs.shape[0]} draft tokens, the block has {drafts}. "
            "Calibrate with the drafter's full block."
        )
