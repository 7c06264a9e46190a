"""Trains the bundled target, a stock `Qwen3_5MoeForCausalLM`, for a given wall-clock time.

    python -m training.tiny.train_target --packed runs/packed --tokenizer runs/tokenizer --output runs/target --seconds
    480

On a GPU the model computes in bfloat16, as it is used later; AdamW keeps float32 masters of every weight. The learning
rate follows the share of the time that has passed (warm-up, then cosine), so that a run ends annealed on any machine.
A checkpoint is written every `--save-seconds` and at the end; `train_log.json` holds the losses and the held-out loss
by domain.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, Qwen3_5MoeForCausalLM
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import load_balancing_loss_func

from training.tiny.fast_target import fast_forms
from training.tiny.optimizers import MasterAdamW, schedule
from training.tiny.pack import read_rows
from training.tiny.target_config import target_config

# Share of each domain in a training step.
MIXTURE = {
    "gsm": 0.04,
    "problems": 0.08,
    "varied": 0.18,
    "restated": 0.14,
    "codeio": 0.08,
    "code": 0.15,
    "code_chat": 0.11,
    "prose": 0.06,
    "prose_chat": 0.07,
    "dictionary": 0.02,
    "documentation": 0.02,
    "factbook": 0.04,
    "chatter": 0.01,
}
_MEGABYTE = 1024 * 1024


class MixedRows:
    """Rows of every domain on the device, drawn by `mixture` (`MIXTURE`), each domain in shuffled epochs."""

    def __init__(self, packed: Path, device: torch.device, seed: int, mixture: dict[str, float] | None = None):
        mixture = MIXTURE if mixture is None else mixture
        self._random = np.random.default_rng(seed)
        self._rows: dict[str, Tensor] = {}
        for domain in json.loads((packed / "index.json").read_text())["train"]:
            rows = read_rows(packed, "train", domain)
            if len(rows):
                self._rows[domain] = torch.from_numpy(rows.astype(np.int16)).to(device)
        self._domains = list(self._rows)
        shares = np.array([mixture.get(domain, 0.0) for domain in self._domains])
        self._shares = shares / shares.sum()
        self._order = {domain: np.empty(0, dtype=np.int64) for domain in self._domains}

    def _take(self, domain: str, count: int) -> np.ndarray:
        while len(self._order[domain]) < count:
            epoch = self._random.permutation(len(self._rows[domain]))
            self._order[domain] = np.concatenate([self._order[domain], epoch])
        taken, self._order[domain] = self._order[domain][:count], self._order[domain][count:]
        return taken

    def batch(self, rows: int) -> Tensor:
        """int64 [rows, length] of token ids."""
        counts = self._random.multinomial(rows, self._shares)
        parts = []
        for domain, count in zip(self._domains, counts, strict=True):
            if count:
                index = torch.from_numpy(self._take(domain, count))
                parts.append(self._rows[domain][index.to(self._rows[domain].device)])
        return torch.cat(parts).long()


def training_loss(model: Qwen3_5MoeForCausalLM, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Next-token loss over all of `rows` int64 [R, T], with and without the load-balancing term."""
    outputs = model.model(input_ids=rows, use_cache=False, output_router_logits=True)
    logits = model.lm_head(outputs.last_hidden_state[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
    balance = load_balancing_loss_func(outputs.router_logits, model.num_experts, model.num_experts_per_tok)
    return loss + model.router_aux_loss_coef * balance, loss.detach()


@torch.no_grad()
def heldout_losses(model: Qwen3_5MoeForCausalLM, packed: Path, padding: int, rows_per_domain: int) -> dict[str, float]:
    """Mean next-token loss in nats by domain, over whole held-out documents (padding left out)."""
    device, losses = next(model.parameters()).device, {}
    for domain, count in json.loads((packed / "index.json").read_text())["heldout"].items():
        if not count:
            continue
        rows = torch.from_numpy(read_rows(packed, "heldout", domain)[:rows_per_domain].astype(np.int64))
        # A document ends with one end-of-text token; those after it are padding.
        lengths = (rows != padding).sum(1).add(1).clamp(max=rows.shape[1])
        total, tokens = 0.0, 0
        for index in lengths.argsort().split(16):
            part = rows[index, : int(lengths[index].max())].to(device)
            logits = model(input_ids=part, use_cache=False).logits[:, :-1]
            ended = (part == padding).cumsum(1)[:, :-1] > 0
            labels = part[:, 1:].masked_fill(ended, -100)
            total += F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum").item()
            tokens += int((~ended).sum())
        losses[domain] = round(total / tokens, 4)
    return losses


def save_target(model: Qwen3_5MoeForCausalLM, end_ids: list[int], output: Path) -> None:
    """Writes the checkpoint in shards under 16 MiB, complete or not at all."""
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    saved = copy.deepcopy(model).to(torch.bfloat16)
    saved.generation_config = GenerationConfig(eos_token_id=end_ids, pad_token_id=model.config.pad_token_id)
    saved.save_pretrained(partial, max_shard_size=15 * _MEGABYTE)
    shutil.rmtree(output, ignore_errors=True)
    os.replace(partial, output)


@dataclass
class Clock:
    """How far a run is: the larger share of its seconds since `start`, and of its steps."""

    seconds: float
    start: float
    max_steps: int = 10**9
    step: int = 0

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.start

    @property
    def progress(self) -> float:
        return min(max(self.elapsed / self.seconds, self.step / self.max_steps), 1.0)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packed", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=480.0, help="training time, loading not counted")
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument("--rows", type=int, default=64, help="rows of one step")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--save-seconds", type=float, default=120.0)
    parser.add_argument("--heldout-rows", type=int, default=192)
    parser.add_argument("--compiled", action="store_true", help="compile the elementwise parts (a minute on a GPU)")
    parser.add_argument("--config", type=json.loads, default={}, help="JSON of config values to change")
    parser.add_argument("--initial", type=Path, help="target checkpoint to go on from")
    parser.add_argument("--mixture", type=json.loads, default=MIXTURE, help="JSON of the share of each domain")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def train(model: Qwen3_5MoeForCausalLM, data: MixedRows, end_ids: list[int], options: argparse.Namespace) -> dict:
    """Trains `model` in place until the time or the steps are used up; returns the log."""
    optimizer = MasterAdamW(model, options.learning_rate, options.weight_decay)
    clock, next_save = Clock(options.seconds, time.monotonic(), options.max_steps), options.save_seconds
    log: dict = {"parameters": sum(p.numel() for p in model.parameters()), "steps": []}
    model.train()
    while clock.progress < 1.0:
        rows = data.batch(options.rows)
        loss, plain = training_loss(model, rows)
        loss.backward()
        norm = optimizer.step(schedule(clock.progress))
        clock.step = step = clock.step + 1
        if step % 50 == 0 or step <= 3:
            log["steps"].append({"step": step, "seconds": round(clock.elapsed, 1), "loss": round(plain.item(), 4)})
            speed = step * rows.numel() / clock.elapsed / 1e6
            print(log["steps"][-1], f"norm {norm.item():.2f}, {speed:.3f} M tokens/s", flush=True)
        if clock.elapsed > next_save:
            save_target(model, end_ids, options.output)
            next_save += options.save_seconds
    log["tokens"], log["seconds"] = clock.step * rows.numel(), round(clock.elapsed, 1)
    return log


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    device = torch.device(options.device)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    end_ids = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if options.initial is None:
        model = Qwen3_5MoeForCausalLM(target_config(tokenizer, **options.config))
    else:
        model = Qwen3_5MoeForCausalLM.from_pretrained(options.initial)
    model = model.to(device, dtype)
    with fast_forms(options.compiled):
        log = train(model, MixedRows(options.packed, device, options.seed, options.mixture), end_ids, options)
    save_target(model, end_ids, options.output)
    with fast_forms():
        log["heldout_loss"] = heldout_losses(model.eval(), options.packed, end_ids[1], options.heldout_rows)
    print(json.dumps(log["heldout_loss"]), f"{log['tokens'] / 1e6:.1f} M tokens", flush=True)
    (options.output / "train_log.json").write_text(json.dumps(log, indent=1))


if __name__ == "__main__":
    main()
