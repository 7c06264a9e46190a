"""The cost curve and the two small latencies of the routing correction, measured on this runtime.

HybridSpec, appendix A.2: fixed-length runs give the decode time per round, fitted by a quadratic in the length.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
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
    target: PreTrainedModel, drafter: Drafter, prompts: list[Prompt], settings: DecodeSettings, engine: str
) -> RoundTimes:
    """Decodes the prompts at every fixed length and without the drafter, in turn; medians over the prompts.

    Args:
        engine: of the pair (`PairIdentity.engine`). Where it is `graphs`, no other rounds are timed instead.

    Raises:
        ValueError: no prompt gave a round, or the rounds cannot be captured.
    """
    options = {"decoding_path": "graphs"} if engine == "graphs" else {}
    decode_at = partial(_seconds_per_round, target, drafter, settings, options)
    lengths = range(2, drafter.num_draft_tokens + 2)
    seconds: dict[int, list[float]] = {length: [] for length in (1, *lengths)}
    for length in (1, 2, lengths[-1]):
        decode_at(prompts[0], length)
    for index, prompt in enumerate(tqdm(prompts, desc="cost", unit="prompt")):
        # Another order for each prompt, so that no length always runs on the warmer machine.
        order = np.random.default_rng(index).permutation(list(seconds))
        for length in map(int, order):
            measured = decode_at(prompt, length)
            if measured is not None:
                seconds[length].append(measured)
    if not all(seconds.values()):
        raise ValueError(
            "No prompt gave a round at every length: every answer ended with the prefill. Give prompts with longer "
            "answers, or raise the number of new tokens."
        )
    return RoundTimes(tuple(statistics.median(seconds[length]) for length in lengths), statistics.median(seconds[1]))


def _seconds_per_round(
    target, drafter, settings: DecodeSettings, options: dict, prompt: Prompt, length: int
) -> float | None:
    """Time of a round, or None if no round ran; length 1 is plain decoding.

    What a call pays once would count the more, the fewer rounds its answer takes: the longer a block, the dearer.
    """
    policy = None if length == 1 else Static(length)
    run = timed_decode(target, prompt.input_ids, settings, None if length == 1 else drafter, policy, **options)
    if run.round_seconds is not None:
        return run.round_seconds
    return run.seconds / run.num_rounds if run.num_rounds else None


def fit_costs(seconds: tuple[float, ...]) -> CostFit:
    """Fits the times of w = 2, 3, .. by a quadratic; one that falls anywhere gives way to the best that does not."""
    lengths, measured = np.arange(2.0, len(seconds) + 2), np.array(seconds)
    coefficients = np.polyfit(lengths, measured, min(2, len(seconds) - 1))
    fitted, notes = np.polyval(coefficients, lengths), []
    fixed = coefficients[-1]
    if (np.diff(fitted) < 0).any() or fitted.min() <= 0:
        fitted, fixed = _rising_fit(lengths, measured)
        notes.append(
            "The quadratic fit of the round time falls somewhere, which a longer block cannot explain: the best "
            "quadratic that never falls is used. Calibrate on an idle machine for a better one."
        )
    residual, spread = ((measured - fitted) ** 2).sum(), ((measured - measured.mean()) ** 2).sum()
    fixed = float(np.clip(fixed, 0.0, MOST_FIXED_SHARE * fitted.min()))
    r2 = float(1 - residual / spread) if spread > 0 else 1.0
    return CostFit(tuple(map(float, fitted)), fixed, r2, tuple(notes))


def _rising_fit(lengths: np.ndarray, measured: np.ndarray) -> tuple[np.ndarray, float]:
    """The best of three shapes that rise throughout, and its value at length 0.

    The boundary of all quadratics that do not fall on these lengths: a line, and the parabolas that are level at
    either end.
    """
    shapes = (
        lambda w: w,
        lambda w: w - w**2 / (2 * lengths[-1]),
        lambda w: (w - lengths[0]) ** 2,
    )
    fits = []
    for shape in shapes:
        rise = shape(lengths)
        centered = rise - rise.mean()
        # Measured times may fall throughout: then the fit is level.
        slope = max(0.0, float(centered @ measured / max(centered @ centered, 1e-12)))
        level = float(measured.mean() - slope * rise.mean())
        fitted = level + slope * rise
        fits.append((float(((measured - fitted) ** 2).sum()), fitted, level + slope * shape(np.array(0.0))))
    _, fitted, at_zero = min(fits, key=lambda fit: fit[0])
    return fitted, float(at_zero)


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

    return slope({length: (lambda length=length: run(length)) for length in range(2, most + 1)}, target.device)


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
    return slope(runs, target.device) / len(layers)


def slope(runs: dict[int, Callable[[], None]], device: torch.device) -> float:
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
