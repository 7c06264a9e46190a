"""C3, C7, C29, C31: what would draft wrongly or not at all is refused before decoding, in words."""

import json

import pytest
import torch
from transformers import (
    JambaConfig,
    JambaForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import hf_hybridspec
from hf_hybridspec import AutoDrafter
from hf_hybridspec.modeling.dflash.modeling_dflash import DFlashDrafter
from tests.scenarios import LOOPS, scripted
from tests.support import drafter_config, random_target

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
UNSUPPORTED = {
    "mamba2": lambda: Mamba2ForCausalLM(
        Mamba2Config(**SMALL, num_heads=4, head_dim=16, n_groups=1, state_size=8, expand=2)
    ),
    "lfm2": lambda: Lfm2ForCausalLM(
        Lfm2Config(**SMALL, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1)
    ),
    "jamba": lambda: JambaForCausalLM(
        JambaConfig(
            **SMALL, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, use_mamba_kernels=False
        )
    ),
    "qwen3": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SMALL, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    ),
}


@pytest.mark.parametrize("model_type", UNSUPPORTED)
def test_c03_an_unsupported_hybrid_is_refused_at_attach(model_type):
    model = UNSUPPORTED[model_type]()
    host_class = type(model)
    with pytest.raises(
        ValueError, match=rf"does not support the model type '{model_type}'.*Supported: Qwen3-Next; Qw"
    ):
        hf_hybridspec.attach(model)
    # Nothing was changed.
    assert type(model) is host_class and not hasattr(model, "_hybridspec")


@pytest.mark.parametrize("option", [{"length_policy": "static:4"}, {"decoding_path": "round"}])
def test_c07_options_without_a_drafter_are_an_error(target_pairs, option):
    pair = target_pairs["qwen3_5_moe"]
    with pytest.raises(ValueError, match="would have no effect: no drafter drafts in this call"):
        pair.attached.generate(pair.prompt, max_new_tokens=4, do_sample=False, **option)


def test_c07_the_hosts_own_flag_without_a_drafter_is_an_error(target_pairs):
    pair = target_pairs["qwen3_5_moe"]
    with pytest.raises(ValueError, match="speculation_type='dflash' would have no effect without a drafter"):
        pair.attached.generate(pair.prompt, max_new_tokens=4, do_sample=False, speculation_type="dflash")


@pytest.mark.parametrize("loop", LOOPS)
def test_c07_where_a_drafter_is_given_statistics_show_its_rounds(target_pairs, loop):
    pair = target_pairs["qwen3_5_moe"]
    drafter = scripted(pair.reference, [15])
    output = pair.attached.generate(
        pair.prompt,
        assistant_model=drafter,
        decoding_path=loop,
        length_policy="full",
        max_new_tokens=33,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert (output.statistics.path, output.statistics.rounds) == (loop, len(drafter.proposals)) == (loop, 2)
    assert output.statistics.acceptance_length == 16


def published(**changes) -> dict:
    """A config as z-lab publishes it; `dflash` changes the nested part."""
    nested = {"mask_token_id": 127, "target_layer_ids": [0, 2], "block_size": 12}
    nested.update(changes.pop("dflash", {}))
    raw = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 128,
        "num_target_layers": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "rope_theta": 10000000,
        "dflash_config": nested,
        **changes,
    }
    return {key: value for key, value in raw.items() if value is not None}


@pytest.fixture
def load(tmp_path):
    """Saves a drafter under a published config and loads it again."""

    def load_drafter(raw: dict):
        raw["dflash_config"] = {key: value for key, value in raw["dflash_config"].items() if value is not None}
        torch.manual_seed(0)
        DFlashDrafter(drafter_config(block_size=12)).save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return AutoDrafter.from_pretrained(tmp_path)

    return load_drafter


def test_c29_block_size_is_read_from_both_places(load):
    # The fault: a default of 16 wherever the other place was meant.
    assert load(published()).block_size == 12
    assert load(published(block_size=12, dflash={"block_size": None})).block_size == 12


def test_c29_rope_is_read_from_both_places(load):
    old = load(published(rope_scaling={"rope_type": "linear", "factor": 4.0}))
    new = load(
        published(rope_theta=None, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000000})
    )
    assert old.config.rope_parameters == new.config.rope_parameters
    assert old.config.rope_parameters["factor"] == 4.0


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"block_size": 8}, "block_size = 8 and dflash_config.block_size = 12"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 10000}},
            "rope_theta = 10000000 and rope_parameters.rope_theta = 10000",
        ),
    ],
)
def test_c29_a_conflict_is_refused(load, changes, message):
    with pytest.raises(ValueError, match=f"conflicting values {message}"):
        load(published(**changes))


@pytest.mark.parametrize(
    "difference, named",
    [
        ({"hidden_size": 48}, "hidden_size is 32, the drafter expects 48"),
        ({"vocab_size": 160}, "vocab_size is 128, the drafter expects 160"),
        ({"num_target_layers": 40}, "num_hidden_layers is 4, the drafter expects 40"),
        ({"num_target_layers": None, "target_layer_ids": [1, 20]}, r"taps \[20\] must be at most 2"),
    ],
)
def test_c31_a_drafter_of_another_target_is_refused_naming_the_mismatch(target_pairs, difference, named):
    pair = target_pairs["qwen3_5_moe"]
    drafter = DFlashDrafter(drafter_config(**difference))
    forwards = []
    handle = pair.attached.register_forward_pre_hook(lambda *arguments: forwards.append(1))
    try:
        with pytest.raises(ValueError, match=named):
            pair.attached.generate(pair.prompt, assistant_model=drafter, max_new_tokens=4, do_sample=False)
    finally:
        handle.remove()
    assert not forwards
    with pytest.raises(ValueError, match=named):
        hf_hybridspec.attach(random_target(), drafter=drafter)
