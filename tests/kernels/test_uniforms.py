"""Counter-based uniforms: published Philox vectors, both implementations, and that they look uniform."""

import pytest
import torch
from scipy.stats import chisquare, kstest

from hf_hybridspec.kernels.dispatch import use_kernels
from hf_hybridspec.kernels.uniforms import fill_uniforms
from hf_hybridspec.kernels.uniforms_reference import philox

# Counter, key and output of Philox4x32-10, from the test vectors of its authors' library.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.fixture(params=["reference", "triton"])
def device(request):
    with use_kernels(request.param):
        yield request.getfixturevalue("triton_device") if request.param == "triton" else "cpu"


def draw(count: int, seed: int, round_index: int, device) -> torch.Tensor:
    uniforms = torch.full((count,), float("nan"), dtype=torch.float64, device=device)
    scalars = (torch.tensor([value], device=device) for value in (seed, round_index))
    fill_uniforms(uniforms, *scalars)
    return uniforms.cpu()


def words(text: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([int(word, 16)]) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "output"), VECTORS)
def test_published_vectors(counter, key, output):
    assert philox(words(counter), words(key)) == words(output)


def test_numbers_of_a_round(device):
    """Words 0 and 1 of the counter (i, 0, low, high): recomputed in Python's integers."""
    seed, round_index = (0x299F31D0 << 32) | 0xA4093822, (5 << 32) | 7
    for index, uniform in enumerate(draw(3, seed, round_index, device).tolist()):
        counter = (torch.tensor([index]), torch.tensor([0]), torch.tensor([7]), torch.tensor([5]))
        c0, c1, _, _ = philox(counter, words("a4093822 299f31d0"))
        assert uniform == ((int(c0) << 32 | int(c1)) >> 11) / 2**53


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1])
def test_triton_equals_the_reference(triton_device, seed):
    for round_index in (0, 1, 2**40 + 3):
        with use_kernels("reference"):
            expected = draw(16, seed, round_index, "cpu")
        with use_kernels("triton"):
            assert torch.equal(draw(16, seed, round_index, triton_device), expected)


def test_rounds_and_seeds_differ():
    draws = [draw(16, seed, index, "cpu") for seed in (1, 2) for index in (1, 2, 1 << 32)]
    assert len({tuple(numbers.tolist()) for numbers in draws}) == len(draws)
    assert torch.equal(draw(16, 1, 1, "cpu"), draws[0])
    # A shorter draw is the beginning of a longer one.
    assert torch.equal(draw(5, 1, 1, "cpu"), draws[0][:5])


def test_uniform_over_rounds_and_within():
    """Kolmogorov-Smirnov over all numbers, and pairs of neighbours over a grid: between rounds and within one."""
    numbers = torch.stack([draw(16, 12345, index, "cpu") for index in range(2000)])
    assert numbers.min() >= 0 and numbers.max() < 1
    assert kstest(numbers.flatten(), "uniform").pvalue > 1e-3
    cells = (numbers * 8).long()
    for pairs in (cells[:, :-1] * 8 + cells[:, 1:], cells[:-1] * 8 + cells[1:]):
        assert chisquare(torch.bincount(pairs.flatten(), minlength=64)).pvalue > 1e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"uniforms": torch.empty(4)}, r"uniforms must be \[n\] fp64"),
        ({"uniforms": torch.empty(8, dtype=torch.float64)[::2]}, r"contiguous.*strides \(2,\)"),
        ({"seed": torch.zeros(2, dtype=torch.int64)}, r"seed must be one int64 on cpu, got torch\.int64 \(2,\)"),
        ({"round_index": torch.zeros(1)}, r"round_index must be one int64 on cpu, got torch\.float32"),
    ],
)
def test_wrong_arguments(change, message):
    zero = torch.zeros(1, dtype=torch.int64)
    arguments = {"uniforms": torch.empty(4, dtype=torch.float64), "seed": zero, "round_index": zero} | change
    with pytest.raises(ValueError, match=message):
        fill_uniforms(**arguments)
