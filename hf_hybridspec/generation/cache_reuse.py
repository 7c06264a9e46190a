"""Continuing from a filled cache: only the tokens that it does not hold are fed, and they must "
"follow what it holds."""

from dataclasses import dataclass

import torch

from ..modeling.hybrid_cache import HybridCache


@dataclass(frozen=True)
class Resumption:
    """How a prompt continues a cache.

    Attributes:
        num_new: rows of the prompt that the cache does not hold.
        earlier_ids: `[1, n]` tokens before the prompt when it holds the new ones alone, else `[1, 0]`; None: unknown.
    """

    num_new: int
    earlier_ids: torch.Tensor | None

    def committed_ids(self, input_ids: torch.Tensor, cache: HybridCache) -> torch.Tensor | None:
        """The tokens that the cache holds once the call has brought its sequence to `input_ids`, or None."""
        if self.earlier_ids is None:
            return None
        return torch.cat([self.earlier_ids, input_ids], dim=1)[:, : cache.committed_length]


def resume(cache: HybridCache, input_ids: torch.Tensor, prompt_length: int, mask_length: int) -> Resumption:
    """Fits a prompt to a cache.

    Args:
        input_ids: `[1, n]`, the whole sequence, or the new tokens alone if the attention mask is longer.
        prompt_length: rows of the prompt (more than n where embeddings were given).
        mask_length: columns of the attention mask.

    Raises:
        ValueError: the sequence is not longer than what the cache holds, or departs from it.
    """
    held = cache.committed_length
    is_whole = mask_length == prompt_length
    has_ids = input_ids.shape[1] == prompt_length
    if not held:
        return Resumption(prompt_length, input_ids[:, :0] if has_ids else None)
    token_ids = cache.token_ids if cache.token_ids is not None and cache.token_ids.shape[1] == held else None
    if not is_whole:
        return Resumption(prompt_length, token_ids if has_ids else None)
    if prompt_length <= held:
        raise ValueError(
            f"The cache holds {held} tokens, the prompt has {prompt_length}. Pass the whole sequence "
            "that the cache holds, "
            "followed by new tokens, or a new cache."
        )
    if has_ids and token_ids is not None:
        differing = (token_ids.to(input_ids.device) != input_ids[:, :held]).nonzero()
        if len(differing):
            raise ValueError(
                f"The prompt departs from the cache at token {int(differing[0, 1])} of {held}. Pass a "
                "prompt that begins "
                "with the tokens the cache holds, or a new cache."
            )
    return Resumption(prompt_length - held, input_ids[:, :0] if has_ids else None)
