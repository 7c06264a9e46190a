"""The keys of published drafter configurations: known ones, noise, and those with one implemented value."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


FAMILY_OF_ARCHITECTURE = {
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "Qwen3DSparkModel": "dspark",
    "DSparkDraftModel": "dspark",
    "ReadyDraftModel": "ready",
}
FAMILY_OF_SPECULATORS_TYPE = {"dflash": "dflash", "dflash2": "dflash2", "dspark": "dspark"}

# Understood, under the same name as the field of our configuration.
SHARED_KEYS = _words(
    """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    hidden_act rms_norm_eps attention_bias max_position_embeddings initializer_range rope_parameters layer_types
    sliding_window is_causal window_from_anchor num_target_layers target_layer_ids block_size mask_token_id
    sample_from_anchor draft_vocab_size input_embedding_scale output_multiplier final_logit_softcapping
    eos_token_id bos_token_id pad_token_id dtype
    """
)

# Integers that nothing else determines.
REQUIRED_KEYS = _words(
    """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads block_size
    mask_token_id
    """
)

DSPARK_KEYS = _words("markov_rank markov_head_type enable_confidence_head confidence_head_with_markov")
READER_KEYS = _words(
    """
    reader_rank reader_state_layers reader_injection_layers reader_injection reader_width
    reader_num_heads reader_key_dim reader_value_dim
    """
)
FAMILY_KEYS = {
    "dflash": frozenset(),
    "dflash2": _words("conv_kernel_size conv_group_size selector_rank selector_top_k"),
    "dspark": DSPARK_KEYS,
    "ready": DSPARK_KEYS | READER_KEYS,
}

# (section or None, key) whose name differs from our field's.
RENAMED_KEYS = {(None, "torch_dtype"): "dtype", ("dflash_config", "causal"): "is_causal"} | {
    ("ready_config", name.removeprefix("reader_")): name for name in READER_KEYS
}

# Keys that change nothing in a drafter's forward: bookkeeping, training settings, and what a configuration copied from
# a target carries along.
NOISE_KEYS = _words(
    """
    architectures auto_map model_type transformers_version use_cache attention_dropout max_window_layers
    use_sliding_window tie_word_embeddings name_or_path _name_or_path return_dict output_hidden_states
    output_attentions chunk_size_feed_forward is_encoder_decoder id2label label2id problem_type
    num_anchors max_anchors loss_decay_gamma confidence_loss_alpha attn_implementation _attn_implementation
    attn_output_gate partial_rotary_factor full_attention_interval mamba_ssm_dtype output_router_logits
    num_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size router_aux_loss_coef
    norm_topk_prob decoder_sparse_step mlp_only_layers image_token_id video_token_id vision_start_token_id
    vision_end_token_id language_model_only
    speculators_model_type speculators_version speculators_config algorithm has_no_defaults_at_init
    projector_type mask_token rope_theta rope_scaling
    """
)
NOISE_PREFIXES = ("linear_", "mrope_", "mtp_")

# Keys that would change the forward; these are the values at which they do not.
NEUTRAL_VALUES = {
    "attention_mode": ("gqa",),
    "rope_is_neox_style": (True,),
    "use_gemma_norm": (False,),
    "attention_value_scale": (1, 1.0),
    "attention_sink_bias": (False,),
    "fc_layernorm": (False,),
    "shift_label": (False,),
    "pure_draft_prefix_len": (0,),
    "use_swa": (False,),
    "enable_qwen35_gated_q_proj": (False,),
    "mlp_bias": (False,),
    "conv_kernel_size": (0,),
    "selector_rank": (0,),
    "markov_rank": (0,),
}
