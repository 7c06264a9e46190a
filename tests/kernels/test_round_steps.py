"""A round's own steps: against the definitions written out in Python, with both implementations."""

import random

import pytest
import torch

from hf_hybridspec.kernels.dispatch import use_kernels
from hf_hybridspec.kernels.round_steps import (
    MAX_ROWS,
    NO_BRANCH,
    RoundState,
    accept_greedily,
    correct_block,
    emit_round,
    open_block,
)

NUM_RECORDS = 4


@pytest.fixture(params=["reference", "triton"])
def device(request):
    with use_kernels(request.param):
        yield request.getfixturevalue("triton_device") if request.param == "triton" else "cpu"


def scalar(value: int, device) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32, device=device)


def running_state(device, **values) -> RoundState:
    """A state in the middle of a sequence, with the named scalars and `stops`, a list."""
    state = RoundState.new(NUM_RECORDS, 3, device)
    state.draft_branch.zero_()
    for index, token in enumerate(values.pop("stops", ())):
        state.stop_tokens[index] = token
    for name, value in values.items():
        getattr(state, name).copy_(torch.as_tensor(value))
    return state


def numbers(state: RoundState) -> dict:
    return {name: tensor.tolist() for name, tensor in vars(state).items()}


@pytest.mark.parametrize("drafts", [0, 1, 7, 15])
@pytest.mark.parametrize(
    ("nominal", "lookahead", "remaining", "free", "expected"),
    [(1, 0, 9, 99, 1), (6, 0, 99, 99, 6), (6, 1, 99, 99, 7), (6, 1, 4, 99, 4), (6, 0, 1, 99, 2), (6, 1, 99, 3, 3),
     (6, 1, 5, 1, 1), (16, 1, 16, 16, 16), (16, 1, 99, 99, 16)],
)  # fmt: skip
def test_a_block_opens(device, drafts, nominal, lookahead, remaining, free, expected):
    state = running_state(device, anchor=77, remaining=remaining, block_tokens=[-5] * MAX_ROWS)
    tokens = torch.arange(100, 100 + drafts, device=device)
    open_block(tokens, scalar(nominal, device), scalar(50, device), 50 + free, lookahead, state)
    assert state.block_tokens.tolist() == [77, *range(100, 100 + drafts), *[-5] * (15 - drafts)]
    assert state.stage0_branch.item() == state.stage1_branch.item() == min(expected, drafts + 1) - 1


@pytest.mark.parametrize(
    ("u", "nominal", "corrected", "expected"),
    [(7, 6, 7, 7), (7, 6, 6, 6), (6, 6, 7, 6), (4, 6, 7, 4), (4, 6, 2, 4), (3, 2, 2, 2), (7, 6, 9, 7)],
)
def test_the_correction_never_exceeds_stage0(device, u, nominal, corrected, expected):
    state = running_state(device, stage0_branch=u - 1, stage1_branch=u - 1)
    correct_block(scalar(nominal, device), scalar(corrected, device), state)
    assert (state.stage1_branch.item(), state.stage0_branch.item()) == (expected - 1, u - 1)


@pytest.mark.parametrize("length", [1, 2, 3, 8, 16])
def test_greedy_acceptance(device, length):
    drafts = list(range(10, 10 + length - 1))
    for num_right in range(length):
        # What follows the first wrong draft is right again, and must not count.
        target = [*drafts, 500]
        target[num_right] = 900 + num_right
        state = running_state(device, block_tokens=[1, *drafts, *[500] * (MAX_ROWS - length)])
        # A column of a matrix: not contiguous.
        column = torch.tensor(target, device=device)[:, None].expand(-1, 2).contiguous()[:, 0]
        accept_greedily(column, state)
        assert (state.num_accepted.item(), state.next_token.item()) == (num_right, 900 + num_right)


def emitted(accepted, own, drafts, stops, remaining) -> tuple[list[int], bool]:
    tokens = [*drafts[:accepted], own][:remaining]
    for index, token in enumerate(tokens):
        if token in stops:
            return tokens[: index + 1], True
    return tokens, len(tokens) == remaining


