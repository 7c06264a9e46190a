"""Length selection: against the definitions written out in Python, with both implementations."""

import math

import pytest
import torch

from hf_hybridspec.kernels.dispatch import use_kernels
from hf_hybridspec.kernels.length_selection import (
    LengthTables,
    Selection,
    correct_length,
    count_new_experts,
    select_length,
)

# fp32 sums of at most 16 terms of order one.
TOLERANCE = 2e-6


@pytest.fixture(params=["reference", "triton"])
def device(request):
    with use_kernels(request.param):
        yield request.getfixturevalue("triton_device") if request.param == "triton" else "cpu"


def entropy_average(drafts: int) -> torch.Tensor:
    """Row i: weights of h_1.. in the average before draft i + 1, by running the recurrence on unit vectors."""
    rows, average = [], torch.eye(drafts)[0]
    for index in range(drafts):
        rows.append(average)
        average = (torch.eye(drafts)[index] + average) / 2
    return torch.stack(rows)


def random_tables(drafts: int, knots: int = 5, counts: int = 9, seed: int = 0) -> LengthTables:
    generator = torch.Generator().manual_seed(seed)

    def ascending(shape):
        return torch.rand(*shape, generator=generator).sort(dim=1).values

    confidence_knots, acceptance_knots = ascending((drafts, knots)), ascending((drafts, knots))
    # A row with fewer knots repeats its last.
    confidence_knots[0, 2:], acceptance_knots[0, 2:] = confidence_knots[0, 1], acceptance_knots[0, 1]
    return LengthTables(
        confidence_knots,
        acceptance_knots,
        entropy_average(drafts),
        torch.tensor([2.5, -0.03, 0.1, -0.4, -0.2, 0.3]),
        torch.rand(drafts, generator=generator).cumsum(0),
        torch.rand(drafts, counts, generator=generator),
    )


def to(tables: LengthTables, device: str) -> LengthTables:
    return LengthTables(**{name: tensor.to(device) for name, tensor in vars(tables).items()})


def signals(drafts: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + seed)
    return torch.rand(drafts, generator=generator), 3 * torch.rand(drafts, generator=generator)


def interpolate(x: float, knots: list[float], values: list[float]) -> float:
    if x <= knots[0]:
        return values[0]
    for x0, x1, y0, y1 in zip(knots, knots[1:], values, values[1:], strict=False):
        if x0 <= x < x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return values[-1]


def written_out(confidence: torch.Tensor, entropy: torch.Tensor, tables: LengthTables) -> tuple[list[float], int]:
    weights = tables.weights.tolist()
    average, product, probs = float(entropy[0]), 1.0, []
    for index in range(confidence.shape[0]):
        calibrated = interpolate(
            float(confidence[index]), tables.confidence_knots[index].tolist(), tables.acceptance_knots[index].tolist()
        )
        h, position = float(entropy[index]), index + 1
        features = [calibrated, position, calibrated * position, math.log(1 + h), math.log(h / average)]
        logit = weights[5] + sum(w * x for w, x in zip(weights, features, strict=False))
        product /= 1 + math.exp(-logit)
        probs.append(product)
        average = (h + average) / 2
    scores = [1 + sum(probs[: w - 1]) - float(tables.token_costs[w - 2]) for w in range(2, len(probs) + 2)]
    return probs, 2 + scores.index(max(scores))


@pytest.mark.parametrize("drafts", [1, 2, 7, 15])
def test_selection_is_equation_5(drafts, device):
    tables, selection, lengths = random_tables(drafts), Selection.empty(drafts, device), set()
    on_device = to(tables, device)
    for seed in range(12):
        confidence, entropy = signals(drafts, seed)
        select_length(confidence.to(device), entropy.to(device), on_device, selection)
        probs, length = written_out(confidence, entropy, tables)
        torch.testing.assert_close(selection.prefix_probs.cpu(), torch.tensor(probs), rtol=0, atol=TOLERANCE)
        assert int(selection.nominal_length) == length == int(selection.length)
        lengths.add(length)
    assert len(lengths) > 1 or drafts < 7


def test_equal_scores_take_the_shorter_length(device):
    tables = random_tables(4)
    certain = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 50.0])
    # Every draft is accepted and costs exactly the token that it brings.
    costs = torch.tensor([1.0, 2.0, 3.0, 4.0])
    tables = LengthTables(**{**vars(tables), "weights": certain, "token_costs": costs})
    selection = Selection.empty(4, device)
    select_length(torch.ones(4, device=device), torch.ones(4, device=device), to(tables, device), selection)
    assert int(selection.nominal_length) == 2


def test_a_block_shorter_than_the_tables_reads_the_first_positions(device):
    tables = random_tables(7)
    confidence, entropy = signals(7, 3)
    whole, part = Selection.empty(7, device), Selection.empty(3, device)
    select_length(confidence.to(device), entropy.to(device), to(tables, device), whole)
    select_length(confidence[:3].to(device), entropy[:3].to(device), to(tables, device), part)
    torch.testing.assert_close(part.prefix_probs, whole.prefix_probs[:3], rtol=0, atol=TOLERANCE)
    assert int(part.nominal_length) <= 4


@pytest.mark.parametrize("nominal", [2, 5, 15])
@pytest.mark.parametrize("new_experts", [0, 3, 8, 20])
def test_correction_is_equation_6(nominal, new_experts, device):
    tables = random_tables(15)
    threshold = float(tables.correction_costs[nominal - 1, min(new_experts, 8)])
    for probability, expected in ((threshold * 1.01, nominal + 1), (threshold * 0.99, nominal), (threshold, nominal)):
        selection = Selection.empty(15, device)
        selection.prefix_probs.fill_(-1.0)[nominal - 1] = probability
        selection.nominal_length.fill_(nominal)
        correct_length(torch.tensor([new_experts], device=device), to(tables, device), selection)
        assert int(selection.length) == expected


def test_correction_stops_at_the_block(device):
    tables = random_tables(3)
    selection = Selection.empty(3, device)
    selection.prefix_probs.fill_(10.0)
    selection.nominal_length.fill_(4)
    correct_length(torch.tensor([0], device=device), to(tables, device), selection)
    assert int(selection.length) == 4


@pytest.mark.parametrize("nominal", [1, 2, 4])
def test_new_experts_are_those_of_no_earlier_row(nominal, device):
    top_k_index = torch.stack(
        [torch.randperm(12, generator=torch.Generator().manual_seed(row))[:3] for row in range(5)]
    )
    earlier = set(top_k_index[:nominal].flatten().tolist())
    expected = len(set(top_k_index[nominal].tolist()) - earlier)
    count = count_new_experts(top_k_index.to(device), torch.tensor([nominal], dtype=torch.int32, device=device))
    assert count.dtype == torch.int32 and count.tolist() == [expected]


def test_shapes_are_refused_in_words():
    tables, selection = random_tables(3), Selection.empty(4, "cpu")
    with pytest.raises(ValueError, match=r"must be \[D\].*got \(3,\), \(3,\) and \(4,\)"):
        select_length(torch.ones(3), torch.ones(3), tables, selection)
    with pytest.raises(ValueError, match=r"calibrated for 3 draft tokens, the block has 4.*full block"):
        select_length(torch.ones(4), torch.ones(4), tables, selection)
    with pytest.raises(ValueError, match="new_experts must be one int32 or int64"):
        correct_length(torch.ones(1), tables, selection)
    with pytest.raises(ValueError, match=r"top_k_index must be \[u, k\]"):
        count_new_experts(torch.ones(4), torch.ones(1))
