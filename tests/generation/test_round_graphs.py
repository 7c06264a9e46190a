"""Rounds run ahead of the host: eagerly on any device, captured on a GPU, with the same tokens and the same state."""

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList

from hf_hybridspec import Full, Static
from hf_hybridspec.generation.adaptive_policies import HybridSpec, NominalOnly
from hf_hybridspec.generation.conditional_graphs import conditional_graph_obstacle
from hf_hybridspec.generation.device_round import GreedyAcceptance, SampledAcceptance
from hf_hybridspec.generation.drafting_guard import DraftingGuard
from hf_hybridspec.generation.emission import Emission
from hf_hybridspec.generation.round_graphs import EagerRounds, RoundGraphs
from hf_hybridspec.generation.round_loop import HostSide, Launches, run_admitted, run_ahead
from hf_hybridspec.generation.statistics import GenerationStatistics
from tests.generation.toy_parts import POSITION_OFFSET, ToyRounds, continuation, toy_rounds
from tests.profiles import make_profile

COMMITTED = 20
ANCHOR = 9
POLICIES = {
    "full": Full,
    "static:2": lambda: Static(2),
    "static:7": lambda: Static(7),
    "hybridspec": lambda: HybridSpec(make_profile(), is_guarded=False),
    "nominal": lambda: NominalOnly(make_profile(), is_guarded=False),
}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> torch.device:
    if request.param == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    if obstacle := conditional_graph_obstacle(device):
        pytest.skip(obstacle)
    return device


@pytest.fixture
def executor(device):
    return RoundGraphs(device) if device.type == "cuda" else EagerRounds()


class StopAt(StoppingCriteria):
    """Stops when the sequence has a length, like a stop string that ends there."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((1,), input_ids.shape[1] >= self.length, device=input_ids.device)


class Listener:
    """A streamer."""

    def __init__(self):
        self.tokens, self.num_puts = [], 0

    def put(self, tokens):
        assert tokens.device.type == "cpu"
        self.tokens += tokens.flatten().tolist()
        self.num_puts += 1

    def end(self):
        pass


def host_of(toys: ToyRounds, limit: int, device, criteria=(), guard=None, streamer=None) -> HostSide:
    """The host's side of a sequence of one known token that may grow by `limit`."""
    config = GenerationConfig(max_length=1 + limit)
    stopping = StoppingCriteriaList([MaxLengthCriteria(1 + limit), *criteria])
    emission = Emission(torch.tensor([[ANCHOR]], device=device), stopping, config, streamer)
    return HostSide(toys.rounds, emission, GenerationStatistics("graphs", "test"), guard)


def decode(toys, executor, policy, acceptance, limit, device, stop_tokens=(), guard=None, streamer=None):
    """The new tokens and the statistics of one sequence."""
    drafting = None if toys.drafter is None else executor.prepare(toys.rounds.drafting_program(policy, acceptance))
    launches = Launches(drafting, executor.prepare(toys.rounds.plain_program(acceptance)))
    toys.begin(ANCHOR, COMMITTED, limit, stop_tokens)
    host = host_of(toys, limit, device, guard=guard, streamer=streamer)
    run_ahead(host, launches)
    return host.emission.input_ids[0, 1:].tolist(), host.statistics


def expected_tokens(count: int) -> list[int]:
    return continuation(ANCHOR, COMMITTED + POSITION_OFFSET, count)


def check_state(toys: ToyRounds, tokens: list[int]) -> None:
    """What is committed is the anchor and all new tokens but the last, and the drafter has seen it."""
    if toys.rounds.state.anchor.is_cuda:
        torch.cuda.synchronize()
    committed = COMMITTED + len(tokens)
    assert toys.block.committed.item() == committed
    assert toys.block.log[COMMITTED:committed].tolist() == [ANCHOR, *tokens[:-1]]
    assert not toys.block.log[committed:].any()
    if toys.drafter is not None:
        assert toys.drafter.committed.item() == committed and toys.drafter.mistakes.item() == 0


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("limit", [1, 2, 30, 200])
def test_greedy_rounds(name, limit, device, executor):
    toys = toy_rounds(device)
    tokens, statistics = decode(toys, executor, POLICIES[name](), GreedyAcceptance(), limit, device)
    assert tokens == expected_tokens(limit)
    check_state(toys, tokens)
    if limit == 200:
        assert len(set(statistics.emitted)) > 1 and max(statistics.verification_lengths) > 1
    if name == "hybridspec" and limit == 200:
        assert len(set(statistics.verification_lengths)) > 3


def test_several_sequences_on_one_capture(device, executor):
    """One engine: policies and lengths in turn; steps that programs share are captured once."""
    toys = toy_rounds(device)
    policies = [Static(5), Full(), Static(5), HybridSpec(make_profile(), is_guarded=False), Full()]
    for limit, policy in zip((40, 7, 80, 60, 3), policies, strict=True):
        tokens, _ = decode(toys, executor, policy, GreedyAcceptance(), limit, device)
        assert tokens == expected_tokens(limit)
        check_state(toys, tokens)
    if device.type == "cuda":
        # 16 Stage 0, 16 Stage 1, 16 commits, 16 corrections; three drafts; opening and publishing.
        assert executor.num_captured == 4 * 16 + 3 + 2


