"""Real acceptance length on held-out prompts: the target drafts and verifies as users run it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_hybridspec.generation.attach import attach, detach
from hf_hybridspec.generation.length_policies import Full
from hf_hybridspec.generation.prefix_survival import AcceptanceSummary, summarise_acceptance
from hf_hybridspec.generation.statistics import GenerationStatistics
from hf_hybridspec.modeling.drafter import Drafter
from hf_hybridspec.modeling.target import swap_gated_delta_nets


def read_prompts(path: str | Path) -> list[str]:
    """First turns of a .jsonl whose rows hold `turns`, `prompt` or `question`. Raises ValueError for other rows."""
    prompts = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        row = json.loads(line)
        text = row.get("turns") or row.get("prompt") or row.get("question")
        if not text:
            raise ValueError(f"Line {number} of {path} has none of turns, prompt and question.")
        prompts.append(text if isinstance(text, str) else text[0])
    return prompts


@torch.no_grad()
def generate_all(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: Drafter,
    prompts: Sequence[str],
    max_new_tokens: int,
) -> list[GenerationStatistics]:
    """Greedy statistics of each prompt, every draft verified. Drafter and target keep their mode; the target is as it
    was for training afterwards."""
    was_training = drafter.training
    drafter.eval()
    attach(target)
    try:
        return [
            target.generate(
                **encode(tokenizer, prompt).to(target.device),
                assistant_model=drafter,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                length_policy=Full(),
                return_dict_in_generate=True,
            ).statistics
            for prompt in prompts
        ]
    finally:
        detach(target)
        swap_gated_delta_nets(target)
        drafter.train(was_training)


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str):
    """input_ids and attention_mask [1, n] of a prompt, templated where the tokenizer has a chat template."""
    if tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt")
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )


def real_acceptance(target, tokenizer, drafter, prompts, max_new_tokens) -> AcceptanceSummary:
    """See `summarise_acceptance`; arguments as `generate_all`."""
    calls = generate_all(target, tokenizer, drafter, prompts, max_new_tokens)
    return summarise_acceptance(calls, drafter.num_draft_tokens)


def as_metrics(summary: AcceptanceSummary) -> Mapping[str, float]:
    """Names and values for a log or a model card."""
    survival = {f"prefix survival at {j}": value for j, value in enumerate(summary.survival, start=1)}
    return {
        "acceptance length (pooled)": summary.pooled,
        "acceptance length (mean of requests)": summary.mean_of_requests,
    } | survival
