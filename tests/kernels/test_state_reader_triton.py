"""The state reader in Triton against its reference: fp32 through the interpreter or on a GPU, bf16 on a GPU."""

import pytest
import torch

from hf_hybridspec.kernels import state_reader_triton
from hf_hybridspec.kernels.dispatch import use_kernels
from hf_hybridspec.kernels.state_reader import gather_states, project_states, read_projected_states
from hf_hybridspec.modeling.ready import ReadyDrafter

from .test_state_reader import inputs

# fp32 sums in another order.
FP32 = {"rtol": 1e-4, "atol": 1e-4}
# bf16 rows and projections: products are exact, their fp32 sums have another order, over 5120 terms.
BF16 = {"rtol": 2e-3, "atol": 2e-3}
SHAPES = [
    (1, 1, 1, 4, 4, 1, 3),
    (2, 7, 4, 8, 6, 4, 40),
    (1, 5, 3, 16, 32, 8, 300),
    (1, 17, 2, 20, 12, 20, 70),
    (2, 3, 2, 70, 62, 8, 40),
]


def both(function):
    with torch.no_grad():
        with use_kernels("reference"):
            expected = function()
        with use_kernels("triton"):
            return function(), expected


@pytest.mark.parametrize(("N", "B", "J", "K", "V", "r", "d"), SHAPES)
def test_project_and_read_equal_the_reference(triton_device, N, B, J, K, V, r, d):
    states, hidden, W, U, value = (tensor.to(triton_device) for tensor in inputs(N, B, J, K, V, r, d))
    found, expected = both(lambda: project_states(states, value, U))
    rms = (expected.mean_square.sum(2) + 1e-6).sqrt()
    torch.testing.assert_close(found.mean_square.sum(2), expected.mean_square.sum(2), **FP32)
    found_core, expected_core = (core.sum(2) / rms[..., None, None] for core in (found.core, expected.core))
    torch.testing.assert_close(found_core, expected_core, **FP32)
    # The parts are read as they are.
    read, exactly = both(lambda: read_projected_states(found, hidden, W))
    torch.testing.assert_close(read, exactly, **FP32)
    with use_kernels("reference"):
        torch.testing.assert_close(read, read_projected_states(expected, hidden, W), **FP32)


@pytest.mark.parametrize(("programs", "parts"), [(1, 1), (4, 2), (480, 5)])
def test_a_read_in_parts_and_steps_equals_the_reference(triton_device, monkeypatch, programs, parts):
    """d = 600 has five steps in fp32: one program takes them all, two take three and two, or each has its own."""
    monkeypatch.setattr(state_reader_triton, "READ_PROGRAMS", programs)
    states, hidden, W, U, value = (tensor.to(triton_device) for tensor in inputs(1, 7, 4, 8, 6, 8, 600))
    taken = []
    monkeypatch.setattr(state_reader_triton, "_pack_kernel", Recorder(state_reader_triton._pack_kernel, taken))
    found, expected = both(lambda: read_projected_states(project_states(states, value, U), hidden, W))
    torch.testing.assert_close(found, expected, **FP32)
    assert taken == [parts]
    # Parts are added in a fixed order.
    again, _ = both(lambda: read_projected_states(project_states(states, value, U), hidden, W))
    assert torch.equal(again, found)


class Recorder:
    """A kernel that notes the number of parts it is launched with."""

    def __init__(self, kernel, taken):
        self.kernel, self.taken = kernel, taken

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.taken.append(options["PARTS"])
            return self.kernel[grid](*args, **options)

        return launch


def test_tensors_that_are_not_contiguous(triton_device):
    states, hidden, W, U, value = (tensor.to(triton_device) for tensor in inputs(2, 7, 4, 8, 6, 4, 40))
    states, hidden = states.mT.contiguous().mT, hidden.transpose(0, 1).contiguous().transpose(0, 1)
    W, U, value = (tensor.mT.contiguous().mT for tensor in (W, U, value))
    found, expected = both(lambda: read_projected_states(project_states(states, value, U), hidden, W))
    torch.testing.assert_close(found, expected, **FP32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("layers", "batch"), [([2, 0], 1), ([1], 2), ([0, 3, 1], 2)])
def test_gather_copies_the_selected_layers_in_order(triton_device, layers, batch, dtype):
    states = torch.randn(4, batch, 3, 70, 62, generator=torch.Generator().manual_seed(1)).to(triton_device)
    out = torch.full((batch, len(layers) * 3, 70, 62), float("nan"), device=triton_device, dtype=dtype)
    expected = torch.cat([states[layer] for layer in layers], dim=1).to(dtype)
    index = torch.tensor(layers, device=triton_device)
    for kind in ("reference", "triton"):
        with use_kernels(kind):
            gather_states(states, index, out.fill_(float("nan")))
        assert torch.equal(out, expected), kind


def test_a_gradient_takes_the_reference_even_where_triton_is_asked_for(triton_device):
    states, hidden, W, U, value = (tensor.to(triton_device) for tensor in inputs(1, 2, 2, 8, 6, 4, 10))
    value.requires_grad_()
    with use_kernels("triton"):
        read_projected_states(project_states(states, value, U), hidden, W).sum().backward()
    assert value.grad.abs().sum() > 0


def test_shapes_that_do_not_match_are_refused():
    states = torch.zeros(4, 1, 3, 8, 6)
    with pytest.raises(ValueError, match=r"out must be contiguous \(1, 6, 8, 6\)"):
        gather_states(states, torch.tensor([0, 1]), torch.zeros(1, 3, 8, 6))
    with pytest.raises(ValueError, match=r"recurrent_states must be \[L, N, HV, K, V\]"):
        gather_states(states[0], torch.tensor([0]), torch.zeros(1, 3, 8, 6))
    with pytest.raises(ValueError, match="int32 or int64"):
        gather_states(states, torch.tensor([0.0]), torch.zeros(1, 3, 8, 6))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_bf16_at_the_papers_shape():
    states, hidden, W, U, value = (tensor.cuda() for tensor in inputs(1, 7, 96, 128, 128, 8, 5120))
    states = states / states.square().mean((-2, -1), keepdim=True).sqrt()
    # Scaled as a fresh reader's, so that the reads are of order one.
    hidden, W, U, value = (
        hidden.bfloat16(),
        (W * 5120**-0.5).bfloat16(),
        (U * 8**-0.5).bfloat16(),
        value.bfloat16() / 11,
    )
    found, expected = both(lambda: read_projected_states(project_states(states, value, U), hidden, W))
    torch.testing.assert_close(found, expected, **BF16)


def test_the_reader_module_runs_on_them(triton_device):
    """`ReadyDrafter` reaches these kernels: the same update as with the reference."""
    from tests.modeling.drafter_helpers import HIDDEN, make_drafter, recurrent_states

    drafter: ReadyDrafter = make_drafter("ready").to(triton_device)
    reader = drafter.layers[2].state_reader
    with torch.no_grad():
        reader.up_proj.weight.fill_(0.5)
    states = drafter.gather_states({layer: state.to(triton_device) for layer, state in recurrent_states(3).items()})
    hidden = torch.randn(1, 15, HIDDEN, generator=torch.Generator().manual_seed(5)).to(triton_device)
    found, expected = both(lambda: reader(hidden, states, 5))
    torch.testing.assert_close(found, expected, **FP32)
