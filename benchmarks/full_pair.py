"""A target and a DFlash drafter of the full shape with random weights, bound to each other."""

import torch
from transformers import PreTrainedModel

from benchmarks.full_target import random_target, target_config
from benchmarks.fused_drafter import FULL_SIZE
from hf_hybridspec.modeling.dflash import DFlashConfig, DFlashDrafter
from hf_hybridspec.modeling.target import input_embedding

TINY_DRAFTER = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "mask_token_id": 511, "num_target_layers": 4, "target_layer_ids": [0, 2],
}  # fmt: skip


def device_and_dtype() -> tuple[torch.device, torch.dtype]:
    """The first GPU and bf16, or the CPU and fp32."""
    if torch.cuda.is_available():
        return torch.device("cuda", 0), torch.bfloat16
    return torch.device("cpu"), torch.float32


def random_pair(is_tiny: bool, num_layers: int | None) -> tuple[PreTrainedModel, DFlashDrafter]:
    """An attached target and its drafter; with fewer layers, the taps that are left."""
    device, dtype = device_and_dtype()
    model = random_target(target_config(is_tiny, num_layers), device, dtype)
    sizes = TINY_DRAFTER if is_tiny else FULL_SIZE
    if num_layers is not None:
        taps = [tap for tap in sizes["target_layer_ids"] if tap < num_layers - 1]
        sizes = sizes | {"num_target_layers": num_layers, "target_layer_ids": taps}
    torch.manual_seed(0)
    with device:
        drafter = DFlashDrafter(DFlashConfig(**sizes, block_size=16)).to(device, dtype).eval()
    return model, drafter.bind(input_embedding(model), model.get_output_embeddings(), model.config)
