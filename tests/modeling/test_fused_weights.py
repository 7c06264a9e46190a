"""Re-laid weights: nothing is held twice, and the model stays what it was for everyone else."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

import hf_hybridspec
from hf_hybridspec.modeling.fused_obstacle import fused_target_obstacle
from hf_hybridspec.modeling.fused_weights import fuse_weights, joined
from hf_hybridspec.modeling.target import text_model
from tests.support import TARGETS, random_prompt, random_target

PROMPT = random_prompt(9, seed=1)


def storages(model) -> dict[int, int]:
    """Bytes of every storage that parameters lie in."""
    return {
        parameter.untyped_storage().data_ptr(): parameter.untyped_storage().nbytes()
        for parameter in model.parameters()
    }


@pytest.fixture(params=TARGETS)
def kind(request) -> str:
    return request.param


def test_the_model_holds_the_same_weights_in_fewer_and_no_larger_storages(kind):
    model = random_target(kind)
    before, sizes = {name: value.clone() for name, value in model.state_dict().items()}, storages(model)
    weights = fuse_weights(model)
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    assert len(storages(model)) < len(sizes)
    assert sum(storages(model).values()) == sum(sizes.values())
    # What the kernels read is the model's own memory.
    held = set(storages(model))
    for layer in weights.layers:
        projection = getattr(layer.mixer, "projection", None)
        projection = layer.mixer.producer.projection if projection is None else projection
        assert projection.untyped_storage().data_ptr() in held
    assert weights.head is model.get_output_embeddings().weight


def test_a_change_of_the_model_reaches_the_joined_weights_and_is_noticed():
    model = random_target("qwen3_5_moe")
    weights = fuse_weights(model)
    assert weights.is_current
    mixer = text_model(model).layers[0].linear_attn
    rows = mixer.in_proj_qkv.weight.shape[0]
    with torch.no_grad():
        mixer.in_proj_z.weight.fill_(3.0)
    projection = weights.layers[0].mixer.producer.projection
    assert (projection[rows : rows + mixer.in_proj_z.weight.shape[0]] == 3.0).all()
    assert not weights.is_current
    weights = fuse_weights(model)
    assert weights.is_current
    model.double()
    assert not weights.is_current


def test_joining_again_joins_nothing(kind):
    model = random_target(kind)
    first = fuse_weights(model)
    held = set(storages(model))
    second = fuse_weights(model)
    assert set(storages(model)) == held
    for one, other in zip(first.layers, second.layers, strict=True):
        assert one.mixer.output.data_ptr() == other.mixer.output.data_ptr()


def test_joined_rows_stand_in_the_order_given():
    one, other = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(2, 4))
    expected = torch.cat([one, other]).detach()
    assert torch.equal(joined(one, other), expected)
    # Parts in another order are no whole.
    assert torch.equal(joined(other, one), expected[[3, 4, 0, 1, 2]])
    assert torch.equal(torch.cat([one, other]), expected)


def test_plain_generate_is_the_same(kind):
    stock, model = random_target(kind), hf_hybridspec.attach(random_target(kind))
    expected = stock.generate(PROMPT, max_new_tokens=20, do_sample=False)
    fuse_weights(model)
    assert torch.equal(model.generate(PROMPT, max_new_tokens=20, do_sample=False), expected)
    hf_hybridspec.detach(model)
    assert type(model) is type(stock)
    with torch.no_grad():
        # Rows of a joined matrix are multiplied by the same library, at most with sums in another order.
        torch.testing.assert_close(model(PROMPT).logits, stock(PROMPT).logits, atol=1e-5, rtol=1e-5)


def test_saved_and_loaded_again(kind, tmp_path):
    model = random_target(kind)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    fuse_weights(model)
    model.save_pretrained(tmp_path)
    auto = AutoModelForImageTextToText if kind.endswith("_vl") else AutoModelForCausalLM
    loaded = auto.from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    state = loaded.state_dict()
    assert list(state) == list(expected) and all(torch.equal(state[name], expected[name]) for name in expected)


def test_tied_weights_stay_tied():
    config = copy.deepcopy(random_target("qwen3_5_moe").config)
    config.tie_word_embeddings = True
    model = type(random_target("qwen3_5_moe"))(config)
    weights = fuse_weights(model)
    assert weights.head is weights.embedding
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_target_without_obstacle_has_none(kind):
    assert fused_target_obstacle(hf_hybridspec.attach(random_target(kind))) is None


def _wrapped_forward(model):
    layer = text_model(model).layers[1].mlp
    layer.forward = layer.forward


def _hook(model):
    text_model(model).layers[1].register_forward_hook(lambda *args: None)


def _subclass(model):
    class Adapted(nn.Linear):
        pass

    text_model(model).layers[0].linear_attn.out_proj.__class__ = Adapted


def _plain_subclass(model):
    text_model(model).layers[0].linear_attn.out_proj.__class__ = nn.modules.linear.NonDynamicallyQuantizableLinear


def _dynamic_rope(model):
    # Other configs hold the same dict.
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "dynamic"}


def _quantised(model):
    model.hf_quantizer = object()


def _two_dtypes(model):
    text_model(model).layers[3].self_attn.o_proj.bfloat16()


def _biased(model):
    projection = text_model(model).layers[3].self_attn.o_proj
    projection.bias = nn.Parameter(torch.zeros(projection.out_features))


def _on_meta(model):
    text_model(model).layers[3].self_attn.o_proj.to("meta")


def _other_activation(model):
    model.config.hidden_act = "gelu"


def _tensor_parallel(model):
    model._tp_size = 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_wrapped_forward, "the forward of layers.1.mlp was replaced"),
        (_hook, "layers.1 has forward hooks"),
        (_subclass, r"layers.0.linear_attn.out_proj is a tests\..*Adapted"),
        (_plain_subclass, "not a plain linear layer"),
        (_dynamic_rope, "rope type dynamic"),
        (_quantised, "quantised"),
        (_two_dtypes, r"weights are of torch.bfloat16, torch.float32"),
        (_biased, "layers.3.self_attn.o_proj has a bias"),
        (_on_meta, "not held whole on one device"),
        (_other_activation, "activation is gelu"),
        (_tensor_parallel, "tensor parallelism"),
    ],
)
def test_obstacles_are_named(change, reason):
    model = random_target("qwen3_5_moe")
    change(model)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(fused_target_obstacle(model))


def test_the_hooks_with_which_the_host_collects_outputs_are_none():
    model = random_target("qwen3_5_moe")
    with torch.no_grad():
        model(PROMPT, output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())
    assert fused_target_obstacle(model) is None


def test_an_adapter_is_an_obstacle():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(random_target("qwen3_5_moe"), config).get_base_model()
    assert "peft" in fused_target_obstacle(model)
