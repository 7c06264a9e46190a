"""Published config.json layouts: where keys may stand, what is refused, and what each family reads."""

import pytest

from hf_hybridspec.modeling.drafter_config import SAME_POSITION, SHIFTED, AttentionSpan, default_target_layer_ids

from .drafter_helpers import CLASSES, FULL, SLIDING, make_config
from .published_examples import dspark, load, speculators, zlab

# ------------------------------------------------------------------------------------------ both nestings (case C29)


def test_block_size_is_read_from_either_place():
    nested = zlab()
    nested["dflash_config"]["block_size"] = 12
    top = zlab(block_size=12)
    del top["dflash_config"]["block_size"]
    assert load(nested).block_size == load(top).block_size == 12


def test_all_drafter_keys_may_stand_at_the_top():
    raw = zlab()
    flat = {key: value for key, value in raw.items() if key != "dflash_config"} | raw["dflash_config"]
    assert load(flat).published_form() == load(raw).published_form()


def test_conflicting_copies_are_refused_naming_both():
    with pytest.raises(ValueError, match=r"conflicting values block_size = 8 and dflash_config.block_size = 16"):
        load(zlab(block_size=8))
    assert load(zlab(block_size=16)).block_size == 16


def test_a_null_copy_is_absent():
    assert load(zlab(block_size=None, target_layer_ids=None)).target_layer_ids[-1] == 37


def test_a_missing_block_size_is_not_guessed():
    raw = zlab()
    del raw["dflash_config"]["block_size"]
    with pytest.raises(ValueError, match=r"missing keys \['block_size'\].*dflash_config"):
        load(raw)


def test_old_and_new_rope_spellings_agree():
    yarn = {"factor": 64, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    new = zlab(rope_parameters={"rope_type": "yarn", "rope_theta": 1e7, **yarn})
    old = zlab(rope_theta=1e7, rope_scaling={"type": "yarn", **yarn})
    del old["rope_parameters"]
    assert load(old).rope_parameters == load(new).rope_parameters
    assert load(old).rope_parameters["factor"] == 64
    plain = zlab(rope_theta=1e7, rope_scaling=None)
    del plain["rope_parameters"]
    assert load(plain).rope_parameters == {"rope_type": "default", "rope_theta": 1e7}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_theta": 1e6}, r"conflicting values rope_theta = 1000000.0 and rope_parameters.rope_theta"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, r"conflicting values rope_parameters.rope_type = 'default'"),
        ({"rope_parameters": None}, "no rope_theta"),
        ({"rope_parameters": {"rope_theta": 1e7, "rope_type": "dynamic", "factor": 2}}, "rope_type 'dynamic' is not"),
        ({"rope_parameters": {"rope_theta": 1e7, "rope_type": "yarn", "factor": 2}}, "needs .'original_max_position"),
    ],
)
def test_conflicting_or_missing_rope_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        load(zlab(**change))


# ------------------------------------------------------------------------------------------ taps, spans, alignment


def test_taps_are_the_listed_layers_and_default_as_published():
    assert load(zlab()).target_layer_ids == [1, 6, 11, 16, 22, 27, 32, 37]
    assert default_target_layer_ids(64, 5) == [1, 16, 31, 46, 61]
    assert default_target_layer_ids(36, 5) == [1, 9, 17, 25, 33]
    assert default_target_layer_ids(40, 1) == [20]
    raw = zlab()
    del raw["dflash_config"]["target_layer_ids"]
    assert load(raw).target_layer_ids == default_target_layer_ids(40, 6)
    raw["num_target_layers"] = None
    with pytest.raises(ValueError, match=r"target_layer_ids .* is required"):
        load(raw)


def test_sliding_layers_are_causal_and_full_ones_are_not_unless_stated():
    assert load(zlab()).attention_spans == (AttentionSpan(True, 4096),) * 5 + (AttentionSpan(False),)
    assert load(zlab(is_causal=False)).attention_spans[0] == AttentionSpan(False, 4096)
    assert load(zlab(), is_causal=True).attention_spans[5] == AttentionSpan(True)
    raw = zlab()
    raw["dflash_config"]["causal"] = False
    assert load(raw).attention_spans[0] == AttentionSpan(False, 4096)


def test_a_window_is_honoured_whatever_the_flag_says():
    assert load(zlab(use_sliding_window=False)).attention_spans[0].window == 4096
    with pytest.raises(ValueError, match="use_sliding_window is true but no layer_types"):
        load(zlab(layer_types=None))
    assert load(zlab(layer_types=None, use_sliding_window=False)).layer_types == [FULL] * 6


def test_alignment_follows_the_architecture_unless_stated():
    assert load(zlab()).alignment == SAME_POSITION
    assert load(dspark()).alignment == SHIFTED
    assert load(dspark(sample_from_anchor=False)).alignment == SAME_POSITION
    assert load(zlab(), sample_from_anchor=True).alignment == SHIFTED


def test_a_dspark_block_without_a_draft_in_the_anchor_row_is_one_row_longer():
    assert load(dspark()).block_size == 7
    assert load(dspark(sample_from_anchor=False)).block_size == 8


def test_dflash_with_a_markov_head_needs_its_alignment_stated():
    raw = zlab(markov_rank=256)
    with pytest.raises(ValueError, match=r"ambiguous.*sample_from_anchor=True"):
        load(raw)
    assert load(raw, sample_from_anchor=True).family == "dspark"
    shifted, same = load(raw, sample_from_anchor=True), load(raw, sample_from_anchor=False)
    assert (shifted.alignment, same.alignment) == (SHIFTED, SAME_POSITION)
    assert shifted.block_size == same.block_size == 16


