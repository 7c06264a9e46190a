"""What of a live transformers model the project touches: which families it supports and where their parts are."""

from types import MethodType

from torch import nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from .gated_delta_net import GATED_DELTA_NETS, BlockGatedDeltaNet, block_class

# model_type of the text config -> family name in messages.
SUPPORTED_FAMILIES = {
    "qwen3_next": "Qwen3-Next",
    "qwen3_5_text": "Qwen3.5, Qwen3.6, Qwen3.8 (dense)",
    "qwen3_5_moe_text": "Qwen3.5, Qwen3.6, Qwen3.8 (MoE)",
}


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """The config of the target's decoder."""
    return model.config.get_text_config(decoder=True)


def text_model(model: PreTrainedModel) -> nn.Module:
    """The target's decoder stack, inside the vision-language class or not."""
    base = model.model
    return base.language_model if hasattr(base, "language_model") else base


def input_embedding(model: PreTrainedModel) -> nn.Module:
    """The token embedding that a drafter borrows."""
    return text_model(model).embed_tokens


def check_supported(model: PreTrainedModel) -> None:
    """Raises ValueError unless the model is a generating model of a supported family with untouched GDN layers."""
    supported = "; ".join(SUPPORTED_FAMILIES.values())
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        raise ValueError(
            f"attach() takes a generating transformers model, got {type(model).__name__}. Supported: {supported}."
        )
    model_type = text_config(model).model_type
    if model_type not in SUPPORTED_FAMILIES:
        raise ValueError(
            f"attach() does not support the model type {model_type!r}: without a rollback for its recurrent layers, "
            f"speculative decoding would be wrong. Supported: {supported}."
        )
    for name, module in gated_delta_nets(model):
        if _has_another_forward(module):
            raise ValueError(
                f"The forward of {name} was replaced by a hub kernel, which would bypass rollback. "
                "Load the model with "
                "use_kernels=False, then attach."
            )


def gated_delta_nets(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Named GDN layers of a model, swapped or not."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if type(module) in GATED_DELTA_NETS or isinstance(module, BlockGatedDeltaNet)
    ]


def swap_gated_delta_nets(model: nn.Module) -> None:
    """Lets every GDN layer verify blocks of a HybridCache. Idempotent."""
    for _, module in gated_delta_nets(model):
        if not isinstance(module, BlockGatedDeltaNet):
            _change_class(module, block_class(type(module)))


def restore_gated_delta_nets(model: nn.Module) -> None:
    """Undoes `swap_gated_delta_nets`."""
    for _, module in gated_delta_nets(model):
        if isinstance(module, BlockGatedDeltaNet):
            _change_class(module, next(parent for parent in type(module).__mro__ if parent in GATED_DELTA_NETS))


# accelerate's hooks keep the forward that they wrap in the first; removing them leaves it in the second.
_OWN_FORWARDS = ("_old_forward", "forward")


def _has_another_forward(module: nn.Module) -> bool:
    """Whether the forward of the class was replaced in the instance; accelerate's hooks wrap it and count as none."""
    own = next((vars(module)[name] for name in _OWN_FORWARDS if name in vars(module)), None)
    return own is not None and getattr(own, "__func__", None) is not type(module).forward


def _change_class(module: nn.Module, new_class: type) -> None:
    """Also within accelerate's hooks, which hold the forward of the old class."""
    old_forward = type(module).forward
    module.__class__ = new_class
    for name in _OWN_FORWARDS:
        if getattr(vars(module).get(name), "__func__", None) is old_forward:
            setattr(module, name, MethodType(new_class.forward, module))


def split_obstacle(model: PreTrainedModel) -> str | None:
    """Why the target's forward cannot be run in two stages here, or None."""
    if text_config(model).layer_types[0] != "linear_attention":
        return "Layer 0 is not a GDN layer"
    devices = set(map(str, getattr(model, "hf_device_map", {}).values()))
    is_offloaded = devices & {"cpu", "disk"} and model.device.type != "cpu"
    if len(devices) > 1 or is_offloaded:
        return "the target is spread over several devices"
    return None
