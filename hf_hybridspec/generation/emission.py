"""The sequence as it grows: where it must stop, what is streamed, and the scores that are returned."""

from dataclasses import dataclass

import torch
from transformers import GenerationConfig
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from .verification import VerifiedTokens


class Emission:
    """Tokens of one sequence, emitted round by round and stopped at the exact token.

    Args:
        input_ids: `[1, n]`, the prompt as given to the call.
        stopping_criteria: the host's list. Limits and EOS are looked up in each block at once, the time once a block,
            every other criterion is asked after each accepted token, as in plain decoding.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None,
    ):
        self._input_ids = input_ids
        # Tokens that a device round has handed to the host, not yet in `_input_ids`.
        self._pending: list[int] = []
        self.is_finished = False
        self._max_length = generation_config.max_length
        self._eos_token_id = getattr(generation_config, "_eos_token_tensor", None)
        self._per_token = StoppingCriteriaList(
            criterion
            for criterion in stopping_criteria
            if not isinstance(criterion, (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria))
        )
        self._per_block = StoppingCriteriaList(c for c in stopping_criteria if isinstance(c, MaxTimeCriteria))
        self._streamer = streamer
        keeps = generation_config.return_dict_in_generate
        self.scores: tuple[torch.Tensor, ...] | None = () if keeps and generation_config.output_scores else None
        self.logits: tuple[torch.Tensor, ...] | None = () if keeps and generation_config.output_logits else None

    @property
    def input_ids(self) -> torch.Tensor:
        """`[1, n]`, prompt and emitted tokens."""
        if self._pending:
            pending = torch.tensor([self._pending], device=self._input_ids.device)
            self._input_ids, self._pending = torch.cat([self._input_ids, pending], dim=1), []
        return self._input_ids

    @property
    def remaining(self) -> int:
        """Tokens that the length limit still allows."""
        return self._max_length - self._input_ids.shape[1] - len(self._pending)

    @property
    def stop_tokens(self) -> list[int]:
        """Tokens that end the sequence."""
        return [] if self._eos_token_id is None else self._eos_token_id.flatten().tolist()

    @property
    def needs_host(self) -> bool:
        """Whether anything but limits and EOS decides where the sequence stops."""
        return bool(self._per_token or self._per_block)

    @property
    def anchor(self) -> torch.Tensor:
        """`[1]` the newest emitted token."""
        return self.input_ids[0, -1:]

    def admit(self, verified: VerifiedTokens) -> "Admission":
        """Decides how many of the round's tokens are emitted. Changes nothing; a criterion may raise."""
        tokens = verified.tokens[: self.remaining]
        is_last = tokens.shape[0] == self.remaining
        if self._eos_token_id is not None:
            ends = torch.isin(tokens, self._eos_token_id.to(tokens.device)).nonzero()
            if len(ends):
                tokens, is_last = tokens[: int(ends[0]) + 1], True
        for count in range(1, tokens.shape[0] + 1) if self._per_token else ():
            if self._stops(self._per_token, verified, count):
                return Admission(count, is_last=True)
        count = tokens.shape[0]
        return Admission(count, is_last or self._stops(self._per_block, verified, count))

    def append(self, verified: VerifiedTokens, admission: "Admission") -> None:
        """Emits the admitted tokens of the round."""
        tokens = verified.tokens[None, : admission.count]
        self._input_ids = torch.cat([self.input_ids, tokens], dim=1)
        self.is_finished = admission.is_last
        self.scores = self._scores_with(verified, admission.count)
        if self.logits is not None:
            self.logits += tuple(verified.logits[: admission.count].split(1))
        if self._streamer is not None:
            self._streamer.put(tokens.cpu())

    def extend(self, tokens: list[int], is_last: bool) -> None:
        """Emits tokens that were admitted on the device; they reach `input_ids` when that is next read."""
        self._pending += tokens
        self.is_finished = is_last
        if self._streamer is not None:
            self._streamer.put(torch.tensor([tokens]))

    def end(self) -> None:
        """Tells the streamer that nothing follows."""
        if self._streamer is not None:
            self._streamer.end()

    def _stops(self, criteria: StoppingCriteriaList, verified: VerifiedTokens, count: int) -> bool:
        sequence = torch.cat([self.input_ids, verified.tokens[None, :count]], dim=1)
        return bool(criteria(sequence, self._scores_with(verified, count)).all())

    def _scores_with(self, verified: VerifiedTokens, count: int) -> tuple[torch.Tensor, ...] | None:
        return None if self.scores is None else self.scores + tuple(verified.scores[:count].split(1))


@dataclass(frozen=True)
class Admission:
    """`count` tokens of a round are emitted, at least 1; `is_last` if the sequence ends with them."""

    count: int
    is_last: bool
