"""ReaDy adapters: a state reader and LoRA on a DSpark drafter, in PEFT's files plus what PEFT does not keep.

A folder holds `adapter_config.json` and `adapter_model.safetensors` as PEFT writes them, `reader_config.json` (the
reader's configuration and the fingerprint of the drafter that was trained on) and a model card. Loading needs no PEFT:
the LoRA products are added to the drafter's weights in fp32, and every tensor must find its place.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from torch import Tensor, nn

from ..drafter_checkpoint import read_tensors
from ..dspark.modeling_dspark import DSparkDrafter
from ..published_keys import READER_KEYS
from ..reader_guard import READER_MODULE
from .modeling_ready import ReadyDrafter

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
READER_CONFIG = "reader_config.json"
MODEL_CARD = "README.md"
PEFT_PREFIX = "base_model.model."
# Variants of LoRA that change what a tensor means; ours are trained without them.
PLAIN_LORA = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "fan_in_fan_out": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layer_replication": None,
    "megatron_config": None,
    "trainable_token_indices": None,
    "target_parameters": None,
}
FINGERPRINT_SAMPLE = 4096


@dataclass(frozen=True)
class ReaderRecord:
    """What `reader_config.json` holds.

    reader: the `reader_` fields of a ReadyConfig, without the prefix; None for an adapter without a reader.
    drafter_fingerprint: of the drafter that was trained on, see `fingerprint`.
    """

    reader: dict[str, Any] | None
    drafter_fingerprint: str

    @classmethod
    def of(cls, drafter: DSparkDrafter, drafter_fingerprint: str) -> "ReaderRecord":
        """The record of a drafter in training; drafter_fingerprint was taken before training."""
        if not isinstance(drafter, ReadyDrafter):
            return cls(None, drafter_fingerprint)
        fields = {name.removeprefix("reader_"): getattr(drafter.config, name) for name in sorted(READER_KEYS)}
        return cls(fields, drafter_fingerprint)

    def save(self, folder: str | PathLike) -> None:
        content = {"reader": self.reader, "drafter_fingerprint": self.drafter_fingerprint}
        Path(folder, READER_CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str | PathLike) -> "ReaderRecord":
        """Raises ValueError for a file that is not such a record."""
        content = read_json(path)
        if content.keys() != {"reader", "drafter_fingerprint"}:
            raise ValueError(f"{READER_CONFIG} must hold reader and drafter_fingerprint, got {sorted(content)}.")
        unknown = sorted((content["reader"] or {}).keys() - {name.removeprefix("reader_") for name in READER_KEYS})
        if unknown:
            raise ValueError(f"{READER_CONFIG} has unknown reader keys {unknown}. Update hf-hybridspec, or retrain.")
        return cls(content["reader"], content["drafter_fingerprint"])


def fingerprint(drafter: nn.Module) -> str:
    """A digest of a drafter's own weights (a sample of each tensor, as bfloat16), the same in every dtype it is loaded
    in. Tensors of a state reader and of LoRA do not count."""
    digest = hashlib.sha256()
    for name, tensor in sorted(drafter.state_dict().items()):
        if f".{READER_MODULE}." in name or "lora_" in name or not tensor.is_floating_point():
            continue
        # Inside PEFT a wrapped layer's weight stands one level deeper.
        digest.update(f"{name.replace('.base_layer', '')} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // FINGERPRINT_SAMPLE)][:FINGERPRINT_SAMPLE]
        digest.update(sample.to(torch.bfloat16).cpu().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Adapter:
    """An adapter folder, read. tensors: names as in the drafter, without PEFT's prefix. scale: of B A."""

    base_drafter: str
    scale: float
    tensors: Mapping[str, Tensor]
    record: ReaderRecord

    @classmethod
    def read(cls, files: Mapping[str, str | PathLike]) -> "Adapter":
        """files: path of each of the three files, by name. Raises ValueError for an adapter that is not ours."""
        config = read_json(files[ADAPTER_CONFIG])
        odd = {
            name: config[name]
            for name, plain in PLAIN_LORA.items()
            if config.get(name, plain) != plain and not (not plain and not config[name])
        }
        if odd:
            raise ValueError(f"{ADAPTER_CONFIG} uses {odd}. Only plain LoRA adapters of train_ready.py are read.")
        rank = config["r"]
        scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
        tensors = read_tensors([Path(files[ADAPTER_WEIGHTS])])
        foreign = sorted(name for name in tensors if not name.startswith(PEFT_PREFIX))
        if foreign:
            raise ValueError(f"{ADAPTER_WEIGHTS} holds tensors that are no adapter's: {foreign}.")
        tensors = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in tensors.items()}
        return cls(config["base_model_name_or_path"], scale, tensors, ReaderRecord.read(files[READER_CONFIG]))

    @torch.no_grad()
    def merge_into(self, drafter: DSparkDrafter) -> DSparkDrafter:
        """A drafter with the adapter's LoRA merged and its reader in place: `drafter` itself, or a ReadyDrafter made
        from it. Weights are changed in place, products are taken in fp32.

        Raises ValueError if the drafter is not the one that was trained on, or a tensor finds no place.
        """
        if not isinstance(drafter, DSparkDrafter) or isinstance(drafter, ReadyDrafter):
            raise ValueError(f"A ReaDy adapter belongs on a DSpark drafter, got a {type(drafter).__name__}.")
        found = fingerprint(drafter)
        if found != self.record.drafter_fingerprint:
            raise ValueError(
                "This adapter was trained on another drafter: its fingerprint is "
                f"{self.record.drafter_fingerprint[:12]}..., the drafter's is {found[:12]}.... Load it on the drafter "
                f"(and revision) that its adapter_config.json names: {self.base_drafter}."
            )
        if self.record.reader is not None:
            reader = {f"reader_{name}": value for name, value in self.record.reader.items()}
            drafter = ReadyDrafter.from_dspark(drafter, **reader)
        self._fill(drafter)
        return drafter.eval()

    def _fill(self, drafter: DSparkDrafter) -> None:
        parameters = dict(drafter.named_parameters())
        expected = {name for name in parameters if f".{READER_MODULE}." in name}
        products, problems = {}, []
        for name, tensor in self.tensors.items():
            if name.endswith(".lora_A.weight"):
                base = name.removesuffix(".lora_A.weight")
                other = self.tensors.get(f"{base}.lora_B.weight")
                if other is None or f"{base}.weight" not in parameters:
                    problems.append(f"no place for {name}")
                    continue
                products[f"{base}.weight"] = self.scale * (other.float() @ tensor.float())
            elif name.endswith(".lora_B.weight"):
                if f"{name.removesuffix('.lora_B.weight')}.lora_A.weight" not in self.tensors:
                    problems.append(f"{name} without its lora_A")
            elif name not in expected:
                problems.append(f"no place for {name}")
        problems += [f"missing {name}" for name in sorted(expected - self.tensors.keys())]
        changes = products | {name: self.tensors[name] for name in expected & self.tensors.keys()}
        problems += [
            f"{name} is {tuple(tensor.shape)}, the drafter's {tuple(parameters[name].shape)}"
            for name, tensor in changes.items()
            if tensor.shape != parameters[name].shape
        ]
        if problems:
            raise ValueError(f"The adapter does not fit the drafter {self.base_drafter}: " + "; ".join(problems) + ".")
        for name, tensor in changes.items():
            parameter = parameters[name]
            value = tensor.float() + parameter.float() if name in products else tensor
            parameter.copy_(value.to(parameter.dtype))


