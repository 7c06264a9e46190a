"""From the target's logits to emitted tokens: logits processors, then greedy acceptance or the point-mass rule."""

from dataclasses import dataclass

import torch
from transformers.generation import logits_process as processors
from transformers.generation.logits_process import LogitsProcessorList

from ..kernels.acceptance import greedy_acceptance, point_mass_acceptance
from ..kernels.uniforms import fill_uniforms

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

    Both are None for a round that stayed on the device.
    """

    tokens: torch.Tensor
    scores: torch.Tensor | None = None
    logits: torch.Tensor | None = None


class UniformStream:
    """Uniforms of one sequence: a function of the seed, the round and the row, in eager rounds as in captured ones.

    Attributes:
        seed: drawn from torch's global CPU generator, so that `set_seed` determines it.
        round_index: of the next draw. The prefill's token is round -1, so that verification rounds count from 0.
    """

    def __init__(self):
        self.seed = int(torch.randint(-(2**63), 2**63 - 1, (1,)))
        self.round_index = -1

    def draw(self, count: int, device: torch.device) -> torch.Tensor:
        """The next round's first `count` uniforms, `[count]` fp64 in [0, 1)."""
        uniforms = torch.empty(count, dtype=torch.float64, device=device)
        fill_uniforms(uniforms, *torch.tensor([[self.seed], [self.round_index]], device=device))
        self.round_index += 1
        return uniforms


class TokenVerifier:
    """Accepts draft tokens so that the emitted ones are distributed as the target's (HybridSpec, appendix C).

    A processor that reads the sequence is called row by row, on accepted prefixes only: it sees what plain decoding
    would show it, in the same order.

    Attributes:
        uniforms: what sampling draws from, one stream for the whole sequence; None for greedy decoding.
    """

    def __init__(self, logits_processor: LogitsProcessorList, do_sample: bool):
        self._processor = logits_processor
        self._do_sample = do_sample
        self.uniforms = UniformStream() if do_sample else None
        self._is_rowwise = all(isinstance(processor, ROWWISE_PROCESSORS) for processor in logits_processor)

    def verify(self, input_ids: torch.Tensor, draft_tokens: torch.Tensor, logits: torch.Tensor) -> VerifiedTokens:
        """Verifies `[M]` draft tokens after `[1, n]` input_ids with the target's logits `[M + 1, vocabulary]`.

        Under sampling, the M + 1 uniforms of the next round are drawn.
        """
        logits = logits.float()
        uniforms = self.uniforms.draw(logits.shape[0], logits.device) if self._do_sample else None
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
