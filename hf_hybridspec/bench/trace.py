"""Trace-driven runs: recorded rounds drive length selection and acceptance, a cost source says what each round takes.

Rounds are recorded at full length, so that what any shorter length would have accepted is known. They are taken as
independent of each other: a shorter length does not change which rounds follow. Throughput from a cost model is
simulated and is called so; a cost source may also run a real engine.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ..calibration.profile import CostModel, RoutingTables
from ..calibration.rounds import RoundArrays
from ..generation.policy_base import MIN_LENGTH, LengthPolicy
from ..modeling.draft import Draft


@dataclass(frozen=True)
class ExecutedRound:
    """What a policy made of a recorded round.

    Attributes:
        index: of the recorded round.
        stage0_length, length: rows up to the router boundary, and rows verified.
        num_emitted: tokens.
    """

    index: int
    stage0_length: int
    length: int
    num_emitted: int


@dataclass(frozen=True)
class TraceResult:
    """Pooled over the rounds of a trace; `lengths` counts rounds by verification length."""

    tokens: int
    seconds: float
    rounds: int
    lengths: dict[int, int]

    @classmethod
    def of(cls, executed: list[ExecutedRound], seconds: float) -> "TraceResult":
        """The sums of executed rounds that took some seconds together."""
        return cls(
            tokens=sum(run.num_emitted for run in executed),
            seconds=seconds,
            rounds=len(executed),
            lengths=dict(sorted(Counter(run.length for run in executed).items())),
        )

    @property
    def tokens_per_second(self) -> float:
        """Pooled throughput."""
        return self.tokens / self.seconds

    @property
    def acceptance_length(self) -> float:
        """Emitted tokens per round."""
        return self.tokens / self.rounds

    @property
    def mean_length(self) -> float:
        """Rows verified per round."""
        return sum(length * count for length, count in self.lengths.items()) / self.rounds


class CostSource(Protocol):
    """Says, or measures, what executed rounds take.

    Attributes:
        description: names where the times come from; it says `simulated` unless an engine computed every round.
    """

    description: str

    def seconds(self, rounds: RoundArrays, executed: list[ExecutedRound]) -> float:
        """Decode time of all executed rounds, drafting included."""


class ModelledCosts:
    """Simulated times: a cost curve, corrected by the (layer, expert) pairs that the recorded rows really selected.

    A round of w rows takes C(w) + eta (pairs of its rows - average pairs of w rows) + s (rows that only Stage 0 saw).

    Args:
        costs: the curve, eta and s.
        routing: the averages that the curve holds.
    """

    def __init__(self, costs: CostModel, routing: RoutingTables, name: str):
        self._costs, self._routing = costs, routing
        self.description = f"simulated: {name}"

    def by_length(self, rounds: RoundArrays) -> np.ndarray:
        """`[rounds, D]` seconds of every round at lengths 2..D + 1, without rows that only Stage 0 sees."""
        curve = np.array([self._costs.round_seconds(length) for length in static_lengths(rounds)])
        surplus = rounds.new_pairs.cumsum(axis=1) - np.cumsum(self._routing.new_pairs)
        return curve + self._costs.expert * surplus

    def seconds(self, rounds: RoundArrays, executed: list[ExecutedRound]) -> float:
        by_length = self.by_length(rounds)
        return sum(
            float(by_length[run.index, run.length - MIN_LENGTH])
            + self._costs.stage0_row * (run.stage0_length - run.length)
            for run in executed
        )


def run_trace(policy: LengthPolicy, rounds: RoundArrays, costs: CostSource) -> TraceResult:
    """Lets a policy choose the length of every recorded round."""
    executed = [execute(policy, rounds, index) for index in range(rounds.num_rounds)]
    return TraceResult.of(executed, costs.seconds(rounds, executed))


def execute(policy: LengthPolicy, rounds: RoundArrays, index: int) -> ExecutedRound:
    """One recorded round under a policy, as the round loop would run it with no limit near."""
    nominal = policy.select(draft_of(rounds, index))
    stage0_length = min(nominal + policy.lookahead, rounds.num_drafts + 1)
    length = nominal
    if stage0_length > nominal:
        # Draft i is row i of the target input: the rows beyond the nominal length are drafts nominal, nominal + 1, ..
        new_experts = int(rounds.new_layer0[index, nominal - 1 : stage0_length - 1].sum())
        length = min(policy.correct(nominal, new_experts), stage0_length)
    emitted = min(int(rounds.num_accepted[index]), length - 1) + 1
    return ExecutedRound(index, stage0_length, length, emitted)


def draft_of(rounds: RoundArrays, index: int) -> Draft:
    """The drafter's signals of a recorded round; its tokens are not recorded."""
    head = None if rounds.acceptance is None else torch.from_numpy(rounds.acceptance[index]).float()
    return Draft(
        torch.zeros(rounds.num_drafts, dtype=torch.long),
        torch.from_numpy(rounds.confidence[index]).float(),
        torch.from_numpy(rounds.entropy[index]).float(),
        head,
    )


def static_lengths(rounds: RoundArrays) -> range:
    """Every fixed length that the recorded block allows."""
    return range(MIN_LENGTH, rounds.num_drafts + 2)
