"""AutoDrafter: a published drafter checkpoint, or a folder, becomes the drafter class that its configuration names."""

import json
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging
from transformers.utils.hub import cached_file

from ..bundled import resolve
from .dflash.modeling_dflash import DFlash2Drafter, DFlashDrafter
from .drafter import Drafter
from .drafter_checkpoint import WEIGHTS, WEIGHTS_INDEX, load_drafter, read_tensors, shard_names
from .dspark.modeling_dspark import DSparkDrafter
from .published_config import read_published_config
from .ready.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, READER_CONFIG, Adapter
from .ready.modeling_ready import ReadyDrafter

logger = logging.get_logger(__name__)

DRAFTER_CLASSES: dict[str, type[Drafter]] = {
    drafter_class.config_class.family: drafter_class
    for drafter_class in (DFlashDrafter, DFlash2Drafter, DSparkDrafter, ReadyDrafter)
}

HUB_ARGUMENTS = frozenset(
    {"revision", "cache_dir", "token", "local_files_only", "force_download", "proxies", "subfolder"}
)


class AutoDrafter:
    """Loads drafters; never instantiated."""

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | PathLike,
        *,
        dtype: str | torch.dtype = "auto",
        device_map: str | int | torch.device | dict[str, Any] | None = None,
        sample_from_anchor: bool | None = None,
        is_causal: bool | None = None,
        **hub_kwargs: Any,
    ) -> Drafter:
        """The drafter of a bundled name, a folder or a Hub repository, in eval mode.

        An adapter of `training/train_ready.py` is merged into the drafter that it names.

        Args:
            pretrained_model_name_or_path: bundled name (`hf_hybridspec.bundled`), folder, or repository id.
            dtype: "auto" keeps the checkpoint's; float16 becomes bfloat16 (drafters overflow in float16).
            device_map: one device ("cuda", 0, {"": "cuda:1"}), or "auto": CUDA where there is one.
            sample_from_anchor: states the row alignment where the checkpoint leaves it ambiguous.
            is_causal: overrides every layer's causality inside the block.
            hub_kwargs: revision, cache_dir, token, local_files_only, force_download, proxies, subfolder.

        Raises:
            ValueError: unknown architecture, unusable configuration, mismatched or unreadable tensors, or an unknown
                argument; the message lists all of them.
            OSError: the name is no folder and no reachable repository.
        """
        unknown = sorted(hub_kwargs.keys() - HUB_ARGUMENTS)
        if unknown:
            raise ValueError(f"AutoDrafter.from_pretrained does not take {unknown}. It takes {sorted(HUB_ARGUMENTS)}.")
        source = resolve(fspath(pretrained_model_name_or_path))
        if _is_adapter(source, hub_kwargs):
            adapter = read_adapter(source, hub_kwargs)
            shared = {name: value for name, value in hub_kwargs.items() if name not in ("revision", "subfolder")}
            base = cls.from_pretrained(
                adapter.base_drafter,
                dtype=dtype,
                device_map=device_map,
                sample_from_anchor=sample_from_anchor,
                is_causal=is_causal,
                **shared,
            )
            return adapter.merge_into(base)
        raw = read_config(source, hub_kwargs)
        published = read_published_config(raw, sample_from_anchor=sample_from_anchor, is_causal=is_causal)
        drafter_class = DRAFTER_CLASSES[published.family]
        config = drafter_class.config_class(**published.values)
        config.name_or_path = source
        device = _device(device_map)
        tensors = read_tensors(Path(_file(source, name, hub_kwargs)) for name in _weight_names(source, hub_kwargs))
        stored = config.dtype or next((t.dtype for t in tensors.values() if t.is_floating_point()), None)
        return load_drafter(drafter_class, config, tensors, _dtype(dtype, stored), device)


def _is_adapter(source: str, hub_kwargs: dict[str, Any]) -> bool:
    folder = Path(source, hub_kwargs.get("subfolder") or "")
    if folder.is_dir():
        return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()
    optional = {"_raise_exceptions_for_missing_entries": False}
    try:
        if cached_file(source, "config.json", **hub_kwargs, **optional) is not None:
            return False
        return cached_file(source, ADAPTER_CONFIG, **hub_kwargs, **optional) is not None
    except OSError:
        # An unreachable repository is reported where a drafter is looked for.
        return False


def read_adapter(source: str, hub_kwargs: dict[str, Any]) -> Adapter:
    """The adapter of a folder or repository; raises ValueError where a file is missing or unusable."""
    files = {}
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS, READER_CONFIG):
        path = cached_file(source, name, **hub_kwargs, _raise_exceptions_for_missing_entries=False)
        if path is None:
            raise ValueError(f"{source} lacks {name}, so it is no adapter of train_ready.py. Use PEFT, or retrain.")
        files[name] = path
    return Adapter.read(files)


def read_config(source: str, hub_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The raw config.json of a drafter; raises ValueError for a folder without one and for an adapter folder."""
    folder = Path(source, hub_kwargs.get("subfolder") or "")
    if folder.is_dir() and not (folder / "config.json").is_file():
        adapter = (folder / "adapter_config.json").is_file()
        what = "an adapter; merge it into its drafter first" if adapter else "no config.json"
        raise ValueError(f"{source} holds {what}. A drafter is a folder with config.json and model.safetensors.")
    try:
        path = _file(source, "config.json", hub_kwargs)
    except OSError as error:
        reason = str(error).strip().splitlines()[0]
        raise OSError(f"{source!r} is neither a folder nor a reachable repository with a drafter: {reason}") from error
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"config.json of {source} is not JSON ({error}). Download the checkpoint again.") from error
    if not isinstance(raw, dict):
        raise ValueError(f"config.json of {source} must hold an object, got {type(raw).__name__}.")
    return raw


def _file(source: str, name: str, hub_kwargs: dict[str, Any]) -> str:
    return cached_file(source, name, **hub_kwargs)


def _weight_names(source: str, hub_kwargs: dict[str, Any]) -> list[str]:
    optional = {"_raise_exceptions_for_missing_entries": False}
    if cached_file(source, WEIGHTS, **hub_kwargs, **optional) is not None:
        return [WEIGHTS]
    index = cached_file(source, WEIGHTS_INDEX, **hub_kwargs, **optional)
    if index is None:
        raise ValueError(f"{source} holds neither {WEIGHTS} nor {WEIGHTS_INDEX}. Other weight formats are not read.")
    return shard_names(Path(index))


def _dtype(requested: str | torch.dtype, stored: torch.dtype | None) -> torch.dtype:
    if isinstance(requested, str):
        dtype = stored if requested == "auto" else getattr(torch, requested, None)
    else:
        dtype = requested
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f'dtype must be "auto" or a floating torch dtype, got {requested!r}.')
    if dtype == torch.float16:
        logger.warning("A drafter computes in bfloat16 instead of float16, in which its hidden states overflow.")
        return torch.bfloat16
    return dtype


def _device(device_map: Any) -> torch.device:
    if isinstance(device_map, dict):
        if len(device_map) != 1:
            raise ValueError(f"A drafter lives on one device: device_map must name one, got {device_map}.")
        device_map = next(iter(device_map.values()))
    if device_map is None:
        return torch.device("cpu")
    if device_map == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device("cuda", device_map) if isinstance(device_map, int) else torch.device(device_map)
