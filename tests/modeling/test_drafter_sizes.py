"""Published geometries at full size, on the meta device: parameter and tensor counts as published.

Counts were read from, or derived from the sizes of, the released files.
"""

import pytest
import torch

from .drafter_helpers import CLASSES, FULL, SLIDING
from .published_examples import load


def published(architecture: str, **values) -> dict:
    raw = {
        "architectures": [architecture],
        "model_type": "qwen3",
        "vocab_size": 248320,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000},
        "num_key_value_heads": 8,
        "num_attention_heads": 32,
    }
    return raw | values


def sizes(hidden: int, feed_forward: int, layers: int, sliding: int = 0, window: int | None = None, **rest) -> dict:
    values = {"hidden_size": hidden, "intermediate_size": feed_forward, "num_hidden_layers": layers}
    values["layer_types"] = [SLIDING] * sliding + [FULL] * (layers - sliding)
    return values | ({"sliding_window": window, "use_sliding_window": True} if sliding else {}) | rest


def block(taps: list[int], mask: int, size: int = 16, **rest) -> dict:
    return {"target_layer_ids": taps, "mask_token_id": mask, "block_size": size} | rest


MOE_TAPS = [1, 6, 11, 16, 22, 27, 32, 37]
OLD_YARN = {
    "rope_type": "yarn",
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
NEW_YARN = OLD_YARN | {"rope_theta": 1e7, "factor": 32.0, "original_max_position_embeddings": 8192}
SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
HEADS = {
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "projector_type": "dspark",
    "attention_mode": "gqa",
}

PUBLISHED = {
    "Qwen3.6-35B-A3B-DFlash": (
        published("DFlashDraftModel", **sizes(2048, 6144, 6, 5, 4096), dflash_config=block(MOE_TAPS, 248077)),
        385_906_176,
        69,
    ),
    "Qwen3.6-35B-A3B-DFlash preview": (
        published("DFlashDraftModel", **sizes(2048, 6144, 8), block_size=16)
        | {
            "num_key_value_heads": 4,
            "rope_parameters": None,
            "rope_theta": 10000000,
            "rope_scaling": OLD_YARN,
            "dflash_config": {"target_layer_ids": [1, 10, 19, 28, 37], "mask_token_id": 248070},
        },
        473_995_264,
        91,
    ),
    "Qwen3.5-122B-A10B-DFlash": (
        published(
            "DFlashDraftModel",
            **sizes(3072, 9216, 6, 5, 4096, num_target_layers=48),
            dflash_config=block([1, 7, 14, 20, 26, 32, 39, 45], 248077),
        ),
        773_893_632,
        69,
    ),
    "Qwen3.5-27B-DFlash": (
        published(
            "DFlashDraftModel",
            **sizes(5120, 17408, 6, 5, 4096),
            dflash_config=block([1, 10, 18, 27, 35, 44, 52, 61], 248077),
        ),
        2_128_682_496,
        69,
    ),
    "Qwen3.6-27B-DFlash": (
        published("DFlashDraftModel", **sizes(5120, 17408, 5, 4, 2048), block_size=16)
        | {"dflash_config": {"target_layer_ids": [1, 16, 31, 46, 61], "mask_token_id": 248070}},
        1_730_213_120,
        58,
    ),
    "Qwen3.8-27B-DFlash2": (
        published(
            "DFlash2DraftModel",
            **sizes(5120, 17408, 5, 5, 2048, is_causal=False),
            dflash_config=block([5, 19, 33, 47, 61], 248070, 8, **SELECTOR),
        ),
        1_924_404_480,
        81,
    ),
    "Qwen3.8-27B-DSpark, first": (
        published("DSparkDraftModel", **sizes(5120, 10240, 5), target_layer_ids=None)
        | {
            "num_attention_heads": 40,
            "rope_parameters": NEW_YARN,
            "dflash_config": block([4, 16, 28, 40, 52], 248077, 7, **HEADS),
        },
        1_359_284_737,
        62,
    ),
    "Qwen3.8-27B-DSpark": (
        published("DSparkDraftModel", **sizes(5120, 17408, 5), draft_vocab_size=248320)
        | {"rope_parameters": NEW_YARN, "dflash_config": block([5, 19, 33, 47, 61], 248070, 7, **HEADS)},
        1_857_358_337,
        62,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_equal_the_published_ones(name):
    raw, parameters, tensors = PUBLISHED[name]
    config = load(raw)
    with torch.device("meta"):
        drafter = CLASSES[config.family][1](config)
    assert sum(parameter.numel() for parameter in drafter.parameters()) == parameters
    assert len(drafter.state_dict()) == tensors


def test_shapes_of_the_current_35b_drafter():
    with torch.device("meta"):
        drafter = CLASSES["dflash"][1](load(PUBLISHED["Qwen3.6-35B-A3B-DFlash"][0]))
    shapes = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    assert shapes["fc.weight"] == (2048, 16384)
    assert shapes["layers.0.self_attn.q_proj.weight"] == (4096, 2048)
    assert shapes["layers.0.self_attn.k_proj.weight"] == shapes["layers.5.self_attn.v_proj.weight"] == (1024, 2048)
    assert shapes["layers.0.mlp.gate_proj.weight"] == (6144, 2048)
    assert (drafter.block_size, drafter.num_draft_tokens) == (16, 15)


def test_shapes_of_dflash2_and_dspark_heads():
    with torch.device("meta"):
        dflash2 = CLASSES["dflash2"][1](load(PUBLISHED["Qwen3.8-27B-DFlash2"][0]))
        dspark = CLASSES["dspark"][1](load(PUBLISHED["Qwen3.8-27B-DSpark"][0]))
    assert tuple(dflash2.layers[0].attention_conv.kernel_projection.weight.shape) == (1280, 5120)
    assert tuple(dflash2.candidate_selector.successor_codebook.shape) == (248320, 256)
    assert tuple(dspark.confidence_head.proj.weight.shape) == (1, 5376)
    assert dspark.num_draft_tokens == 7
    assert float(dspark.rotary_emb.attention_scaling) == pytest.approx(1.3466, abs=1e-4)
