"""Pauses drafting while it makes decoding slower: on prompts whose drafts are hardly ever accepted.

The guard compares what rounds have emitted per second with a drafter and without. It knows earlier rounds only, so no
round's length depends on that round's verification draws.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable

import torch

from ..modeling.drafter import Draft
from .draft_session import DraftSession
from .policy_base import LengthPolicy

# Rounds of the same kind that a throughput is measured over, and the fewest that it is believed from.
WINDOW, FEWEST = 24, 3
# Rounds between two measurements of plain decoding, and rounds of the first pause; both double up to the longest.
FIRST_INTERVAL, LONGEST_INTERVAL = 16, 256
# A kind of rounds that is so much faster is left alone for the longest interval.
CLEARLY_FASTER = 1.3


class DraftingGuard:
    """Says before each round whether to draft.

    Drafting comes first. After `FIRST_INTERVAL` rounds, `FEWEST` rounds run without drafts; whichever is faster goes
    on, and the other is tried again for `FEWEST` rounds after an interval that grows as long as the answer stays.
    """

    def __init__(self):
        self._rounds = {True: deque(maxlen=WINDOW), False: deque(maxlen=WINDOW)}
        self._is_faster = True
        self._interval = FIRST_INTERVAL
        # Rounds left before the mode changes; in a trial, the slower mode runs.
        self._left, self._in_trial = FIRST_INTERVAL, False

    @property
    def is_drafting(self) -> bool:
        """Whether the next round drafts."""
        return self._is_faster != self._in_trial

    def record(self, num_tokens: int, seconds: float) -> None:
        """Counts a finished round of the kind that `is_drafting` said."""
        self._rounds[self.is_drafting].append((num_tokens, seconds))
        self._left -= 1
        if self._left > 0:
            return
        if not self._in_trial:
            self._in_trial, self._left = True, FEWEST
            # Only what the trial measures counts: the text may have changed since the last one.
            self._rounds[self.is_drafting].clear()
            return
        ratio = self.tokens_per_second(True) / self.tokens_per_second(False)
        if (ratio >= 1) != self._is_faster:
            self._interval = FIRST_INTERVAL
        elif max(ratio, 1 / ratio) >= CLEARLY_FASTER:
            self._interval = LONGEST_INTERVAL
        else:
            self._interval = min(2 * self._interval, LONGEST_INTERVAL)
        self._is_faster, self._in_trial, self._left = ratio >= 1, False, self._interval

    def tokens_per_second(self, is_drafting: bool) -> float:
        """Measured throughput of a kind of rounds; the median time, since single rounds are disturbed from outside."""
        rounds = self._rounds[is_drafting]
        tokens = statistics.fmean(num_tokens for num_tokens, _ in rounds)
        return tokens / max(statistics.median(seconds for _, seconds in rounds), 1e-9)


class GuardedSession:
    """A DraftSession that proposes nothing while the guard pauses drafting.

    Args:
        clock: gives seconds. A round lasts from one proposal to the next.
    """

    def __init__(self, session: DraftSession, guard: DraftingGuard, clock: Callable[[], float] = time.perf_counter):
        self.guard = guard
        self.session = session
        self._clock = clock
        self._start: float | None = None
        self._num_tokens = 0

    def observe(self, features: torch.Tensor) -> None:
        """Takes the taps of committed rows; a round commits as many rows as it emits tokens."""
        self.session.observe(features)
        self._num_tokens += features.shape[0]

    def propose(self, anchor: torch.Tensor) -> Draft:
        """The proposal block after `anchor` `[1]`, or a draft of no tokens."""
        now = self._clock()
        if self._start is not None:
            self.guard.record(self._num_tokens, now - self._start)
        self._start, self._num_tokens = now, 0
        if self.guard.is_drafting:
            return self.session.propose(anchor)
        nothing = torch.empty(0, device=anchor.device)
        return Draft(anchor[:0], nothing, nothing)


def guarded(session: DraftSession, policy: LengthPolicy, device: torch.device) -> DraftSession | GuardedSession:
    """The session under a guard if the policy asks for one on this device, else itself."""
    is_guarded = device.type == "cuda" if policy.is_guarded is None else policy.is_guarded
    return GuardedSession(session, DraftingGuard()) if is_guarded else session
