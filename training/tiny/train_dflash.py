"""Trains the bundled DFlash drafter on answers that the target itself wrote.

    python -m training.tiny.train_dflash --target runs/target --tokenizer runs/tokenizer --answers runs/answers.npz \\
        --output runs/dflash --seconds 240

The target is frozen; its taps are computed once and kept on the device. Every step lays blocks at random anchors of
the answers (`training.anchors`); the loss falls with the row (`--gamma`), and in the last part of the run follows the
drafter's own chance of reaching a row.
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

from hf_hybridspec.modeling.dflash import DFlashConfig, DFlashDrafter
from training.anchors import BlockLayout, lay_out_blocks, sample_anchors
from training.drafting import draft_hidden
from training.losses import decay_weights, survival_weights, weighted_cross_entropy
from training.tiny.fast_target import fast_forms
from training.tiny.optimizers import MasterAdamW, schedule
from training.tiny.regenerate import load_answers
from training.tiny.train_target import Clock, MixedRows

TAPS = [1, 4, 6]
_ROWS_PER_FORWARD = 256


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


class FeatureStore:
    """Token rows and the target's taps for all of them, kept on the device, so that the target runs once.

    rows: (tokens int64, answer start); rows are cut at `longest` tokens. Raises ValueError when no row has eight
    answer tokens within that length.
    """

    def __init__(self, target: Qwen3_5MoeForCausalLM, rows: list[tuple[Tensor, int]], taps: list[int], longest: int):
        kept = [(row[:longest], start) for row, start in rows if min(len(row), longest) - start >= 8]
        if not kept:
            raise ValueError(
                f"no row with an answer of at least 8 tokens within {longest} tokens, of {len(rows)} rows"
            )
        kept.sort(key=lambda row: len(row[0]))
        self._padding, device = target.config.pad_token_id, target.device
        lengths = torch.tensor([len(row) for row, _ in kept])
        self._longest = int(lengths.max())
        self.lengths = lengths.to(device)
        self.answer_starts = torch.tensor([start for _, start in kept], device=device)
        self.row_starts = (lengths.cumsum(0) - lengths).to(device)
        self.tokens = torch.cat([row for row, _ in kept]).to(device)
        width = len(taps) * target.config.hidden_size
        self.features = torch.empty(len(self.tokens), width, dtype=target.dtype, device=device)
        for first in range(0, len(kept), _ROWS_PER_FORWARD):
            index = torch.arange(first, min(first + _ROWS_PER_FORWARD, len(kept)), device=device)
            tokens, inside = self._gather(index, int(self.lengths[index].max()))
            self.features[self._positions(index, tokens.shape[1])[inside]] = tapped_features(target, tokens, taps)[
                inside
            ]

    def __len__(self) -> int:
        return len(self.lengths)

    def _positions(self, index: Tensor, length: int) -> Tensor:
        return self.row_starts[index, None] + torch.arange(length, device=index.device)

    def _gather(self, index: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Tokens [B, S], right-padded to a multiple of the recurrent chunk, and which of them are inside the rows."""
        length = -(-longest // 64) * 64
        inside = torch.arange(length, device=index.device) < self.lengths[index, None]
        positions = self._positions(index, length).clamp(max=len(self.tokens) - 1)
        return self.tokens[positions].masked_fill(~inside, self._padding), inside

    def batch(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Random rows of any kind: tokens [B, S], answer_mask [B, S] bool, features [B, S, K*H], S always the same.

        Nothing is read back from the device.
        """
        index = torch.randint(len(self), (rows,), device=self.lengths.device)
        tokens, inside = self._gather(index, self._longest)
        positions = torch.arange(tokens.shape[1], device=index.device)
        answer_mask = inside & (positions >= self.answer_starts[index, None])
        flat = self._positions(index, tokens.shape[1]).clamp(max=len(self.tokens) - 1)
        return tokens, answer_mask, self.features[flat]


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


def save_drafter(drafter: DFlashDrafter, output: Path) -> None:
    saved = copy.deepcopy(drafter).to(torch.bfloat16)
    saved.save_pretrained(output)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--answers", type=Path, nargs="+", required=True, help="one or more answers.npz")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument("--save-seconds", type=float, default=60.0)
    parser.add_argument("--initial", type=Path, help="drafter checkpoint to go on from")
    parser.add_argument("--packed", type=Path, help="packed corpus, for rows of plain text besides the answers")
    parser.add_argument("--corpus-rows", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=64, help="rows of one step")
    parser.add_argument("--longest", type=int, default=576, help="tokens of a row, the prompt included")
    parser.add_argument("--anchors", type=int, default=48, help="blocks of each row and step")
    parser.add_argument("--learning-rate", type=float, default=0.015)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--gamma", type=float, default=4.0)
    parser.add_argument("--survival-share", type=float, default=0.7, help="last part of the run with survival weights")
    parser.add_argument("--config", type=json.loads, default={}, help="JSON of drafter config values to change")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def load_models(options: argparse.Namespace) -> tuple[Qwen3_5MoeForCausalLM, DFlashDrafter]:
    """The frozen target, and the drafter bound to it: new, or from `--initial`."""
    device = torch.device(options.device)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = Qwen3_5MoeForCausalLM.from_pretrained(options.target, dtype=dtype).to(device).eval().requires_grad_(False)
    if options.initial is None:
        drafter = DFlashDrafter(drafter_config(target, tokenizer.mask_token_id, **options.config))
    else:
        drafter = DFlashDrafter.from_pretrained(options.initial)
    drafter = drafter.to(device, dtype).train()
    return target, drafter.bind(target.get_input_embeddings(), target.lm_head, target.config)


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
    rows = [row for path in options.answers for row in load_answers(path)]
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
