"""The host's part of device rounds: it launches them ahead and hands out what they have emitted."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .device_round import DeviceRound, RoundRecord
from .drafting_guard import DraftingGuard
from .emission import Emission
from .statistics import GenerationStatistics
from .verification import VerifiedTokens

# Rounds under way beside the one whose tokens the host waits for: enough to hide the host, few to waste at the end.
ROUNDS_AHEAD = 3
# Seconds between two looks for a record; a round takes a millisecond or more.
POLL_INTERVAL = 5e-5


@dataclass(frozen=True)
class Launches:
    """What runs a whole round with drafts, and one without; either may be missing, not both."""

    drafting: Callable[[], None] | None
    plain: Callable[[], None] | None


@dataclass(frozen=True)
class HostSide:
    """What the host does with a sequence's rounds.

    Attributes:
        guard: says before each round whether to draft; None: always, if there is a drafter.
    """

    rounds: DeviceRound
    emission: Emission
    statistics: GenerationStatistics
    guard: DraftingGuard | None


def run_ahead(host: HostSide, launches: Launches) -> None:
    """Emits until the sequence ends. The device alone decides where; rounds launched after that change nothing."""
    under_way: deque[bool] = deque()
    number, mark = 0, time.perf_counter()
    while not host.emission.is_finished:
        drafts = _drafts_next(host, launches)
        # Rounds of one kind are measured alone: the other kind waits until they have ended.
        while len(under_way) <= ROUNDS_AHEAD and (not under_way or under_way[-1] == drafts):
            (launches.drafting if drafts else launches.plain)()
            under_way.append(drafts)
        number += 1
        record = wait_for_record(host.rounds, number)
        now = time.perf_counter()
        if under_way.popleft() == drafts and host.guard is not None:
            host.guard.record(len(record.tokens), now - mark)
        mark = now
        host.statistics.add_round(record.length, len(record.tokens))
        host.emission.extend(record.tokens, record.has_ended)


def run_admitted(host: HostSide, verify: Launches, commit: Callable[[int], None]) -> None:
    """Emits until the sequence ends, for calls in which the host decides where: one round at a time.

    Args:
        verify: rounds without their commits.
        commit: commits what `state.commit_length` says, of a round that verified so many rows.
    """
    number, mark = 0, time.perf_counter()
    while not host.emission.is_finished:
        drafts = _drafts_next(host, verify)
        (verify.drafting if drafts else verify.plain)()
        number += 1
        record = wait_for_record(host.rounds, number)
        verified = VerifiedTokens(torch.tensor(record.tokens, device=host.emission.input_ids.device))
        admission = host.emission.admit(verified)
        if admission.count < len(record.tokens):
            host.rounds.state.commit_length.fill_(admission.count)
        commit(record.length)
        if host.guard is not None:
            host.guard.record(admission.count, time.perf_counter() - mark)
        mark = time.perf_counter()
        host.statistics.add_round(record.length, admission.count)
        host.emission.append(verified, admission)


def wait_for_record(rounds: DeviceRound, number: int) -> RoundRecord:
    """The record of round `number`, counted from 1, once it is there. Nothing is synchronised.

    Raises:
        RuntimeError: everything launched has ended without it, or the device has failed.
    """
    device = rounds.state.anchor.device
    while (record := rounds.mailbox.read(number)) is None:
        is_idle = device.type != "cuda" or torch.cuda.current_stream(device).query()
        if is_idle and rounds.mailbox.read(number) is None:
            raise RuntimeError(
                f"Round {number} left no record although all launched work has ended. Decode this call with "
                "decoding_path='round' and report it."
            )
        time.sleep(POLL_INTERVAL)
    return record


def _drafts_next(host: HostSide, launches: Launches) -> bool:
    if launches.drafting is None:
        return False
    return launches.plain is None or host.guard is None or host.guard.is_drafting
