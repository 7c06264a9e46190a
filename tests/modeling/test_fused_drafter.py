"""A fused drafter proposes what its module proposes, round after round, and hands its context back."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from hf_hybridspec.kernels.compile_ahead_triton import compiling_ahead
from hf_hybridspec.kernels.dispatch import use_kernels
from hf_hybridspec.modeling.block_state import SelectedStates
from hf_hybridspec.modeling.fused_drafter import FusedDrafter, fused_drafter_obstacle

from .drafter_helpers import FULL, HIDDEN, SLIDING, TAPS, YARN, bind, features, make_drafter, observed, states_for

# fp32 sums in another order, through a few layers.
TOLERANCE = 1e-4
CASES = {
    "dflash": ("dflash", {}),
    "dflash, yarn, capped": (
        "dflash",
        {
            "rope_parameters": dict(YARN),
            "final_logit_softcapping": 3.0,
            "output_multiplier": 0.5,
            "input_embedding_scale": 2.0,
        },
    ),
    "dflash, bidirectional windows": ("dflash", {"is_causal": False, "layer_types": [SLIDING] * 3, "block_size": 16}),
    "dflash, window from the anchor": ("dflash", {"window_from_anchor": True, "layer_types": [SLIDING, FULL, FULL]}),
    "dspark": ("dspark", {}),
    "dspark, rows after the anchor": ("dspark", {"sample_from_anchor": False, "enable_confidence_head": False}),
    "dspark, own head": ("dspark", {"draft_vocab_size": 31, "markov_rank": 0}),
    "ready": ("ready", {"reader_injection": "pre_attention"}),
    "ready, all layers": ("ready", {"reader_injection_layers": [0, 1, 2]}),
}


def _drafter(case: str):
    family, changes = CASES[case]
    drafter = bind(make_drafter(family, **changes))
    if changes.get("draft_vocab_size"):
        drafter.d2t.copy_(torch.arange(drafter.config.draft_vocab_size) % 19)
        drafter = bind(drafter)
    return drafter


def _assert_same_draft(draft, expected):
    assert torch.equal(draft.tokens, expected.tokens)
    for name in ("confidence", "entropy", "acceptance"):
        one, other = getattr(draft, name), getattr(expected, name)
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, atol=TOLERANCE, rtol=TOLERANCE)


def _selected(drafter, states):
    """The states that a drafter reads as views of one stack, in which they lie in another order."""
    if states is None:
        return None
    layer_ids = drafter.recurrent_layer_ids
    stack = torch.stack([states[layer_idx] for layer_idx in reversed(layer_ids)])
    return SelectedStates(stack, {layer_idx: len(layer_ids) - 1 - place for place, layer_idx in enumerate(layer_ids)})


def _run_rounds(drafter, fused, context, commits, seed=0):
    """Rounds of both: the module sees committed rows only, the fused drafter all rows and how many count."""
    position = context.length
    for index, (rows, commit) in enumerate(commits):
        anchor, states = torch.tensor([(7 * index + seed) % 40]), states_for(drafter)
        expected = drafter.propose(context, anchor, position, states)
        _assert_same_draft(fused.propose(anchor, _selected(drafter, states) if index % 2 else states), expected)
        taps = features(rows, seed=100 + index)
        fused.observe(taps, torch.tensor([commit], dtype=torch.int32))
        drafter.observe(context, taps[:commit], torch.arange(position, position + commit))
        position += commit
        assert int(fused.committed) == position


COMMITS = [(5, 3), (2, 1), (16, 16), (1, 1), (4, 1), (16, 2), (3, 3), (8, 5)]


@pytest.mark.parametrize("prompt", [1, 4, 23])
@pytest.mark.parametrize("case", CASES)
def test_rounds_equal_the_module(case, prompt):
    drafter = _drafter(case)
    fused = FusedDrafter(drafter, max_context=80)
    context = observed(drafter, prompt)
    fused.begin(context)
    _run_rounds(drafter, fused, context, COMMITS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs Triton only without CUDA")
def test_rounds_in_triton():
    drafter = _drafter("dspark")
    fused = FusedDrafter(drafter, max_context=80)
    context = observed(drafter, 9)
    fused.begin(context)
    with use_kernels("triton"):
        _run_rounds(drafter, fused, context, COMMITS[:2])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs Triton only without CUDA")
@pytest.mark.parametrize("case", CASES)
def test_a_walk_without_launches_leaves_no_trace(case):
    """What a kernel would have written may be an index: of the token before a draft, say."""
    drafter = _drafter(case)
    fused = FusedDrafter(drafter, max_context=80)
    context = observed(drafter, 9)
    with use_kernels("triton"), compiling_ahead(torch.device("cpu")), _no_memory_is_cleared_by_chance():
        fused.begin(context)
        fused.propose(torch.tensor([3]), states_for(drafter))
        fused.observe(features(4), torch.tensor([2], dtype=torch.int32))
    fused.begin(context)
    _run_rounds(drafter, fused, context, COMMITS[:2])


@contextmanager
def _no_memory_is_cleared_by_chance():
    """Memory that is not written to holds NaN and the largest integers."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_two_sequences_one_after_the_other():
    drafter = _drafter("dflash")
    fused = FusedDrafter(drafter, max_context=80)
    for seed in (0, 5):
        context = observed(drafter, 6 + seed, seed)
        fused.begin(context)
        _run_rounds(drafter, fused, context, COMMITS[:4], seed)


