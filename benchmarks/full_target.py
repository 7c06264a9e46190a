"""A target of the full shape with random weights, made on the device, and a cache that holds a context of noise."""

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel, Qwen3_5MoeTextConfig
from transformers.initialization import no_init_weights

import hf_hybridspec
from hf_hybridspec.modeling.block_state import AttentionState, BlockState
from hf_hybridspec.modeling.hybrid_cache import HybridCache

TINY = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}  # fmt: skip


def target_config(is_tiny: bool, num_layers: int | None) -> Qwen3_5MoeTextConfig:
    """Qwen3.6-35B-A3B is the default config; fewer layers keep their kinds."""
    config = Qwen3_5MoeTextConfig(**(TINY if is_tiny else {}))
    if num_layers is not None:
        config.num_hidden_layers, config.layer_types = num_layers, config.layer_types[:num_layers]
    return config


@torch.no_grad()
def random_target(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """An attached target whose matrices are normal with standard deviation 0.02; all else as a fresh model has it."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device, no_init_weights():
            model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    finally:
        torch.set_default_dtype(default)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.02, generator=generator)
    return hf_hybridspec.attach(model.eval())


@torch.no_grad()
def noisy_cache(model: PreTrainedModel, context: int, room: int) -> HybridCache:
    """A static cache of `context` tokens and `room` more, with noise for keys, values and states."""
    cache = HybridCache(model.config, context + room)
    model(input_ids=torch.ones(1, 1, dtype=torch.int64, device=model.device), cache=cache)
    state = BlockState(cache)
    generator = torch.Generator(model.device).manual_seed(1)
    for part in state.layers.values():
        if isinstance(part, AttentionState):
            tensors = (part.keys, part.values)
        else:
            tensors = (part.conv_state, part.recurrent_state)
        for tensor in tensors:
            tensor.normal_(0, 0.1, generator=generator)
    state.committed.fill_(context)
    state.release()
    return cache


def model_bytes(model: PreTrainedModel) -> int:
    """Bytes of all parameters."""
    return sum(parameter.nbytes for parameter in model.parameters())
