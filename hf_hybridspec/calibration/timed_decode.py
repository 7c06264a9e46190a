"""Decoding one prompt against the clock, prefill excluded."""

import time
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from ..generation.policy_base import LengthPolicy
from ..generation.statistics import GenerationStatistics
from ..modeling.drafter import Drafter


@dataclass(frozen=True)
class DecodeSettings:
    """How every prompt of a comparison is decoded; greedy at temperature 0."""

    max_new_tokens: int
    temperature: float = 0.0

    def generation_config(self) -> GenerationConfig:
        """Exactly these settings, whatever the checkpoint suggests."""
        if self.temperature == 0:
            return GenerationConfig(max_new_tokens=self.max_new_tokens, do_sample=False)
        return GenerationConfig(
            max_new_tokens=self.max_new_tokens, do_sample=True, temperature=self.temperature, top_p=1.0, top_k=0
        )


@dataclass(frozen=True)
class TimedDecode:
    """One decoded prompt.

    Attributes:
        token_ids: the new tokens; the first belongs to the prefill.
        seconds: from the first new token to the end of the call.
        statistics: None for plain decoding.
        round_seconds: of a round, the first left out, since a call's first round also pays for its start; None with
            fewer than two.
    """

    token_ids: tuple[int, ...]
    seconds: float
    statistics: GenerationStatistics | None
    round_seconds: float | None = None

    @property
    def num_decoded(self) -> int:
        """Tokens emitted after the prefill."""
        return len(self.token_ids) - 1

    @property
    def num_rounds(self) -> int:
        """Forwards of the target after the prefill."""
        return self.num_decoded if self.statistics is None else self.statistics.rounds


class DecodeClock(BaseStreamer):
    """A streamer that only notes when the prefill's token arrives, when rounds end, and when decoding ends.

    The loops hand over tokens on the CPU, so that a device has finished what is timed; one put a round.
    """

    def __init__(self):
        self._num_puts = 0
        self._start = self._stop = self._first_round = self._last_round = 0.0

    @property
    def seconds(self) -> float:
        """Decode time; 0 if the prefill's token was the only one."""
        return self._stop - self._start

    @property
    def round_seconds(self) -> float | None:
        """As in `TimedDecode`."""
        num_timed = self._num_puts - 3
        return (self._last_round - self._first_round) / num_timed if num_timed > 0 else None

    def put(self, value: torch.Tensor) -> None:
        # The first put is the prompt, the second the prefill's token.
        self._num_puts += 1
        self._stop = time.perf_counter()
        if self._num_puts == 2:
            self._start = self._stop
        elif self._num_puts == 3:
            self._first_round = self._stop
        self._last_round = self._stop

    def end(self) -> None:
        self._stop = time.perf_counter()


def timed_decode(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    settings: DecodeSettings,
    drafter: Drafter | None = None,
    length_policy: LengthPolicy | None = None,
    **options,
) -> TimedDecode:
    """Decodes `[1, n]` tokens, plainly without a drafter. `options` are more arguments of generate()."""
    clock = DecodeClock()
    drafting = {} if drafter is None else {"assistant_model": drafter, "length_policy": length_policy}
    sequences = target.generate(
        input_ids, generation_config=settings.generation_config(), streamer=clock, **drafting, **options
    )
    statistics = None if drafter is None else target.generation_statistics
    token_ids = tuple(sequences[0, input_ids.shape[1] :].tolist())
    return TimedDecode(token_ids, clock.seconds, statistics, clock.round_seconds)
