"""How often a drafted greedy answer leaves that of plain decoding, in bf16 and fp32, on the bundled models.

    python -m benchmarks.flip_rate --output benchmarks/results/flip_rate_h200.json

In fp32 no answer may differ. In 16 bits two ways of adding up the same products round differently, and where the two
best tokens are nearly tied the answer goes another way: that is no error of the method, but a user wants to know how
often. Answers are compared with plain decoding of the same attached model (one row a round, the same kernels) and with
that of transformers. The flip rate is the number of answers that leave the other, over the tokens compared until then.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_hybridspec
from benchmarks.environment import describe_environment
from hf_hybridspec import AutoDrafter
from hf_hybridspec.bundled import resolve
from hf_hybridspec.calibration.prompts import load_prompts, render, take_per_kind
from hf_hybridspec.modeling.drafter import Drafter

POLICIES = ("static:2", "static:4", "static:6", "static:8", "static:12", "full")


def common_prefix(first: list[int], second: list[int]) -> int:
    """Tokens at the start that both have."""
    same = 0
    while same < min(len(first), len(second)) and first[same] == second[same]:
        same += 1
    return same


def flip_rate(answers: list[list[int]], others: list[list[int]]) -> dict[str, float]:
    """Answers that leave their others, the tokens compared until then, and flips per token."""
    flips = tokens = 0
    for answer, other in zip(answers, others, strict=True):
        same = common_prefix(answer, other)
        differs = same < max(len(answer), len(other))
        flips, tokens = flips + differs, tokens + same + differs
    return {"answers": len(answers), "flips": flips, "tokens": tokens, "flips_per_token": round(flips / tokens, 7)}


@torch.inference_mode()
def decode(model: PreTrainedModel, prompt: Tensor, new_tokens: int, **options) -> list[int]:
    """The new tokens of a greedy answer."""
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, do_sample=False, **options
    )
    return output[0, prompt.shape[1] :].tolist()


def measure(
    target: PreTrainedModel, drafter: Drafter, prompts: list[Tensor], new_tokens: int, policies: list[str]
) -> dict:
    """Flip rates of every policy against plain decoding, attached and by transformers, and which path was taken."""
    stock = [decode(target, prompt, new_tokens) for prompt in prompts]
    target = hf_hybridspec.attach(target)
    plain = [decode(target, prompt, new_tokens) for prompt in prompts]
    found: dict = {"plain_against_transformers": flip_rate(plain, stock), "drafted": {}}
    for policy in policies:
        options = {"assistant_model": drafter, "length_policy": policy}
        answers = [decode(target, prompt, new_tokens, **options) for prompt in prompts]
        found["path"] = target.generation_statistics.path
        found["drafted"][policy] = {
            "against_plain": flip_rate(answers, plain),
            "against_transformers": flip_rate(answers, stock),
        }
        print(policy, found["drafted"][policy], flush=True)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file, written after every dtype")
    parser.add_argument("--per-kind", type=int, default=10, help="held-out prompts of each kind")
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--dtypes", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"])
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--commit", help="the commit measured, where the files have no git history")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report: dict = {
        "what": "greedy answers of the bundled models against plain decoding: flips per token",
        "environment": describe_environment(options.commit),
        "prompts_per_kind": options.per_kind,
        "max_new_tokens": options.max_new_tokens,
    }
    tokenizer = AutoTokenizer.from_pretrained(resolve("tiny"))
    texts = take_per_kind(load_prompts("bundled"), options.per_kind)
    prompts = [prompt.input_ids for prompt in render(texts, tokenizer, torch.device(device), False)]
    for name in options.dtypes:
        load = {"dtype": getattr(torch, name)}
        target = AutoModelForCausalLM.from_pretrained(resolve("tiny"), **load).to(device).eval()
        drafter = AutoDrafter.from_pretrained("tiny-dflash", **load).to(device).eval()
        report[name] = measure(target, drafter, prompts, options.max_new_tokens, options.policies)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
