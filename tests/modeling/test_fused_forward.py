"""The fused stages equal the split forward over a HybridCache, round after round, and are blind to later rows."""

import pytest
import torch

import hf_hybridspec
from hf_hybridspec import HybridCache
from hf_hybridspec.kernels.dispatch import use_kernels
from hf_hybridspec.modeling.block_state import AttentionState, BlockState
from hf_hybridspec.modeling.fused_forward import FusedBoundary, FusedForward
from hf_hybridspec.modeling.split_forward import SplitForward, VerifiedRows
from hf_hybridspec.modeling.target import text_model
from tests.support import TARGETS, random_prompt, random_target

from .cache_helpers import NEXT, ROWS, STATIC_LENGTH, assert_same_content, run

PROMPT = random_prompt(9, seed=5)
TAPS = (2, 0)
# Sums of fp32 in another order, through four layers of random weights; a wrong row is off by 0.1 and more.
TOLERANCE = 5e-4


class Fused:
    """An attached target with its fused forward, and a sequence that a split forward runs beside it."""

    def __init__(self, kind: str):
        self.model = hf_hybridspec.attach(random_target(kind))
        self.fused = FusedForward(self.model, TAPS)
        self.split = SplitForward(text_model(self.model), self.model.get_output_embeddings(), TAPS)

    def start(self, prompt: torch.Tensor = PROMPT) -> "Fused":
        self.cache, self.twin = (HybridCache(self.model.config, STATIC_LENGTH) for _ in range(2))
        for cache in (self.cache, self.twin):
            run(self.model, cache, prompt)
        self.state = BlockState(self.cache)
        return self

    @torch.no_grad()
    def expected(self, rows: torch.Tensor, length: int, offset: int = 0) -> VerifiedRows:
        self.twin.begin_block(rows.shape[0])
        positions = torch.arange(rows.shape[0])[None] + self.twin.committed_length + offset
        return self.split.stage1(self.split.stage0(rows[None], positions, self.twin), length, self.twin, None)

    def stage0(self, rows: torch.Tensor, offset: int = 0) -> FusedBoundary:
        return self.fused.stage0(rows, torch.tensor([offset]), self.state)

    def run(self, rows: torch.Tensor, length: int, offset: int = 0) -> VerifiedRows:
        return self.fused.stage1(self.stage0(rows, offset), length, self.state)

    def commit(self, length: int) -> None:
        self.twin.commit(length)
        self.state.commit(torch.tensor([length], dtype=torch.int32))


@pytest.fixture(scope="module")
def fused_targets() -> dict[str, Fused]:
    return {kind: Fused(kind) for kind in TARGETS}


@pytest.fixture(params=TARGETS)
def sequence(request, fused_targets) -> Fused:
    """A sequence of every class in turn, at the end of its prompt."""
    return fused_targets[request.param].start()


