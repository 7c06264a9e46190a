"""The fused stages on a GPU: the split forward's rows in every dtype, the same bits from graphs, and little memory."""

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
# Relative Frobenius error of logits: four layers of random weights amplify rounding, a wrong row is off by 0.3.
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2}


class OnDevice:
    """An attached target on the GPU; two caches of one prompt, one for each forward."""

    def __init__(self, kind: str, dtype: torch.dtype):
        self.model = hf_hybridspec.attach(random_target(kind).to("cuda", dtype))
        self.fused = FusedForward(self.model, TAPS)
        self.split = SplitForward(text_model(self.model), self.model.get_output_embeddings(), TAPS)
        self.caches = [HybridCache(self.model.config, STATIC_LENGTH) for _ in range(2)]
        for cache in self.caches:
            run(self.model, cache, random_prompt(9, seed=5).cuda())
        self.state = BlockState(self.caches[0])
        self.offset = torch.zeros(1, dtype=torch.int64, device="cuda")

    def run(self, rows: torch.Tensor, length: int) -> VerifiedRows:
        return self.fused.stage1(self.fused.stage0(rows, self.offset, self.state), length, self.state)

    @torch.no_grad()
    def expected(self, rows: torch.Tensor, length: int) -> VerifiedRows:
        twin = self.caches[1]
        twin.begin_block(rows.shape[0])
        positions = torch.arange(rows.shape[0], device="cuda")[None] + twin.committed_length
        with use_kernels("reference"):
            return self.split.stage1(self.split.stage0(rows[None], positions, twin), length, twin, None)

    def commit(self, length: int) -> None:
        self.state.commit(torch.tensor([length], dtype=torch.int32, device="cuda"))
        with use_kernels("reference"):
            self.caches[1].commit(length)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("kind", TARGETS)
def test_rounds_equal_those_of_the_split_forward(kind, dtype):
    """Of 16-bit targets the median row: a near-tie of a router gives single rows another expert."""
    target = OnDevice(kind, dtype)
    for num_stage0, length, committed in ((3, 2, 2), (16, 16, 7), (1, 1, 1), (9, 8, 0), (5, 5, 5)):
        rows = ROWS[0, :num_stage0].cuda()
        actual, expected = target.run(rows, length), target.expected(rows, length)
        for name in ("logits", "features"):
            given, wanted = getattr(actual, name), getattr(expected, name)
            errors = [relative_error(one, other) for one, other in zip(given, wanted, strict=True)]
            assert sorted(errors)[len(errors) // 2] <= LIMITS[dtype], (name, errors)
        target.commit(committed)


@pytest.mark.parametrize("kind", TARGETS)
def test_captured_stages_give_the_same_bits(kind):
    """Stage 0 of 3 and of 16 rows, Stage 1 of 2, and commits of a length that the graph reads, each a graph."""
    target, twin = OnDevice(kind, torch.bfloat16), OnDevice(kind, torch.bfloat16)
    state, fused, length = target.state, target.fused, torch.zeros(1, dtype=torch.int32, device="cuda")
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
        twin.commit(committed)
        assert torch.equal(state.committed, twin.state.committed)


def test_a_row_does_not_depend_on_how_many_run_beside_it():
    """Bit by bit up to 8 rows and above; between the two the GDN solve has another shape."""
    target = OnDevice("qwen3_5_moe", torch.bfloat16)
    rows = ROWS[0, :16].cuda()
    for longest in (8, 16):
        expected = target.run(rows[:longest], longest)
        for length in range(1 if longest == 8 else 9, longest):
            shorter = target.run(rows[:length], length)
            assert torch.equal(shorter.logits, expected.logits[:length]), length


def test_joining_weights_takes_little_memory():
    """Peak and end, allocator included, stay within 3 % of the model's own size."""
    config = Qwen3_5MoeTextConfig(num_hidden_layers=8, num_experts=64, vocab_size=4096)
    with torch.device("cuda"):
        model = Qwen3_5MoeForCausalLM(config).bfloat16()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    size, before = sum(parameter.nbytes for parameter in model.parameters()), torch.cuda.memory_reserved()
    fuse_weights(model)
    assert torch.cuda.max_memory_reserved() - before <= 0.03 * size
    assert torch.cuda.memory_reserved() - before <= 0.03 * size
