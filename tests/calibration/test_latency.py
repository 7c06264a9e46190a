"""What calibration times: the rounds that the pair will run, captured or eager, and the kernels behind them."""

from types import SimpleNamespace

import pytest
import torch

import hf_hybridspec
from hf_hybridspec import AutoDrafter, HybridSpecModelForCausalLM
from hf_hybridspec.bundled import resolve
from hf_hybridspec.calibration import calibrate as calibration
from hf_hybridspec.calibration import fused_latency, latency
from hf_hybridspec.calibration.calibrate import CalibrationPlan, calibrate
from hf_hybridspec.calibration.capture import Prompt
from hf_hybridspec.calibration.timed_decode import TimedDecode
from hf_hybridspec.generation import round_engine
from hf_hybridspec.generation.pair_identity import pair_identity
from hf_hybridspec.generation.round_engine import eager_device_rounds
from hf_hybridspec.modeling.dflash import DFlashDrafter
from hf_hybridspec.modeling.fused_forward import FusedForward
from tests.support import drafter_config, random_prompt, random_target


@pytest.fixture
def pair():
    """An attached target, a drafter of a family that can be captured, and a prompt."""
    torch.manual_seed(3)
    return hf_hybridspec.attach(random_target()), DFlashDrafter(drafter_config()).eval(), random_prompt(9, seed=1)


@pytest.fixture
def decoded(monkeypatch) -> list[tuple[str, str]]:
    """Policy and path of every decode that is timed."""
    runs, original = [], latency.timed_decode

    def watched(target, *args, **options):
        run = original(target, *args, **options)
        plain = ("plain", options.get("decoding_path", "auto"))
        runs.append(plain if run.statistics is None else (run.statistics.policy, run.statistics.path))
        return run

    monkeypatch.setattr(latency, "timed_decode", watched)
    return runs


def profile_of(pair, folder):
    target, drafter, prompt = pair
    plan = CalibrationPlan([Prompt("p", "kind", prompt)], "one", 30, 1, 5, str(folder / "rounds.jsonl"))
    return calibrate(target, drafter, plan)


def refuse(*args):
    raise AssertionError("this is not what the rounds of the pair run")


def test_captured_rounds_are_timed_where_the_pair_runs_them(pair, decoded, monkeypatch, tmp_path):
    monkeypatch.setattr(latency, "slope", lambda runs, device: 0.0)
    monkeypatch.setattr(fused_latency, "slope", lambda runs, device: len([run() for run in runs.values()]) and 0.01)
    for name in ("measure_stage0_row", "measure_expert"):
        monkeypatch.setattr(calibration, name, refuse)
    with eager_device_rounds():
        profile = profile_of(pair, tmp_path)
    assert profile.pair.engine == "graphs"
    assert {path for _, path in decoded} == {"graphs"}
    assert {policy for policy, _ in decoded} == {"plain", *(f"static:{length}" for length in range(2, 17))}
    assert profile.costs.stage0_row == 0.01 and 0 < profile.costs.expert < 0.01
    # Another loop's costs do not hold for the pair.
    with pytest.raises(ValueError, match="its engine is graphs, this call's is eager"):
        profile.check_pair(pair_identity(*pair[:2]))


def test_eager_rounds_are_timed_on_a_cpu(pair, decoded, monkeypatch, tmp_path):
    for name in ("fused_stage0_row", "expert_seconds"):
        monkeypatch.setattr(calibration, name, refuse)
    profile = profile_of(pair, tmp_path)
    assert profile.pair.engine == "eager"
    assert {path for policy, path in decoded if policy != "plain"} == {"round"}
    assert {path for policy, path in decoded if policy == "plain"} == {"auto"}


def test_a_drafter_that_cannot_be_captured_is_calibrated_in_eager_rounds(pair, decoded, monkeypatch, tmp_path):
    monkeypatch.setattr(round_engine, "fused_drafter_obstacle", lambda drafter: "its Markov head is not fused")
    with eager_device_rounds():
        profile = profile_of(pair, tmp_path)
    assert profile.pair.engine == "eager"
    assert {path for policy, path in decoded if policy != "plain"} == {"round"}


def test_no_other_rounds_are_timed_in_place_of_captured_ones(pair, tmp_path):
    target, drafter, prompt = pair
    prompts = [Prompt("p", "kind", prompt)]
    with pytest.raises(ValueError, match="'graphs' cannot serve this call"):
        latency.measure_rounds(target, drafter, prompts, latency.DecodeSettings(10), "graphs")


def test_stage_0_is_timed_at_every_length_and_experts_at_several_counts(pair, monkeypatch):
    keys = []

    def noted(runs, device):
        keys.append(list(runs))
        for run in runs.values():
            run()
        return 1.6

    monkeypatch.setattr(fused_latency, "slope", noted)
    target, _, prompt = pair
    seconds = fused_latency.fused_stage0_row(target, Prompt("p", "kind", prompt), num_rows=6)
    assert seconds == 1.6 and keys[0] == [2, 3, 4, 5, 6]
    forward = FusedForward(target)
    num_layers = len(forward.weights.layers)
    assert fused_latency.expert_seconds(forward, 6) == pytest.approx(1.6 / num_layers)
    top_k = target.config.num_experts_per_tok
    # Equal rows select one row's experts, and more different rows more of them.
    assert keys[1][0] == top_k and keys[1] == sorted(keys[1]) and len(set(keys[1])) == len(keys[1]) == 4


def test_a_measured_round_does_not_pay_for_its_call(monkeypatch):
    """Ten seconds a call on top of a second a round: with fewer rounds at longer lengths they would tilt the fit."""

    def decode(target, input_ids, settings, drafter, policy, **options):
        num_rounds = 12 if policy is None else 24 // policy.length
        statistics = None if policy is None else SimpleNamespace(rounds=num_rounds)
        return TimedDecode(tuple(range(13)), 10.0 + num_rounds, statistics, None if num_rounds < 2 else 1.0)

    monkeypatch.setattr(latency, "timed_decode", decode)
    prompts = [Prompt("p", "kind", torch.zeros(1, 3, dtype=torch.int64))]
    times = latency.measure_rounds(None, SimpleNamespace(num_draft_tokens=15), prompts, None, "eager")
    # A block of 13 rows or more needs one round here, and the call is all that was timed.
    assert times.by_length == (1.0,) * 11 + (11.0,) * 4
    assert times.autoregressive == 1.0


def test_a_dense_target_has_no_experts_to_time():
    target = hf_hybridspec.attach(random_target("qwen3_5"))
    assert fused_latency.expert_seconds(FusedForward(target), 4) == 0.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_captured_rounds_of_the_bundled_pair_are_timed_on_a_gpu(tmp_path):
    target = HybridSpecModelForCausalLM.from_pretrained(resolve("tiny"), dtype=torch.bfloat16).cuda().eval()
    drafter = AutoDrafter.from_pretrained("tiny-dflash", dtype=torch.bfloat16).cuda()
    profile = profile_of((target, drafter, random_prompt(30).cuda()), tmp_path)
    assert profile.pair.engine == "graphs" and min(profile.costs.measured) > 0
    # Microseconds: the eager modules take a hundred times as long for a row or an expert.
    assert profile.costs.stage0_row < 2e-5 and profile.costs.expert < 2e-5
