"""The round of `decoding.py` on fixed buffers: steps with nothing read on the host between them.

A `Program` says which steps run in which order and where the device chooses. `run_program` runs one eagerly, reading
the choices on the host; `round_graphs.py` captures the same steps into a graph that chooses by itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from ..kernels.length_selection import Selection, count_new_experts
from ..kernels.round_steps import MAX_ROWS, RoundState, accept_greedily, correct_block, emit_round, open_block
from ..kernels.sampled_acceptance import accept_sampled
from ..kernels.sampling import SamplingSettings
from ..kernels.uniforms import fill_uniforms
from .policy_base import DeviceLengthPolicy

# Records that the device keeps: rounds launched ahead of the host must be fewer.
NUM_RECORDS = 32
MAX_STOP_TOKENS = 16


@dataclass(frozen=True)
class Step:
    """A piece of a round; steps of one key do the same on the same buffers."""

    key: tuple
    run: Callable[[], None]


@dataclass(frozen=True)
class Switch:
    """A choice: branch i runs, in order, if `selector`, one int32 on the device, holds i; any other value: none."""

    selector: torch.Tensor
    branches: tuple[tuple[Step, ...], ...]


Program = tuple[Step | Switch, ...]


def run_program(program: Program) -> None:
    """Runs a program on any device; the choices are read on the host."""
    for item in program:
        if isinstance(item, Step):
            item.run()
            continue
        choice = int(item.selector)
        for step in item.branches[choice] if 0 <= choice < len(item.branches) else ():
            step.run()


class Acceptance(Protocol):
    """How a round's tokens follow from the target's logits.

    Attributes:
        kind: steps captured with one acceptance serve every other of its kind that shares its tensors.
    """

    kind: str

    def accept(self, logits: torch.Tensor, state: RoundState) -> None:
        """Writes `state.num_accepted` and `state.next_token`, from logits `[w, vocabulary]`."""


class GreedyAcceptance:
    """The longest prefix equal to the target's argmax (HybridSpec, Proposition 1)."""

    kind = "greedy"

    def accept(self, logits: torch.Tensor, state: RoundState) -> None:
        accept_greedily(logits.argmax(dim=-1), state)


class SampledAcceptance:
    """The point-mass rule (HybridSpec, Proposition 2) with uniforms that seed and round determine.

    Attributes:
        seed: `[1]` int64.
        settings: of the distribution; its tensors may change between calls.
    """

    def __init__(self, device: torch.device, is_filtered: bool):
        self.kind = "filtered" if is_filtered else "sampled"
        self.seed = torch.zeros(1, dtype=torch.int64, device=device)
        self.settings = SamplingSettings.new(device)
        self._is_filtered = is_filtered
        self._uniforms = torch.empty(MAX_ROWS, dtype=torch.float64, device=device)

    def accept(self, logits: torch.Tensor, state: RoundState) -> None:
        length = logits.shape[0]
        fill_uniforms(self._uniforms[:length], self.seed, state.round_index)
        accept_sampled(logits, self._uniforms[:length], self.settings, self._is_filtered, state)


@dataclass(frozen=True)
class RoundRecord:
    """What the host learns of a round: u, w, its tokens, and whether the sequence has ended with them."""

    stage0_length: int
    length: int
    tokens: list[int]
    has_ended: bool


class Mailbox:
    """The newest records as the host sees them, copied whole at the end of every round."""

    def __init__(self, state: RoundState):
        is_pinned = state.records.is_cuda
        self._records = torch.zeros(state.records.shape, dtype=torch.int64, pin_memory=is_pinned)
        # The same memory: reading an element of a tensor takes a microsecond, of an array much less.
        self._rows = self._records.numpy()

    def publish(self, state: RoundState) -> None:
        """Copies the records to the host, without waiting where the device works on its own."""
        self._records.copy_(state.records, non_blocking=True)

    def clear(self) -> None:
        """Forgets all records. No round may be under way."""
        self._records.zero_()

    def read(self, number: int) -> RoundRecord | None:
        """The record of round `number`, counted from 1, or None while it is not there as a whole."""
        row = self._rows[(number - 1) % NUM_RECORDS]
        if row[0] >> 32 != number:
            return None
        words = row.tolist()
        if any(word >> 32 != number for word in words):
            return None
        header, *tokens = (word & 0xFFFFFFFF for word in words)
        count = header >> 16 & 0xFF
        return RoundRecord(header >> 8 & 0xFF, header & 0xFF, tokens[:count], bool(header >> 24))


