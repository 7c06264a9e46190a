"""Draft choice in plain torch. Row k with head logits l, token t before it, Markov weights E and P:

    x = cap tanh(multiplier l / cap) + P E[t]          p = softmax(x)
    token = argmax x          confidence = max p          entropy = -sum p log p

Forbidden columns get `LOWEST` for the first term. The Markov term is rounded to the dtype of its weights.
"""

import torch
import torch.nn.functional as F

from .draft_choice import DraftChoice, MarkovWeights, ProposalRules

# Finite, so that a forbidden column's zero share of the entropy is not 0 * inf.
LOWEST = -1e30


def choose_tokens(
    logits, anchor, rules: ProposalRules, markov: MarkovWeights | None = None, counters=None
) -> DraftChoice:
    """As `draft_choice.choose_tokens`; needs no counters."""
    scores = logits.float() * rules.multiplier
    if rules.softcap:
        scores = torch.tanh(scores / rules.softcap) * rules.softcap
    scores = scores.masked_fill(rules.forbidden, LOWEST)
    if markov is None:
        columns = scores.argmax(-1)
        tokens = _tokens(columns, rules)
    else:
        scores, columns, tokens = _chain(scores, anchor, rules, markov)
    log_probabilities = scores.log_softmax(-1)
    confidence = log_probabilities.gather(-1, columns[:, None]).squeeze(-1).exp()
    return DraftChoice(tokens, confidence, -(log_probabilities.exp() * log_probabilities).sum(-1))


def _chain(scores, anchor, rules: ProposalRules, markov: MarkovWeights):
    """Scores, columns and tokens of all rows, chosen one after the other."""
    previous, corrected, columns, tokens = anchor, [], [], []
    for row in scores:
        bias = F.linear(F.embedding(previous, markov.embedding), markov.projection)
        corrected.append(row + bias[0].float())
        columns.append(corrected[-1].argmax(-1, keepdim=True))
        previous = _tokens(columns[-1], rules)
        tokens.append(previous)
    return torch.stack(corrected), torch.cat(columns), torch.cat(tokens)


def _tokens(columns: torch.Tensor, rules: ProposalRules) -> torch.Tensor:
    return columns if rules.offsets is None else columns + rules.offsets[columns]
