"""Draft choice: reference against the formulas row by row in float64, Triton against the reference."""

import pytest
import torch

from hf_hybridspec.kernels.dispatch import use_kernels
from hf_hybridspec.kernels.draft_choice import MarkovWeights, ProposalRules, choose_tokens

# fp32 sums over a few thousand columns in another order.
TOLERANCE = 1e-5
# draft rows, columns, Markov rank (0: none), softcap, reduced vocabulary
CASES = [
    (5, 53, 0, None, False),
    (3, 2500, 0, 4.0, True),
    (4, 53, 8, None, False),
    (3, 700, 20, 3.0, True),
    (1, 40, 0, None, False),
]


def _case(num_drafts, columns, rank, softcap, is_reduced, device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(columns)
    logits = 3 * torch.randn(num_drafts, columns, generator=generator)
    forbidden = torch.rand(columns, generator=generator) < 0.3
    # The largest logit of the first row is forbidden.
    forbidden[logits[0].argmax()] = True
    vocabulary = 2 * columns if is_reduced else columns
    offsets = torch.arange(columns).flip(0) if is_reduced else None
    anchor = torch.tensor([vocabulary - 2], device=device)
    markov = None
    if rank:
        weights = (torch.randn(size, rank, generator=generator).to(device, dtype) for size in (vocabulary, columns))
        markov = MarkovWeights(*weights)
    rules = ProposalRules(forbidden.to(device), 0.7, softcap, None if offsets is None else offsets.to(device))
    return logits.to(device, dtype), anchor, rules, markov


def _choose(kind, case, counters=None):
    with use_kernels(kind):
        return choose_tokens(*case, counters)


def _by_rows(logits, anchor, rules, markov):
    """Tokens, confidence and entropy, one row after the other in float64."""
    previous, rows = int(anchor), []
    for row in logits.double():
        scores = row * rules.multiplier
        if rules.softcap:
            scores = rules.softcap * torch.tanh(scores / rules.softcap)
        if markov is not None:
            scores = scores + markov.projection.double() @ markov.embedding[previous].double()
        scores[rules.forbidden] = float("-inf")
        probabilities = scores.softmax(0)
        column = int(scores.argmax())
        previous = column if rules.offsets is None else column + int(rules.offsets[column])
        rows.append((previous, float(probabilities[column]), float(torch.special.entr(probabilities).sum())))
    return rows


@pytest.mark.parametrize("case", CASES)
def test_reference_follows_the_formulas(case):
    case = _case(*case)
    choice = _choose("reference", case)
    tokens, confidence, entropy = zip(*_by_rows(*case), strict=True)
    assert tuple(choice.tokens.tolist()) == tokens
    torch.testing.assert_close(choice.confidence, torch.tensor(confidence), atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(choice.entropy, torch.tensor(entropy), atol=TOLERANCE, rtol=TOLERANCE)


def _check_triton(case):
    expected, choice = _choose("reference", case), _choose("triton", case)
    assert torch.equal(choice.tokens, expected.tokens)
    torch.testing.assert_close(choice.confidence, expected.confidence, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(choice.entropy, expected.entropy, atol=10 * TOLERANCE, rtol=10 * TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_triton_equals_reference(case, triton_device):
    _check_triton(_case(*case, triton_device))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rank", [0, 256])
@pytest.mark.parametrize("columns", [32000, 248320])
def test_triton_at_full_size(columns, rank):
    _check_triton(_case(15, columns, rank, None, False, "cuda"))
    choice = _choose("triton", _case(7, columns, rank, None, False, "cuda", torch.bfloat16))
    assert bool(((choice.confidence > 0) & (choice.confidence <= 1) & (choice.entropy > 0)).all())


def test_the_lowest_of_equal_columns_is_chosen(triton_device):
    logits = torch.zeros(2, 3000, device=triton_device)
    logits[1, [70, 2100, 2900]] = 5.0
    forbidden = torch.zeros(3000, dtype=torch.bool, device=triton_device)
    forbidden[:2] = True
    case = logits, torch.tensor([0], device=triton_device), ProposalRules(forbidden), None
    assert _choose("triton", case).tokens.tolist() == _choose("reference", case).tokens.tolist() == [2, 70]


def test_counters_are_zero_again(triton_device):
    case = _case(*CASES[3], triton_device)
    counters = torch.zeros(4, dtype=torch.int32, device=triton_device)
    first = _choose("triton", case, counters)
    assert not counters.any()
    assert torch.equal(_choose("triton", case, counters).entropy, first.entropy)


def test_errors_name_what_is_given_and_allowed():
    logits, anchor, rules, markov = _case(*CASES[2])
    with pytest.raises(ValueError, match="forbidden must be"):
        choose_tokens(logits[:, :-1], anchor, rules)
    with pytest.raises(ValueError, match=r"anchor must be \[1\] of int64"):
        choose_tokens(logits, anchor.int(), rules)
    with pytest.raises(ValueError, match="D of at least 1"):
        choose_tokens(logits[:0], anchor, rules)
    with pytest.raises(ValueError, match=r"markov\.projection must be"):
        choose_tokens(logits, anchor, rules, MarkovWeights(markov.embedding, markov.projection[:-1]))
