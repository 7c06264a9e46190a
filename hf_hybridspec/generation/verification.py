"""From the target's logits to emitted tokens: logits processors, then greedy acceptance or the point-mass rule."""

from dataclasses import dataclass

import torch
from transformers.generation import logits_process as processors
from transformers.generation.logits_process import LogitsProcessorList

from ..kernels.acceptance import greedy_acceptance, point_mass_acceptance

# Processors that look at one row of scores and never at the tokens before it: all rows of a block at once.
ROWWISE_PROCESSORS = (
    processors.TemperatureLogitsWarper,
    processors.TopKLogitsWarper,
    processors.TopPLogitsWarper,
    processors.MinPLogitsWarper,
    processors.TypicalLogitsWarper,
    processors.EpsilonLogitsWarper,
    processors.EtaLogitsWarper,
    processors.SuppressTokensLogitsProcessor,
    processors.InfNanRemoveLogitsProcessor,
)


@dataclass(frozen=True)
class VerifiedTokens:
    """Outcome of one round.

    Attributes:
        tokens: `[A + 1]` int64, accepted drafts and the target's own token.
        scores: `[A + 1, vocabulary]` fp32, processed scores that each token was chosen from.
        logits: `[A + 1, vocabulary]` fp32, the target's logits.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    logits: torch.Tensor


class TokenVerifier:
    """Accepts draft tokens so that the emitted ones are distributed as the target's (HybridSpec, appendix C).

    A processor that reads the sequence is called row by row, on accepted prefixes only: it sees what plain decoding
    would show it, in the same order.
    """

    def __init__(self, logits_processor: LogitsProcessorList, do_sample: bool):
        self._processor = logits_processor
        self._do_sample = do_sample
        self._is_rowwise = all(isinstance(processor, ROWWISE_PROCESSORS) for processor in logits_processor)

    def verify(self, input_ids: torch.Tensor, draft_tokens: torch.Tensor, logits: torch.Tensor) -> VerifiedTokens:
        """Verifies `[M]` draft tokens after `[1, n]` input_ids with the target's logits `[M + 1, vocabulary]`.

        Under sampling, draws M + 1 uniforms from the device's global generator.
        """
        logits = logits.float()
        uniforms = torch.rand(logits.shape[0], device=logits.device) if self._do_sample else None
        scores = self._process(input_ids, draft_tokens, logits, uniforms)
        if self._do_sample:
            acceptance = point_mass_acceptance(draft_tokens, scores.softmax(dim=-1), uniforms)
        else:
            acceptance = greedy_acceptance(draft_tokens, scores.argmax(dim=-1))
        num_accepted = int(acceptance.num_accepted)
        tokens = torch.cat([draft_tokens[:num_accepted], acceptance.next_token.view(1)])
        return VerifiedTokens(tokens, scores[: num_accepted + 1], logits[: num_accepted + 1])

    def _process(self, input_ids, draft_tokens, logits, uniforms) -> torch.Tensor:
        """Processed scores. Rows after the first rejected draft stay raw: nothing reads them."""
        if not self._processor:
            return logits
        scores = logits.clone()
        if self._is_rowwise:
            return self._processor(input_ids.expand(scores.shape[0], -1), scores)
        for row in range(scores.shape[0]):
            prefix = torch.cat([input_ids, draft_tokens[None, :row]], dim=1)
            scores[row] = self._processor(prefix, scores[row : row + 1])[0]
            if row < draft_tokens.shape[0] and not self._accepts(draft_tokens[row], scores[row], uniforms, row):
                break
        return scores

    def _accepts(self, draft_token, scores, uniforms, row) -> bool:
        if self._do_sample:
            return bool(uniforms[row] < scores.softmax(dim=-1)[draft_token])
        return bool(scores.argmax() == draft_token)
