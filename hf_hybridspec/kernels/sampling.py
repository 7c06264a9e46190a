"""The distribution that tokens are drawn from, with every setting in device memory: temperature, top-k, top-p, min-p.

Torch operations on any device, with no read on the CPU, so that a captured graph serves any settings. The steps and
their order are those of transformers' logits warpers.
"""

from dataclasses import dataclass
from enum import Enum

import torch

# Where top-k keeps at most so many tokens, the rest of a large vocabulary need not be sorted.
MOST_FEW = 64


class Filtering(Enum):
    """What may drop tokens: nothing, a top-k of at most `MOST_FEW` and whatever follows it, or anything."""

    NONE = "sampled"
    FEW = "few"
    ANY = "filtered"


@dataclass(frozen=True)
class SamplingSettings:
    """Settings of one call, `[1]` each, on one device; `set` changes them.

    Attributes:
        temperature: fp32, positive.
        top_k: int64, tokens that are kept, ties with the last of them included; the vocabulary's size keeps all.
        tail_mass: fp32, 1 - top_p: least probable tokens are dropped while their mass stays within it.
        min_p: fp32, least probability relative to the most probable token.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    tail_mass: torch.Tensor
    min_p: torch.Tensor

    @classmethod
    def new(cls, device: torch.device | str) -> "SamplingSettings":
        """Settings to be `set` before use."""
        floats = torch.zeros(3, 1, device=device)
        return cls(floats[0], torch.zeros(1, dtype=torch.int64, device=device), floats[1], floats[2])

    def set(self, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
        """Overwrites all settings."""
        self.temperature.fill_(temperature)
        self.top_k.fill_(top_k)
        self.tail_mass.fill_(1 - top_p)
        self.min_p.fill_(min_p)


def sampling_probs(logits: torch.Tensor, settings: SamplingSettings, filtering: Filtering) -> torch.Tensor:
    """`[w, vocabulary]` fp32 probabilities of logits `[w, vocabulary]` of any floating dtype.

    Args:
        filtering: what the settings may drop. `NONE` applies the temperature alone; `FEW` needs
            `settings.top_k <= MOST_FEW`, and gives what `ANY` gives.
    """
    scores = logits.float() / settings.temperature
    if filtering is Filtering.NONE:
        return scores.softmax(dim=-1)
    is_dropped = _dropped_of_few(scores, settings) if filtering is Filtering.FEW else _dropped_of_all(scores, settings)
    probs = scores.masked_fill(is_dropped, -torch.inf).softmax(dim=-1)
    is_rare = probs < settings.min_p * probs.amax(dim=-1, keepdim=True)
    return scores.masked_fill(is_dropped | is_rare, -torch.inf).softmax(dim=-1)


def _dropped_of_all(scores: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    """What top-k and top-p drop, by sorting all scores."""
    vocabulary = scores.shape[-1]
    ascending, order = scores.sort(dim=-1)
    last_kept = ascending.index_select(1, vocabulary - settings.top_k.clamp(max=vocabulary))
    mass = ascending.masked_fill(ascending < last_kept, -torch.inf).softmax(dim=-1).cumsum(dim=-1)
    is_tail = mass <= settings.tail_mass
    # The most probable token always stays.
    is_tail[:, -1] = False
    return (scores < last_kept) | torch.empty_like(is_tail).scatter_(1, order, is_tail)


def _dropped_of_few(scores: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    """The same for a top-k of a few: only the best are sorted.

    Tokens that tie with the last one kept may be any number; what lies above them is among the best. Top-p drops
    ties first, then the least of what lies above, so one score ends what is kept, and of the tokens that have it the
    first in order stay.
    """
    best = scores.topk(min(MOST_FEW, scores.shape[-1]), dim=-1).values
    last_kept = best.index_select(1, settings.top_k.clamp(max=best.shape[-1]) - 1)
    num_ties = (scores == last_kept).sum(dim=-1, keepdim=True)
    is_above = best > last_kept
    num_above = is_above.sum(dim=-1, keepdim=True)

    # Masses relative to that of the best token.
    masses = (best - best[:, :1]).exp() * is_above
    tie_mass = (last_kept - best[:, :1]).exp()
    tail = settings.tail_mass * (masses.sum(dim=-1, keepdim=True) + num_ties * tie_mass)
    drops_ties = (num_ties * tie_mass <= tail) & (num_above > 0)
    # One of several equally good tokens stays, and one of those that top-p does not drop as a whole.
    ties_left = (num_ties - (tail / tie_mass).floor().clamp(max=num_ties)).clamp(min=1)
    up_to_here = masses.flip(-1).cumsum(dim=-1).flip(-1) + num_ties * tie_mass
    is_tail = is_above & (up_to_here <= tail) & drops_ties
    is_tail[:, 0] = False
    num_left = (num_above - is_tail.sum(dim=-1, keepdim=True)).clamp(min=1)

    end = torch.where(drops_ties, best.gather(1, num_left - 1), last_kept)
    place = torch.arange(best.shape[-1], device=best.device)
    num_at_end = torch.where(drops_ties, ((best == end) & (place < num_left)).sum(dim=-1, keepdim=True), ties_left)
    is_end = scores == end
    # Counted over all rows at once, which is one fast scan; a row begins where the one before it ended.
    counts = is_end.view(-1).cumsum(dim=0, dtype=torch.int32).view_as(scores)
    before = counts[:, :1] - is_end[:, :1].int()
    return (scores < end) | (is_end & (counts - before > num_at_end))
