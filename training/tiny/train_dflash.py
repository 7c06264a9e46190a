"""Trains the bundled DFlash drafter on answers that the target itself wrote.

    python -m training.tiny.train_dflash --target runs/target --tokenizer runs/tokenizer --answers runs/answers.npz \\
        --output runs/dflash --seconds 240

The target is frozen and computes its taps on the fly. Every step lays blocks at random anchors of the answers
(`training.anchors`); the loss falls with the row (`--gamma`), and in the last part of the run follows the drafter's
own chance of reaching a row.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path
from random import Random

import torch
from torch import Tensor
from transformers import AutoTokenizer, Qwen3_5MoeForCausalLM

from hf_hybridspec.modeling.dflash import DFlashConfig, DFlashDrafter
from training.anchors import BlockLayout, block_forward, lay_out_blocks, project_features, sample_anchors
from training.losses import decay_weights, survival_weights, weighted_cross_entropy
from training.tiny.fast_target import use_fast_forms
from training.tiny.optimizers import MasterAdamW, schedule
from training.tiny.regenerate import load_answers
from training.tiny.train_target import Clock

TAPS = [1, 4, 6]


def drafter_config(target: Qwen3_5MoeForCausalLM, mask_token_id: int, **changes) -> DFlashConfig:
    """Three layers of the target's width, blocks of 16, about 2 M parameters; `changes` override single values."""
    text = target.config.get_text_config()
    values = {
        "vocab_size": text.vocab_size,
        "hidden_size": text.hidden_size,
        "intermediate_size": 2 * text.hidden_size,
        "num_hidden_layers": 3,
        "num_attention_heads": text.num_attention_heads,
        "num_key_value_heads": text.num_key_value_heads,
        "head_dim": text.head_dim,
        "max_position_embeddings": text.max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        "num_target_layers": text.num_hidden_layers,
        "target_layer_ids": TAPS,
        "block_size": 16,
        "mask_token_id": mask_token_id,
        "dtype": "bfloat16",
    }
    return DFlashConfig(**(values | changes))


