"""Tiny drafters and targets for the drafter tests."""

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

from hf_hybridspec.modeling.dflash import DFlash2Config, DFlash2Drafter, DFlashConfig, DFlashDrafter
from hf_hybridspec.modeling.drafter import Drafter
from hf_hybridspec.modeling.drafter_config import DrafterConfig
from hf_hybridspec.modeling.dspark import DSparkConfig, DSparkDrafter
from hf_hybridspec.modeling.ready import ReadyConfig, ReadyDrafter

VOCABULARY, HIDDEN, TAPS, LAYERS, MASK = 53, 32, (1, 4, 6), 8, 50
SLIDING, FULL = "sliding_attention", "full_attention"

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}

CLASSES = {
    "dflash": (DFlashConfig, DFlashDrafter),
    "dflash2": (DFlash2Config, DFlash2Drafter),
    "dspark": (DSparkConfig, DSparkDrafter),
    "ready": (ReadyConfig, ReadyDrafter),
}
FAMILY_VALUES = {
    "dflash": {},
    "dflash2": {
        "conv_kernel_size": 2,
        "conv_group_size": 8,
        "selector_rank": 8,
        "selector_top_k": 6,
        "is_causal": False,
    },
    "dspark": {"markov_rank": 8, "enable_confidence_head": True},
    "ready": {
        "markov_rank": 8,
        "enable_confidence_head": True,
        "reader_rank": 4,
        "reader_state_layers": [2, 6],
        "reader_num_heads": 4,
        "reader_key_dim": 8,
        "reader_value_dim": 6,
    },
}


def config_values(family: str, **changes) -> dict:
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rope_parameters": dict(PLAIN_ROPE),
        "layer_types": [FULL] * 3 if family in ("dspark", "ready") else [SLIDING, SLIDING, FULL],
        "sliding_window": None if family in ("dspark", "ready") else 6,
        "num_target_layers": LAYERS,
        "target_layer_ids": list(TAPS),
        "block_size": 5,
        "mask_token_id": MASK,
    }
    return values | FAMILY_VALUES[family] | changes


def make_config(family: str, **changes) -> DrafterConfig:
    return CLASSES[family][0](**config_values(family, **changes))


def make_drafter(family: str, seed: int = 0, scale: float = 6.0, **changes) -> Drafter:
    """A random fp32 drafter; weights are scaled up so that attention and heads matter to the result."""
    torch.manual_seed(seed)
    drafter = CLASSES[family][1](make_config(family, **changes)).eval()
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.add_(0.02 * scale * torch.randn_like(parameter))
    return drafter


def target_config(**changes) -> PreTrainedConfig:
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
        "eos_token_id": 7,
        "pad_token_id": 8,
        "bos_token_id": 9,
    }
    return Qwen3_5MoeTextConfig(**(values | changes))


def bind(drafter: Drafter, seed: int = 1, **kwargs) -> Drafter:
    generator = torch.Generator().manual_seed(seed)
    embedding = nn.Embedding(VOCABULARY, HIDDEN)
    head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
    with torch.no_grad():
        for weight in (embedding.weight, head.weight):
            weight.copy_(torch.randn(weight.shape, generator=generator))
    return drafter.bind(embedding, head, target_config(), **kwargs)


def features(count: int, seed: int = 2) -> torch.Tensor:
    return torch.randn(count, len(TAPS) * HIDDEN, generator=torch.Generator().manual_seed(seed))


def recurrent_states(blocks: int = 1, seed: int = 3) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {layer: torch.randn(blocks, 4, 8, 6, generator=generator) for layer in (2, 6)}


def states_for(drafter: Drafter) -> dict[int, torch.Tensor] | None:
    return recurrent_states() if drafter.recurrent_layer_ids else None


def observed(drafter: Drafter, count: int, seed: int = 2):
    """A context holding positions 0..count - 1."""
    context = drafter.new_context()
    drafter.observe(context, features(count, seed), torch.arange(count))
    return context
