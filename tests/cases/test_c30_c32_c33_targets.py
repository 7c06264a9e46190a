"""C30, C32, C33: half-precision targets, adapted targets, and prompts on which drafting does not pay.

C33 on a GPU (never below 0.95 of plain decoding's speed) belongs to the captured round and its policies; here the
shortest static policy is held to as many target forwards as plain decoding, and two rows in each.
"""

import pytest
import torch
from peft import LoraConfig, get_peft_model

import hf_hybridspec
from hf_hybridspec.generation.length_policies import Static
from hf_hybridspec.modeling.drafter_layers import DrafterRMSNorm
from tests.scenarios import LOOPS, assisted, plain, scripted
from tests.support import random_prompt, random_target


@pytest.mark.parametrize("target_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("loop", LOOPS)
def test_c30_the_drafter_computes_in_bf16_beside_any_target(loop, target_dtype):
    model = hf_hybridspec.attach(random_target().to(target_dtype))
    prompt = random_prompt(9, seed=1)
    expected = plain(random_target().to(target_dtype), prompt, max_new_tokens=24)
    drafter = scripted(expected, [15, 3, 0]).to(torch.bfloat16)
    seen = []
    for module in drafter.modules():
        if isinstance(module, DrafterRMSNorm):
            module.register_forward_hook(lambda norm, args, output: seen.append(output.dtype))
    output = assisted(model, prompt, drafter, loop, max_new_tokens=24, return_dict_in_generate=True)
    assert seen and set(seen) == {torch.bfloat16}
    # The target's own precision is left alone.
    assert output.cache.layers[-1].keys.dtype == target_dtype
    assert output.statistics.acceptance_length > 2
    # In half precision a near tie may flip; where both run in fp32 it does not.
    same = int((output.sequences == expected).long().cumprod(-1).sum())
    assert same == expected.shape[1] if target_dtype == torch.float32 else same > 9


def adapted_target(seed: int = 0):
    torch.manual_seed(seed)
    config = LoraConfig(
        r=4, target_modules=["in_proj_qkv", "in_proj_b", "q_proj", "o_proj", "gate_proj"], init_lora_weights=False
    )
    return get_peft_model(random_target(), config).eval()


@pytest.mark.parametrize("loop", LOOPS)
def test_c32_an_adapter_is_followed_exactly(target_pairs, loop):
    pair = target_pairs["qwen3_5_moe"]
    inputs = {"input_ids": pair.prompt}
    expected = plain(adapted_target(), inputs, max_new_tokens=30)
    assert not torch.equal(expected, pair.reference[:, :39])
    model = hf_hybridspec.attach(adapted_target())
    drafter = scripted(expected)
    assert torch.equal(assisted(model, inputs, drafter, loop, max_new_tokens=30), expected)
    with model.disable_adapter():
        drafter.script(pair.reference[0], [3, 0, 15])
        assert torch.equal(assisted(model, inputs, drafter, loop, max_new_tokens=30), pair.reference[:, :39])


@pytest.mark.parametrize("loop", LOOPS)
def test_c33_where_nothing_is_accepted_a_round_is_one_forward_of_two_rows(target_pairs, loop):
    pair = target_pairs["qwen3_5_moe"]
    rows = []
    handle = pair.attached.model.layers[1].register_forward_pre_hook(
        lambda module, args, kwargs: rows.append((args[0] if args else kwargs["hidden_states"]).shape[1]),
        with_kwargs=True,
    )
    try:
        output = assisted(
            pair.attached, pair.prompt, scripted(pair.reference, [0]), loop, max_new_tokens=30, length_policy=Static(2)
        )
    finally:
        handle.remove()
    assert torch.equal(output, pair.reference[:, :39])
    # The prefill and 29 rounds: as many forwards as plain decoding takes for 30 tokens.
    assert len(rows) == 30
    assert max(rows[1:]) == 2
    assert pair.attached.generation_statistics.mean_verification_length == 2
