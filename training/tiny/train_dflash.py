"""Trains the bundled DFlash drafter on answers that the target itself wrote.

    python -m training.tiny.train_dflash --target runs/target --tokenizer runs/tokenizer --answers runs/answers.npz \\
        --output runs/dflash --seconds 240

The target is frozen; its taps are computed once and kept on the device. Every step lays blocks at random anchors of
the answers (`training.anchors`); the loss falls with the row (`--gamma`), and in the last part of the run follows the
drafter's own chance of reaching a row.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3_5MoeForCausalLM

from hf_hybridspec.modeling.dflash import DFlashConfig, DFlashDrafter
from training.anchors import BlockLayout, lay_out_blocks, sample_anchors
from training.drafting import draft_hidden
from training.losses import decay_weights, survival_weights, weighted_cross_entropy
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
from training.tiny.train_target import Clock, MixedRows


def drafter_config(target: Qwen3_5MoeForCausalLM, mask_token_id: int, **changes) -> DFlashConfig:
    """The shared backbone with blocks of 16; `changes` override single values."""
    return DFlashConfig(**(backbone_values(target, mask_token_id) | {"block_size": 16} | changes))


def corpus_rows(packed: Path, count: int, length: int, seed: int) -> list[tuple[Tensor, int]]:
    """Rows of the target's own training text, all of it to be predicted: more varied than its answers."""
    rows = MixedRows(packed, torch.device("cpu"), seed).batch(count)[:, :length]
    return [(row, 0) for row in rows]


def drafter_loss(logits: Tensor, layout: BlockLayout, first_draft_row: int, gamma: float, survival: bool) -> Tensor:
    """Loss of logits [B, N, R, V] over the layout's supervised rows.

    With `survival`, every block weighs the same: hard blocks, whose weight is on their first rows, cost most rounds.
    """
    weights = decay_weights(layout.supervised, first_draft_row, gamma)
    if survival:
        chance = logits.detach().float().log_softmax(-1).gather(-1, layout.labels.unsqueeze(-1)).squeeze(-1).exp()
        weights = survival_weights(chance, layout.supervised, alpha=0.2)
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-6)
    return weighted_cross_entropy(logits, layout.labels, weights)


@torch.no_grad()
def accepted_prefix(logits: Tensor, layout: BlockLayout) -> float:
    """Mean number of supervised rows, from the first draft row on, whose top-1 token is the label (teacher forced)."""
    right = (logits.argmax(-1) == layout.labels) & layout.supervised
    accepted = right[..., 1:].long().cumprod(-1).sum(-1)
    return accepted[layout.valid].float().mean().item()


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_arguments(parser)
    parser.add_argument("--initial", type=Path, help="drafter checkpoint to go on from")
    parser.add_argument("--packed", type=Path, help="packed corpus, for rows of plain text besides the answers")
    parser.add_argument("--corpus-rows", type=int, default=10_000)
    parser.add_argument("--gamma", type=float, default=4.0)
    parser.add_argument("--survival-share", type=float, default=0.7, help="last part of the run with survival weights")
    return parser.parse_args(arguments)


def load_models(options: argparse.Namespace) -> tuple[Qwen3_5MoeForCausalLM, DFlashDrafter]:
    """The frozen target, and the drafter bound to it: new, or from `--initial`."""
    target, tokenizer = load_target(options)
    if options.initial is None:
        drafter = DFlashDrafter(drafter_config(target, tokenizer.mask_token_id, **options.config))
    else:
        drafter = DFlashDrafter.from_pretrained(options.initial)
    return target, bind_for_training(drafter, target)


def train_step(drafter: DFlashDrafter, store: FeatureStore, options: argparse.Namespace, survival: bool):
    """Forward and backward of one batch; returns the loss, the logits and the layout."""
    tokens, answer_mask, features = store.batch(options.rows)
    anchors, valid = sample_anchors(answer_mask, options.anchors)
    layout = lay_out_blocks(tokens, answer_mask, anchors, valid, drafter.block_size, drafter.alignment)
    logits = drafter.logits(draft_hidden(drafter, tokens, features, layout))
    loss = drafter_loss(logits, layout, drafter.alignment.first_draft_row, options.gamma, survival)
    loss.backward()
    return loss.detach(), logits.detach(), layout


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    target, drafter = load_models(options)
    rows = answer_rows(options)
    if options.packed is not None:
        rows += corpus_rows(options.packed, options.corpus_rows, options.longest, options.seed)
    started = time.monotonic()
    with fast_forms():
        store = FeatureStore(target, rows, list(drafter.target_layer_ids), options.longest)
    print(f"{len(store)} rows, {len(store.tokens) / 1e6:.2f} M tokens, {time.monotonic() - started:.0f} s", flush=True)
    optimizer = MasterAdamW(drafter, options.learning_rate, options.weight_decay, muon=True)
    clock, log = Clock(options.seconds, time.monotonic(), options.max_steps), []
    next_save = options.save_seconds
    while clock.progress < 1.0:
        loss, logits, layout = train_step(drafter, store, options, clock.progress > 1 - options.survival_share)
        optimizer.step(schedule(clock.progress))
        clock.step = step = clock.step + 1
        if step % 200 == 0 or step <= 3:
            accepted = round(accepted_prefix(logits, layout), 3)
            log.append(
                {"step": step, "seconds": round(clock.elapsed, 1), "loss": round(loss.item(), 4), "accepted": accepted}
            )
            print(log[-1], flush=True)
        if clock.elapsed > next_save:
            save_drafter(drafter, options.output)
            next_save += options.save_seconds
    save_drafter(drafter, options.output)
    (options.output / "train_log.json").write_text(json.dumps(log, indent=1))
    print(f"{clock.step} steps, {sum(p.numel() for p in drafter.parameters()) / 1e6:.2f} M parameters", flush=True)


if __name__ == "__main__":
    main()
