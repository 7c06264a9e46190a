"""A target and a drafter of a few tensor operations, on any device, that keep every contract of a device round.

The token after `token` at `position` is a fixed function of both. Everything is on fixed buffers and nothing is read
on the host, so that rounds of these parts can be captured.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch

from hf_hybridspec.generation.device_round import DeviceRound, RoundParts
from hf_hybridspec.kernels.round_steps import MAX_ROWS
from hf_hybridspec.modeling.draft import Draft

VOCABULARY = 64
WRONG_TOKEN = 63
CAPACITY = 2048
POSITION_OFFSET = 3


def token_after(token, position):
    """Of ints or tensors; never 0 or WRONG_TOKEN."""
    return (token * 7 + position * 3 + 5) % 61 + 1


def continuation(anchor: int, position: int, count: int) -> list[int]:
    """The `count` tokens after an anchor at a position."""
    tokens = [anchor]
    for step in range(count):
        tokens.append(token_after(tokens[-1], position + step))
    return tokens[1:]


class ToyBlock:
    """Keeps the committed tokens in `log`."""

    def __init__(self, device):
        self.committed = torch.zeros(1, dtype=torch.int32, device=device)
        self.log = torch.zeros(CAPACITY + MAX_ROWS, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(MAX_ROWS, dtype=torch.int64, device=device)
        self._rows = torch.arange(MAX_ROWS, device=device)

    def commit(self, commit_length):
        places = self._rows + self.committed
        kept = torch.where(self._rows < commit_length, self.tokens, self.log.index_select(0, places))
        self.log.index_copy_(0, places, kept)
        self.committed.add_(commit_length)


class ToyTarget:
    """Logits `[w, V]`, random but for the maximum; two Layer-0 experts a row."""

    def __init__(self, device):
        generator = torch.Generator().manual_seed(0)
        table = 2 * torch.randn(VOCABULARY, VOCABULARY, generator=generator)
        table[torch.arange(VOCABULARY), torch.arange(VOCABULARY)] = table.amax(1) + 0.5
        self._table = table.to(device)
        self._positions = torch.zeros(MAX_ROWS, dtype=torch.int64, device=device)
        self._experts = torch.zeros(MAX_ROWS, 2, dtype=torch.int64, device=device)
        self._rows = torch.arange(MAX_ROWS, device=device)

    def stage0(self, token_ids, position_offset, state: ToyBlock):
        length = token_ids.shape[0]
        state.tokens[:length].copy_(token_ids)
        self._positions[:length].copy_(self._rows[:length] + state.committed + position_offset)
        self._experts[:length, 0].copy_(token_ids % 6)
        self._experts[:length, 1].copy_(6 + self._positions[:length] % 2)
        return SimpleNamespace(routed=SimpleNamespace(top_k_index=self._experts))

    def stage1(self, boundary, length, state: ToyBlock):
        tokens, positions = state.tokens[:length], self._positions[:length]
        logits = self._table.index_select(0, token_after(tokens, positions))
        return SimpleNamespace(logits=logits, features=torch.stack([tokens, positions], dim=1).float())


class ToyDrafter:
    """Right for a number of drafts that depends on the position, about as confident; counts rows it must not see."""

    def __init__(self, device, num_draft_tokens: int = 15):
        self.num_draft_tokens = num_draft_tokens
        self.committed = torch.zeros(1, dtype=torch.int32, device=device)
        self.mistakes = torch.zeros(1, dtype=torch.int64, device=device)
        self._rows = torch.arange(MAX_ROWS, device=device)

    def propose(self, anchor, recurrent_states) -> Draft:
        position = self.committed + POSITION_OFFSET
        token, tokens = anchor, []
        for step in range(self.num_draft_tokens):
            token = token_after(token, position + step)
            tokens.append(token)
        num_right = (position * 5) % 17
        places = self._rows[: self.num_draft_tokens]
        tokens = torch.where(places < num_right, torch.cat(tokens), WRONG_TOKEN)
        confidence = torch.where(places < num_right, 0.9, 0.5) - 0.02 * ((position + places) % 5)
        return Draft(tokens, confidence.float(), (1.2 - confidence).float())

    def observe(self, features, commit_length):
        expected = self._rows[: features.shape[0]] + self.committed + POSITION_OFFSET
        is_committed = self._rows[: features.shape[0]] < commit_length
        self.mistakes.add_(((features[:, 1] != expected) & is_committed).sum())
        self.committed.add_(commit_length)


@dataclass(frozen=True)
class ToyRounds:
    """A device round of the toys, with what to look at afterwards."""

    rounds: DeviceRound
    block: ToyBlock
    drafter: ToyDrafter | None

    def begin(self, anchor: int, committed: int, remaining: int, stop_tokens=()) -> None:
        """Starts a sequence whose `committed` rows the target and the drafter know."""
        self.block.committed.fill_(committed)
        self.block.log.zero_()
        if self.drafter is not None:
            self.drafter.committed.fill_(committed)
            self.drafter.mistakes.zero_()
        self.rounds.start(anchor, remaining, list(stop_tokens), POSITION_OFFSET)


def toy_rounds(device, drafts: bool = True) -> ToyRounds:
    device = torch.device(device)
    block, drafter = ToyBlock(device), ToyDrafter(device) if drafts else None
    return ToyRounds(DeviceRound(RoundParts(ToyTarget(device), block, CAPACITY, drafter, {}), device), block, drafter)
