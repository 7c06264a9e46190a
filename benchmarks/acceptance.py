"""Real acceptance lengths of the bundled models, and decoding speed against plain decoding of the same code.

    python -m benchmarks.acceptance --output benchmarks/results/acceptance_cpu.json

Every held-out prompt of every kind is decoded greedily on the round path: at full length and at some static lengths.
The first prompts of each kind are also decoded plainly, and the tokens compared; then the speed of every static length
on the prompts of one kind is measured against plain decoding, in turn, prefill excluded, on one CPU thread.
"""

import argparse
import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel

from benchmarks.environment import describe_environment
from hf_hybridspec import AutoDrafter, Full, HybridSpecModelForCausalLM, LengthPolicy, Static
from hf_hybridspec.bundled import resolve
from hf_hybridspec.calibration.capture import Prompt
from hf_hybridspec.calibration.prompts import load_prompts, render, take_per_kind
from hf_hybridspec.calibration.timed_decode import DecodeSettings, TimedDecode, timed_decode
from hf_hybridspec.modeling.drafter import Drafter


@dataclass(frozen=True)
class Pair:
    """An attached target and its drafter, and how both are used here."""

    target: PreTrainedModel
    drafter: Drafter
    settings: DecodeSettings

    def decode(self, prompt: Prompt, policy: LengthPolicy | None) -> TimedDecode:
        """Decodes a prompt on the round path, or plainly without a policy."""
        if policy is None:
            return timed_decode(self.target, prompt.input_ids, self.settings)
        return timed_decode(self.target, prompt.input_ids, self.settings, self.drafter, policy, decoding_path="round")


def measure_acceptance(pair: Pair, prompts: list[Prompt], policies: Iterable[LengthPolicy]) -> dict[str, dict]:
    """Policy name -> emitted tokens per round, over all prompts together."""
    measured = {}
    for policy in policies:
        counts = [pair.decode(prompt, policy).statistics for prompt in prompts]
        rounds = sum(count.rounds for count in counts)
        emitted = sum(sum(count.emitted) for count in counts)
        rows = sum(sum(count.verification_lengths) for count in counts)
        measured[policy.name] = {
            "acceptance_length": round(emitted / max(rounds, 1), 3),
            "mean_verification_length": round(rows / max(rounds, 1), 3),
            "rounds": rounds,
            "emitted_tokens": emitted,
        }
    return measured


def count_identical(pair: Pair, prompts: list[Prompt], policies: Iterable[LengthPolicy]) -> dict[str, int]:
    """How many answers equal plain decoding token for token."""
    compared = identical = 0
    for prompt in prompts:
        plain = pair.decode(prompt, None).token_ids
        for policy in policies:
            compared += 1
            identical += pair.decode(prompt, policy).token_ids == plain
    return {"answers": compared, "identical": identical}


def measure_speed(pair: Pair, prompts: list[Prompt], lengths: Iterable[int], num_runs: int) -> dict:
    """Pooled decoding speed of every static length and of plain decoding; each prompt's time is a median of runs."""
    systems = {"autoregressive": None} | {f"static:{length}": Static(length) for length in lengths}
    seconds, tokens = dict.fromkeys(systems, 0.0), 0
    for prompt in prompts:
        runs: dict[str, list[TimedDecode]] = {name: [] for name in systems}
        for _ in range(num_runs):
            for name, policy in systems.items():
                runs[name].append(pair.decode(prompt, policy))
        if len({run.token_ids for of_system in runs.values() for run in of_system}) != 1:
            raise RuntimeError("Answers differ between systems: a speed of wrong answers is worth nothing.")
        tokens += runs["autoregressive"][0].num_decoded
        for name, of_system in runs.items():
            seconds[name] += statistics.median(run.seconds for run in of_system)
    return {
        name: {
            "tokens_per_second": round(tokens / seconds[name], 1),
            "over_autoregressive": round(seconds["autoregressive"] / seconds[name], 3),
        }
        for name in systems
    }


def measure(pair: Pair, prompts: list[Prompt], options: argparse.Namespace) -> dict[str, dict]:
    """All three measurements."""
    policies = [Full(), *map(Static, options.lengths)]
    result: dict[str, dict] = {"acceptance": {}, "identity": {}}
    for kind in dict.fromkeys(prompt.kind for prompt in prompts):
        members = [prompt for prompt in prompts if prompt.kind == kind]
        result["acceptance"][kind] = measure_acceptance(pair, members, policies)
        result["identity"][kind] = count_identical(pair, members[: options.compared], policies)
        print(kind, result["acceptance"][kind]["full"], result["identity"][kind], flush=True)
    timed = [prompt for prompt in prompts if prompt.kind == options.timed_kind][: options.timed]
    if timed:
        speed = measure_speed(pair, timed, options.timed_lengths, options.runs)
        result["speed"] = {"kind": options.timed_kind, "prompts": len(timed), "runs": options.runs, "systems": speed}
        print(speed, flush=True)
    return result


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--drafter", default="tiny-dflash")
    parser.add_argument("--prompts", default="bundled", help="as for hf-hybridspec bench")
    parser.add_argument("--per-kind", type=int, default=40, help="prompts of each kind")
    parser.add_argument("--thinking", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--lengths", type=int, nargs="*", default=[4, 8], help="static lengths beside full")
    parser.add_argument("--compared", type=int, default=5, help="prompts of each kind compared with plain decoding")
    parser.add_argument("--timed-kind", default="gsm")
    parser.add_argument("--timed", type=int, default=8, help="prompts that are timed")
    parser.add_argument("--timed-lengths", type=int, nargs="*", default=[2, 4, 6, 8, 10, 12, 16])
    parser.add_argument("--runs", type=int, default=3, help="interleaved runs behind a median")
    parser.add_argument("--commit", help="the commit measured, where the files have no git history")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(1)
    # Before the models are read: the checkout may move on while they are measured.
    environment = describe_environment(options.commit)
    target = HybridSpecModelForCausalLM.from_pretrained(resolve(options.target), dtype=torch.float32).eval()
    drafter = AutoDrafter.from_pretrained(options.drafter, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(resolve(options.target))
    texts = take_per_kind(load_prompts(options.prompts), options.per_kind)
    prompts = render(texts, tokenizer, target.device, options.thinking)
    result = measure(Pair(target, drafter, DecodeSettings(options.max_new_tokens)), prompts, options)
    names = ("target", "drafter", "prompts", "per_kind", "thinking", "max_new_tokens")
    settings = {name: getattr(options, name) for name in names} | {"dtype": "float32", "threads": 1}
    record = {"environment": environment, "settings": settings} | result
    options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