class DeviceTarget(Protocol):
    """The target's two stages on fixed buffers (`FusedForward`)."""

    def stage0(self, token_ids: torch.Tensor, position_offset: torch.Tensor, state):
        """Runs `[u]` tokens to the router boundary, whose rows stay in place until the next Stage 0."""

    def stage1(self, boundary, length: int, state):
        """Runs the boundary's first rows to `logits` `[w, vocabulary]` and `features` `[w, taps * hidden]`."""


class DeviceBlock(Protocol):
    """The target's cache on fixed buffers (`BlockState`); `committed` is `[1]` int32."""

    committed: torch.Tensor

    def commit(self, commit_length: torch.Tensor) -> None:
        """Makes the first rows of the block permanent; `commit_length` is `[1]` int32."""


@dataclass(frozen=True)
class RoundParts:
    """What a round works with; everything that a step reads or writes stays in place.

    Attributes:
        capacity: rows that the target's cache holds.
        drafter: a FusedDrafter, or None for plain decoding, in which a round has one row.
        recurrent_states: target layer -> committed state, of the layers that the drafter reads.
    """

    target: DeviceTarget
    block: DeviceBlock
    capacity: int
    drafter: object | None
    recurrent_states: Mapping[int, torch.Tensor]


class DeviceRound:
    """The steps of a round, and the programs that they make up.

    Attributes:
        state: of the sequence; `start` begins one.
        mailbox: where the host finds the records.
    """

    def __init__(self, parts: RoundParts, device: torch.device):
        self.parts = parts
        self.state = RoundState.new(NUM_RECORDS, MAX_STOP_TOKENS, device)
        self.mailbox = Mailbox(self.state)
        self._position_offset = torch.zeros(1, dtype=torch.int64, device=device)
        self._one = torch.ones(1, dtype=torch.int32, device=device)
        self._no_tokens = torch.empty(0, dtype=torch.int64, device=device)
        self._none_new = torch.zeros(1, dtype=torch.int32, device=device)
        if parts.drafter is not None:
            self._selection = Selection.empty(parts.drafter.num_draft_tokens, device)
        self._boundary = None
        # By kind of acceptance and length: what a captured Stage 1 wrote must be where the commit after it reads.
        self._features: dict[tuple[str, int], torch.Tensor] = {}

    def start(self, anchor: int, remaining: int, stop_tokens: list[int], position_offset: int) -> None:
        """Begins a sequence after its prefill. No round may be under way.

        Args:
            anchor: the newest emitted token.
            remaining: tokens that may follow it.
            stop_tokens: at most MAX_STOP_TOKENS.
            position_offset: the anchor's position minus the rows in the cache.
        """
        state = self.state
        self.mailbox.clear()
        state.records.zero_()
        state.round_index.zero_()
        state.anchor.fill_(anchor)
        state.remaining.fill_(remaining)
        state.stop_tokens.copy_(torch.tensor(stop_tokens + [-1] * (MAX_STOP_TOKENS - len(stop_tokens))))
        self._position_offset.fill_(position_offset)
        state.draft_branch.fill_(0 if remaining > 0 else -1)
        state.stage0_branch.fill_(-1)
        state.stage1_branch.fill_(-1)

    # --- Programs -----------------------------------------------------------------------------------------------

    def drafting_program(self, policy: DeviceLengthPolicy, acceptance: Acceptance, commits: bool = True) -> Program:
        """A round of Algorithm 1; without its commits, `commit_program` must follow before the next round."""
        longest = policy.longest(self.parts.drafter.num_draft_tokens)
        lengths = range(1, longest + 1)
        corrects = policy.lookahead > 0
        return (
            Switch(self.state.draft_branch, ((Step(("draft", policy.key), partial(self._draft, policy)),),)),
            Switch(
                self.state.stage0_branch,
                tuple((self._stage0_step(u), *([self._correct_step(policy, u)] if corrects else [])) for u in lengths),
            ),
            Switch(self.state.stage1_branch, tuple(self._stage1_steps(w, acceptance, commits) for w in lengths)),
            self._publish_step(),
        )

    def plain_program(self, acceptance: Acceptance, commits: bool = True) -> Program:
        """A round of one row, without drafts."""
        opening = Step(("open",), self._open_plainly)
        steps = (opening, self._stage0_step(1), *self._stage1_steps(1, acceptance, commits))
        return (Switch(self.state.draft_branch, (steps,)), self._publish_step())

    def commit_program(self, length: int, acceptance: Acceptance) -> Program:
        """Commits `state.commit_length` rows of a round that verified `length`."""
        return (self._commit_step(length, acceptance),)

    def _stage0_step(self, length: int) -> Step:
        return Step(("stage0", length), partial(self._stage0, length))

    def _correct_step(self, policy: DeviceLengthPolicy, length: int) -> Step:
        return Step(("correct", policy.key, length), partial(self._correct, policy, length))

    def _stage1_steps(self, length: int, acceptance: Acceptance, commits: bool) -> tuple[Step, ...]:
        verify = Step(("stage1", acceptance.kind, length), partial(self._stage1, length, acceptance))
        return (verify, self._commit_step(length, acceptance)) if commits else (verify,)

    def _commit_step(self, length: int, acceptance: Acceptance) -> Step:
        return Step(("commit", acceptance.kind, length), partial(self._commit, length, acceptance.kind))

    def _publish_step(self) -> Step:
        return Step(("publish",), partial(self.mailbox.publish, self.state))

    # --- Steps --------------------------------------------------------------------------------------------------

    def _draft(self, policy: DeviceLengthPolicy) -> None:
        """Algorithm 1, steps 1 to 4: drafts, nominal length, Stage-0 length."""
        parts = self.parts
        draft = parts.drafter.propose(self.state.anchor, parts.recurrent_states)
        policy.select_on_device(draft, self._selection)
        nominal = self._selection.nominal_length
        open_block(draft.tokens, nominal, parts.block.committed, parts.capacity, policy.lookahead, self.state)

    def _open_plainly(self) -> None:
        open_block(self._no_tokens, self._one, self.parts.block.committed, self.parts.capacity, 0, self.state)

    def _stage0(self, length: int) -> None:
        tokens = self.state.block_tokens[:length]
        self._boundary = self.parts.target.stage0(tokens, self._position_offset, self.parts.block)

    def _correct(self, policy: DeviceLengthPolicy, length: int) -> None:
        """Steps 6 to 11. The lookahead row is the last of Stage 0, if Stage 0 ran it at all."""
        new_experts = self._none_new
        if self._boundary.routed is not None:
            new_experts = count_new_experts(self._boundary.routed.top_k_index[:length], self.state.stage0_branch)
        policy.correct_on_device(new_experts, self._selection)
        correct_block(self._selection.nominal_length, self._selection.length, self.state)

    def _stage1(self, length: int, acceptance: Acceptance) -> None:
        """Steps 12 to 14, and the record of what is emitted."""
        rows = self.parts.target.stage1(self._boundary, length, self.parts.block)
        self._features[acceptance.kind, length] = rows.features
        acceptance.accept(rows.logits, self.state)
        emit_round(self.state)

    def _commit(self, length: int, kind: str) -> None:
        """Steps 15 and 16: caches, states, drafter context."""
        self.parts.block.commit(self.state.commit_length)
        if self.parts.drafter is not None:
            self.parts.drafter.observe(self._features[kind, length], self.state.commit_length)
