"""DFlash2's convolution and candidate selector against their formulas."""

import pytest
import torch

from hf_hybridspec.modeling.dflash.modeling_dflash import BlockConvolution

from ..drafter_helpers import HIDDEN, MASK, bind, make_config, make_drafter, observed


def random_convolution(taps: int) -> BlockConvolution:
    generator = torch.Generator().manual_seed(taps)
    convolution = BlockConvolution(make_config("dflash2", conv_kernel_size=taps))
    with torch.no_grad():
        for parameter in convolution.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return convolution


@pytest.mark.parametrize("taps", [1, 2, 3])
@pytest.mark.parametrize("side", [0, 1])
def test_convolution_equals_its_formula_within_each_block(taps, side):
    convolution, generator = random_convolution(taps), torch.Generator().manual_seed(0)
    x, y = (torch.randn(1, 10, HIDDEN, generator=generator) for _ in range(2))
    with torch.no_grad():
        # Dynamic taps come from x, also where y is convolved.
        result = convolution.convolve(y, convolution.dynamic_taps(x), side, rows_per_block=5)
        groups = HIDDEN // 8
        dynamic = (x[0] @ convolution.kernel_projection.weight.T).view(10, 2, taps, groups)
        for row in range(10):
            for channel in range(HIDDEN):
                expected = sum(
                    (convolution.base_kernel[side, o, channel] + dynamic[row, side, o, channel // 8])
                    * y[0, row - o, channel]
                    for o in range(taps)
                    if row % 5 - o >= 0
                )
                assert result[0, row, channel] == pytest.approx(float(expected), rel=1e-4, abs=1e-5)


def test_a_fresh_convolution_passes_its_input_through():
    torch.manual_seed(0)
    drafter = type(make_drafter("dflash2"))(make_config("dflash2"))
    x = torch.randn(1, 5, HIDDEN)
    convolution = drafter.layers[0].attention_conv
    assert torch.equal(convolution.convolve(x, convolution.dynamic_taps(x), 0, 5), x)


def test_the_selector_walks_greedily_over_the_top_candidates():
    drafter = bind(make_drafter("dflash2"))
    selector = drafter.candidate_selector
    hidden = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        draft = drafter.choose(hidden, torch.tensor([11]))
        logits = hidden @ drafter.target.head.weight.T
        logits[:, MASK] = -torch.inf
        previous = 11
        for row in range(4):
            candidates = logits[row].argsort(descending=True)[:6]
            wanted = selector.predecessor_codebook[previous] * (selector.hidden_projection.weight @ hidden[row])
            scores = torch.stack([logits[row, c] + wanted @ selector.successor_codebook[c] for c in candidates])
            previous = int(candidates[scores.argmax()])
            assert draft.tokens[row] == previous
            probabilities = scores.softmax(0)
            torch.testing.assert_close(draft.confidence[row], probabilities.max())
            torch.testing.assert_close(draft.entropy[row], -(probabilities * probabilities.log()).sum())


def test_the_selector_changes_the_proposal():
    drafter = bind(make_drafter("dflash2"))
    context = observed(drafter, 9)
    with_selector = drafter.propose(context, torch.tensor([11]), 9).tokens
    with torch.no_grad():
        drafter.candidate_selector.successor_codebook.mul_(50)
    assert not torch.equal(with_selector, drafter.propose(context, torch.tensor([11]), 9).tokens)
