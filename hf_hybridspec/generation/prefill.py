"""Prefill for the host's assisted loop, which knows neither chunks nor filled caches."""

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..modeling.hybrid_cache import HybridCache
from .cache_reuse import Resumption


def prefill_head(
    model: PreTrainedModel,
    cache: HybridCache,
    input_ids: torch.Tensor,
    resumption: Resumption,
    generation_config: GenerationConfig,
    model_kwargs: dict,
) -> None:
    """Runs all chunks of the prompt but the last, and tells the cache how many rows the host's own prefill has left.

    Only prompts of token ids are run in chunks: images and embeddings are left to the host's prefill, in one piece.
    """
    chunk = generation_config.prefill_chunk_size
    remaining = resumption.num_new
    is_plain = model_kwargs.get("inputs_embeds") is None and not model_kwargs.get("mm_encoder_outputs")
    while chunk is not None and is_plain and remaining > chunk:
        rows = slice(-remaining, -remaining + chunk)
        mask, position_ids = model_kwargs.get("attention_mask"), model_kwargs["position_ids"]
        model(
            input_ids=input_ids[:, rows],
            attention_mask=None if mask is None else mask[:, : mask.shape[1] - remaining + chunk],
            position_ids=position_ids[..., rows],
            cache=cache,
            logits_to_keep=1,
        )
        remaining -= chunk
    cache.prefill_length = remaining
