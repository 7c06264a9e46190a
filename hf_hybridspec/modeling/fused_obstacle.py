"""Why a target cannot run with fused weights: what the kernels would bypass, or cannot read."""

from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from .target import split_obstacle, text_config, text_model

# Others compute their frequencies from the length, on the CPU.
STATIC_ROPE_TYPES = ("default", "linear", "yarn", "llama3")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A GDN layer's decay rates, which the kernels widen from any dtype.
DECAY_NAMES = ("A_log", "dt_bias")
# Modules of other packages have other forwards.
KNOWN_PACKAGES = ("torch", "transformers", "hf_hybridspec")
# The host's own hooks, which do nothing unless it collects outputs.
HOST_HOOKS = "transformers.utils.output_capturing"


def fused_target_obstacle(model: PreTrainedModel) -> str | None:
    """The first reason against `fuse_weights` for a supported target, or None."""
    return split_obstacle(model) or next(_reasons(model), None)


def _reasons(model: PreTrainedModel) -> Iterator[str]:
    config, decoder, head = text_config(model), text_model(model), model.get_output_embeddings()
    if getattr(model, "hf_quantizer", None) is not None:
        yield "the weights are quantised"
    if (model.tp_size or 1) > 1:
        yield "the weights are split by tensor parallelism"
    if config.hidden_act != "silu":
        yield f"the activation is {config.hidden_act}, not silu"
    if (rope_type := config.rope_parameters["rope_type"]) not in STATIC_ROPE_TYPES:
        yield f"the rope type {rope_type} depends on the length"
    named = [*decoder.named_modules(), ("lm_head", head)]
    for name, module in named:
        yield from _module_reasons(name, module)
    # Where dtypes mix, the host widens in the middle of a layer; the kernels would not.
    weights = dict(decoder.named_parameters()) | {"lm_head": head.weight}
    yield from _weight_reasons(weights)


def _module_reasons(name: str, module: nn.Module) -> Iterator[str]:
    if type(module).__module__.split(".")[0] not in KNOWN_PACKAGES:
        yield f"{name} is a {type(module).__module__}.{type(module).__name__}, whose forward would be bypassed"
    if hasattr(module, "in_features") and type(module) is not nn.Linear:
        yield f"{name} is a {type(module).__name__}, not a plain linear layer"
    if getattr(module, "bias", None) is not None:
        yield f"{name} has a bias"
    if "_hf_hook" in vars(module):
        yield f"{name} carries an accelerate hook"
    if "forward" in vars(module):
        yield f"the forward of {name} was replaced"
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    if any(getattr(hook, "__module__", None) != HOST_HOOKS for hook in hooks):
        yield f"{name} has forward hooks, which would be bypassed"


def _weight_reasons(weights: dict[str, torch.Tensor]) -> Iterator[str]:
    for name, weight in weights.items():
        if weight.is_meta or hasattr(weight, "device_mesh"):
            yield f"{name} is not held whole on one device"
        if weight.is_inference():
            yield f"{name} was made in inference mode, so that its changes cannot be noticed"
    devices = {weight.device for weight in weights.values()}
    if len(devices) > 1:
        yield f"weights are on {', '.join(sorted(map(str, devices)))}"
    dtypes = {weight.dtype for name, weight in weights.items() if name.rsplit(".", 1)[-1] not in DECAY_NAMES}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        yield f"weights are of {', '.join(sorted(map(str, dtypes)))}, not of one of {', '.join(map(str, DTYPES))}"