@pytest.mark.parametrize("seed", range(30))
def test_a_round_is_emitted(device, seed):
    """Random rounds one after another until the sequence ends; then nothing is left to run."""
    rng = random.Random(seed)
    stops = rng.sample(range(1, 40), rng.randrange(4))
    remaining, first_round = rng.randrange(1, 60), rng.choice([0, 3, 1 << 20])
    state = running_state(device, stops=stops, remaining=remaining, round_index=first_round)
    for number in range(first_round + 1, first_round + 100):
        length = rng.randint(1, 16)
        u = rng.randint(length, 16)
        accepted, own = rng.randrange(length), rng.randrange(1, 40)
        drafts = [rng.randrange(1, 40) for _ in range(15)]
        for tensor, value in ((state.stage0_branch, u - 1), (state.stage1_branch, length - 1)):
            tensor.fill_(value)
        state.block_tokens.copy_(torch.tensor([0, *drafts]))
        state.num_accepted.fill_(accepted), state.next_token.fill_(own)
        emit_round(state)
        tokens, has_ended = emitted(accepted, own, drafts, stops, remaining)
        remaining -= len(tokens)
        record = state.records[(number - 1) % NUM_RECORDS].tolist()
        assert [word >> 32 for word in record] == [number] * 17
        header, *words = [word & 0xFFFFFFFF for word in record]
        assert header == length + (u << 8) + (len(tokens) << 16) + (has_ended << 24)
        assert words == [*tokens, *[0] * (16 - len(tokens))]
        assert state.commit_length.item() == len(tokens) and state.anchor.item() == tokens[-1]
        assert state.remaining.item() == remaining and state.round_index.item() == number
        branches = [state.draft_branch.item(), state.stage0_branch.item(), state.stage1_branch.item()]
        assert branches == ([NO_BRANCH] * 3 if has_ended else [0, u - 1, length - 1])
        if has_ended:
            return
    raise AssertionError("the limit was never met")


def test_triton_equals_the_reference(triton_device):
    """All steps in a row from the same random state leave the same state."""
    outcomes = []
    for kind, device in (("reference", "cpu"), ("triton", triton_device)):
        rng = random.Random(5)
        state = running_state(device, stops=[7, 9], remaining=400, anchor=5)
        outcomes.append([])
        with use_kernels(kind):
            for _ in range(40):
                drafts = torch.tensor([rng.randrange(10, 13) for _ in range(15)], device=device)
                nominal = scalar(rng.randint(2, 16), device)
                open_block(drafts, nominal, scalar(8, device), 1000, 1, state)
                correct_block(nominal, nominal + rng.randrange(2), state)
                length = state.stage1_branch.item() + 1
                accept_greedily(torch.tensor([rng.randrange(10, 13) for _ in range(length)], device=device), state)
                emit_round(state)
                outcomes[-1].append(numbers(state))
    assert outcomes[0] == outcomes[1]
    assert len({outcome["num_accepted"][0] for outcome in outcomes[0]}) > 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: open_block(torch.zeros(16, dtype=torch.int64), scalar(2, "cpu"), scalar(0, "cpu"), 9, 0, s),
         r"draft_tokens must be \[D\] int64 with D < 16, got .*block_size"),
        (lambda s: open_block(torch.zeros(3, dtype=torch.int64), s.anchor, scalar(0, "cpu"), 9, 0, s),
         r"nominal_length must be one int32, got torch\.int64"),
        (lambda s: correct_block(scalar(2, "cpu"), torch.zeros(2, dtype=torch.int32), s),
         r"corrected_length must be one int32, got torch\.int32 \(2,\)"),
        (lambda s: accept_greedily(torch.zeros(17, dtype=torch.int64), s), r"target_tokens must be \[w\] int64"),
        (lambda s: accept_greedily(torch.zeros(3), s), r"target_tokens must be \[w\] int64"),
    ],
)  # fmt: skip
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call(RoundState.new(NUM_RECORDS, 3, "cpu"))
