"""How far proposal blocks survive verification, with censoring (ReaDy, appendix E)."""

from collections.abc import Iterable
from dataclasses import dataclass

from .statistics import GenerationStatistics


@dataclass(frozen=True)
class Round:
    """One verification round.

    num_accepted: accepted drafts. num_verified: drafts that the target checked. is_cut: the sequence ended in this
    round, so that drafts after its end were never judged.
    """

    num_accepted: int
    num_verified: int
    is_cut: bool


def rounds_of(statistics: GenerationStatistics) -> list[Round]:
    """The rounds of one call; its last is the one in which the sequence ended."""
    last = statistics.rounds - 1
    return [
        Round(emitted - 1, length - 1, is_cut=index == last and emitted < length)
        for index, (emitted, length) in enumerate(
            zip(statistics.emitted, statistics.verification_lengths, strict=True)
        )
    ]


def prefix_survival(rounds: Iterable[Round], num_draft_tokens: int) -> list[float]:
    """Share of fully observable rounds whose first j drafts were all accepted, for j = 1..num_draft_tokens.

    A round counts where every draft of the block was checked and the sequence did not end inside it; other rounds are
    censored, not counted as rejections. Empty where no round is observable.
    """
    observable = [round for round in rounds if round.num_verified >= num_draft_tokens and not round.is_cut]
    if not observable:
        return []
    return [
        sum(round.num_accepted >= j for round in observable) / len(observable) for j in range(1, num_draft_tokens + 1)
    ]


@dataclass(frozen=True)
class AcceptanceSummary:
    """Over the requests of a run. pooled: emitted tokens / verification rounds of all requests. mean_of_requests: mean
    of the requests' own ratios. survival: see `prefix_survival`. requests: those with at least one round."""

    pooled: float
    mean_of_requests: float
    survival: list[float]
    requests: int


def summarise_acceptance(calls: Iterable[GenerationStatistics], num_draft_tokens: int) -> AcceptanceSummary:
    """The summary of the calls that had a round. Raises ValueError where none had."""
    calls = [call for call in calls if call.rounds]
    if not calls:
        raise ValueError("No request had a verification round. Generate more tokens for each prompt.")
    emitted, rounds = sum(sum(call.emitted) for call in calls), sum(call.rounds for call in calls)
    survival = prefix_survival([round for call in calls for round in rounds_of(call)], num_draft_tokens)
    mean = sum(call.acceptance_length for call in calls) / len(calls)
    return AcceptanceSummary(emitted / rounds, mean, survival, len(calls))
