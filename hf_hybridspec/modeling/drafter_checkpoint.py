"""Loads a drafter's safetensors strictly: every tensor of the model, no other, each of the right shape."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .drafter import Drafter
from .drafter_config import DrafterConfig

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"

# Prefixes that trainers and exporters put before the published names, in the order in which they may nest.
PREFIXES = ("module.", "model.", "logit_head.")
ALIASES = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
    "candidate_selector.predecessor_codebook.weight": "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook.weight": "candidate_selector.successor_codebook",
}
# What only repeats the target's own tensors, or follows from the configuration.
DROPPED_PREFIXES = ("embed_tokens.", "rotary_emb.", "verifier_norm.", "verifier_lm_head.", "t2d")


def load_drafter(
    drafter_class: type[Drafter],
    config: DrafterConfig,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> Drafter:
    """Builds `drafter_class(config)` and fills it with a checkpoint's tensors (name -> tensor), in eval mode.

    Raises ValueError listing all missing, unexpected and mis-shaped tensors.
    """
    tensors = rename_tensors(tensors, config)
    config = drafter_class.adapt_config(config, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    with torch.device("meta"):
        drafter = drafter_class(config)
    expected = drafter.state_dict()
    _check_names_and_shapes(expected, tensors)
    tensors = {
        name: tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
        for name, tensor in tensors.items()
    }
    drafter.load_state_dict(tensors, assign=True)
    drafter.rotary_emb = type(drafter.rotary_emb)(config).to(device)
    config.dtype = dtype
    return drafter.eval()


def read_tensors(files: Iterable[Path]) -> dict[str, Tensor]:
    """All tensors of the files, on the CPU. Raises ValueError for a truncated, corrupted or empty file."""
    tensors = {}
    for file in files:
        if file.stat().st_size == 0:
            raise ValueError(f"{file.name} is empty. Download the checkpoint again.")
        try:
            with safe_open(file, framework="pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(
                f"{file.name} is truncated or corrupted ({error}). Download the checkpoint again."
            ) from error
    return tensors


def rename_tensors(tensors: Mapping[str, Tensor], config: DrafterConfig) -> dict[str, Tensor]:
    """Published and legacy names -> our (and z-lab's) names; drops copies of the target's embedding and head; splits
    fused projections. Raises ValueError where two tensors claim one name."""
    renamed: dict[str, Tensor] = {}
    for original, tensor in tensors.items():
        name = canonical_name(original)
        if name.startswith(DROPPED_PREFIXES) or (name.startswith("lm_head.") and config.draft_vocab_size is None):
            _check_copy(name, tensor, config)
            continue
        parts = _split_fused(name, tensor, config)
        for part, value in parts.items():
            if part in renamed:
                raise ValueError(f"The checkpoint holds two tensors for {part}; one of them is named {original}.")
            renamed[part] = value
    return renamed


def canonical_name(name: str) -> str:
    """A tensor's published name, without wrappers' prefixes."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return ALIASES.get(name, name)


def _check_copy(name: str, tensor: Tensor, config: DrafterConfig) -> None:
    expected = (config.vocab_size, config.hidden_size)
    if name in ("embed_tokens.weight", "lm_head.weight") and tuple(tensor.shape) != expected:
        raise ValueError(f"{name} is {tuple(tensor.shape)} but a copy of the target's would be {expected}.")


def _split_fused(name: str, tensor: Tensor, config: DrafterConfig) -> dict[str, Tensor]:
    queries, keys = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    if ".qkv_proj." in name and tensor.shape[0] == queries + 2 * keys:
        parts = zip("qkv", tensor.split([queries, keys, keys]), strict=True)
        return {name.replace("qkv_proj", f"{letter}_proj"): part.contiguous() for letter, part in parts}
    if ".gate_up_proj." in name and tensor.shape[0] == 2 * config.intermediate_size:
        parts = zip(("gate", "up"), tensor.chunk(2), strict=True)
        return {name.replace("gate_up_proj", f"{word}_proj"): part.contiguous() for word, part in parts}
    return {name: tensor}


def _check_names_and_shapes(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    problems = []
    if missing := sorted(expected.keys() - found.keys()):
        problems.append(f"missing tensors {missing}")
    if unexpected := sorted(found.keys() - expected.keys()):
        problems.append(f"unexpected tensors {unexpected}")
    for name in sorted(expected.keys() & found.keys()):
        if expected[name].shape != found[name].shape:
            problems.append(
                f"{name} is {tuple(found[name].shape)}, the configuration asks for {tuple(expected[name].shape)}"
            )
    if problems:
        raise ValueError("The checkpoint does not match its configuration: " + "; ".join(problems) + ".")


def shard_names(index: Path) -> list[str]:
    """File names listed in a safetensors index; raises ValueError if it is not one."""
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (json.JSONDecodeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{index.name} is not a safetensors index ({error!r}). Download the checkpoint again."
        ) from error
