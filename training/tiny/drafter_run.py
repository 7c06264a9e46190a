"""What the scripts that train drafters share: arguments, models, saving, and rows with the target's features."""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3_5MoeForCausalLM

from hf_hybridspec.modeling.drafter import Drafter
from training.tiny.regenerate import load_answers

TAPS = [1, 4, 6]
_ROWS_PER_FORWARD = 256


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what every run needs: target, answers, output, time, batch, optimizer, device."""
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--answers", type=Path, nargs="+", required=True, help="one or more answers.npz")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=240.0, help="training time, loading not counted")
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument("--save-seconds", type=float, default=60.0)
    parser.add_argument("--rows", type=int, default=64, help="rows of one step")
    parser.add_argument("--longest", type=int, default=576, help="tokens of a row, the prompt included")
    parser.add_argument("--anchors", type=int, default=48, help="blocks of each row and step")
    parser.add_argument("--learning-rate", type=float, default=0.015)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--config", type=json.loads, default={}, help="JSON of drafter config values to change")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)


def backbone_values(target: Qwen3_5MoeForCausalLM, mask_token_id: int) -> dict[str, Any]:
    """Config values of three layers of the target's width, about 2 M parameters."""
    text = target.config.get_text_config()
    return {
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
        "mask_token_id": mask_token_id,
        "dtype": "bfloat16",
    }


def load_target(options: argparse.Namespace) -> tuple[Qwen3_5MoeForCausalLM, PreTrainedTokenizerBase]:
    """The frozen target on the run's device, in bfloat16 on a GPU and float32 elsewhere, and its tokenizer."""
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = Qwen3_5MoeForCausalLM.from_pretrained(options.target, dtype=dtype).to(device).eval().requires_grad_(False)
    return target, AutoTokenizer.from_pretrained(options.tokenizer)


def bind_for_training(drafter: Drafter, target: Qwen3_5MoeForCausalLM) -> Drafter:
    """The drafter in training mode, moved to the target's device and dtype and bound to it."""
    drafter = drafter.to(target.device, target.dtype).train()
    return drafter.bind(target.get_input_embeddings(), target.lm_head, target.config)


def answer_rows(options: argparse.Namespace) -> list[tuple[Tensor, int]]:
    """(tokens int64, answer start) of every row of the run's answers."""
    return [row for path in options.answers for row in load_answers(path)]


def save_drafter(drafter: Drafter, output: Path) -> None:
    """Writes the drafter in bfloat16."""
    copy.deepcopy(drafter).to(torch.bfloat16).save_pretrained(output)


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
