"""The bundled target's shape."""

from transformers import PreTrainedTokenizerBase, Qwen3_5MoeTextConfig


def target_config(tokenizer: PreTrainedTokenizerBase, **changes) -> Qwen3_5MoeTextConfig:
    """13.5 M parameters, 5.2 M active: eight layers (GDN, GDN, GDN, attention) x 2, 32 experts of which 4 a token.

    `changes` override single values (smaller models in tests).
    """
    values = {
        "vocab_size": len(tokenizer),
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 128,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": True,
        "router_aux_loss_coef": 1e-3,
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
        "pad_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        "dtype": "bfloat16",
    }
    return Qwen3_5MoeTextConfig(**(values | changes))
