"""Sampled acceptance: tokens of the Triton kernels against those of all probabilities, for the same uniforms."""

import pytest
import torch

from hf_hybridspec.kernels import sampled_acceptance_triton
from hf_hybridspec.kernels.dispatch import use_kernels
from hf_hybridspec.kernels.round_steps import RoundState
from hf_hybridspec.kernels.sampled_acceptance import accept_sampled
from hf_hybridspec.kernels.sampling import SamplingSettings, sampling_probs

# Temperature, top-k, top-p, min-p; NONE keeps every token.
NONE = 1 << 31
QWEN = (0.7, 20, 0.8, 0.0)
# A uniform so near to the border of a token is left out: sums of another order and other roundings of e^x.
NEAR = 2e-6
# Tokens of a tile, and so many that some lists of groups take three.
TILE, MANY = 4096, 9000


def logits_of(kind: str, rows: int, vocabulary: int) -> torch.Tensor:
    """`distinct` fp32, `bf16` with ties as of heads, `flat`, `few` that are finite, `mixed` ties of few values."""
    generator = torch.Generator().manual_seed(rows)
    logits = 2.5 * torch.randn(rows, vocabulary, generator=generator)
    if kind == "few":
        return logits.masked_fill(torch.rand(rows, vocabulary, generator=generator) < 0.9, -torch.inf)
    return {
        "distinct": logits,
        "bf16": logits.bfloat16(),
        "flat": torch.zeros_like(logits),
        "mixed": logits.round().clamp(max=3),
    }[kind]


class Case:
    """Logits, settings and drafts on one device; `outcome` is what a kind of kernels makes of given uniforms."""

    def __init__(self, logits: torch.Tensor, values: tuple, device: str, drafts: list[int]):
        self.settings, self.state = SamplingSettings.new(device), RoundState.new(2, 2, device)
        self.settings.set(*values)
        self.logits, self.is_filtered = logits.to(device), values[1:] != (NONE, 1.0, 0.0)
        self.state.block_tokens[1 : len(drafts) + 1] = torch.tensor(drafts, dtype=torch.int64)
        self.drafts = drafts

    def probs(self) -> torch.Tensor:
        return sampling_probs(self.logits, self.settings, self.is_filtered).double().cpu()

    def reachable(self) -> int:
        """How many drafts can be accepted, one after the other."""
        return int((self.probs()[range(len(self.drafts)), self.drafts] > 0).long().cumprod(0).sum())

    def outcome(self, kind: str, uniforms) -> tuple[int, int]:
        uniforms = torch.as_tensor(uniforms, dtype=torch.float64, device=self.logits.device)
        with use_kernels(kind):
            accept_sampled(self.logits, uniforms, self.settings, self.is_filtered, self.state)
        return self.state.num_accepted.item(), self.state.next_token.item()