# ------------------------------------------------------------------------------------------ DSpark


def test_a_copied_target_configuration_is_noise():
    config = load(dspark())
    assert (config.family, config.markov_rank, config.mask_token_id) == ("dspark", 256, 248070)
    assert "partial_rotary_factor" not in config.rope_parameters
    assert not hasattr(config, "attn_output_gate")


@pytest.mark.parametrize("section", ["dspark_config", "dflash_config"])
def test_nested_dspark_equals_the_flat_one(section):
    names = ("block_size", "mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type")
    flat = dspark()
    nested = {key: value for key, value in flat.items() if key not in names}
    nested[section] = {name: flat[name] for name in names} | {"projector_type": "dspark", "attention_mode": "gqa"}
    nested |= {"architectures": ["DSparkDraftModel"], "target_layer_ids": None}
    assert load(nested).published_form() == load(flat).published_form()


# ------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"residual_scale": 2.0, "alpha": 1}, r"unknown keys \['alpha', 'residual_scale'\]"),
        ({"attention_sink_bias": True}, r"attention_sink_bias = True is not supported \(supported: False\)"),
        ({"use_gemma_norm": True}, "use_gemma_norm = True is not supported"),
        ({"conv_kernel_size": 2}, "conv_kernel_size = 2 is not supported"),
        ({"projector_type": "domino"}, "projector_type 'domino' contradicts"),
        ({"dflash_config": "none"}, "malformed: dflash_config must be an object, got 'none'"),
        ({"rope_parameters": 1, "layer_types": "full"}, "malformed: .'rope_parameters': 1, 'layer_types': 'full'"),
        ({"dtype": "mxfp4"}, "dtype 'mxfp4' is no torch dtype"),
        ({"torch_dtype": "float32"}, "conflicting values dtype = 'bfloat16' and torch_dtype = 'float32'"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ({"layer_types": [SLIDING] * 5}, "layer_types has 5 entries for 6 layers"),
        ({"layer_types": ["chunked_attention"] * 6}, "got .'chunked_attention'."),
        ({"sliding_window": None}, "sliding layers need a positive sliding_window"),
        ({"num_key_value_heads": 5}, "num_attention_heads must be a multiple"),
        ({"vocab_size": None, "hidden_size": None}, r"missing keys \['hidden_size', 'vocab_size'\]"),
        ({"num_hidden_layers": "6"}, "not integers: .'num_hidden_layers': '6'"),
        ({"num_attention_heads": -4}, "num_attention_heads must be positive, got -4"),
    ],
)
def test_unusable_configurations_are_refused_with_the_reason(change, message):
    with pytest.raises(ValueError, match=message):
        load(zlab(**change))


def test_unknown_keys_of_a_nested_section_are_refused_and_neutral_ones_pass():
    raw = zlab()
    raw["dflash_config"] |= {"pure_draft_prefix_len": 0, "use_swa": False, "projector_type": "dflash"}
    load(raw)
    raw["dflash_config"]["pure_draft_prefix_len"] = 2
    with pytest.raises(ValueError, match="pure_draft_prefix_len = 2"):
        load(raw)
    raw["dflash_config"] |= {"pure_draft_prefix_len": 0, "swa_window_size": 128}
    with pytest.raises(ValueError, match=r"unknown keys \['swa_window_size'\]"):
        load(raw)


def test_all_problems_are_listed_at_once():
    with pytest.raises(ValueError, match=r"(?s)conflicting values block_size.*use_gemma_norm.*unknown keys"):
        load(zlab(block_size=8, use_gemma_norm=True, surprise=1))


@pytest.mark.parametrize(
    ("architectures", "message"),
    [
        (["Qwen3_5MoeForCausalLM"], "looks like a target model, not a drafter. Supported: DFlashDraftModel"),
        (["Eagle3DraftModel"], "names no supported drafter. Supported: DFlashDraftModel, DFlash2DraftModel"),
        ([], "names no supported drafter"),
        (None, "names no supported drafter"),
    ],
)
def test_other_architectures_are_refused_with_what_is_supported(architectures, message):
    with pytest.raises(ValueError, match=message):
        load(zlab(architectures=architectures))
    with pytest.raises(ValueError, match="speculators_model_type 'eagle3' is not supported"):
        load(speculators(speculators_model_type="eagle3"))


# ------------------------------------------------------------------------------------------ writing


@pytest.mark.parametrize("family", CLASSES)
def test_the_published_form_reads_back_to_an_equal_configuration(family):
    changes = {"is_causal": True, "input_embedding_scale": 2.0, "final_logit_softcapping": 30.0}
    config = make_config(family, **changes)
    again = load(config.published_form())
    assert type(again) is type(config)
    assert again.to_dict() == config.to_dict()


def test_dspark_without_a_draft_in_the_anchor_row_reads_back():
    config = make_config("dspark", sample_from_anchor=False)
    assert config.published_form()["dflash_config"]["block_size"] == 4
    assert load(config.published_form()).block_size == 5


def test_a_class_refuses_another_familys_configuration():
    dflash, dspark_class = CLASSES["dflash"][0], CLASSES["dspark"][0]
    assert dflash.from_dict(zlab()).block_size == 16
    with pytest.raises(ValueError, match="DSparkConfig reads dspark configurations, this one is dflash"):
        dspark_class.from_dict(zlab())