def test_plain_decoding(device, executor):
    toys = toy_rounds(device, drafts=False)
    tokens, statistics = decode(toys, executor, None, GreedyAcceptance(), 50, device)
    assert tokens == expected_tokens(50)
    assert set(statistics.verification_lengths) == {1} and statistics.rounds == 50
    check_state(toys, tokens)


def test_two_models_take_turns(device):
    executors = [RoundGraphs(device) if device.type == "cuda" else EagerRounds() for _ in range(2)]
    pair = [toy_rounds(device) for _ in range(2)]
    for _ in range(2):
        for toys, executor in zip(pair, executors, strict=True):
            tokens, _ = decode(toys, executor, Full(), GreedyAcceptance(), 40, device)
            assert tokens == expected_tokens(40)
            check_state(toys, tokens)


@pytest.mark.parametrize("place", [0, 5, 33])
def test_stop_tokens_end_the_sequence_on_the_device(place, device, executor):
    toys = toy_rounds(device)
    stop = expected_tokens(100)[place]
    listener = Listener()
    tokens, statistics = decode(
        toys, executor, Full(), GreedyAcceptance(), 100, device, stop_tokens=[62, stop], streamer=listener
    )
    expected = expected_tokens(100)
    assert tokens == expected[: expected.index(stop) + 1] == listener.tokens
    assert listener.num_puts == statistics.rounds
    check_state(toys, tokens)


@pytest.mark.parametrize("length", [1, 4, 21])
def test_a_host_criterion_cuts_within_a_round(length, device, executor):
    """Nothing beyond the cut is committed, and the same buffers serve the next sequence."""
    toys, acceptance = toy_rounds(device), GreedyAcceptance()
    for stop_length in (length, 30):
        verify = Launches(
            executor.prepare(toys.rounds.drafting_program(Full(), acceptance, commits=False)),
            executor.prepare(toys.rounds.plain_program(acceptance, commits=False)),
        )
        commits = {rows: executor.prepare(toys.rounds.commit_program(rows, acceptance)) for rows in range(1, 17)}
        toys.begin(ANCHOR, COMMITTED, 100)
        host = host_of(toys, 100, device, criteria=[StopAt(1 + stop_length)])
        run_admitted(host, verify, lambda rows, commits=commits: commits[rows]())
        tokens = host.emission.input_ids[0, 1:].tolist()
        assert tokens == expected_tokens(stop_length)
        check_state(toys, tokens)


@pytest.mark.parametrize("is_filtered", [False, True])
def test_sampled_rounds_equal_eager_ones(is_filtered, device):
    """Eager rounds on the CPU against this device's: same seed, same uniforms, same tokens."""
    outcomes = []
    for place in ("cpu", device):
        place = torch.device(place)
        toys = toy_rounds(place)
        executor = RoundGraphs(place) if place.type == "cuda" else EagerRounds()
        acceptance = SampledAcceptance(place, is_filtered)
        outcomes.append([])
        for seed, temperature in ((1, 0.5), (2, 0.5), (3, 1.5)):
            acceptance.seed.fill_(seed)
            acceptance.settings.set(temperature, 30, 0.9, 0.001)
            tokens, statistics = decode(toys, executor, Static(6), acceptance, 80, place)
            check_state(toys, tokens)
            outcomes[-1].append((tokens, statistics.emitted))
    assert outcomes[0] == outcomes[1]
    assert len({str(tokens) for tokens, _ in outcomes[0]}) == 3


class Fickle(DraftingGuard):
    """Changes its mind after every few rounds, whatever they took."""

    def __init__(self):
        self.kinds, self._drafts = [], True

    @property
    def is_drafting(self):
        return self._drafts

    def record(self, num_tokens, seconds):
        assert seconds > 0
        self.kinds.append((self._drafts, num_tokens))
        if len(self.kinds) % 4 == 0:
            self._drafts = not self._drafts


def test_a_guard_pauses_drafting(device, executor):
    toys, guard = toy_rounds(device), Fickle()
    tokens, statistics = decode(toys, executor, Full(), GreedyAcceptance(), 150, device, guard=guard)
    assert tokens == expected_tokens(150)
    check_state(toys, tokens)
    assert {1, 16} <= set(statistics.verification_lengths)
    # Rounds are counted for the kind that they were.
    assert all(count == 1 for drafts, count in guard.kinds if not drafts)
    assert any(count > 1 for drafts, count in guard.kinds if drafts)


def test_a_round_without_a_record_is_an_error(device, executor):
    toys = toy_rounds(device)
    toys.begin(ANCHOR, COMMITTED, 5)
    host = host_of(toys, 5, device)
    with pytest.raises(RuntimeError, match="Round 1 left no record"):
        run_ahead(host, Launches(None, lambda: None))