@pytest.mark.parametrize("commits", [[], COMMITS])
@pytest.mark.parametrize("case", ["dflash", "dspark"])
def test_the_context_comes_back(case, commits):
    drafter = _drafter(case)
    fused = FusedDrafter(drafter, max_context=80)
    context, returned = observed(drafter, 6), observed(drafter, 6)
    fused.begin(returned)
    _run_rounds(drafter, fused, context, commits)
    fused.end(returned)
    assert returned.length == context.length
    for layer, expected in zip(returned.layers, context.layers, strict=True):
        assert torch.equal(layer.positions, expected.positions)
        torch.testing.assert_close(layer.key_values.keys, expected.key_values.keys, atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(layer.key_values.values, expected.key_values.values, atol=TOLERANCE, rtol=TOLERANCE)
    position, anchor = context.length, torch.tensor([3])
    _assert_same_draft(drafter.propose(returned, anchor, position), drafter.propose(context, anchor, position))


def test_positions_need_not_start_at_zero():
    drafter = _drafter("dflash")
    fused = FusedDrafter(drafter, max_context=80)
    context = drafter.new_context()
    drafter.observe(context, features(7), torch.arange(20, 27))
    fused.begin(context)
    anchor = torch.tensor([11])
    _assert_same_draft(fused.propose(anchor), drafter.propose(context, anchor, 27))
    fused.observe(features(4, seed=3), torch.tensor([2], dtype=torch.int32))
    drafter.observe(context, features(4, seed=3)[:2], torch.arange(27, 29))
    _assert_same_draft(fused.propose(anchor), drafter.propose(context, anchor, 29))


def test_parameters_become_views_of_joined_weights():
    drafter = _drafter("dflash")
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    fused = FusedDrafter(drafter, max_context=16)
    assert all(torch.equal(tensor, before[name]) for name, tensor in drafter.state_dict().items())
    attention, joined = drafter.layers[1].self_attn, fused.layers[1].projection
    assert attention.v_proj.weight.data_ptr() == joined[-attention.v_proj.out_features :].data_ptr()
    again = FusedDrafter(drafter, max_context=16)
    assert again.layers[1].projection.data_ptr() == joined.data_ptr()
    storages = {parameter.untyped_storage().data_ptr() for parameter in drafter.parameters()}
    # o, gate|up, down and four norms in each of three layers; q|k|v of all; fc and two norms.
    assert len(storages) == 3 * 7 + 1 + 3


def test_obstacles():
    assert fused_drafter_obstacle(_drafter("dflash")) is None
    reasons = {
        "sublayers that are not fused": ("dflash2", {}),
        "at most 16": ("dflash", {"block_size": 17}),
        "biases": ("dflash", {"attention_bias": True}),
        "depends on the length": (
            "dflash",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2}},
        ),
        "type gated": ("dspark", {"markov_head_type": "gated"}),
    }
    for reason, (family, changes) in reasons.items():
        assert reason in fused_drafter_obstacle(bind(make_drafter(family, **changes)))
    drafter = bind(make_drafter("dflash").to(torch.bfloat16))
    assert "dtype" in fused_drafter_obstacle(drafter)
    with pytest.raises(ValueError, match="cannot run fused: drafter and target differ"):
        FusedDrafter(drafter, 16)
    drafter = bind(make_drafter("dflash"))
    drafter.target.head.bias = nn.Parameter(torch.zeros(drafter.target.head.out_features))
    assert "no plain linear layer" in fused_drafter_obstacle(drafter)


def test_contexts_that_cannot_be_continued():
    drafter = _drafter("dflash")
    fused = FusedDrafter(drafter, max_context=20)
    with pytest.raises(ValueError, match="is empty"):
        fused.begin(drafter.new_context())
    with pytest.raises(ValueError, match="position 20, the buffers hold 20"):
        fused.begin(observed(drafter, 21))
    context = observed(drafter, 4)
    drafter.observe(context, features(1), torch.tensor([9]))
    with pytest.raises(ValueError, match="have a gap"):
        fused.begin(context)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", ["dflash", "dspark", "ready, all layers"])
def test_captured_rounds_equal_the_module(case):
    drafter = _drafter(case).cuda()
    drafter.target.embedding.cuda(), drafter.target.head.cuda()
    fused = FusedDrafter(drafter, max_context=200)
    states = {layer: state.cuda() for layer, state in (states_for(drafter) or {}).items()}
    anchor = torch.tensor([3], device="cuda")
    commit, taps = torch.ones(1, dtype=torch.int32, device="cuda"), torch.zeros(6, len(TAPS) * HIDDEN, device="cuda")
    context = drafter.new_context()
    drafter.observe(context, features(30).cuda(), torch.arange(30, device="cuda"))
    graphs = []
    for call in (lambda: fused.propose(anchor, states), lambda: fused.observe(taps, commit)):
        fused.begin(context)
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call()
        graphs.append((graph, result))
    (propose, draft), (observe, _) = graphs
    fused.begin(context)
    position = 30
    for index, length in enumerate((3, 1, 6, 2, 5)):
        anchor.fill_(5 + index)
        propose.replay()
        with use_kernels("reference"):
            _assert_same_draft(draft, drafter.propose(context, anchor, position, states))
        taps.copy_(features(6, seed=index))
        commit.fill_(length)
        observe.replay()
        drafter.observe(context, taps[:length], torch.arange(position, position + length, device="cuda"))
        position += length
    assert int(fused.committed) == position
