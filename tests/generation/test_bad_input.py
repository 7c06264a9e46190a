"""Bad input is one clear sentence: what was given, what is allowed, the next step. The next call is right."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

import hf_hybridspec
from hf_hybridspec.modeling.dflash.modeling_dflash import DFlashDrafter
from tests.scenarios import LOOPS, assisted, scripted
from tests.support import drafter_config, random_prompt, random_target


@pytest.fixture
def moe(target_pairs):
    return target_pairs["qwen3_5_moe"]


NEW = {"max_new_tokens": 6}
REFUSED = {
    "empty prompt": (
        {"inputs": torch.empty(1, 0, dtype=torch.long)},
        r"The prompt is empty\. Give at least one token",
    ),
    "empty prompt of a tokenizer": ({"inputs": torch.empty(1, 0)}, r"The prompt is empty\. Give at least one token"),
    "prompt beyond the context": (
        {"inputs": random_prompt(2049)},
        r"The prompt has 2049 tokens, the target's context at most 2048\. Shorten",
    ),
    "batch": ({"inputs": random_prompt(9).repeat(2, 1)}, r"one sequence at a time, got a batch of 2\. Call generate"),
    "several sequences": (
        {"num_return_sequences": 3, "do_sample": True},
        r"num_return_sequences has to be 1 when doing assisted generate, but is 3",
    ),
    "guidance": ({"guidance_scale": 2.0}, r"guidance_scale=2\.0 cannot be combined with an assistant"),
    "no cache": ({"use_cache": False}, r"needs a cache: leave use_cache out or set it to True"),
    "unknown policy": ({"length_policy": "fastest"}, r"Unknown length policy 'fastest'\. Use 'full'"),
    "policy of one row": ({"length_policy": "static:1"}, r"must be at least 2 .*got 1"),
    "policy beyond the block": ({"length_policy": "static:17"}, r"must be in \[2, 16\].*got 17"),
    "unknown path": (
        {"decoding_path": "graph"},
        r"decoding_path must be one of auto, graphs, round, host, got 'graph'",
    ),
    "cache of another kind": ({"cache": object()}, r"cache must be a DynamicCache, a StaticCache or a HybridCache"),
    "offloaded cache": ({"cache_implementation": "offloaded"}, r"'offloaded' cannot be rolled back\. Use 'dynamic'"),
    "draft count of another assistant": ({"num_assistant_tokens": 4}, r"num_assistant_tokens would have no effect"),
    "prompt lookup beside a drafter": ({"prompt_lookup_num_tokens": 4}, r"prompt_lookup_num_tokens would have no"),
    "mixing the drafter in": ({"assistant_ensemble_weight": 0.5}, r"assistant_ensemble_weight mixes the drafter"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("loop", LOOPS)
def test_refused_and_the_next_call_is_right(moe, loop, case):
    wrong, message = REFUSED[case]
    drafter = scripted(moe.reference)
    options = {"inputs": moe.prompt, "decoding_path": loop, "do_sample": False, **NEW, **wrong}
    with pytest.raises((ValueError, TypeError), match=message):
        moe.attached.generate(assistant_model=drafter, **options)
    output = assisted(moe.attached, moe.prompt, drafter.script(moe.reference[0], [3, 0, 15]), loop, max_new_tokens=20)
    assert torch.equal(output, moe.reference[:, :29])


@pytest.mark.parametrize("loop", LOOPS)
def test_a_static_cache_that_is_one_slot_too_small(moe, loop):
    drafter = scripted(moe.reference)
    cache = StaticCache(config=moe.attached.config, max_cache_len=9 + 6 - 2)
    with pytest.raises(ValueError, match=r"cache has 13 slots; the prompt and 6 new tokens need 14\. Pass a larger"):
        assisted(moe.attached, moe.prompt, drafter, loop, max_new_tokens=6, cache=cache)
    # The same cache serves a call for which it is large enough.
    output = assisted(moe.attached, moe.prompt, drafter, loop, max_new_tokens=5, cache=cache)
    assert torch.equal(output, moe.reference[:, :14])


@pytest.mark.parametrize("loop", LOOPS)
def test_a_cache_of_another_model(target_pairs, loop):
    dense, moe = target_pairs["qwen3_5"], target_pairs["qwen3_5_moe"]
    config = dense.stock.config.__class__(
        **{**dense.stock.config.to_dict(), "num_hidden_layers": 8, "layer_types": None}
    )
    with pytest.raises(ValueError, match=r"The cache does not match the model: it has 8 layers .* the model 4"):
        assisted(moe.attached, moe.prompt, scripted(moe.reference), loop, cache=DynamicCache(config=config), **NEW)


@pytest.mark.parametrize(
    "difference",
    [{"hidden_size": 64}, {"vocab_size": 256}, {"num_target_layers": 6, "target_layer_ids": [0, 4]}],
    ids=["hidden_size", "vocab_size", "layers"],
)
@pytest.mark.parametrize("given_to", ["attach", "generate"])
def test_a_drafter_of_another_target(moe, difference, given_to):
    torch.manual_seed(0)
    drafter = DFlashDrafter(drafter_config(**difference))
    name = {"num_target_layers": "num_hidden_layers"}.get(next(iter(difference)), next(iter(difference)))
    model = random_target() if given_to == "attach" else moe.attached
    with pytest.raises(ValueError, match=rf"does not fit the target .*{name} is .*Use the drafter that was trained"):
        if given_to == "attach":
            hf_hybridspec.attach(model, drafter=drafter)
        else:
            model.generate(moe.prompt, assistant_model=drafter, do_sample=False, **NEW)
    if given_to == "attach":
        # Nothing was changed: the model is stock still.
        assert type(model).__mro__[1] is not hf_hybridspec.generation.mixin.HybridSpecGenerationMixin
        assert not hasattr(model, "_hybridspec")


@pytest.mark.parametrize(
    "options", [{"length_policy": "full"}, {"decoding_path": "round"}, {"speculation_type": "dflash"}]
)
def test_options_of_drafting_without_a_drafter(moe, options):
    with pytest.raises(ValueError, match=rf"{next(iter(options))}.* would have no effect.*AutoDrafter"):
        moe.attached.generate(moe.prompt, do_sample=False, **NEW, **options)


def test_options_of_drafting_where_beams_are_searched(moe):
    with pytest.raises(ValueError, match="length_policy would have no effect"):
        moe.attached.generate(
            moe.prompt, assistant_model=scripted(moe.reference), num_beams=2, length_policy="full", **NEW
        )
