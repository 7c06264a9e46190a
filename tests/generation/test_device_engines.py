"""Buffers over many calls: who uses them, when they are made anew, and what a failed call leaves behind."""

import copy

import pytest
import torch

import hf_hybridspec
from hf_hybridspec import HybridCache
from hf_hybridspec.generation import round_engine
from hf_hybridspec.generation.device_round import Switch
from hf_hybridspec.generation.round_engine import eager_device_rounds
from hf_hybridspec.generation.round_graphs import EagerRounds
from hf_hybridspec.kernels.compile_ahead_triton import compiling_ahead
from hf_hybridspec.kernels.dispatch import use_kernels
from hf_hybridspec.modeling.dflash import DFlashDrafter
from tests.generation.device_helpers import engines_of, expected_of, real_drafter, unpadded
from tests.scenarios import plain
from tests.support import drafter_config, random_prompt, random_target


@pytest.fixture(autouse=True)
def device_rounds():
    with eager_device_rounds():
        yield


def test_one_engine_serves_many_calls(target_pairs):
    """Policies, sampling and lengths change; buffers and steps stay."""
    pair = target_pairs["qwen3_next"]
    drafter = real_drafter()
    engines_of(pair.attached).clear()
    for options in ({}, {"length_policy": "static:4"}, {"do_sample": True}, {"length_policy": "full"}):
        pair.attached.generate(
            pair.prompt, assistant_model=drafter, decoding_path="graphs", max_new_tokens=20,
            **{"do_sample": False, **options},
        )  # fmt: skip
    assert len(engines_of(pair.attached)) == 1
    engine = engines_of(pair.attached)[0]
    output = pair.attached.generate(
        pair.prompt, assistant_model=drafter, decoding_path="graphs", max_new_tokens=20, do_sample=False
    )
    assert engines_of(pair.attached) == [engine]
    assert torch.equal(output, expected_of(pair, 20))


def test_a_longer_sequence_gets_larger_buffers(target_pairs, monkeypatch):
    pair = target_pairs["qwen3_5"]
    monkeypatch.setattr(round_engine, "SMALLEST_CAPACITY", 32)
    engines_of(pair.attached).clear()
    for num_new, capacity in ((4, 32), (30, 64), (60, 128), (5, 128)):
        output = pair.attached.generate(pair.prompt, max_new_tokens=num_new, do_sample=False, decoding_path="graphs")
        assert torch.equal(output, expected_of(pair, num_new))
        assert [engine.capacity for engine in engines_of(pair.attached)] == [capacity]
    engines_of(pair.attached).clear()


def test_two_models_and_two_drafters_take_turns(target_pairs):
    pairs = [target_pairs[kind] for kind in ("qwen3_5_moe", "qwen3_5")]
    drafters = [real_drafter(), real_drafter("dspark")]
    for _ in range(2):
        for pair in pairs:
            for drafter in drafters:
                output = pair.attached.generate(
                    pair.prompt, assistant_model=drafter, decoding_path="graphs", max_new_tokens=12, do_sample=False
                )
                assert torch.equal(output, expected_of(pair, 12))
    assert sum(engine.is_of(drafters[0]) for engine in engines_of(pairs[0].attached)) == 1


class WalkedRounds(EagerRounds):
    """Walks through every step before any runs, as captured rounds do to compile their kernels."""

    num_walked = 0

    def prepare(self, program):
        with use_kernels("triton"), compiling_ahead(torch.device("cpu")):
            for item in program:
                for branch in item.branches if isinstance(item, Switch) else [[item]]:
                    for step in branch:
                        step.run()
                        WalkedRounds.num_walked += 1
        return super().prepare(program)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs Triton only without CUDA")
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe", "qwen3_5"])
def test_steps_that_were_walked_through_run_as_ever(kind, target_pairs, monkeypatch):
    pair = target_pairs[kind]
    monkeypatch.setattr(round_engine, "EagerRounds", WalkedRounds)
    monkeypatch.setattr(WalkedRounds, "num_walked", 0)
    engines_of(pair.attached).clear()
    for drafter in (real_drafter(), real_drafter("dspark")):
        output = pair.attached.generate(
            pair.prompt, assistant_model=drafter, decoding_path="graphs", max_new_tokens=20, do_sample=False
        )
        assert torch.equal(output, expected_of(pair, 20))
    assert WalkedRounds.num_walked > 40
    engines_of(pair.attached).clear()


