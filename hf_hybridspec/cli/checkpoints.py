"""Loads what an ID names: a bundled model, a folder, or a Hub repository."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..bundled import BUNDLED_MODELS, resolve
from ..generation.attach import attach
from ..modeling.auto import AutoDrafter, read_config
from ..modeling.drafter import Drafter
from ..modeling.published_keys import FAMILY_OF_ARCHITECTURE
from ..modeling.ready.adapter import ADAPTER_CONFIG
from ..modeling.target import SUPPORTED_FAMILIES, input_embedding
from .errors import CommandError, first_sentence


@dataclass(frozen=True)
class Placement:
    """Where models live and in which dtype; `dtype` is a torch dtype or "auto", the checkpoint's."""

    device: torch.device
    dtype: torch.dtype | str

    @classmethod
    def of(cls, device: str | None, dtype: str) -> "Placement":
        """Reads `--device` and `--dtype`; raises CommandError for a device that is not there."""
        has_cuda = torch.cuda.is_available()
        name = device or ("cuda" if has_cuda else "cpu")
        try:
            placed = torch.device(name)
        except RuntimeError:
            placed = None
        if placed is None or placed.type not in ("cpu", "cuda"):
            raise CommandError(f"--device must be cpu, cuda or cuda:N, got {name!r}.")
        count = torch.cuda.device_count() if has_cuda else 0
        if placed.type == "cuda" and (placed.index or 0) >= count:
            raise CommandError(f"--device {name} is not here: PyTorch sees {count} CUDA devices. Try --device cpu.")
        if dtype == "auto":
            return cls(placed, torch.float32 if placed.type == "cpu" else "auto")
        return cls(placed, getattr(torch, dtype))


def is_drafter(source: str) -> bool:
    """Whether the ID names a drafter, or an adapter of one; raises CommandError if there is none to read."""
    folder = Path(resolve(source))
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file():
        return True
    config = _raw_config(source)
    architectures = config.get("architectures") or []
    return "speculators_model_type" in config or any(name in FAMILY_OF_ARCHITECTURE for name in architectures)


def target_config(source: str) -> PreTrainedConfig:
    """The config of a supported target; raises CommandError for anything else."""
    if is_drafter(source):
        raise CommandError(f"{source!r} is a drafter, not a target. Give the model that it was trained for.")
    try:
        config = AutoConfig.from_pretrained(resolve(source))
    except (ValueError, OSError, KeyError) as error:
        raise CommandError(f"The config.json of {source!r} cannot be used: {first_sentence(error)}.") from error
    model_type = config.get_text_config(decoder=True).model_type
    if model_type not in SUPPORTED_FAMILIES:
        supported = "; ".join(SUPPORTED_FAMILIES.values())
        raise CommandError(f"{source!r} has the model type {model_type!r}. Supported targets: {supported}.")
    return config


def load_drafter(source: str, placement: Placement) -> Drafter:
    """The drafter of an ID; raises CommandError."""
    if not is_drafter(source):
        raise CommandError(f"{source!r} is not a drafter. Give the drafter that was trained for the target.")
    try:
        return AutoDrafter.from_pretrained(resolve(source), dtype=placement.dtype, device_map=placement.device)
    except (ValueError, OSError) as error:
        raise CommandError(f"The drafter {source!r} cannot be loaded: {_one_line(error)}") from error


def load_target(source: str, placement: Placement) -> PreTrainedModel:
    """The attached target of an ID, in eval mode; raises CommandError, also for a checkpoint that lacks tensors."""
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            resolve(source), dtype=placement.dtype, device_map=placement.device, output_loading_info=True
        )
    except (ValueError, OSError, RuntimeError, SafetensorError) as error:
        raise CommandError(
            f"The weights of {source!r} cannot be loaded ({first_sentence(error)}). Download the checkpoint again."
        ) from error
    # transformers fills absent tensors with random numbers.
    if absent := sorted(map(str, [*loading["missing_keys"], *loading["mismatched_keys"]])):
        raise CommandError(
            f"The checkpoint of {source!r} lacks {len(absent)} tensors, such as {absent[0]}. "
            "Download the checkpoint again."
        )
    return attach(model.eval())


def load_tokenizer(source: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a target; raises CommandError."""
    reason = "it knows no words"
    try:
        tokenizer = AutoTokenizer.from_pretrained(resolve(source))
        # Without its files, transformers makes an empty one of the right class.
        if tokenizer("a")["input_ids"]:
            return tokenizer
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        reason = first_sentence(error)
    raise CommandError(
        f"The tokenizer of {source!r} cannot be used: {reason}. A target needs its tokenizer files beside its weights."
    )


def check_pair(drafter: Drafter, drafter_source: str, config: PreTrainedConfig, target_source: str) -> None:
    """Raises CommandError naming every mismatch if the drafter was not made for the target."""
    try:
        drafter.check_fit(config)
    except ValueError as error:
        raise CommandError(f"{drafter_source!r} does not fit {target_source!r}. {_one_line(error)}") from error


def bind_pair(target: PreTrainedModel, drafter: Drafter, tokenizer: PreTrainedTokenizerBase) -> None:
    """Lends the target's embedding and head to the drafter, which then proposes ids of the tokenizer only."""
    drafter.bind(input_embedding(target), target.get_output_embeddings(), target.config, len(tokenizer))


def _raw_config(source: str) -> dict[str, Any]:
    folder = resolve(source)
    if not Path(folder).is_dir() and folder.count("/") != 1:
        # Hub ids are OWNER/NAME; asking for anything else only costs the time of a failing request.
        raise CommandError(_not_found(source))
    if Path(folder).is_dir() and not Path(folder, "config.json").is_file():
        raise CommandError(f"The folder {source!r} holds no config.json. Give the folder of a target or a drafter.")
    try:
        return read_config(folder, {})
    except ValueError as error:
        raise CommandError(_one_line(error)) from error
    except OSError as error:
        raise CommandError(_not_found(source)) from error


def _not_found(source: str) -> str:
    bundled = ", ".join(BUNDLED_MODELS)
    return (
        f"{source!r} is no bundled model ({bundled}), no folder, and no repository that the Hub gives out from here. "
        "Check its spelling, or give a folder."
    )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
