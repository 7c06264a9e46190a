"""DSpark: the DFlash backbone with one draft token per row, a Markov head and a confidence head."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..draft import Draft
from ..drafter import Drafter
from ..drafter_config import DrafterConfig
from .configuration_dspark import DSparkConfig
from .markov_head import MARKOV_HEADS


class ConfidenceHead(nn.Module):
    """P(draft token accepted | the prefix was accepted) from a row's hidden state and the token before it."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.proj = nn.Linear(config.confidence_width, 1, bias=config.confidence_head_bias)

    def forward(self, features: Tensor) -> Tensor:
        """features [.., confidence_width] -> fp32 logits [..] (before the sigmoid)."""
        bias = None if self.proj.bias is None else self.proj.bias.float()
        return F.linear(features.float(), self.proj.weight.float(), bias).squeeze(-1)


class DSparkDrafter(Drafter):
    """DSpark. Draft tokens are chosen left to right; `Draft.acceptance` is the confidence head's estimate."""

    config_class = DSparkConfig

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.markov_head = MARKOV_HEADS[config.markov_head_type](config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        self.post_init()

    def corrected_logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """fp32 logits of whole blocks with known tokens: hidden [N, D, H] draft rows, previous [N, D] int64 the token
        before each (the anchor, then the labels) -> [N, D, C]."""
        logits = self.logits(hidden)
        return logits if self.markov_head is None else logits + self.markov_head(previous, hidden).float()

    def confidence_logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """fp32 logits [..] of the acceptance of each draft row: hidden [.., H], previous [..] int64."""
        if not self.config.confidence_head_with_markov or self.markov_head is None:
            return self.confidence_head(hidden)
        return self.confidence_head(torch.cat((hidden, self.markov_head.markov_w1(previous)), dim=-1))

    def choose(self, hidden: Tensor, anchor: Tensor) -> Draft:
        logits = self.proposal_logits(hidden)
        previous, state, columns, corrected = [anchor[0]], None, [], []
        for row in range(hidden.shape[0]):
            corrected.append(logits[row])
            if self.markov_head is not None:
                step = self.markov_head.step(previous[-1], hidden[row], state)
                corrected[-1], state = logits[row] + step.bias.float(), step.state
            columns.append(corrected[-1].argmax(-1))
            previous.append(self.target_ids(columns[-1]))
        draft = Draft.of(torch.stack(previous[1:]), torch.stack(columns), torch.stack(corrected))
        if self.confidence_head is None:
            return draft
        acceptance = torch.sigmoid(self.confidence_logits(hidden, torch.stack(previous[:-1])))
        return Draft(draft.tokens, draft.confidence, draft.entropy, acceptance)

    @classmethod
    def adapt_config(cls, config: DrafterConfig, shapes: Mapping[str, tuple[int, ...]]) -> DrafterConfig:
        if "markov_head.markov_w1.weight" in shapes:
            config.markov_rank = shapes["markov_head.markov_w1.weight"][-1]
        proj = shapes.get("confidence_head.proj.weight")
        config.enable_confidence_head = proj is not None
        if proj is not None:
            config.confidence_head_with_markov = proj[-1] != config.hidden_size
            config.confidence_head_bias = "confidence_head.proj.bias" in shapes
        return config