@pytest.mark.parametrize("part", ["target", "drafter"])
def test_changed_weights_are_noticed(part):
    model = hf_hybridspec.attach(random_target("qwen3_5_moe"))
    stock, drafter, prompt = random_target("qwen3_5_moe"), real_drafter(), random_prompt(9, seed=1)

    def both():
        outputs = [
            model.generate(
                prompt,
                assistant_model=drafter,
                max_new_tokens=15,
                do_sample=False,
                decoding_path=path,
                length_policy="full",
            )
            for path in ("graphs", "round")
        ]
        assert torch.equal(*outputs)
        return outputs[0]

    before = both()
    assert torch.equal(before, stock.generate(prompt, max_new_tokens=15, do_sample=False))
    engine = engines_of(model)[0]
    with torch.no_grad():
        changed = model.model.layers[1].input_layernorm.weight if part == "target" else drafter.norm.weight
        changed.add_(torch.linspace(-1, 1, changed.shape[0]))
    after = both()
    assert engines_of(model) != [engine] and len(engines_of(model)) == 1
    assert torch.equal(after, before) == (part == "drafter")


def test_a_call_within_a_call_leaves_the_buffers_alone(target_pairs):
    """A streamer that asks the same model something: its call runs in the eager loop."""
    pair = target_pairs["qwen3_5_moe"]
    drafter, inner = real_drafter(), []

    class Asking:
        num_puts = 0

        def put(self, tokens):
            # The prompt and the prefill's token come first.
            self.num_puts += 1
            if self.num_puts == 4:
                inner.append(
                    pair.attached.generate(pair.prompt, assistant_model=drafter, max_new_tokens=9, do_sample=False)
                )
                inner.append(pair.attached.generation_statistics)

        def end(self):
            pass

    output = pair.attached.generate(
        pair.prompt, assistant_model=drafter, decoding_path="graphs", max_new_tokens=30, do_sample=False,
        streamer=Asking(),
    )  # fmt: skip
    assert torch.equal(output, expected_of(pair, 30)) and torch.equal(inner[0], expected_of(pair, 9))
    assert inner[1].path == "round" and inner[1].reason == "another call is using the buffers"


def test_a_failure_in_a_round_leaves_a_cache_that_goes_on(target_pairs):
    pair = target_pairs["qwen3_5_moe"]
    cache, drafter = HybridCache(pair.attached.config), real_drafter()
    call = {"assistant_model": drafter, "do_sample": False, "decoding_path": "graphs", "cache": cache}
    first = pair.attached.generate(pair.prompt, max_new_tokens=10, **call)
    prompt = unpadded(torch.cat([first, random_prompt(3, seed=7)], dim=1))

    class Interrupting:
        num_puts = 0

        def put(self, tokens):
            self.num_puts += 1
            if self.num_puts == 5:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pair.attached.generate(**prompt, max_new_tokens=20, streamer=Interrupting(), **call)
    assert cache.committed_length == first.shape[1] - 1
    expected = plain(pair.stock, prompt, max_new_tokens=20)
    assert torch.equal(pair.attached.generate(**prompt, max_new_tokens=20, **call), expected)


def test_a_window_with_a_gap_is_left_to_the_eager_loop(target_pairs):
    """A plain turn between drafted ones leaves positions that the drafter has not seen."""
    pair = target_pairs["qwen3_5"]
    torch.manual_seed(3)
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 30}
    drafter, cache = DFlashDrafter(drafter_config(**layers)).eval(), HybridCache(pair.attached.config)
    prompt, paths = pair.prompt, []
    for turn, drafts in enumerate((True, False, True)):
        inputs = unpadded(prompt)
        drafting = {"assistant_model": drafter} if drafts else {}
        output = pair.attached.generate(**inputs, max_new_tokens=8, do_sample=False, cache=cache, **drafting)
        assert torch.equal(output, plain(pair.stock, inputs, max_new_tokens=8))
        paths.append(pair.attached.generation_statistics.path)
        prompt = torch.cat([output, random_prompt(3, seed=turn)], dim=1)
    assert paths == ["graphs", "graphs", "round"]
    assert "have a gap" in pair.attached.generation_statistics.reason


def test_inference_mode_and_no_grad_share_buffers(target_pairs):
    pair = target_pairs["qwen3_5"]
    drafter = real_drafter()
    engines_of(pair.attached).clear()
    for mode in (torch.inference_mode(), torch.no_grad(), torch.inference_mode()):
        with mode:
            output = pair.attached.generate(
                pair.prompt, assistant_model=drafter, decoding_path="graphs", max_new_tokens=9, do_sample=False
            )
        assert torch.equal(output, expected_of(pair, 9))
    assert len(engines_of(pair.attached)) == 1


def test_a_copy_of_the_model_has_buffers_of_its_own(target_pairs):
    pair = target_pairs["qwen3_5"]
    pair.attached.generate(pair.prompt, max_new_tokens=4, do_sample=False, decoding_path="graphs")
    twin = copy.deepcopy(pair.attached)
    assert engines_of(pair.attached) and not engines_of(twin)
    output = twin.generate(pair.prompt, max_new_tokens=9, do_sample=False, decoding_path="graphs")
    assert torch.equal(output, expected_of(pair, 9))
