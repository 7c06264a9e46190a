"""The cost curve and the two small latencies of the routing correction, measured on this runtime.

HybridSpec, appendix A.2: fixed-length runs give the decode time per round, fitted by a quadratic in the length.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.isotonic import IsotonicRegression
from tqdm import tqdm
from transformers import PreTrainedModel

from ..generation.length_policies import Static
from ..modeling.drafter import Drafter
from ..modeling.hybrid_cache import HybridCache
from ..modeling.sparse_moe import has_router
from ..modeling.split_forward import SplitForward
from ..modeling.target import text_model
from .capture import Prompt
from .timed_decode import DecodeSettings, timed_decode

REPEATS = 20
# The intercept of the fit stays below the cheapest round, so that the target's share of it is positive.
MOST_FIXED_SHARE = 0.95


@dataclass(frozen=True)
class RoundTimes:
    """Seconds: of a round at w = 2..D + 1 (`by_length`), and of a token without a drafter."""

    by_length: tuple[float, ...]
    autoregressive: float


@dataclass(frozen=True)
class CostFit:
    """Quadratic fit of the round times: values at the measured lengths, the length-independent part, R^2, notes."""

    fitted: tuple[float, ...]
    fixed: float
    r2: float
    notes: tuple[str, ...]


def measure_rounds(
    target: PreTrainedModel, drafter: Drafter, prompts: list[Prompt], settings: DecodeSettings
) -> RoundTimes:
    """Decodes the prompts at every fixed length and without the drafter, in turn; medians over the prompts.

    Raises:
        ValueError: no prompt gave a round.
    """
    lengths = range(2, drafter.num_draft_tokens + 2)
    seconds: dict[int, list[float]] = {length: [] for length in (1, *lengths)}
    for length in (1, 2, lengths[-1]):
        _seconds_per_round(target, drafter, prompts[0], settings, length)
    for index, prompt in enumerate(tqdm(prompts, desc="cost", unit="prompt")):
        # Another order for each prompt, so that no length always runs on the warmer machine.
        order = np.random.default_rng(index).permutation(list(seconds))
        for length in map(int, order):
            measured = _seconds_per_round(target, drafter, prompt, settings, length)
            if measured is not None:
                seconds[length].append(measured)
    if not all(seconds.values()):
        raise ValueError(
            "No prompt gave a round at every length: every answer ended with the prefill. Give prompts with longer "
            "answers, or raise the number of new tokens."
        )
    return RoundTimes(tuple(statistics.median(seconds[length]) for length in lengths), statistics.median(seconds[1]))


def _seconds_per_round(target, drafter, prompt: Prompt, settings: DecodeSettings, length: int) -> float | None:
    """Decode time per round, or None if no round ran; length 1 is plain decoding."""
    policy = None if length == 1 else Static(length)
    run = timed_decode(target, prompt.input_ids, settings, None if length == 1 else drafter, policy)
    return run.seconds / run.num_rounds if run.num_rounds else None


def fit_costs(seconds: tuple[float, ...]) -> CostFit:
    """Fits the times of w = 2, 3, ..; a curve that falls anywhere is replaced by the closest one that does not."""
    lengths, measured = np.arange(2, len(seconds) + 2), np.array(seconds)
    coefficients = np.polyfit(lengths, measured, min(2, len(seconds) - 1))
    fitted = np.polyval(coefficients, lengths)
    notes = []
    if (np.diff(fitted) < 0).any() or fitted.min() <= 0:
        fitted = IsotonicRegression().fit_transform(lengths, measured)
        notes.append(
            "The quadratic fit of the round time falls with the length; the closest non-decreasing curve is used."
        )
    residual, spread = ((measured - fitted) ** 2).sum(), ((measured - measured.mean()) ** 2).sum()
    fixed = float(np.clip(coefficients[-1], 0.0, MOST_FIXED_SHARE * fitted.min()))
    r2 = float(1 - residual / spread) if spread > 0 else 1.0
    return CostFit(tuple(map(float, fitted)), fixed, r2, tuple(notes))


@torch.no_grad()
def measure_stage0_row(target: PreTrainedModel, drafter: Drafter, prompt: Prompt) -> float:
    """s: seconds that one more row adds to Stage 0; 0 if the slope is lost in noise."""
    text = text_model(target)
    forward = SplitForward(text, target.get_output_embeddings(), drafter.target_layer_ids)
    cache = HybridCache(target.config)
    target(prompt.input_ids, cache=cache, logits_to_keep=1)
    start = prompt.input_ids.shape[1]
    most = drafter.num_draft_tokens + 1
    tokens = prompt.input_ids[:, -1:].expand(1, most)
    positions = torch.arange(start, start + most, device=tokens.device)[None]

    def run(length: int) -> None:
        cache.begin_block(length)
        forward.stage0(tokens[:, :length], positions[:, :length], cache)
        cache.discard_block()

    return _slope({length: (lambda length=length: run(length)) for length in range(2, most + 1)}, target.device)


@torch.no_grad()
def measure_expert(target: PreTrainedModel, num_rows: int) -> float:
    """eta: seconds that one more distinct expert adds to one MoE layer, at a fixed number of assignments.

    All MoE layers run in turn, so that no layer finds its weights in a cache. 0 for a dense target.
    """
    layers = [layer.mlp for layer in text_model(target).layers if has_router(layer.mlp)]
    if not layers:
        return 0.0
    config = target.config.get_text_config(decoder=True)
    top_k, most = config.num_experts_per_tok, min(config.num_experts, num_rows * config.num_experts_per_tok)
    rows = torch.randn(num_rows, config.hidden_size, dtype=target.dtype, device=target.device)
    weights = torch.full((num_rows, top_k), 1 / top_k, dtype=target.dtype, device=target.device)
    order = torch.arange(num_rows * top_k, device=target.device).view(num_rows, top_k)

    def run(num_distinct: int) -> None:
        for mlp in layers:
            mlp.experts(rows, order % num_distinct, weights)

    counts = sorted({top_k + (most - top_k) * step // 5 for step in range(6)})
    runs = {count: (lambda count=count: run(count)) for count in counts}
    return _slope(runs, target.device) / len(layers)


def _slope(runs: dict[int, Callable[[], None]], device: torch.device) -> float:
    """Least-squares slope of the median time over the keys, interleaved; at least 0."""
    seconds: dict[int, list[float]] = {key: [] for key in runs}
    for repeat in range(REPEATS + 1):
        for key, run in runs.items():
            _synchronize(device)
            start = time.perf_counter()
            run()
            _synchronize(device)
            # The first time warms up.
            if repeat:
                seconds[key].append(time.perf_counter() - start)
    if len(runs) < 2:
        return 0.0
    medians = [statistics.median(times) for times in seconds.values()]
    return max(0.0, float(np.polyfit(list(runs), medians, 1)[0]))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