def save_adapter(model: nn.Module, folder: str | PathLike, base_drafter: str, record: ReaderRecord) -> None:
    """Writes the adapter of a PeftModel. base_drafter: the name under which `AutoDrafter` finds the drafter again."""
    for config in model.peft_config.values():
        config.base_model_name_or_path = base_drafter
        # Set by PEFT for classes of modules; what is trained is listed by name here.
        config.auto_mapping = None
    # PEFT would otherwise read the base drafter's configuration to look for grown embeddings; a drafter has none.
    model.save_pretrained(folder, save_embedding_layers=False)
    record.save(folder)


@dataclass(frozen=True)
class CardFacts:
    """What a model card states. metrics: name -> value. license: of the adapter, an identifier of the Hub."""

    base_drafter: str
    target: str
    dataset: str
    stage: str
    samples: int
    metrics: Mapping[str, float]
    license: str


def write_model_card(folder: str | PathLike, facts: CardFacts) -> None:
    """Writes README.md of an adapter folder, with the Hub's metadata block."""
    lines = [
        "---",
        f"license: {facts.license}",
        "library_name: hf-hybridspec",
        f"base_model: {facts.base_drafter}",
        "datasets:",
        f"- {facts.dataset}",
        "tags:",
        "- speculative-decoding",
        "- ready",
        "---",
        "",
        f"# Drafter adapter for {facts.target}",
        "",
        f"Trained with `training/train_ready.py`, stage `{facts.stage}`, on {facts.samples} samples of "
        f"`{facts.dataset}`. The target is frozen and not part of this adapter.",
        "",
        "| | |",
        "|---|---|",
        f"| base drafter | `{facts.base_drafter}` |",
        f"| target | `{facts.target}` |",
        *(f"| {name} | {value:.4f} |" for name, value in facts.metrics.items()),
        "",
        "```python",
        "import hf_hybridspec",
        "",
        'drafter = hf_hybridspec.AutoDrafter.from_pretrained("PATH OR ID OF THIS ADAPTER")',
        "```",
        "",
        f"License: {facts.license}. The licence of the base drafter applies to it as well.",
        "",
    ]
    Path(folder, MODEL_CARD).write_text("\n".join(lines), encoding="utf-8")


def push_to_hub(
    folder: str | PathLike,
    repo_id: str,
    token: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
) -> str:
    """Uploads an adapter folder; returns the commit's address. Raises ValueError for a folder that is no adapter."""
    missing = [name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS, READER_CONFIG) if not Path(folder, name).is_file()]
    if missing:
        raise ValueError(f"{folder} is no adapter: it lacks {missing}. Train one with training/train_ready.py.")
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    commit = api.upload_folder(
        repo_id=repo_id,
        folder_path=str(folder),
        revision=revision,
        commit_message="Upload drafter adapter",
        allow_patterns=[ADAPTER_CONFIG, ADAPTER_WEIGHTS, READER_CONFIG, MODEL_CARD],
    )
    return commit.commit_url


def read_json(path: str | PathLike) -> dict[str, Any]:
    """An object in a JSON file. Raises ValueError for anything else."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{Path(path).name} is not JSON ({error}). Download the adapter again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{Path(path).name} must hold an object, got {type(content).__name__}.")
    return content