def assert_equal_rows(actual: VerifiedRows, expected: VerifiedRows) -> None:
    for name in ("logits", "features"):
        given, wanted = getattr(actual, name), getattr(expected, name)
        assert given.shape == wanted.shape
        torch.testing.assert_close(given, wanted, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("length", range(1, 17))
def test_rows_equal_those_of_the_split_forward(sequence, length):
    """Every w after Stage 0 of w and of w + 1 rows, two blocks each, all rows committed in between."""
    for num_stage0 in {length, min(length + 1, 16)}:
        sequence.start()
        for _ in range(2):
            rows = ROWS[0, :num_stage0]
            assert_equal_rows(sequence.run(rows, length), sequence.expected(rows, length))
            sequence.commit(length)


def test_rounds_of_random_lengths(sequence):
    """Committed prefixes of any length, none included; afterwards the cache goes on alone."""
    generator = torch.Generator().manual_seed(0)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    for _ in range(8):
        num_stage0 = draw(1, 16)
        length = draw(1, num_stage0)
        rows = torch.randint(1, 99, (num_stage0,), generator=generator)
        assert_equal_rows(sequence.run(rows, length), sequence.expected(rows, length))
        sequence.commit(draw(0, length))
    sequence.state.release()
    assert_same_content(sequence.cache, sequence.twin, tolerance=TOLERANCE)
    expected = run(sequence.model, sequence.twin, NEXT)
    torch.testing.assert_close(run(sequence.model, sequence.cache, NEXT), expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_commit_that_does_nothing_is_noticed(sequence):
    """The negative control of the tests above."""
    rows = ROWS[0, :4]
    sequence.run(rows, 4), sequence.expected(rows, 4)
    sequence.twin.commit(3)
    with pytest.raises(AssertionError):
        assert_equal_rows(sequence.run(rows, 4), sequence.expected(rows, 4))


@pytest.mark.parametrize("offset", [-4, 3])
def test_positions_are_moved_by_the_offset(sequence, offset):
    """Text rows after an image: time, height and width move alike."""
    rows = ROWS[0, :5]
    moved = sequence.run(rows, 5, offset)
    assert_equal_rows(moved, sequence.expected(rows, 5, offset))
    sequence.twin.discard_block()
    with pytest.raises(AssertionError):
        assert_equal_rows(moved, sequence.expected(rows, 5))


@pytest.mark.parametrize(("num_stage0", "length"), [(2, 1), (7, 4), (16, 15), (16, 2)])
def test_no_value_of_a_later_row_is_read(sequence, num_stage0, length):
    """With all that Stage 0 left beyond row w overwritten, rows and commits stay bit by bit."""
    rows = ROWS[0, :num_stage0]
    expected, committed = sequence.run(rows, length), torch.tensor([length], dtype=torch.int32)
    sequence.state.commit(committed)
    following = sequence.run(rows[:1], 1)

    sequence.start()
    boundary = sequence.stage0(rows)
    residual = boundary.residual
    residual.values[length:] = residual.scaled[length:] = residual.squares[:, length:] = float("nan")
    if (routed := boundary.routed) is not None:
        routed.top_k_index[length:], routed.slots[length:] = 10**9, 100
        routed.top_k_weights[length:] = routed.shared_gate[length:] = float("nan")
    first = sequence.state.layers[0]
    for tensor in (first.conv_rows[None], first.factors.z, first.factors.k, first.factors.g):
        tensor[:, length:] = float("nan")
    for part in sequence.state.layers.values():
        if isinstance(part, AttentionState):
            part.keys[:, 9 + length :], part.values[:, 9 + length :] = float("nan"), float("nan")
    actual = sequence.fused.stage1(boundary, length, sequence.state)
    sequence.state.commit(committed)
    for rows_of, wanted in ((actual, expected), (sequence.run(rows[:1], 1), following)):
        assert torch.equal(rows_of.logits, wanted.logits) and torch.equal(rows_of.features, wanted.features)
        assert rows_of.logits.isfinite().all()


def test_a_row_does_not_depend_on_the_rows_after_it(sequence):
    """Bit by bit only on a GPU: the libraries of a CPU choose the order of a sum by the number of rows."""
    rows = ROWS[0, :16]
    longest = sequence.run(rows, 16)
    for length in (1, 2, 7, 15):
        shorter = sequence.run(rows[:length], length)
        torch.testing.assert_close(shorter.logits, longest.logits[:length], atol=TOLERANCE, rtol=TOLERANCE)


def test_stages_of_all_lengths_leave_their_rows_in_one_place(sequence):
    """What a captured Stage 1 reads is where any captured Stage 0 writes."""
    one, other = sequence.stage0(ROWS[0, :3]), sequence.stage0(ROWS[0, :16])
    assert one.residual.values.data_ptr() == other.residual.values.data_ptr()
    if one.routed is not None:
        for name in vars(one.routed):
            assert getattr(one.routed, name).data_ptr() == getattr(other.routed, name).data_ptr()
    # A Stage 1 that was captured after the shorter one finds the rows of the longer one.
    assert_equal_rows(sequence.fused.stage1(one, 3, sequence.state), sequence.expected(ROWS[0, :16], 3))
    sequence.stage0(ROWS[0, 3:6])
    sequence.twin.discard_block()
    assert_equal_rows(sequence.fused.stage1(other, 2, sequence.state), sequence.expected(ROWS[0, 3:6], 2))


def test_without_taps_there_are_no_features(fused_targets):
    sequence = fused_targets["qwen3_5_moe"].start()
    plain = FusedForward(sequence.model)
    boundary = plain.stage0(ROWS[0, :2], torch.zeros(1, dtype=torch.int64), sequence.state)
    assert plain.stage1(boundary, 2, sequence.state).features.shape == (2, 0)


def test_an_obstacle_is_an_error():
    model = random_target("qwen3_5_moe")
    text_model(model).layers[0].register_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match=r"cannot run fused: layers\.0 has forward hooks"):
        FusedForward(hf_hybridspec.attach(model))


@pytest.mark.slow
@pytest.mark.parametrize("kind", TARGETS)
def test_triton_equals_the_split_forward(kind, fused_targets):
    """The kernels themselves, through the interpreter or on a GPU."""
    sequence = fused_targets[kind].start()
    with use_kernels("triton"):
        for num_stage0, length, committed in ((3, 2, 2), (16, 16, 5), (1, 1, 1)):
            rows = ROWS[0, :num_stage0]
            actual = sequence.run(rows, length)
            with use_kernels("reference"):
                assert_equal_rows(actual, sequence.expected(rows, length))
                sequence.twin.commit(committed)
            sequence.state.commit(torch.tensor([committed], dtype=torch.int32))
