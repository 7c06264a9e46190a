"""Plain decoding in transformers' own loops, on the same weights: what a user has without the project."""

import time

import torch
from transformers import PreTrainedModel
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

import hf_hybridspec

# New tokens of the two calls whose difference is a step's time; the compiled call is slow once.
SHORT, LONG = 8, 72


def measure_baseline(model: PreTrainedModel, kind: str, context: int) -> dict:
    """Milliseconds of a step of `generate`, greedy, after a prompt of `context` tokens; prefill excluded.

    Args:
        kind: `eager` (dynamic cache) or `static` (static cache, which transformers compiles).
    """
    hf_hybridspec.detach(model)
    options = {"cache_implementation": "static"} if kind == "static" else {}
    first = _seconds(model, context, SHORT, options)
    steps = []
    for _ in range(3):
        short, long = (_seconds(model, context, count, options) for count in (SHORT, LONG))
        steps.append((long - short) / (LONG - SHORT))
    step = sorted(steps)[1]
    return {
        "ms_per_token": round(1e3 * step, 3),
        "tokens_per_second": round(1 / step, 2),
        "first_call_seconds": round(first, 1),
    }


class StopAfter(StoppingCriteria):
    """Ends a call early, so that calls of every length use a static cache of one size, and compile once."""

    def __init__(self, length: int):
        self._length = length

    def __call__(self, input_ids, scores, **kwargs):
        shape, is_done = input_ids.shape[:1], input_ids.shape[1] >= self._length
        return torch.full(shape, is_done, dtype=torch.bool, device=input_ids.device)


def _seconds(model: PreTrainedModel, context: int, count: int, options: dict) -> float:
    prompt = torch.ones(1, context, dtype=torch.int64, device=model.device)
    stop = StoppingCriteriaList([StopAfter(context + count)])
    if prompt.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    output = model.generate(prompt, max_new_tokens=LONG, do_sample=False, stopping_criteria=stop, **options)
    if prompt.is_cuda:
        torch.cuda.synchronize()
    assert output.shape[1] == context + count
    return time.perf_counter() - start
