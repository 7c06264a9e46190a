"""Calibration from captured rounds and measured latencies to a profile (HybridSpec, appendix A.2)."""

from dataclasses import dataclass

import torch
import transformers
from transformers import PreTrainedModel

from ..generation.pair_identity import pair_identity
from ..modeling.drafter import Drafter
from ..modeling.fused_forward import FusedForward
from ..modeling.sparse_moe import has_router
from ..modeling.target import input_embedding, text_config, text_model
from .acceptance_model import cross_validated, fit_acceptance, predict_prefix
from .capture import Prompt, capture
from .fused_latency import expert_seconds, fused_stage0_row
from .latency import RoundTimes, fit_costs, measure_expert, measure_rounds, measure_stage0_row
from .profile import AcceptanceModel, CalibrationProfile, CostModel, FitQuality, PairIdentity
from .prompts import prompts_hash
from .rate import best_static_length, dinkelbach_rate
from .rounds import CaptureSettings, RoundArrays, RoundFile
from .routing import fit_routing
from .temperatures import fit_temperatures
from .timed_decode import DecodeSettings

# Of a timed answer, by engine (`PairIdentity.engine`): captured rounds are cheap, and few of them say little.
TIMED_TOKENS = {"eager": 24, "graphs": 96}


@dataclass(frozen=True)
class CalibrationPlan:
    """What to measure, and how much of it.

    Attributes:
        prompts, prompts_name: what is captured, and where it came from.
        max_new_tokens: of a captured answer.
        timed_prompts: how many of the prompts are decoded at every fixed length.
        timed_tokens: of a timed answer; None: `TIMED_TOKENS`.
        rounds_path: file of captured rounds; an interrupted calibration continues from it.
    """

    prompts: list[Prompt]
    prompts_name: str
    max_new_tokens: int
    timed_prompts: int
    timed_tokens: int | None
    rounds_path: str


@dataclass(frozen=True)
class PromptSet:
    """Where calibration prompts came from, and the hash of each."""

    name: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class MeasuredCosts:
    """The cost model, R^2 of its fit, and the fallbacks taken."""

    model: CostModel
    r2: float
    notes: tuple[str, ...]


def calibrate(target: PreTrainedModel, drafter: Drafter, plan: CalibrationPlan) -> CalibrationProfile:
    """Captures rounds, measures latencies and fits everything. `drafter` must be bound or fit the target.

    Raises:
        ValueError: no prompt gave a whole round, or the rounds file belongs to another pair.
    """
    drafter.bind(input_embedding(target), target.get_output_embeddings(), target.config)
    pair = pair_identity(target, drafter)
    file = RoundFile(plan.rounds_path, CaptureSettings(pair, plan.max_new_tokens))
    rounds = RoundArrays.of(capture(target, drafter, plan.prompts, plan.max_new_tokens, file))
    costs = measure_costs(target, drafter, plan, pair.engine)
    is_sparse = any(has_router(layer.mlp) for layer in text_model(target).layers)
    source = PromptSet(plan.prompts_name, tuple(prompt.key for prompt in plan.prompts))
    return assemble(rounds, costs, pair, source, text_config(target).num_experts_per_tok if is_sparse else 0)


def measure_costs(target: PreTrainedModel, drafter: Drafter, plan: CalibrationPlan, engine: str) -> MeasuredCosts:
    """Everything that is timed, on the rounds that `engine` names: captured ones (`graphs`) or eager ones."""
    timed, num_rows = spread(plan.prompts, plan.timed_prompts), drafter.num_draft_tokens + 1
    timed_tokens = plan.timed_tokens or TIMED_TOKENS[engine]
    times = measure_rounds(target, drafter, timed, DecodeSettings(timed_tokens), engine)
    if engine == "graphs":
        stage0_row = fused_stage0_row(target, timed[0], num_rows)
        expert = expert_seconds(FusedForward(target), num_rows)
    else:
        stage0_row, expert = measure_stage0_row(target, drafter, timed[0]), measure_expert(target, num_rows)
    return modelled(times, stage0_row, expert)


def modelled(times: RoundTimes, stage0_row: float, expert: float) -> MeasuredCosts:
    """The cost model of measured times: `stage0_row` is s and `expert` eta, in seconds."""
    fit = fit_costs(times.by_length)
    model = CostModel(times.by_length, fit.fitted, fit.fixed, stage0_row, expert, times.autoregressive)
    return MeasuredCosts(model, fit.r2, fit.notes)


def assemble(
    rounds: RoundArrays, costs: MeasuredCosts, pair: PairIdentity, source: PromptSet, top_k: int
) -> CalibrationProfile:
    """The profile of captured rounds and measured costs; `top_k` experts a row, 0 without an MoE."""
    acceptance = fit_acceptance(rounds)
    model = AcceptanceModel(
        acceptance.model.confidence_knots,
        acceptance.model.acceptance_knots,
        acceptance.model.weights,
        fit_temperatures(rounds),
    )
    quality = cross_validated(rounds)
    routing = fit_routing(rounds, top_k)
    notes = [*acceptance.notes, *costs.notes]
    if not quality.held_out:
        notes.append("With one prompt, fit quality is measured on the rounds of the fit.")
    return CalibrationProfile(
        pair=pair,
        acceptance=model,
        costs=costs.model,
        routing=routing.tables,
        rho=dinkelbach_rate(predict_prefix(model, rounds), costs.model),
        static_length=best_static_length(rounds.num_accepted, costs.model),
        quality=FitQuality(
            quality.reliability,
            quality.calibration_error,
            quality.brier_score,
            quality.held_out,
            costs.r2,
            routing.correlation,
        ),
        prompts=source.name,
        prompts_hash=prompts_hash(source.keys),
        prompt_keys=source.keys,
        num_rounds=rounds.num_rounds,
        software=f"torch {torch.__version__}, transformers {transformers.__version__}",
        notes=tuple(notes),
    )


def spread(prompts: list[Prompt], count: int) -> list[Prompt]:
    """`count` prompts evenly spaced over the list, so that every kind has a share."""
    step = max(1.0, len(prompts) / count)
    return [prompts[int(index * step)] for index in range(min(count, len(prompts)))]
