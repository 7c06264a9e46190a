"""Which models are supported, where their parts are, and that swapping GDN layers can be undone."""

from types import MethodType

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5MoeModel,
)

from hf_hybridspec.modeling.gated_delta_net import BlockGatedDeltaNet
from hf_hybridspec.modeling.target import (
    SUPPORTED_FAMILIES,
    check_supported,
    gated_delta_nets,
    input_embedding,
    restore_gated_delta_nets,
    split_obstacle,
    swap_gated_delta_nets,
    text_config,
    text_model,
)
from tests.support import HIDDEN_SIZE, VOCAB_SIZE, random_target

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
UNSUPPORTED = {
    "mamba2": lambda: Mamba2ForCausalLM(
        Mamba2Config(vocab_size=32, hidden_size=16, num_heads=4, head_dim=8, num_hidden_layers=1, state_size=8)
    ),
    "lfm2": lambda: Lfm2ForCausalLM(Lfm2Config(**SMALL, layer_types=["conv"])),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SMALL)),
}


def test_parts(pair):
    assert isinstance(input_embedding(pair.stock), nn.Embedding)
    assert input_embedding(pair.stock).weight.shape == (VOCAB_SIZE, HIDDEN_SIZE)
    assert len(text_model(pair.stock).layers) == text_config(pair.stock).num_hidden_layers == 4
    assert text_config(pair.stock).model_type in SUPPORTED_FAMILIES
    assert split_obstacle(pair.stock) is None


def test_every_class_is_supported_swapped_and_restored(pair):
    target = random_target(pair.kind)
    check_supported(target)
    classes = [type(module) for _, module in gated_delta_nets(target)]
    names, state = [name for name, _ in target.named_modules()], target.state_dict()
    swap_gated_delta_nets(target)
    swap_gated_delta_nets(target)
    swapped = [module for _, module in gated_delta_nets(target)]
    assert len(swapped) == 3 and all(isinstance(module, BlockGatedDeltaNet) for module in swapped)
    assert [type(module).__name__ for module in swapped] == [host.__name__ for host in classes]
    assert [name for name, _ in target.named_modules()] == names and target.state_dict().keys() == state.keys()
    restore_gated_delta_nets(target)
    restore_gated_delta_nets(target)
    assert [type(module) for _, module in gated_delta_nets(target)] == classes


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_other_models_are_refused_and_the_supported_ones_named(name):
    with pytest.raises(ValueError) as refusal:
        check_supported(UNSUPPORTED[name]())
    assert repr(name) in str(refusal.value)
    for family in SUPPORTED_FAMILIES.values():
        assert family in str(refusal.value)


def test_what_does_not_generate_is_refused(target_pairs):
    for given in (nn.Linear(2, 2), text_model(target_pairs["qwen3_5_moe"].stock), Qwen3_5MoeModel):
        with pytest.raises(ValueError, match="takes a generating transformers model, got"):
            check_supported(given)


def test_a_hub_kernel_in_place_of_the_forward_is_refused():
    """It would advance the state in a block."""
    target = random_target("qwen3_next")
    _, module = gated_delta_nets(target)[1]
    module.forward = MethodType(lambda self, hidden_states, **_: hidden_states, module)
    with pytest.raises(ValueError, match=r"layers\.1\.linear_attn was replaced by a hub kernel.*use_kernels=False"):
        check_supported(target)


def test_the_published_configs_map_to_supported_classes(target_pairs):
    """`AutoModelForCausalLM` gives the text class for the text config."""
    for kind in ("qwen3_5_moe", "qwen3_5", "qwen3_next"):
        config = target_pairs[kind].stock.config
        with torch.device("meta"):
            check_supported(AutoModelForCausalLM.from_config(config))
