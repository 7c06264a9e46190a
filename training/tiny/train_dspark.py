"""Trains the bundled DSpark drafter (block 7, Markov head, confidence head) on answers that the target itself wrote.

    python -m training.tiny.train_dspark --target runs/target --tokenizer runs/tokenizer --answers runs/answers.npz \\
        --initial runs/dflash --output runs/dspark --seconds 240

As `train_dflash`, from the same rows: the target's taps and last hidden rows are computed once and kept on the
device. The loss is DSpark's own, 0.1 cross entropy + 0.9 L1 + 1.0 confidence. `--initial` may name a DSpark drafter
or a DFlash drafter of the same widths, whose backbone is then taken over.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, Qwen3_5MoeForCausalLM

from hf_hybridspec.modeling.auto import AutoDrafter
from hf_hybridspec.modeling.dspark import DSparkConfig, DSparkDrafter
from training.anchors import sample_anchors
from training.objective import DraftingObjective, LossWeights, ObjectiveOutput, TrainingBatch
from training.target_features import TargetRecord
from training.tiny.fast_target import fast_forms
from training.tiny.optimizers import MasterAdamW, schedule
from training.tiny.regenerate import load_answers
from training.tiny.train_dflash import FeatureStore, drafter_config
from training.tiny.train_target import Clock

BLOCK_SIZE = 7
MARKOV_RANK = 64
# What a new Markov or confidence head has and a DFlash backbone lacks.
HEADS = ("markov_head.", "confidence_head.")


def dspark_config(target: Qwen3_5MoeForCausalLM, mask_token_id: int, **changes) -> DSparkConfig:
    """The backbone of the bundled DFlash drafter with DSpark's block and heads; `changes` override single values."""
    shared = drafter_config(target, mask_token_id)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "head_dim", "max_position_embeddings", "rope_parameters", "num_target_layers",
             "target_layer_ids", "mask_token_id", "dtype")  # fmt: skip
    values = {name: getattr(shared, name) for name in names}
    values |= {"block_size": BLOCK_SIZE, "markov_rank": MARKOV_RANK, "enable_confidence_head": True}
    return DSparkConfig(**(values | changes))


def take_over(drafter: DSparkDrafter, initial: Path) -> None:
    """Copies the tensors of another drafter. Raises ValueError where anything but the heads is missing or differs."""
    tensors = AutoDrafter.from_pretrained(initial, dtype=torch.float32).state_dict()
    own = drafter.state_dict()
    problems = [name for name in own if name not in tensors and not name.startswith(HEADS)]
    problems += [name for name in tensors if name not in own or tensors[name].shape != own[name].shape]
    if problems:
        raise ValueError(f"--initial {initial} has another backbone; it differs in {problems}.")
    drafter.load_state_dict(tensors, strict=False)


class DSparkStore:
    """Batches for the objective: a `FeatureStore` that also keeps the last layer's output, before the final norm."""

    def __init__(self, target: Qwen3_5MoeForCausalLM, rows: list[tuple[Tensor, int]], taps: list[int], longest: int):
        last = target.config.num_hidden_layers - 1
        self._store = FeatureStore(target, rows, [*taps, last], longest)
        self._norm = target.model.norm
        self._width = target.config.hidden_size

    def __len__(self) -> int:
        return len(self._store)

    @torch.no_grad()
    def batch(self, rows: int, anchors: int) -> tuple[TrainingBatch, TargetRecord]:
        """Random rows with anchors, and what the objective reads of the target."""
        tokens, answer_mask, features = self._store.batch(rows)
        positions, valid = sample_anchors(answer_mask, anchors)
        record = TargetRecord(features[..., : -self._width], self._norm(features[..., -self._width :]), {})
        return TrainingBatch(tokens, answer_mask, positions, valid), record


def estimate(output: ObjectiveOutput) -> float:
    """Estimated acceptance length of a batch: 1 + the draft tokens expected to be accepted."""
    return 1 + float(output.survived.sum()) / max(1, int(output.observable))


def save_drafter(drafter: DSparkDrafter, output: Path) -> None:
    """Writes the drafter in bfloat16."""
    copy.deepcopy(drafter).to(torch.bfloat16).save_pretrained(output)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--answers", type=Path, nargs="+", required=True, help="one or more answers.npz")
    parser.add_argument("--initial", type=Path, help="DSpark or DFlash drafter to start from")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=240.0, help="training time, loading not counted")
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument("--save-seconds", type=float, default=60.0)
    parser.add_argument("--rows", type=int, default=64, help="rows of one step")
    parser.add_argument("--longest", type=int, default=576, help="tokens of a row, the prompt included")
    parser.add_argument("--anchors", type=int, default=48, help="blocks of each row and step")
    parser.add_argument("--blocks-per-chunk", type=int, default=1024)
    parser.add_argument("--learning-rate", type=float, default=0.015)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--config", type=json.loads, default={}, help="JSON of drafter config values to change")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def load_models(options: argparse.Namespace) -> tuple[Qwen3_5MoeForCausalLM, DSparkDrafter]:
    """The frozen target and the drafter bound to it."""
    device = torch.device(options.device)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = Qwen3_5MoeForCausalLM.from_pretrained(options.target, dtype=dtype).to(device).eval().requires_grad_(False)
    drafter = DSparkDrafter(dspark_config(target, tokenizer.mask_token_id, **options.config))
    if options.initial is not None:
        take_over(drafter, options.initial)
    drafter = drafter.to(device, dtype).train()
    return target, drafter.bind(target.get_input_embeddings(), target.lm_head, target.config)


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    target, drafter = load_models(options)
    rows = [row for path in options.answers for row in load_answers(path)]
    with fast_forms():
        store = DSparkStore(target, rows, list(drafter.target_layer_ids), options.longest)
    objective = DraftingObjective(drafter, LossWeights(confidence=1.0), options.blocks_per_chunk)
    optimizer = MasterAdamW(drafter, options.learning_rate, options.weight_decay, muon=True)
    clock, step, log, next_save = Clock(options.seconds, time.monotonic()), 0, [], options.save_seconds
    while clock.progress < 1.0 and step < options.max_steps:
        output = objective(*store.batch(options.rows, options.anchors))
        output.loss.backward()
        optimizer.step(schedule(clock.progress))
        step += 1
        if step % 200 == 0 or step <= 3:
            accepted, loss = round(estimate(output), 3), round(output.loss.item(), 4)
            log.append({"step": step, "seconds": round(clock.elapsed, 1), "loss": loss, "acceptance": accepted})
            print(log[-1], flush=True)
        if clock.elapsed > next_save:
            save_drafter(drafter, options.output)
            next_save += options.save_seconds
    save_drafter(drafter, options.output)
    (options.output / "train_log.json").write_text(json.dumps(log, indent=1))
    parameters = sum(p.numel() for p in drafter.parameters()) / 1e6
    print(f"{len(store)} rows, {step} steps, {parameters:.2f} M parameters", flush=True)


if __name__ == "__main__":
    main()