def case_of(kind, values, rows, vocabulary, device) -> Case:
    """Drafts of the best, a probable and an improbable token in turn."""
    logits = logits_of(kind, rows, vocabulary)
    order = logits.float().sort(descending=True, stable=True).indices
    places = [0, 2, vocabulary // 2]
    return Case(logits, values, device, [int(order[row, places[row % 3]]) for row in range(rows - 1)])


def check_borders(case: Case, rejects: int, tokens: int) -> None:
    """Tokens of the row after so many accepted drafts change where the cumulative distribution says, at both ends.

    Args:
        tokens: how many of them are looked at, spread over the distribution.
    """
    row = case.probs()[rejects]
    uniforms = [0.0] * rejects + [1.0 - 2.0**-53] * (len(case.drafts) - rejects)
    if rejects < len(case.drafts):
        row[case.drafts[rejects]] = 0.0
    borders = torch.cat([torch.zeros(1, dtype=row.dtype), (row / row.sum()).cumsum(0)])
    wide = (borders.diff() > 4 * NEAR).nonzero().view(-1)
    for token in wide[torch.linspace(0, len(wide) - 1, tokens).long()].tolist():
        for uniform in (borders[token] + NEAR, borders[token + 1] - NEAR):
            assert case.outcome("triton", [*uniforms, float(uniform)]) == (rejects, token)


CASES = {
    "temperature": ("bf16", (0.7, NONE, 1.0, 0.0), 3, MANY),
    "qwen": ("bf16", QWEN, 4, MANY),
    "top-k of one tile": ("distinct", (1.0, 50, 1.0, 0.0), 2, MANY),
    "top-k beyond the groups": ("bf16", (1.0, 300, 0.9, 0.0), 1, MANY),
    "top-p alone": ("distinct", (1.0, NONE, 0.3, 0.0), 1, MANY),
    "top-p of a few": ("distinct", (0.3, NONE, 0.9, 0.0), 2, MANY),
    "min-p alone": ("bf16", (1.3, NONE, 1.0, 0.1), 2, MANY),
    "all": ("bf16", (1.3, 30, 0.95, 0.05), 2, MANY),
    "more ties than a tile": ("flat", (1.0, 7, 0.001, 0.0), 2, MANY),
    "ties within top-p": ("mixed", (1.0, NONE, 0.02, 0.0), 1, MANY),
    "a small vocabulary": ("distinct", (1.0, 7, 0.9, 0.0), 3, 50),
    "fewer than top-k": ("few", (1.0, 30, 0.99, 0.0), 2, 100),
}


@pytest.fixture(scope="session")
def takes_long(triton_device, watches_races) -> bool:
    """Whether a launch takes long: interpreted, or watched for races."""
    return triton_device == "cpu" or watches_races


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_drawn_as_the_probabilities_say(name, triton_device, takes_long):
    case = case_of(*CASES[name], triton_device)
    check_borders(case, case.reachable(), 3 if takes_long else 100)


@pytest.mark.parametrize("name", ["temperature", "qwen", "all", "a small vocabulary"])
def test_the_first_row_that_rejects_leaves_its_draft_out(name, triton_device, takes_long):
    case = case_of(*CASES[name], triton_device)
    assert case.reachable() > 0
    for rejects in range(case.reachable()):
        check_borders(case, rejects, 2 if takes_long else 100)


@pytest.mark.parametrize("name", ["temperature", "qwen", "more ties than a tile", "a small vocabulary"])
def test_drafts_are_accepted_with_their_probability(name, triton_device):
    case = case_of(*CASES[name], triton_device)
    for row, draft in enumerate(case.drafts[: case.reachable() + 1]):
        prob = float(case.probs()[row, draft])
        uniforms = [0.0] * row + [prob * (1 - NEAR)] + [1.0 - 2.0**-53] * (len(case.drafts) - row)
        assert case.outcome("triton", uniforms)[0] == (row + 1 if prob > 0 else row)
        if prob < 1 - NEAR:
            uniforms[row] = prob * (1 + NEAR)
            assert case.outcome("triton", uniforms)[0] == row


def test_kernels_that_sort_nothing_equal_the_reference(triton_device, takes_long):
    """Any uniforms: the same drafts and the same token, whichever kind decides."""
    generator = torch.Generator().manual_seed(0)
    for name in ("qwen", "a small vocabulary"):
        case = case_of(*CASES[name], triton_device)
        for _ in range(3 if takes_long else 200):
            uniforms = torch.rand(len(case.drafts) + 1, dtype=torch.float64, generator=generator)
            assert case.outcome("triton", uniforms) == case.outcome("reference", uniforms)


def test_a_draft_that_is_all_the_target_can_say_survives_its_rejection(triton_device):
    logits = torch.full((2, 100), -torch.inf)
    logits[0, 41] = logits[1, 3] = 2.0
    # No uniform below 1 rejects it, so the rule is asked with one that is not.
    for values in ((1.0, NONE, 1.0, 0.0), (1.0, 3, 0.9, 0.0)):
        assert Case(logits, values, triton_device, [41]).outcome("triton", [1.0, 0.5]) == (0, 41)


def test_a_wrong_end_is_noticed(triton_device, monkeypatch):
    """The negative control: one token more than top-k allows moves the borders."""
    name = "top-k of one tile"
    kind, (temperature, top_k, top_p, min_p), rows, vocabulary = CASES[name]
    case = case_of(kind, (temperature, top_k, top_p, min_p), rows, vocabulary, triton_device)
    probs = case.probs()
    case.settings.set(temperature, top_k + 1, top_p, min_p)
    monkeypatch.setattr(case, "probs", lambda: probs)
    with pytest.raises(AssertionError):
        check_borders(case, len(case.drafts), 5)


def test_strided_rows_and_the_tile_are_as_said(triton_device):
    assert sampled_acceptance_triton.BLOCK == TILE < MANY / 2
    case = case_of(*CASES["qwen"], triton_device)
    uniforms = [0.3, 0.6, 0.2, 0.7]
    expected = case.outcome("triton", uniforms)
    wide = torch.zeros(8, MANY, dtype=case.logits.dtype, device=triton_device)
    wide[::2] = case.logits
    case.logits = wide[::2]
    assert case.outcome("triton", uniforms) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("values", [QWEN, (0.4, NONE, 0.95, 0.0), (1.0, NONE, 1.0, 0.0), (1.0, 50, 1.0, 0.02)])
@pytest.mark.parametrize("rows", [1, 6, 16])
def test_at_full_size(values, rows, takes_long):
    case = case_of("bf16", values, rows, 248_320, "cuda")
    check_borders(case, case.reachable(), 1 if takes_long else 30)


@pytest.mark.parametrize("shape", [(0, 9), (17, 9), (9,)])
def test_refused_logits(shape):
    case = case_of("flat", QWEN, 1, 9, "cpu")
    case.logits = torch.zeros(shape)
    with pytest.raises(ValueError, match=r"logits must be \[w, vocabulary\], floating, with 1 <= w <= 16, got"):
        case.outcome("reference", torch.zeros(max(1, shape[0])))


def test_refused_uniforms():
    case = case_of("flat", QWEN, 2, 9, "cpu")
    with pytest.raises(ValueError, match=r"uniforms must be \(2,\) of fp64, one per row of logits, got .* \(3,\)"):
        case.outcome("reference", [0.1, 0.2, 0.3])
