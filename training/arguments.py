"""Arguments of train_ready.py: dataclasses, a YAML file, and the command line, which wins."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser, TrainingArguments

STAGES = ("reader", "joint", "ft")


@dataclass
class ReadyArguments:
    """What is trained on what."""

    target: str = field(metadata={"help": "Target: bundled name, folder or Hub id."})
    drafter: str = field(metadata={"help": "Pretrained DSpark drafter: bundled name, folder or Hub id."})
    dataset: str = field(metadata={"help": "Hub id, or a .jsonl file with the same columns."})
    stage: str = field(metadata={"help": "reader (stage 1), joint (stage 2: reader + LoRA), ft (LoRA, no reader)."})
    adapter: str | None = field(default=None, metadata={"help": "Adapter folder to start from (stage 2)."})
    target_revision: str | None = None
    drafter_revision: str | None = None
    dataset_split: str = "train"
    dataset_license: str = field(default="apache-2.0", metadata={"help": "Licence that the model card states."})
    max_samples: int | None = None
    max_length: int = 2048
    chat_template: str | None = field(
        default=None, metadata={"help": "Shipped template or file; default tokenizer's."}
    )
    enable_thinking: bool = True
    num_anchors: int = field(default=128, metadata={"help": "Anchors of a sequence, at most."})
    reader_state_layers: list[int] | None = None
    reader_injection_layers: list[int] | None = None
    reader_injection: str = "post_attention"
    reader_rank: int = 8
    reader_width: int | None = None
    lora_rank: int = 16
    lora_alpha: int = 32
    lora_target_modules: list[str] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc"]
    )
    ce_weight: float = 0.1
    l1_weight: float = 0.9
    position_decay: float = 4.0
    blocks_per_chunk: int = field(default=32, metadata={"help": "Blocks whose logits exist at one time."})
    eval_prompts: str | None = field(
        default=None, metadata={"help": ".jsonl with `turns`; drafted at each evaluation."}
    )
    eval_max_new_tokens: int = 256

    def __post_init__(self):
        if self.stage not in STAGES:
            raise ValueError(f"stage must be one of {', '.join(STAGES)}, got {self.stage!r}.")
        if self.stage == "ft" and self.reader_state_layers:
            raise ValueError("stage ft has no reader: leave out reader_state_layers.")
        if self.stage != "ft" and not self.reader_state_layers and self.adapter is None:
            raise ValueError(f"stage {self.stage} needs reader_state_layers, GDN layers of the target.")
        for name in ("max_length", "num_anchors", "lora_rank", "blocks_per_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}.")

    def reader(self, target_config) -> dict[str, Any]:
        """The `reader_` fields of a ReadyConfig for a target."""
        names = ("rank", "state_layers", "injection_layers", "injection", "width")
        return {f"reader_{name}": getattr(self, f"reader_{name}") for name in names} | {
            "reader_num_heads": target_config.linear_num_value_heads,
            "reader_key_dim": target_config.linear_key_head_dim,
            "reader_value_dim": target_config.linear_value_head_dim,
        }

    def recipe(self) -> dict[str, Any]:
        """What must be the same when a run is resumed."""
        loose = {"eval_prompts", "eval_max_new_tokens", "blocks_per_chunk", "dataset_license"}
        return {name: value for name, value in vars(self).items() if name not in loose}


def parse_arguments(command_line: Sequence[str]) -> tuple[ReadyArguments, TrainingArguments]:
    """Reads `--config FILE` (YAML) and then the command line over it.

    Raises ValueError for an unknown or ill-typed key in the file; argparse exits with 2 for the command line.
    """
    parser = HfArgumentParser((ReadyArguments, TrainingArguments), description="Trains ReaDy adapters.")
    head = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    head.add_argument("--config")
    known, rest = head.parse_known_args(command_line)
    prefix = _as_command_line(Path(known.config), parser) if known.config else []
    ready, training = parser.parse_args_into_dataclasses(args=[*prefix, *rest])
    return ready, training


def _as_command_line(path: Path, parser: HfArgumentParser) -> list[str]:
    """A YAML file as arguments, so that types are checked in one place and later arguments win."""
    if not path.is_file():
        raise ValueError(f"--config {path} does not exist. Configurations ship in training/configs/.")
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold keys and values, got {type(content).__name__}.")
    options = {action.dest for action in parser._actions}
    words = []
    for key, value in content.items():
        if key not in options:
            near = difflib.get_close_matches(str(key), options, n=1)
            raise ValueError(f"{path} has the unknown key {key!r}." + (f" Did you mean {near[0]!r}?" if near else ""))
        if value is None:
            continue
        values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
        words += [f"--{key}", *map(str, values)]
    return words
