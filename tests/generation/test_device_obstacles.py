"""What keeps a call off fixed buffers is named, and the eager loop takes over."""

import pytest
import torch

import hf_hybridspec
from hf_hybridspec import LengthPolicy
from hf_hybridspec.generation import round_engine
from hf_hybridspec.generation.device_call import DeviceCall
from hf_hybridspec.generation.round_engine import RoundEngine, eager_device_rounds
from tests.generation.device_helpers import PROMPT_LENGTH, engines_of, real_drafter
from tests.generation.host_drafter import host_drafted_device_rounds
from tests.scenarios import scripted
from tests.support import random_prompt, random_target


@pytest.fixture(autouse=True)
def device_rounds():
    with eager_device_rounds():
        yield


class Fixed(LengthPolicy):
    name = "fixed"

    def select(self, draft):
        return 4


OBSTACLES = {
    "padding": (
        lambda pair: {
            "inputs": torch.cat([torch.zeros(1, 2, dtype=torch.long), pair.prompt], dim=1),
            "attention_mask": torch.tensor([[0, 0, *[1] * PROMPT_LENGTH]]),
        },
        "the prompt is padded",
    ),
    "a policy of one's own": (
        lambda pair: {"length_policy": Fixed()},
        "the length policy 'fixed' decides on the host",
    ),
    "scores": (lambda pair: {"return_dict_in_generate": True, "output_scores": True}, "scores or logits are"),
    "a processor": (lambda pair: {"repetition_penalty": 1.3}, "RepetitionPenaltyLogitsProcessor works on"),
    "many stop tokens": (lambda pair: {"eos_token_id": list(range(100, 120))}, "there are 20 EOS tokens, at most 16"),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_an_obstacle_is_named_and_the_eager_loop_takes_over(target_pairs, name):
    pair = target_pairs["qwen3_5_moe"]
    make, reason = OBSTACLES[name]
    options = {"inputs": pair.prompt, "assistant_model": real_drafter(), "max_new_tokens": 12, "do_sample": False}
    options |= make(pair)
    with pytest.raises(
        ValueError, match=f"decoding_path='graphs' cannot serve this call: {reason}.*'round' or 'host'"
    ):
        pair.attached.generate(decoding_path="graphs", **options)
    pair.attached.generate(**options)
    statistics = pair.attached.generation_statistics
    assert statistics.path == "round" and reason in statistics.reason


def test_a_drafter_with_its_own_methods_is_asked_itself(target_pairs):
    pair = target_pairs["qwen3_5_moe"]
    drafter = scripted(pair.reference)
    pair.attached.generate(pair.prompt, assistant_model=drafter, max_new_tokens=12, do_sample=False)
    statistics = pair.attached.generation_statistics
    assert statistics.path == "round" and statistics.reason == "a ScriptedDrafter may draft in its own way"
    assert drafter.proposals


def test_without_room_the_eager_loop_takes_over_for_good(monkeypatch):
    model, prompt = hf_hybridspec.attach(random_target("qwen3_5")), random_prompt(9, seed=1)
    attempts = []

    def prepare(self, *args):
        attempts.append(1)
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(RoundEngine, "prepare", prepare)
    outputs = []
    for _ in range(2):
        outputs.append(model.generate(prompt, assistant_model=real_drafter(), max_new_tokens=9, do_sample=False))
        assert model.generation_statistics.path == "round"
    assert len(attempts) == 1 and not engines_of(model)
    assert "found no room" in model.generation_statistics.reason
    assert torch.equal(outputs[0], random_target("qwen3_5").generate(prompt, max_new_tokens=9, do_sample=False))


def test_a_cpu_is_no_place_for_graphs(target_pairs, monkeypatch):
    pair = target_pairs["qwen3_5_moe"]
    token = round_engine._allows_eager.set(False)
    try:
        with monkeypatch.context() as patch:
            # A call that does not name graphs must not even look for an engine.
            patch.setattr(DeviceCall, "obstacle", None)
            for assistant in (real_drafter(), None):
                pair.attached.generate(pair.prompt, assistant_model=assistant, max_new_tokens=5, do_sample=False)
        assert pair.attached.generation_statistics.path == "round"
        with pytest.raises(ValueError, match=r"decoding_path='graphs' cannot serve this call: .* cpu device"):
            pair.attached.generate(pair.prompt, max_new_tokens=5, do_sample=False, decoding_path="graphs")
    finally:
        round_engine._allows_eager.reset(token)


def test_the_host_drafter_of_these_tests_is_used(target_pairs):
    """The scripted runs above show nothing unless their drafter was asked from the device round."""
    pair = target_pairs["qwen3_5_moe"]
    drafter = scripted(pair.reference)
    with host_drafted_device_rounds():
        pair.attached.generate(pair.prompt, assistant_model=drafter, max_new_tokens=9, do_sample=False)
    assert pair.attached.generation_statistics.path == "graphs" and drafter.proposals
