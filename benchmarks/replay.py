"""Timing of work that a GPU repeats from a graph; on a CPU the same work is called and timed, for dry runs."""

import statistics
import time
from collections.abc import Callable, Mapping
from itertools import pairwise

import torch


class Captured:
    """Work captured into a graph of its own, warmed up before; on a CPU the work itself.

    Args:
        work: called again only on a CPU. What it returns stays alive, and holds what the newest replay has left.
    """

    def __init__(self, work: Callable[[], object]):
        self._work, self._graph = work, None
        self.result = work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self.result = work()

    def replay(self) -> None:
        """Runs the work once more."""
        if self._graph is None:
            self.result = self._work()
        else:
            self._graph.replay()


def times_in_turn(
    works: Mapping[str, Captured], replays: int, before: Callable[[int], None] | None = None
) -> dict[str, list[float]]:
    """Milliseconds of every replay; the works take turns, so that slow phases of a device hit all of them.

    Args:
        before: called with the number of each turn, outside what is timed.
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(replays):
        if before is not None:
            before(turn)
        for name, taken in zip(works, _turn(list(works.values())), strict=True):
            times[name].append(taken)
    return times


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of each list."""
    return {name: statistics.median(values) for name, values in times.items()}


def _turn(works: list[Captured]) -> list[float]:
    if not torch.cuda.is_available():
        marks = [time.perf_counter()]
        for work in works:
            work.replay()
            marks.append(time.perf_counter())
        return [1e3 * (end - start) for start, end in pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(works) + 1)]
    # The first event waits behind this, so that launching the first graph is not part of its time.
    works[0].replay()
    events[0].record()
    for work, event in zip(works, events[1:], strict=True):
        work.replay()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairwise(events)]
