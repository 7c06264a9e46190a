"""Trains the bundled DSpark drafter (block 7, Markov head, confidence head) on answers that the target itself wrote.

    python -m training.tiny.train_dspark --target runs/target --tokenizer runs/tokenizer --answers runs/answers.npz \\
        --initial runs/dflash --output runs/dspark --seconds 240

As `train_dflash`, from the same rows: the target's taps and last hidden rows are computed once and kept on the
device. The loss is DSpark's own, 0.1 cross entropy + 0.9 L1 + 1.0 confidence. `--initial` may name a DSpark drafter
or a DFlash drafter of the same widths, whose backbone is then taken over. A run ends annealed, after `--seconds` or
after `--max-steps`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3_5MoeForCausalLM

from hf_hybridspec.modeling.auto import AutoDrafter
from hf_hybridspec.modeling.dspark import DSparkConfig, DSparkDrafter
from training.anchors import sample_anchors
from training.objective import DraftingObjective, LossWeights, ObjectiveOutput, TrainingBatch
from training.target_features import TargetRecord
from training.tiny.drafter_run import (
    FeatureStore,
    add_run_arguments,
    answer_rows,
    backbone_values,
    bind_for_training,
    load_target,
    save_drafter,
)
from training.tiny.fast_target import fast_forms
from training.tiny.optimizers import MasterAdamW, schedule
from training.tiny.train_target import Clock

BLOCK_SIZE = 7
MARKOV_RANK = 64
# What a new Markov or confidence head has and a DFlash backbone lacks.
HEADS = ("markov_head.", "confidence_head.")


def dspark_config(target: Qwen3_5MoeForCausalLM, mask_token_id: int, **changes) -> DSparkConfig:
    """The shared backbone with DSpark's block and heads; `changes` override single values."""
    values = {"block_size": BLOCK_SIZE, "markov_rank": MARKOV_RANK, "enable_confidence_head": True}
    return DSparkConfig(**(backbone_values(target, mask_token_id) | values | changes))


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


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_arguments(parser)
    parser.add_argument("--initial", type=Path, help="DSpark or DFlash drafter to start from")
    parser.add_argument("--blocks-per-chunk", type=int, default=1024)
    return parser.parse_args(arguments)


def load_models(options: argparse.Namespace) -> tuple[Qwen3_5MoeForCausalLM, DSparkDrafter]:
    """The frozen target and the drafter bound to it."""
    target, tokenizer = load_target(options)
    drafter = DSparkDrafter(dspark_config(target, tokenizer.mask_token_id, **options.config))
    if options.initial is not None:
        take_over(drafter, options.initial)
    return target, bind_for_training(drafter, target)


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    target, drafter = load_models(options)
    with fast_forms():
        store = DSparkStore(target, answer_rows(options), list(drafter.target_layer_ids), options.longest)
    objective = DraftingObjective(drafter, LossWeights(confidence=1.0), options.blocks_per_chunk)
    optimizer = MasterAdamW(drafter, options.learning_rate, options.weight_decay, muon=True)
    clock, log = Clock(options.seconds, time.monotonic(), options.max_steps), []
    next_save = options.save_seconds
    while clock.step < options.max_steps and clock.progress < 1.0:
        output = objective(*store.batch(options.rows, options.anchors))
        output.loss.backward()
        optimizer.step(schedule(clock.progress))
        clock.step = step = clock.step + 1
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
    print(f"{len(store)} rows, {clock.step} steps, {parameters:.2f} M parameters", flush=True)


if __name__ == "__main__":
    main()
