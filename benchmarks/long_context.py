"""Long prompts through `generate` at the full shape of Qwen3.6-35B-A3B: prefill in chunks, then plain decoding.

    python -m benchmarks.long_context --output benchmarks/results/long_context_h200.json

Weights and prompts are random. Each context is decoded twice, and the second call counts: the first compiles and
captures. Times are taken where a streamer hears tokens: the first ends the prefill, the rest is decoding.

    python -m benchmarks.long_context --tiny --contexts 40 100 --chunk 16 --output long.json     (no GPU: a dry run)
"""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from benchmarks.environment import describe_environment, require_gpu
from benchmarks.full_target import random_target, target_config
from hf_hybridspec import HybridCache


class Clock(BaseStreamer):
    """When tokens were heard, and how many."""

    def __init__(self):
        self.moments: list[tuple[float, int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.moments.append((time.perf_counter(), value.numel()))

    def end(self) -> None:
        """Nothing is left to be heard."""


def timed_call(model: PreTrainedModel, prompt: torch.Tensor, new_tokens: int, chunk: int) -> dict[str, float | str]:
    """One call of `generate`: seconds of its prefill and tokens per second after it."""
    clock, start = Clock(), time.perf_counter()
    cache = HybridCache(model.config, prompt.shape[1] + new_tokens)
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        cache=cache,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        prefill_chunk_size=chunk,
        streamer=clock,
    )
    assert output.shape[1] == prompt.shape[1] + new_tokens
    # The prompt is heard first, then the prefill's own token.
    (_, _), (first, _), *rest = clock.moments
    decoded = sum(count for _, count in rest)
    statistics = model.generation_statistics
    return {
        "prefill_seconds": round(first - start, 3),
        "decode_tokens_per_second": round(decoded / (rest[-1][0] - first), 1),
        "path": "transformers" if statistics is None else statistics.path,
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file, written after every context")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=4096, help="prompt tokens of one forward")
    parser.add_argument("--layers", type=int, help="fewer layers than the target has")
    parser.add_argument("--tiny", action="store_true", help="a tiny target; runs on a CPU as well")
    parser.add_argument("--commit", help="the commit measured, where the files have no git history")
    options = parser.parse_args(arguments)
    require_gpu(parser, options.tiny)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = target_config(options.tiny, options.layers)
    model = random_target(config, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    report: dict = {
        "what": "plain decoding after prompts prefilled in chunks, through generate, random weights",
        "environment": describe_environment(options.commit),
        "new_tokens": options.new_tokens,
        "chunk": options.chunk,
        "contexts": {},
    }
    generator = torch.Generator().manual_seed(0)
    for context in options.contexts:
        prompt = torch.randint(config.vocab_size, (1, context), generator=generator).to(device)
        calls = [timed_call(model, prompt, options.new_tokens, options.chunk) for _ in range(2)]
        report["contexts"][str(context)] = calls[1]
        print(context, json.dumps(calls), flush=True)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
