"""The state reader's features against the paper's formulas, written per state and per row."""

import pytest
import torch

from hf_hybridspec.kernels.state_reader import project_states, read_projected_states


def inputs(N, B, J, K, V, r, d, dtype=torch.float32):
    generator = torch.Generator().manual_seed(N * 100 + B * 10 + J)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    states = draw(N, J, K, V) * torch.logspace(-2, 2, J, dtype=dtype)[None, :, None, None]
    return states, draw(N, B, d), draw(J, r, d), draw(J, r, K), draw(J, V, r)


@pytest.mark.parametrize("N", [1, 3])
@pytest.mark.parametrize(("B", "J", "K", "V", "r", "d"), [(1, 1, 4, 4, 1, 3), (7, 4, 8, 6, 4, 10), (5, 3, 6, 8, 8, 7)])
def test_features_equal_the_formulas(N, B, J, K, V, r, d):
    states, hidden, W, U, value = inputs(N, B, J, K, V, r, d)
    features = read_projected_states(project_states(states, value, U), hidden, W).view(N, B, J, r + 1)
    for n in range(N):
        for s in range(J):
            S = states[n, s].double().T  # dv x dk, as the paper writes it
            rms = torch.sqrt((S * S).mean() + 1e-6)
            T = value[s].double().T @ (S / rms)
            for j in range(B):
                q = U[s].double().T @ (W[s].double() @ hidden[n, j].double())
                torch.testing.assert_close(features[n, j, s, :r].double(), T @ q, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(features[n, j, s, r].double(), rms.log(), rtol=1e-5, atol=1e-5)


def test_reads_do_not_depend_on_a_states_scale_but_log_rms_does():
    states, hidden, W, U, value = inputs(1, 2, 2, 8, 6, 4, 10)
    states = states / states.square().mean((-2, -1), keepdim=True).sqrt()
    small = read_projected_states(project_states(states, value, U), hidden, W).view(2, 2, 5)
    large = read_projected_states(project_states(states * 100, value, U), hidden, W).view(2, 2, 5)
    torch.testing.assert_close(small[..., :4], large[..., :4], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(large[..., 4] - small[..., 4], torch.full((2, 2), 100.0).log(), rtol=1e-4, atol=1e-4)


def test_a_zero_state_is_finite_and_states_are_left_alone():
    states, hidden, W, U, value = inputs(1, 2, 2, 8, 6, 4, 10)
    states[0, 0] = 0
    before = states.clone()
    assert torch.isfinite(read_projected_states(project_states(states, value, U), hidden, W)).all()
    assert torch.equal(states, before)


def test_low_precision_inputs_are_computed_in_fp32():
    states, hidden, W, U, value = inputs(1, 2, 2, 8, 6, 4, 10, dtype=torch.bfloat16)
    features = read_projected_states(project_states(states, value, U), hidden, W)
    exact = read_projected_states(project_states(states.float(), value.float(), U.float()), hidden.float(), W.float())
    assert features.dtype == torch.float32
    assert torch.equal(features, exact)


def test_shapes_that_do_not_match_are_refused():
    states, hidden, W, U, value = inputs(1, 2, 2, 8, 6, 4, 10)
    with pytest.raises(ValueError, match=r"must be \[2, 6, r\]"):
        project_states(states, value.transpose(1, 2), U)
    with pytest.raises(ValueError, match=r"states must be \[N, J, K, V\]"):
        project_states(states[0], value, U)
    with pytest.raises(ValueError, match=r"key_projection must be \(2, 4, 8\)"):
        project_states(states, value, U[..., :5])
    projected = project_states(states, value, U)
    with pytest.raises(ValueError, match=r"query_projection must be \(2, 4, 10\)"):
        read_projected_states(projected, hidden, W[:1])
    with pytest.raises(ValueError, match=r"hidden must be \[1, B, d\]"):
        read_projected_states(projected, hidden.expand(3, -1, -1), W)
