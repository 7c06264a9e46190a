"""config.json contents in the published layouts."""

from hf_hybridspec.modeling.published_config import read_published_config

from .drafter_helpers import CLASSES, FULL, SLIDING


def zlab(**changes) -> dict:
    """The current z-lab layout of a Qwen3.6-35B-A3B DFlash drafter, nested keys and all."""
    raw = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "layer_types": [SLIDING] * 5 + [FULL],
        "max_position_embeddings": 262144,
        "max_window_layers": 6,
        "num_attention_heads": 32,
        "num_hidden_layers": 6,
        "num_key_value_heads": 8,
        "num_target_layers": 40,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000},
        "sliding_window": 4096,
        "use_sliding_window": True,
        "tie_word_embeddings": False,
        "transformers_version": "5.0.0",
        "use_cache": True,
        "vocab_size": 248320,
        "dflash_config": {
            "block_size": 16,
            "mask_token_id": 248077,
            "target_layer_ids": [1, 6, 11, 16, 22, 27, 32, 37],
        },
    }
    return raw | changes


def load(raw: dict, **overrides):
    published = read_published_config(raw, **overrides)
    return CLASSES[published.family][0](**published.values)


def dspark(**changes) -> dict:
    """DeepSpec's flat layout: a copy of a Qwen3.5-family target's configuration."""
    raw = {key: value for key, value in zlab().items() if key != "dflash_config"}
    raw |= {
        "architectures": ["Qwen3DSparkModel"],
        "layer_types": [FULL] * 6,
        "block_size": 7,
        "mask_token_id": 248070,
        "target_layer_ids": [1, 9, 17, 25, 33],
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "num_anchors": 512,
        "attn_output_gate": True,
        "linear_num_value_heads": 32,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "rope_parameters": {"rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 0.25},
    }
    return raw | changes


def speculators(kind="dspark", **changes) -> dict:
    raw = {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {"algorithm": kind, "proposal_methods": [{"speculative_tokens": 8}]},
        "transformer_layer_config": {
            "model_type": "qwen3",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 5,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "layer_types": [SLIDING] * 5,
            "sliding_window": 2048,
            "use_sliding_window": True,
            "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
            "vocab_size": 248320,
        },
        "aux_hidden_state_layer_ids": [2, 10, 20, 30, 37],
        "draft_vocab_size": 32000,
        "block_size": 8,
        "mask_token_id": 248077,
        "sliding_window_non_causal": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    if kind == "dspark":
        raw |= {"markov_rank": 256, "markov_head_type": "vanilla", "enable_confidence_head": True}
    return raw | changes
