"""Rounds over a full-size target on buffers of their own, run again and again from the same start."""

import time
from dataclasses import dataclass
from itertools import pairwise

import torch
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteriaList

from benchmarks.full_target import noisy_cache
from benchmarks.scripted_forward import ScriptedForward
from benchmarks.simulated_parts import SimulatedDrafter
from hf_hybridspec.generation.device_round import DeviceRound, RoundParts
from hf_hybridspec.generation.emission import Emission
from hf_hybridspec.generation.round_graphs import EagerRounds, RoundGraphs
from hf_hybridspec.generation.round_loop import ROUNDS_AHEAD, HostSide, Launches, run_ahead, wait_for_record
from hf_hybridspec.generation.statistics import GenerationStatistics
from hf_hybridspec.kernels.round_steps import MAX_ROWS
from hf_hybridspec.modeling.block_state import BlockState
from hf_hybridspec.modeling.fused_drafter import FusedDrafter


@dataclass(frozen=True)
class CountedRounds:
    """Seconds of all rounds together, and by round the rows verified and the tokens emitted."""

    seconds: float
    lengths: list[int]
    emitted: list[int]


class Session:
    """Rounds over one target, on buffers of their own.

    Args:
        forward: of the target.
        drafter: a FusedDrafter or a SimulatedDrafter, or None for plain decoding.
        context: rows of noise that every run starts from.
    """

    def __init__(self, model, forward: ScriptedForward, drafter, context: int, room: int):
        device = model.device
        self.context, self.device = context, device
        self.state = BlockState(noisy_cache(model, context, room))
        self.rounds = DeviceRound(RoundParts(forward, self.state, context + room, drafter, {}), device)
        self.fused = getattr(drafter, "fused", drafter)
        if isinstance(drafter, SimulatedDrafter):
            drafter.round_index = self.rounds.state.round_index
        self.executor = RoundGraphs(device) if device.type == "cuda" else EagerRounds()
        self.launches: Launches | None = None
        self._kept = {layer: [part.clone() for part in parts] for layer, parts in self._states().items()}
        self._draft_context = None if drafter is None else draft_context(self.fused, context)

    def prepare(self, policy, acceptance, executor=None) -> float:
        """Captures the rounds; returns the seconds that took."""
        executor = executor or self.executor
        self._rewind()
        start = time.perf_counter()
        if self.fused is None:
            launches = Launches(None, executor.prepare(self.rounds.plain_program(acceptance)))
        else:
            launches = Launches(executor.prepare(self.rounds.drafting_program(policy, acceptance)), None)
        self._synchronize()
        self.launches = launches
        return time.perf_counter() - start

    def run(self, num_tokens: int) -> tuple[float, GenerationStatistics, list[int]]:
        """Seconds, statistics and tokens of one sequence."""
        self._rewind()
        emission = Emission(
            torch.ones(1, 1, dtype=torch.int64, device=self.device),
            StoppingCriteriaList([MaxLengthCriteria(1 + num_tokens)]),
            GenerationConfig(max_length=1 + num_tokens),
            None,
        )
        host = HostSide(self.rounds, emission, GenerationStatistics("graphs", ""), None)
        self.rounds.start(1, num_tokens, [], 0)
        self._synchronize()
        start = time.perf_counter()
        run_ahead(host, self.launches)
        seconds = time.perf_counter() - start
        self._synchronize()
        return seconds, host.statistics, emission.input_ids[0, 1:].tolist()

    def run_rounds(self, num_rounds: int) -> CountedRounds:
        """So many rounds of one sequence, which has room for them."""
        self._rewind()
        self.rounds.start(1, (num_rounds + 1) * MAX_ROWS, [], 0)
        launch = self.launches.drafting or self.launches.plain
        records, launched = [], 0
        self._synchronize()
        start = time.perf_counter()
        for number in range(1, num_rounds + 1):
            while launched < min(num_rounds, number + ROUNDS_AHEAD):
                launch()
                launched += 1
            records.append(wait_for_record(self.rounds, number))
        seconds = time.perf_counter() - start
        return CountedRounds(seconds, [one.length for one in records], [len(one.tokens) for one in records])

    def idle_fraction(self, num_tokens: int) -> float | None:
        """Share of the time between launches in which the device waits for the host; None without a GPU."""
        if self.device.type != "cuda":
            return None
        inner = self.launches.drafting or self.launches.plain
        events = []

        def marked() -> None:
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pair[0].record()
            inner()
            pair[1].record()
            events.append(pair)

        launches, self.launches = self.launches, Launches(marked, None)
        if self.fused is None:
            self.launches = Launches(None, marked)
        self.run(num_tokens)
        self.launches = launches
        gaps = [before[1].elapsed_time(after[0]) for before, after in pairwise(events)]
        return sum(gaps) / events[0][0].elapsed_time(events[-1][1])

    def _states(self) -> dict:
        parts = self.state.layers.items()
        return {idx: [part.conv_state, part.recurrent_state] for idx, part in parts if hasattr(part, "conv_state")}

    def _rewind(self) -> None:
        self._synchronize()
        for layer, parts in self._states().items():
            for part, kept in zip(parts, self._kept[layer], strict=True):
                part.copy_(kept)
        self.state.committed.fill_(self.context)
        if self.fused is not None:
            self.fused.begin(self._draft_context)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@torch.no_grad()
def draft_context(fused: FusedDrafter, length: int):
    """A drafter's context of noise."""
    drafter, device = fused.drafter, fused.committed.device
    context = drafter.new_context()
    generator = torch.Generator(device).manual_seed(2)
    features = torch.empty(length, drafter.fc.in_features, device=device).normal_(generator=generator)
    drafter.observe(context, features.to(drafter.compute_dtype), torch.arange(length, device=device))
    return context
