"""Measures the bundled models: held-out loss by domain and greedy acceptance length on held-out prompts.

    python -m training.tiny.evaluate --target tiny --drafter tiny-dflash --packed runs/packed --output tiny_models.json

Greedy verification emits exactly the target's own greedy answer, whatever the drafter proposes. So each answer is
decoded once without drafting, and the rounds are replayed along it: a block is proposed at the anchor from the taps
before it, the accepted drafts are those that equal the answer's next tokens, and the next anchor follows them. This
counts the rounds that a real run at full block makes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3_5MoeForCausalLM

from hf_hybridspec.bundled import resolve
from hf_hybridspec.modeling.dflash import DFlashDrafter
from training.anchors import lay_out_blocks
from training.drafting import block_forward, project_features
from training.tiny.drafter_run import tapped_features
from training.tiny.fast_target import fast_forms
from training.tiny.regenerate import answer_batch
from training.tiny.train_target import heldout_losses

KINDS = ("gsm", "code", "dialogue", "prose")


def read_prompts(folder: Path, kind: str, tokenizer: PreTrainedTokenizerBase, thinking: bool) -> list[list[int]]:
    """Token ids of the first turn of every prompt of a kind, through the chat template."""
    prompts = []
    for line in (folder / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines():
        messages = [{"role": "user", "content": json.loads(line)["turns"][0]}]
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=thinking)
        prompts.append(list(encoded["input_ids"]))
    return prompts


@torch.no_grad()
def replay_rounds(
    drafter: DFlashDrafter, features: Tensor, tokens: Tensor, prompt_lengths: Tensor, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Rounds and emitted tokens of greedy decoding at full block, for B answers at once.

    features: [B, S, K*H]. tokens: [B, S] int64, prompt, answer and padding. prompt_lengths, lengths: [B] int64, where
    the answer starts and where it ends. The answer's first token comes from the prompt's own forward and is the first
    anchor. Returns rounds [B] and emitted [B] int64, the first token not counted in either.
    """
    context = project_features(drafter, features)
    anchor, rounds, emitted = prompt_lengths.clone(), torch.zeros_like(lengths), torch.zeros_like(lengths)
    always = torch.ones_like(tokens, dtype=torch.bool)
    while bool((active := anchor < lengths - 1).any()):
        layout = lay_out_blocks(
            tokens, always, anchor[:, None], active[:, None], drafter.block_size, drafter.alignment
        )
        hidden = block_forward(drafter, tokens, context, layout)[:, 0, drafter.alignment.first_draft_row :]
        drafts = drafter.proposal_logits(hidden).argmax(-1)
        wanted = anchor[:, None] + 1 + torch.arange(drafts.shape[1], device=tokens.device)
        right = drafts == tokens.gather(1, wanted.clamp(max=tokens.shape[1] - 1))
        right &= wanted < lengths[:, None]
        accepted = right.long().cumprod(1).sum(1)
        new = torch.minimum(accepted + 1, lengths - 1 - anchor) * active
        rounds, emitted, anchor = rounds + active, emitted + new, anchor + new
    return rounds, emitted


def _right_padded(rows: list[list[int]], padding: int, device: torch.device) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [padding] * (width - len(row)) for row in rows], device=device)


def _chunks(items: list, size: int) -> Iterator[list]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def acceptance(
    target: Qwen3_5MoeForCausalLM, drafter: DFlashDrafter, prompts: list[list[int]], max_new_tokens: int, batch: int
) -> dict[str, float]:
    """Acceptance length (emitted tokens / verification rounds) over all prompts, and the mean answer length."""
    rounds, emitted, answer_tokens = 0, 0, 0
    for part in _chunks(prompts, batch):
        answers = list(answer_batch(target, part, max_new_tokens, sample=False))
        rows = [prompt + answer for prompt, answer in zip(part, answers, strict=True)]
        tokens = _right_padded(rows, target.config.pad_token_id, target.device)
        features = tapped_features(target, tokens, list(drafter.target_layer_ids))
        starts = torch.tensor([len(prompt) for prompt in part], device=target.device)
        ends = torch.tensor([len(row) for row in rows], device=target.device)
        part_rounds, part_emitted = replay_rounds(drafter, features, tokens, starts, ends)
        rounds, emitted = rounds + int(part_rounds.sum()), emitted + int(part_emitted.sum())
        answer_tokens += sum(map(len, answers))
    return {
        "acceptance_length": round(emitted / max(rounds, 1), 3),
        "rounds": rounds,
        "emitted_tokens": emitted,
        "mean_answer_tokens": round(answer_tokens / len(prompts), 1),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--tokenizer", help="defaults to the target")
    parser.add_argument("--drafter", default="tiny-dflash")
    parser.add_argument("--prompts", type=Path, default=Path(resolve("tiny")).parent / "prompts")
    parser.add_argument("--packed", type=Path, help="packed corpus, for the held-out loss by domain")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=40)
    parser.add_argument("--heldout-rows", type=int, default=192)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    dtype = getattr(torch, options.dtype)
    tokenizer = AutoTokenizer.from_pretrained(resolve(options.tokenizer or options.target))
    target = Qwen3_5MoeForCausalLM.from_pretrained(resolve(options.target), dtype=dtype).to(options.device).eval()
    drafter = DFlashDrafter.from_pretrained(resolve(options.drafter), dtype=dtype).to(options.device).eval()
    drafter.bind(target.get_input_embeddings(), target.lm_head, target.config, tokenizer_size=len(tokenizer))
    device_name = torch.cuda.get_device_name() if target.device.type == "cuda" else "cpu"
    result: dict = {"device": device_name, "dtype": options.dtype, "block_size": drafter.block_size, "greedy": {}}
    with fast_forms():
        for thinking in (False, True):
            for kind in KINDS:
                prompts = read_prompts(options.prompts, kind, tokenizer, thinking)
                measured = acceptance(target, drafter, prompts, options.max_new_tokens, options.batch_size)
                result["greedy"].setdefault("thinking" if thinking else "plain", {})[kind] = measured
                print("thinking" if thinking else "plain", kind, measured, flush=True)
        if options.packed is not None:
            padding = target.config.pad_token_id
            result["heldout_loss"] = heldout_losses(target, options.packed, padding, options.heldout_rows)
            print(result["heldout_loss"], flush=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
