"""A prompt to be decoded, with and without a drafter, against the clock."""

import statistics
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedModel, set_seed
from transformers.generation.streamers import BaseStreamer

from ..calibration.timed_decode import DecodeClock, TimedDecode
from ..generation.policy_base import LengthPolicy
from ..modeling.drafter import Drafter


class StreamingClock(DecodeClock):
    """A DecodeClock that hands all tokens on to a streamer, or to nobody."""

    def __init__(self, streamer: BaseStreamer | None):
        super().__init__()
        self._streamer = streamer

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        if self._streamer is not None:
            self._streamer.put(value)

    def end(self) -> None:
        super().end()
        if self._streamer is not None:
            self._streamer.end()


def tokens_per_second(run: TimedDecode) -> float:
    """Tokens after the prefill's, per second; 0 if there are none."""
    return run.num_decoded / run.seconds if run.num_decoded > 0 and run.seconds > 0 else 0.0


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
    ) -> TimedDecode:
        """Decodes with `drafter`, or plainly without one."""
        if self.seed is not None:
            set_seed(self.seed)
        clock = StreamingClock(streamer)
        drafting = {} if drafter is None else {"assistant_model": drafter, "length_policy": length_policy}
        sequences = self.target.generate(
            **self.inputs, generation_config=self.generation_config, streamer=clock, **drafting
        )
        new_tokens = tuple(sequences[0, self.inputs["input_ids"].shape[1] :].tolist())
        counts = None if drafter is None else self.target.generation_statistics
        return TimedDecode(new_tokens, clock.seconds, counts)

    def compare(self, drafter: Drafter, length_policy: LengthPolicy | None, num_runs: int) -> Comparison:
        """Decodes `num_runs` times plainly and with the drafter, in turn."""
        plain, drafted = [], []
        for _ in range(num_runs):
            plain.append(self.decode())
            drafted.append(self.decode(drafter, length_policy))
        return Comparison(
            statistics.median(map(tokens_per_second, drafted)),
            statistics.median(map(tokens_per_second, plain)),
            first_difference(plain[0].token_ids, drafted[0].token_ids),
        )


def first_difference(left: tuple[int, ...], right: tuple[int, ...]) -> int | None:
    """Index of the first token in which two texts differ (a missing one differs), or None."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))
