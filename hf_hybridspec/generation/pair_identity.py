"""Which target, drafter, device and dtype a call runs on, as a calibration profile names them."""

import hashlib
import json

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..calibration.profile import PairIdentity
from ..modeling.drafter import Drafter
from ..modeling.target import text_config
from .round_engine import are_default, engine_obstacle

# What makes two architectures different in cost or acceptance; names of config attributes.
SIZES = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "vocab_size",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "block_size",
    "target_layer_ids",
    "layer_types",
)
# Elements sampled of every parameter: reading them is cheap, and other weights differ in nearly all of them.
SAMPLES = 4


def pair_identity(target: PreTrainedModel, drafter: Drafter) -> PairIdentity:
    """The identity of a pair whose drafter is bound. Reads a few weights of either model."""
    return PairIdentity(
        target=str(target.config.name_or_path or type(target).__name__),
        target_fingerprint=_fingerprint(target, text_config(target)),
        drafter=str(drafter.config.name_or_path or type(drafter).__name__),
        drafter_fingerprint=_fingerprint(drafter, drafter.config),
        num_draft_tokens=drafter.num_draft_tokens,
        device=device_name(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        engine=engine_name(target, drafter),
    )


def engine_name(target: PreTrainedModel, drafter: Drafter) -> str:
    """The rounds that `auto` takes with a bound drafter where nothing in a call stands against it.

    A cost of other rounds does not hold.
    """
    return "graphs" if are_default(target.device) and engine_obstacle(target, drafter) is None else "eager"


def device_name(device: torch.device) -> str:
    """A GPU's product name, else the kind of device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@torch.no_grad()
def _fingerprint(module: nn.Module, config: PreTrainedConfig) -> str:
    """Digest of sizes and of sampled weights; two files of the same weights have the same."""
    digest = hashlib.sha256(json.dumps([_plain(getattr(config, name, None)) for name in SIZES]).encode())
    for name, parameter in sorted(module.named_parameters()):
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
    samples = [
        parameter.flatten()[:: max(1, parameter.numel() // SAMPLES)][:SAMPLES].double()
        for _, parameter in sorted(module.named_parameters())
        if not parameter.is_meta and parameter.numel()
    ]
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for sample in samples:
        by_device.setdefault(sample.device, []).append(sample)
    for group in by_device.values():
        digest.update(torch.cat(group).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _plain(value):
    return list(value) if isinstance(value, tuple) else value
