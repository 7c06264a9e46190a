"""One timed generate() call, and decoding with and without a drafter side by side."""

import statistics
import time
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedModel, set_seed
from transformers.generation.streamers import BaseStreamer

from ..generation.length_policies import LengthPolicy
from ..generation.statistics import GenerationStatistics
from ..modeling.drafter import Drafter


@dataclass(frozen=True)
class TimedRun:
    """One decoded prompt.

    Attributes:
        token_ids: the new tokens.
        seconds: from the first new token to the end, so that the prefill is left out.
        statistics: None for plain decoding.
    """

    token_ids: list[int]
    seconds: float
    statistics: GenerationStatistics | None

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first, which belongs to the prefill, per second; 0 if there is none."""
        decoded = len(self.token_ids) - 1
        return decoded / self.seconds if decoded > 0 and self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Comparison:
    """Decoding with and without a drafter.

    Attributes:
        tokens_per_second, autoregressive_tokens_per_second: medians over the runs.
        first_difference: index of the first new token that differs, or None.
    """

    tokens_per_second: float
    autoregressive_tokens_per_second: float
    first_difference: int | None

    @property
    def speedup(self) -> float:
        """Times as fast with the drafter; 0 if nothing was decoded."""
        plain = self.autoregressive_tokens_per_second
        return self.tokens_per_second / plain if plain else 0.0


class DecodeClock(BaseStreamer):
    """Notes when the prefill's token arrives and when decoding ends; hands all tokens on to `streamer`."""

    def __init__(self, streamer: BaseStreamer | None = None):
        self._streamer = streamer
        self._num_puts = 0
        self._start = 0.0
        self.seconds = 0.0

    def put(self, value: torch.Tensor) -> None:
        # The first put holds the prompt, the second the prefill's token.
        self._num_puts += 1
        if self._num_puts == 2:
            self._start = time.perf_counter()
        if self._streamer is not None:
            self._streamer.put(value)

    def end(self) -> None:
        if self._num_puts > 1:
            self.seconds = time.perf_counter() - self._start
        if self._streamer is not None:
            self._streamer.end()


@dataclass(frozen=True)
class Request:
    """A prompt and how to decode it; `inputs` are generate()'s tensors, `seed` is set before every run."""

    target: PreTrainedModel
    inputs: dict[str, torch.Tensor]
    generation_config: GenerationConfig
    seed: int | None = None

    def decode(
        self,
        drafter: Drafter | None = None,
        length_policy: LengthPolicy | None = None,
        streamer: BaseStreamer | None = None,
    ) -> TimedRun:
        """Decodes with `drafter`, or plainly without one."""
        if self.seed is not None:
            set_seed(self.seed)
        clock = DecodeClock(streamer)
        sequences = self.target.generate(
            **self.inputs,
            generation_config=self.generation_config,
            assistant_model=drafter,
            length_policy=length_policy,
            streamer=clock,
        )
        new_tokens = sequences[0, self.inputs["input_ids"].shape[1] :].tolist()
        return TimedRun(new_tokens, clock.seconds, self.target.generation_statistics if drafter else None)

    def compare(self, drafter: Drafter, length_policy: LengthPolicy | None, num_runs: int) -> Comparison:
        """Decodes `num_runs` times plainly and with the drafter, in turn."""
        plain, drafted = [], []
        for _ in range(num_runs):
            plain.append(self.decode())
            drafted.append(self.decode(drafter, length_policy))
        return Comparison(
            statistics.median(run.tokens_per_second for run in drafted),
            statistics.median(run.tokens_per_second for run in plain),
            first_difference(plain[0].token_ids, drafted[0].token_ids),
        )


def first_difference(left: list[int], right: list[int]) -> int | None:
    """Index of the first token in which two lists differ (a missing one differs), or None."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))
