"""DSpark's sequential head: a low-rank bias on a row's logits that depends on the token before it."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .configuration_dspark import DSparkConfig


@dataclass(frozen=True)
class MarkovStep:
    """bias: [.., C] to add to a row's logits. state: [.., r], the RNN head's state after this row; None elsewhere."""

    bias: Tensor
    state: Tensor | None = None


class MarkovHead(nn.Module):
    """The vanilla head: bias = W2 W1[previous]; C is the drafter's vocabulary, W1 is indexed by target ids."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size or config.vocab_size, bias=False)

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> MarkovStep:
        """One row: previous [..] int64 (the token before it), hidden [.., H], state of the row before (None first)."""
        return MarkovStep(self.markov_w2(self.markov_w1(previous)))

    def forward(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """Biases of whole blocks whose tokens are known: previous [N, B], hidden [N, B, H] -> [N, B, C]."""
        return self.step(previous, hidden, None).bias


class GatedMarkovHead(MarkovHead):
    """bias = W2 (g * W1[previous]) with g = sigmoid(gate([hidden ; W1[previous]]))."""

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> MarkovStep:
        token = self.markov_w1(previous)
        gate = torch.sigmoid(self.gate_proj(torch.cat((hidden, token), dim=-1)))
        return MarkovStep(self.markov_w2(gate * token))


class RecurrentMarkovHead(MarkovHead):
    """A gated recurrence over the block's rows; the joint projection is gate, candidate, output, in this order."""

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * config.markov_rank + config.hidden_size, 3 * config.markov_rank)

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> MarkovStep:
        token = self.markov_w1(previous)
        state = torch.zeros_like(token) if state is None else state
        gate, candidate, output = self.joint_proj(torch.cat((state, token, hidden), dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        state = gate * state + (1 - gate) * torch.tanh(candidate)
        return MarkovStep(self.markov_w2(torch.tanh(output)), state)

    def forward(self, previous: Tensor, hidden: Tensor) -> Tensor:
        state, biases = None, []
        for row in range(previous.shape[1]):
            step = self.step(previous[:, row], hidden[:, row], state)
            state = step.state
            biases.append(step.bias)
        return torch.stack(biases, dim=1)


MARKOV_HEADS = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RecurrentMarkovHead}