@torch.no_grad()
def tapped_features(target: Qwen3_5MoeForCausalLM, tokens: Tensor, taps: list[int]) -> Tensor:
    """[B, S, K*H]: outputs of the tapped layers, in order, for tokens [B, S]; padding must be on the right."""
    captured: dict[int, Tensor] = {}

    def keep(tap: int):
        return lambda module, inputs, output: captured.__setitem__(tap, output)

    hooks = [target.model.layers[tap].register_forward_hook(keep(tap)) for tap in taps]
    try:
        target.model(input_ids=tokens, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat([captured[tap] for tap in taps], dim=-1)


class AnswerBatches:
    """Endless batches of regenerated answers: rows of similar length together, right-padded, in shuffled epochs."""

    def __init__(
        self, answers: list[tuple[Tensor, int]], tokens_per_batch: int, longest: int, padding: int, seed: int
    ):
        kept = [(row[:longest], prompt) for row, prompt in answers if min(len(row), longest) - prompt >= 8]
        if not kept:
            raise ValueError(f"no answer of at least 8 tokens within {longest} tokens among {len(answers)} rows")
        self._rows = sorted(kept, key=lambda row: len(row[0]))
        self._padding, self._random = padding, Random(seed)
        self._batches: list[tuple[int, int]] = []
        start = 0
        while start < len(self._rows):
            stop = start + 1
            while stop < len(self._rows) and (stop + 1 - start) * len(self._rows[stop][0]) <= tokens_per_batch:
                stop += 1
            self._batches.append((start, stop))
            start = stop
        self._queue: list[tuple[int, int]] = []

    def next(self) -> tuple[Tensor, Tensor]:
        """tokens int64 [B, S] and answer_mask bool [B, S] (True on what the target wrote)."""
        if not self._queue:
            self._queue = list(self._batches)
            self._random.shuffle(self._queue)
        rows = self._rows[slice(*self._queue.pop())]
        # A multiple of the recurrent chunk, so that few shapes occur.
        length = -(-max(len(row) for row, _ in rows) // 64) * 64
        tokens = torch.full((len(rows), length), self._padding)
        mask = torch.zeros(len(rows), length, dtype=torch.bool)
        for i, (row, prompt) in enumerate(rows):
            tokens[i, : len(row)] = row
            mask[i, prompt : len(row)] = True
        return tokens, mask


def drafter_loss(logits: Tensor, layout: BlockLayout, first_draft_row: int, gamma: float, survival: bool) -> Tensor:
    """Loss of logits [B, N, R, V] over the layout's supervised rows."""
    weights = decay_weights(layout.supervised, first_draft_row, gamma)
    if survival:
        chance = logits.detach().float().log_softmax(-1).gather(-1, layout.labels.unsqueeze(-1)).squeeze(-1).exp()
        weights = survival_weights(chance, layout.supervised, alpha=0.1)
    return weighted_cross_entropy(logits, layout.labels, weights)


@torch.no_grad()
def accepted_prefix(logits: Tensor, layout: BlockLayout) -> float:
    """Mean number of supervised rows, from the first draft row on, whose top-1 token is the label (teacher forced)."""
    right = (logits.argmax(-1) == layout.labels) & layout.supervised
    accepted = right[..., 1:].long().cumprod(-1).sum(-1)
    return accepted[layout.valid].float().mean().item()


def save_drafter(drafter: DFlashDrafter, output: Path) -> None:
    saved = copy.deepcopy(drafter).to(torch.bfloat16)
    saved.save_pretrained(output)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument("--tokens-per-batch", type=int, default=32_768)
    parser.add_argument("--longest", type=int, default=832, help="tokens of a row, the prompt included")
    parser.add_argument("--anchors", type=int, default=48, help="blocks of each row and step")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--gamma", type=float, default=7.0)
    parser.add_argument("--survival-share", type=float, default=0.4, help="last part of the run with survival weights")
    parser.add_argument("--config", type=json.loads, default={}, help="JSON of drafter config values to change")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    torch.manual_seed(options.seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    use_fast_forms()
    device = torch.device(options.device)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = Qwen3_5MoeForCausalLM.from_pretrained(options.target, dtype=dtype).to(device).eval().requires_grad_(False)
    config = drafter_config(target, tokenizer.mask_token_id, **options.config)
    drafter = DFlashDrafter(config).to(device, dtype)
    drafter.bind(target.get_input_embeddings(), target.lm_head, target.config)
    padding = target.config.pad_token_id
    data = AnswerBatches(
        load_answers(options.answers), options.tokens_per_batch, options.longest, padding, options.seed
    )
    optimizer = MasterAdamW(drafter, options.learning_rate, options.weight_decay)
    first_row, clock, step, log = drafter.alignment.first_draft_row, Clock(options.seconds, time.monotonic()), 0, []
    while clock.progress < 1.0 and step < options.max_steps:
        tokens, answer_mask = (x.to(device) for x in data.next())
        anchors, valid = sample_anchors(answer_mask, options.anchors)
        layout = lay_out_blocks(tokens, answer_mask, anchors, valid, drafter.block_size, drafter.alignment)
        context = project_features(drafter, tapped_features(target, tokens, config.target_layer_ids))
        logits = drafter.logits(block_forward(drafter, tokens, context, layout))
        survival = clock.progress > 1 - options.survival_share
        loss = drafter_loss(logits, layout, first_row, options.gamma, survival)
        loss.backward()
        optimizer.step(schedule(clock.progress))
        step += 1
        if step % 50 == 0 or step <= 3:
            record = {
                "step": step,
                "seconds": round(clock.elapsed, 1),
                "loss": round(loss.item(), 4),
                "accepted": round(accepted_prefix(logits, layout), 3),
            }
            log.append(record)
            print(record, flush=True)
    save_drafter(drafter, options.output)
    (options.output / "train_log.json").write_text(json.dumps(log, indent=1))
    print(f"{step} steps, {sum(p.numel() for p in drafter.parameters()) / 1e6:.2f} M parameters", flush=True)


if __name__ == "__main__":
    main()
