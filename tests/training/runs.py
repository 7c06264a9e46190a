"""A whole training setup in a folder: random target with a tokenizer, random DSpark, a data set."""

import json
import string
from pathlib import Path

import torch
import yaml
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from tests.support import VOCAB_SIZE, random_target
from tests.training.helpers import make_dspark

STATE_LAYERS = [1, 2]


def letter_tokenizer() -> Qwen3_5Tokenizer:
    """One token for each letter, digit and space; unknown characters are left out."""
    letters = [*string.ascii_letters, *string.digits, "Ġ", "Ċ", ".", ",", "+", "=", "?"]
    tokenizer = Qwen3_5Tokenizer(vocab={letter: i + 1 for i, letter in enumerate(letters)}, merges=[])
    assert len(tokenizer) < VOCAB_SIZE - 1
    return tokenizer


def write_rows(path: Path, count: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with path.open("w") as file:
        for _ in range(count):
            length = int(torch.randint(20, 60, (1,), generator=generator))
            tokens = torch.randint(1, 99, (length,), generator=generator).tolist()
            file.write(json.dumps({"input_ids": tokens, "assistant_mask": [0] * 6 + [1] * (length - 6)}) + "\n")


def write_setup(folder: Path, rows: int = 16, **changes) -> dict:
    """Saves models and rows in `folder`; returns the arguments of a short run of stage `reader`."""
    random_target().save_pretrained(folder / "target")
    letter_tokenizer().save_pretrained(folder / "target")
    make_dspark().save_pretrained(folder / "drafter")
    write_rows(folder / "rows.jsonl", rows)
    return {
        "target": str(folder / "target"),
        "drafter": str(folder / "drafter"),
        "dataset": str(folder / "rows.jsonl"),
        "stage": "reader",
        "max_length": 48,
        "num_anchors": 6,
        "blocks_per_chunk": 8,
        "reader_state_layers": STATE_LAYERS,
        "lora_rank": 2,
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "logging_steps": 1,
        "learning_rate": 0.01,
        "save_steps": 2,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    } | changes


def write_config(folder: Path, values: dict) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def losses_of(output_dir: str | Path) -> list[float]:
    state = json.loads(Path(output_dir, "trainer_state.json").read_text())
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]
