"""The fused stages on a GPU: the split forward's rows in every dtype, the same bits from graphs, and little memory."""

import statistics

import pytest
import torch
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

import hf_hybridspec
from hf_hybridspec import HybridCache
from hf_hybridspec.kernels.dispatch import use_kernels
from hf_hybridspec.modeling.block_state import BlockState
from hf_hybridspec.modeling.fused_forward import FusedForward
from hf_hybridspec.modeling.fused_weights import fuse_weights
from hf_hybridspec.modeling.split_forward import SplitForward, VerifiedRows
from hf_hybridspec.modeling.target import text_model
from tests.support import TARGETS, random_prompt, random_target

from .cache_helpers import ROWS, STATIC_LENGTH, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TAPS = (2, 0)
# Rows of Stage 0, of Stage 1, and committed ones.
ROUNDS = ((3, 2, 2), (16, 16, 7), (1, 1, 1), (9, 8, 0), (5, 5, 5))
# Error that the fused rows may have beyond FACTOR times that of the split forward in the same dtype.
FLOORS = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 5e-3}
FACTOR = 1.5


def prefilled(model) -> HybridCache:
    cache = HybridCache(model.config, STATIC_LENGTH)
    run(model, cache, random_prompt(9, seed=5).cuda())
    return cache


def attached(kind: str, dtype: torch.dtype):
    return hf_hybridspec.attach(random_target(kind).to("cuda", dtype))


class FusedRounds:
    """The fused forward on buffers of its own."""

    def __init__(self, model):
        self.forward, self.state = FusedForward(model, TAPS), BlockState(prefilled(model))
        self.offset = torch.zeros(1, dtype=torch.int64, device="cuda")

    def run(self, rows: torch.Tensor, length: int) -> VerifiedRows:
        return self.forward.stage1(self.forward.stage0(rows, self.offset, self.state), length, self.state)

    def commit(self, length: int) -> None:
        self.state.commit(torch.tensor([length], dtype=torch.int32, device="cuda"))


class SplitRounds:
    """The split forward with reference kernels on a cache of its own."""

    def __init__(self, model):
        self.forward = SplitForward(text_model(model), model.get_output_embeddings(), TAPS)
        self.cache = prefilled(model)

    @torch.no_grad()
    def run(self, rows: torch.Tensor, length: int) -> VerifiedRows:
        self.cache.begin_block(rows.shape[0])
        positions = torch.arange(rows.shape[0], device="cuda")[None] + self.cache.committed_length
        with use_kernels("reference"):
            boundary = self.forward.stage0(rows[None], positions, self.cache)
            return self.forward.stage1(boundary, length, self.cache, None)

    def commit(self, length: int) -> None:
        with use_kernels("reference"):
            self.cache.commit(length)


def relative_errors(actual: torch.Tensor, expected: torch.Tensor) -> list[float]:
    """Frobenius error of each row over the norm of the expected one."""
    difference = (actual.double() - expected.double()).flatten(1).norm(dim=1)
    return (difference / expected.double().flatten(1).norm(dim=1)).tolist()


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("kind", TARGETS)
def test_rounds_are_as_exact_as_those_of_the_split_forward(kind, dtype):
    """Against the split forward in float32 on the same weights, the median row of five rounds.

    Random weights amplify rounding, and a near-tie of a router gives single rows another expert: so 16-bit rows are
    held to the error of the split forward's own. Rows of a wrong forward are off by about one.
    """
    model = attached(kind, dtype)
    rounds = [FusedRounds(model), SplitRounds(model), SplitRounds(attached(kind, dtype).float())]
    errors = {name: ([], []) for name in ("logits", "features")}
    for num_stage0, length, committed in ROUNDS:
        fused, split, exact = (each.run(ROWS[0, :num_stage0].cuda(), length) for each in rounds)
        for name, (of_fused, of_split) in errors.items():
            expected = getattr(exact, name).reshape(length, -1)
            of_fused += relative_errors(getattr(fused, name).reshape(length, -1), expected)
            of_split += relative_errors(getattr(split, name).reshape(length, -1), expected)
        for each in rounds:
            each.commit(committed)
    for name, (of_fused, of_split) in errors.items():
        limit = FACTOR * statistics.median(of_split) + FLOORS[dtype]
        assert statistics.median(of_fused) <= limit <= 0.5, (name, of_fused, of_split)


@pytest.mark.parametrize("kind", TARGETS)
def test_captured_stages_give_the_same_bits(kind):
    """Stage 0 of 3 and of 16 rows, Stage 1 of 2, and commits of a length that the graph reads, each a graph."""
    model = attached(kind, torch.bfloat16)
    target, twin = FusedRounds(model), FusedRounds(model)
    state, fused, length = target.state, target.forward, torch.zeros(1, dtype=torch.int32, device="cuda")
    rows = ROWS[0, :16].cuda()
    boundary = fused.stage0(rows, target.offset, state)
    works = {
        "short": lambda: fused.stage0(rows[:3], target.offset, state),
        "long": lambda: fused.stage0(rows, target.offset, state),
        "rest": lambda: fused.stage1(boundary, 2, state),
        "commit": lambda: state.commit(length),
    }
    graphs, results = {}, {}
    for name, work in works.items():
        work()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            results[name] = work()
    for stage0, num_rows, committed in (("short", 3, 2), ("long", 16, 1), ("short", 3, 0), ("long", 16, 2)):
        length.fill_(committed)
        graphs[stage0].replay(), graphs["rest"].replay()
        expected = twin.run(rows[:num_rows], 2)
        assert torch.equal(results["rest"].logits, expected.logits)
        assert torch.equal(results["rest"].features, expected.features)
        graphs["commit"].replay()
        twin.state.commit(length)
        assert torch.equal(state.committed, twin.state.committed)


def test_a_row_does_not_depend_on_how_many_run_beside_it():
    """Bit by bit up to 8 rows and above; between the two the GDN solve has another shape."""
    target = FusedRounds(attached("qwen3_5_moe", torch.bfloat16))
    rows = ROWS[0, :16].cuda()
    for longest in (8, 16):
        expected = target.run(rows[:longest], longest)
        for length in range(1 if longest == 8 else 9, longest):
            shorter = target.run(rows[:length], length)
            assert torch.equal(shorter.logits, expected.logits[:length]), length


def test_joining_weights_takes_little_memory():
    """Peak and end, allocator included, stay within 3 % of the model's own size."""
    config = Qwen3_5MoeTextConfig(num_hidden_layers=8, vocab_size=4096)
    with torch.device("cuda"):
        model = Qwen3_5MoeForCausalLM(config).bfloat16()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    size, before = sum(parameter.nbytes for parameter in model.parameters()), torch.cuda.memory_reserved()
    fuse_weights(model)
    assert torch.cuda.max_memory_reserved() - before <= 0.03 * size
    assert torch.cuda.memory_reserved() - before <= 0.03 * size
