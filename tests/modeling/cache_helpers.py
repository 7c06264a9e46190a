"""Running a target over a HybridCache, and comparing two caches."""

import copy
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from hf_hybridspec import HybridCache
from tests.support import random_prompt

STATIC_LENGTH = 96
ROWS = random_prompt(40, seed=3)
NEXT = random_prompt(3, seed=4)
# Verification in one solve against one recurrent step a row: the order of fp32 sums differs, and four layers of random
# weights (of 0.2, not 0.02) amplify it, in the host's own chunked forward as much (1.1e-3 from fp64). A row too many
# or too few is off by 0.1 and more.
TOLERANCE = 2e-3


@torch.no_grad()
def run(target: PreTrainedModel, cache, token_ids: torch.Tensor) -> torch.Tensor:
    """Logits `[n, vocabulary]` of `[1, n]` tokens that follow what the cache holds."""
    return target(input_ids=token_ids, cache=cache).logits[0]


def prefilled(target: PreTrainedModel, prompt: torch.Tensor, is_static: bool = False) -> HybridCache:
    cache = HybridCache(target.config, STATIC_LENGTH if is_static else None)
    run(target, cache, prompt)
    return cache


def run_block(target: PreTrainedModel, cache: HybridCache, token_ids: torch.Tensor) -> torch.Tensor:
    """Logits of a new block, which is left open."""
    cache.begin_block(token_ids.shape[1])
    return run(target, cache, token_ids)


@dataclass(frozen=True)
class Decoded:
    """A cache after j tokens were decoded one by one.

    Attributes:
        logits: `[j, vocabulary]`, after each of them.
        next_logits: `[3, vocabulary]`, of the tokens NEXT when they follow in one forward.
    """

    cache: HybridCache
    logits: torch.Tensor
    next_logits: torch.Tensor


def decoded_one_by_one(target: PreTrainedModel, cache: HybridCache, token_ids: torch.Tensor) -> list[Decoded]:
    """What `cache` becomes after 0, 1, ... all of the tokens; `cache` itself stays as it is."""
    cache = copy.deepcopy(cache)
    logits = torch.empty(0)
    steps = []
    for position in range(token_ids.shape[1] + 1):
        steps.append(Decoded(copy.deepcopy(cache), logits, run(target, copy.deepcopy(cache), NEXT)))
        if position < token_ids.shape[1]:
            logits = torch.cat([logits, run(target, cache, token_ids[:, position : position + 1])])
    return steps


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)


def held_tensors(cache) -> list[torch.Tensor]:
    """The committed content of every layer: key, value and both states."""
    tensors = []
    length = int(cache.get_seq_length())
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionLayer):
            tensors += [layer.conv_states[0], layer.recurrent_states[0]]
        else:
            tensors += [layer.keys[..., :length, :], layer.values[..., :length, :]]
    return tensors


def assert_same_content(actual, expected, tolerance: float = TOLERANCE) -> None:
    assert int(actual.get_seq_length()) == int(expected.get_seq_length())
    for one, other in zip(held_tensors(actual), held_tensors(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
