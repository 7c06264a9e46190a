"""The distribution that tokens are drawn from, with every setting in device memory: temperature, top-k, top-p, min-p.

Torch operations on any device, with no read on the CPU, so that a captured graph serves any settings. The steps and
their order are those of transformers' logits warpers.
"""

from dataclasses import dataclass

import torch


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


def sampling_probs(logits: torch.Tensor, settings: SamplingSettings, is_filtered: bool) -> torch.Tensor:
    """`[w, vocabulary]` fp32 probabilities of logits `[w, vocabulary]` of any floating dtype.

    Args:
        is_filtered: whether `settings` may drop tokens; otherwise the temperature alone is applied.
    """
    scores = logits.float() / settings.temperature
    if not is_filtered:
        return scores.softmax(dim=-1)
    is_dropped = _is_dropped(scores, settings)
    probs = scores.masked_fill(is_dropped, -torch.inf).softmax(dim=-1)
    is_rare = probs < settings.min_p * probs.amax(dim=-1, keepdim=True)
    return scores.masked_fill(is_dropped | is_rare, -torch.inf).softmax(dim=-1)


def _is_dropped(scores: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    """What top-k and top-p drop."""
    vocabulary = scores.shape[-1]
    ascending, order = scores.sort(dim=-1, stable=True)
    last_kept = ascending.index_select(1, vocabulary - settings.top_k.clamp(max=vocabulary))
    mass = ascending.masked_fill(ascending < last_kept, -torch.inf).softmax(dim=-1).cumsum(dim=-1)
    is_tail = mass <= settings.tail_mass
    # The most probable token always stays.
    is_tail[:, -1] = False
    return (scores < last_kept) | torch.empty_like(is_tail).scatter_(1, order, is_tail)
