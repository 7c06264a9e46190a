"""attach and detach: what changes on a live model, that it can be undone, and what is refused."""

import copy
import json

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import hf_hybridspec
from hf_hybridspec import Static, attach, detach
from hf_hybridspec.generation.mixin import HybridSpecGenerationMixin
from hf_hybridspec.modeling.dflash import DFlashDrafter
from hf_hybridspec.modeling.target import SUPPORTED_FAMILIES, gated_delta_nets
from tests.conftest import character_tokenizer
from tests.modeling.test_target import UNSUPPORTED
from tests.scenarios import assisted, scripted
from tests.support import TARGETS, drafter_config, random_prompt, random_target, scripted_drafter


@pytest.fixture(params=TARGETS)
def target(request):
    return random_target(request.param)


def modules_of(model):
    return [(name, type(module)) for name, module in model.named_modules()]


def test_attach_and_detach_are_idempotent_and_undo_each_other(target):
    before, state_keys = modules_of(target), list(target.state_dict())
    assert attach(target) is target and attach(target) is target
    assert isinstance(target, HybridSpecGenerationMixin) and type(target) is not before[0][1]
    assert type(target).__name__ == before[0][1].__name__ and type(target).__module__ == before[0][1].__module__
    assert list(target.state_dict()) == state_keys
    assert detach(target) is target and detach(target) is target
    assert modules_of(target) == before
    assert not hasattr(target, "_hybridspec") and target._is_stateful
    attach(target)
    assert isinstance(target, HybridSpecGenerationMixin) and len(gated_delta_nets(target)) == 3


def test_stock_refuses_before_attach_and_again_after_detach(target):
    """The gap that the package fills."""
    prompt, options = random_prompt(6), {"prompt_lookup_num_tokens": 2, "max_new_tokens": 3, "do_sample": False}
    for _ in range(2):
        with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
            target.generate(prompt, **options)
        attach(target)
        assert target.generate(prompt, **options).shape == (1, 9)
        detach(target)


def test_a_saved_attached_model_loads_as_stock(pair, tmp_path):
    pair.attached.save_pretrained(tmp_path / "attached")
    pair.stock.save_pretrained(tmp_path / "stock")
    saved, stock = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("attached", "stock"))
    assert saved["architectures"] == [type(pair.stock).__name__] and saved == stock
    reloaded = type(pair.stock).from_pretrained(tmp_path / "attached")
    assert [type(module) for module in reloaded.modules()] == [type(module) for module in pair.stock.modules()]
    for name, tensor in pair.stock.state_dict().items():
        assert torch.equal(reloaded.state_dict()[name], tensor)


def test_from_pretrained_and_attach_in_one(saved_pair):
    model = hf_hybridspec.HybridSpecModelForCausalLM.from_pretrained(saved_pair.target, dtype=torch.float32)
    assert isinstance(model, HybridSpecGenerationMixin)
    stock = AutoModelForCausalLM.from_pretrained(saved_pair.target)
    prompt = random_prompt(5)
    expected = stock.generate(prompt, max_new_tokens=12, do_sample=False)
    output = assisted(model.eval(), prompt, scripted(expected), "round", max_new_tokens=12)
    assert torch.equal(output, expected)


def test_a_deep_copy_works_alone(target_pairs):
    """The copy's GDN layers and statistics are its own; detaching one leaves the other attached."""
    pair = target_pairs["qwen3_5_moe"]
    original = attach(copy.deepcopy(pair.stock))
    duplicate = copy.deepcopy(original)
    expected = pair.reference[:, :40]
    assert torch.equal(assisted(duplicate, pair.prompt, scripted(expected), "round", max_new_tokens=31), expected)
    assert original.generation_statistics is None
    detach(original)
    assert torch.equal(assisted(duplicate, pair.prompt, scripted(expected), "host", max_new_tokens=31), expected)


def test_plain_generate_of_an_attached_model_is_stock(pair):
    expected = pair.reference[:, :40]
    assert torch.equal(pair.attached.generate(pair.prompt, max_new_tokens=31, do_sample=False), expected)
    batch = pair.prompt.expand(2, -1)
    options = {"max_new_tokens": 8, "num_beams": 2, "do_sample": False}
    assert torch.equal(pair.attached.generate(batch, **options), pair.stock.generate(batch, **options))


def test_a_default_drafter_and_policy(target):
    """Attaching again replaces both; a call's own assistant and policy win."""
    prompt = random_prompt(6)
    expected = target.generate(prompt, max_new_tokens=24, do_sample=False)
    attach(target, drafter=scripted(expected, (15,)), length_policy="static:4")
    assert torch.equal(target.generate(prompt, max_new_tokens=24, do_sample=False), expected)
    statistics = target.generation_statistics
    assert statistics.policy == "static:4" and set(statistics.emitted[:-1]) == {4}
    target.generate(prompt, max_new_tokens=24, do_sample=False, length_policy=Static(7))
    assert target.generation_statistics.policy == "static:7"
    own = scripted(expected, (0,))
    target.generate(prompt, max_new_tokens=24, do_sample=False, assistant_model=own)
    assert own.proposals and set(target.generation_statistics.emitted) == {1}
    attach(target)
    assert torch.equal(target.generate(prompt, max_new_tokens=24, do_sample=False), expected)
    assert target.generation_statistics is None


def test_a_tokenizer_bounds_what_the_attached_drafter_proposes(monkeypatch):
    """Also in later calls, which know no tokenizer; the text stays the target's own."""
    target, prompt, proposed = random_target(), random_prompt(6), []
    expected = target.generate(prompt, max_new_tokens=24, do_sample=False)
    torch.manual_seed(1)
    drafter, propose = DFlashDrafter(drafter_config()).eval(), DFlashDrafter.propose

    def record(*arguments):
        draft = propose(*arguments)
        proposed.append(int(draft.tokens.max()))
        return draft

    monkeypatch.setattr(DFlashDrafter, "propose", record)
    largest = []
    for tokenizer in (None, character_tokenizer(40)):
        attach(target, drafter=drafter, tokenizer=tokenizer)
        proposed.clear()
        assert torch.equal(target.generate(prompt, max_new_tokens=24, do_sample=False), expected)
        largest.append(max(proposed))
    assert largest[0] >= 40 > largest[1]
    with pytest.raises(ValueError, match="tokenizer has no effect without a drafter"):
        attach(target, tokenizer=tokenizer)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_models_are_refused_and_stay_as_they_are(name):
    model = UNSUPPORTED[name]()
    before = modules_of(model)
    with pytest.raises(ValueError, match=repr(name)) as refusal:
        attach(model)
    assert all(family in str(refusal.value) for family in SUPPORTED_FAMILIES.values())
    assert modules_of(model) == before
    assert detach(model) is model


def test_drafters_and_policies_that_do_not_fit_leave_the_model_stock(target_pairs):
    target = random_target("qwen3_5_moe")
    before = modules_of(target)
    other_target = DFlashDrafter(drafter_config(hidden_size=64))
    for arguments, message in [
        ((other_target,), "hidden_size is 32, the drafter expects 64"),
        ((target_pairs["qwen3_5"].stock,), "drafter must come from AutoDrafter, got Qwen3_5ForCausalLM"),
        ((nn.Linear(2, 2),), "got Linear"),
        ((scripted_drafter(7), Static(8)), r"in \[2, 7\]"),
        ((None, "statik:6"), "Unknown length policy 'statik:6'"),
    ]:
        with pytest.raises(ValueError, match=message):
            attach(target, *arguments)
        assert modules_of(target) == before
