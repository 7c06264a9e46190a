"""ReaDy's tables on the bundled models: every row trained by train_ready.py, then measured on held-out prompts.

    python -m training.tiny.ablations --dataset runs/rows.jsonl --output runs/ablations
    python -m training.tiny.ablations --output runs/ablations --summarise --table docs/ready_ablations.md \\
        --results benchmarks/results/ready_summary.json

Rows that are finished are skipped, so the same command goes on where it was stopped; `--seconds` ends the run before a
row that would not fit, and `--part I/N` shares the rows out over N processes (I from 0, other arguments the same). The
headline rows (DSpark, DSpark + FT, ReaDy) come first, with three seeds; `ft` and ReaDy see the same samples and as
many steps. Acceptance is real: rounds along the target's own greedy answers (`training.walk`), in float32. The answers
are made first (`--rows` with no pattern makes them alone) and kept in the output folder.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import hf_hybridspec.bundled
from hf_hybridspec.bundled import resolve
from hf_hybridspec.kernels.dispatch import use_kernels
from hf_hybridspec.modeling.auto import AutoDrafter
from hf_hybridspec.modeling.dspark.modeling_dspark import DSparkDrafter
from hf_hybridspec.modeling.target import input_embedding
from training.arguments import parse_arguments
from training.evaluation import encode, read_prompts
from training.regenerate import Prompt, answer
from training.results import current_commit
from training.target_features import FrozenTarget
from training.tiny.fast_target import fast_forms
from training.tiny.ready_tables import write_summary
from training.train_ready import train
from training.walk import walk

KINDS = ("gsm", "code", "dialogue", "prose")
HELD_OUT = Path(hf_hybridspec.bundled.__file__).with_name("prompts")
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Row:
    """One row of a table for one seed.

    stages: those of train_ready.py to run, in order. reader: its settings. budget: of the steps and samples of a row.
    """

    table: str
    label: str
    stages: tuple[str, ...]
    seed: int = 0
    reader: dict = field(default_factory=dict)
    budget: int = 1

    @property
    def name(self) -> str:
        return f"{self.table}-{self.label}-seed{self.seed}".replace(" ", "").replace("(", "").replace(")", "")


BASE = {"reader_state_layers": [2, 6], "reader_rank": 8}
TWO_STAGES = ("reader", "joint")


def all_rows() -> Iterator[Row]:
    """Headline rows first, then each ablation of the paper (tables 3 to 6) and a few of our own."""
    for seed in SEEDS:
        yield Row("headline", "dspark", (), seed)
        yield Row("headline", "dspark_ft", ("ft",), seed)
        yield Row("headline", "ready", TWO_STAGES, seed, BASE)
    # 64 is the full rank of the bundled target's states.
    for rank in (4, 16, 64):
        yield Row("rank", str(rank), TWO_STAGES, 0, BASE | {"reader_rank": rank})
    for layers in ([0], [2], [6], [0, 2, 6]):
        yield Row("state layers", str(layers), TWO_STAGES, 0, BASE | {"reader_state_layers": layers})
    for layers in ([0, 2], [0, 1, 2]):
        yield Row("injection layers", str(layers), TWO_STAGES, 0, BASE | {"reader_injection_layers": layers})
    yield Row("injection", "pre_attention", TWO_STAGES, 0, BASE | {"reader_injection": "pre_attention"})
    for width in (8, 128):
        yield Row("reader width", str(width), TWO_STAGES, 0, BASE | {"reader_width": width})
    for budget in (2, 4):
        yield Row("budget", f"dspark_ft x{budget}", ("ft",), 0, {}, budget)
        yield Row("budget", f"ready x{budget}", TWO_STAGES, 0, BASE, budget)
    # LoRA for as many steps as in dspark_ft: two stages give it half of them.
    for seed in SEEDS:
        yield Row("stages", "joint alone", ("joint",), seed, BASE)


def part_of(rows: Sequence[Row], part: str) -> list[Row]:
    """Every N-th row from the I-th for part "I/N": rows that are trained and rows that are not by themselves, so that
    each part has as many to train. Raises ValueError for another text."""
    words = part.split("/")
    if len(words) != 2 or not all(map(str.isdecimal, words)) or int(words[0]) >= int(words[1]):
        raise ValueError(f"--part must be I/N with I from 0 to N - 1, got {part!r}.")
    first, step = map(int, words)
    trained, untrained = [row for row in rows if row.stages], [row for row in rows if not row.stages]
    # From the last part on, which has the fewest rows to train.
    return trained[first::step] + untrained[step - 1 - first :: step]


def train_row(row: Row, options: argparse.Namespace, folder: Path) -> Path | None:
    """Runs the row's stages; returns the last adapter.

    Each budget is options.steps, or a multiple, halved over two stages. Rows of one budget see the same samples twice,
    in two stages or in two epochs of one. A stage's seed is its own, so that its anchors are new.
    """
    adapter, steps = None, row.budget * options.steps
    for number, stage in enumerate(row.stages):
        output = folder / stage
        words = ["--config", str(options.config), "--stage", stage, "--output_dir", str(output)]
        words += ["--dataset", str(options.dataset), "--target", options.target, "--drafter", options.drafter]
        words += ["--seed", str(row.seed + 100 * number), "--max_steps", str(steps // len(row.stages))]
        words += ["--per_device_train_batch_size", str(options.batch), "--save_strategy", "no"]
        words += ["--max_samples", str(steps // 2 * options.batch)]
        words += ["--learning_rate", str(options.reader_learning_rate if stage == "reader" else options.learning_rate)]
        words += ["--use_cpu", str(options.device == "cpu"), *options.train_arguments]
        reader = row.reader if stage == row.stages[0] else {}
        for key, value in reader.items():
            words += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
        if adapter is not None:
            words += ["--adapter", str(adapter)]
        train(*parse_arguments(words))
        adapter = output
    return adapter


def greedy_texts(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace
) -> dict[str, list[dict]]:
    """The target's greedy answers to the held-out prompts by kind, made once and kept in the output folder."""
    path = options.output / "greedy.json"
    if path.is_file():
        return json.loads(path.read_text())
    settings = {"max_new_tokens": options.max_new_tokens, "do_sample": False}
    ends = target.generation_config.eos_token_id
    ends = [ends] if isinstance(ends, int) else list(ends or [])
    texts = {}
    for kind in KINDS:
        prompts = read_prompts(HELD_OUT / f"{kind}.jsonl")[: options.prompts]
        prompts = [Prompt(i, encode(tokenizer, text)["input_ids"][0].tolist()) for i, text in enumerate(prompts)]
        # One at a time: padding would change the rounding, and with it the text, of a batch.
        answers = [answer(target, [prompt], tokenizer.pad_token_id or 0, settings)[0] for prompt in prompts]
        texts[kind] = [
            {"prompt": prompt.tokens, "answer": tokens, "ended": tokens[-1] in ends}
            for prompt, tokens in zip(prompts, answers, strict=True)
            if len(tokens) > 1
        ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(texts))
    return texts


@torch.no_grad()
def measure(drafter: DSparkDrafter, target: PreTrainedModel, texts: dict[str, list[dict]]) -> dict[str, list[dict]]:
    """kind -> for each prompt, emitted tokens and rounds."""
    drafter = drafter.to(target.device).eval()
    drafter.bind(input_embedding(target), target.get_output_embeddings(), target.config)
    frozen, results = FrozenTarget(target, drafter), {}
    for kind, rows in texts.items():
        results[kind] = []
        for text in rows:
            tokens = torch.tensor(text["prompt"] + text["answer"], device=target.device)
            statistics = walk(drafter, frozen, tokens, len(text["prompt"]), text["ended"])
            results[kind].append({"emitted": sum(statistics.emitted), "rounds": statistics.rounds})
    return results


def run(options: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Trains and measures every row that has no result yet."""
    tokenizer = AutoTokenizer.from_pretrained(resolve(options.target))
    target = AutoModelForCausalLM.from_pretrained(resolve(options.target), dtype=torch.float32)
    target = target.to(options.device).eval()
    texts = greedy_texts(target, tokenizer, options)
    start, longest = time.monotonic(), 0.0
    for row in rows:
        path = options.output / row.name / "result.json"
        if path.is_file():
            continue
        began = time.monotonic()
        if began - start + longest > options.seconds:
            print(f"Stopped before {row.name}: --seconds {options.seconds} would not suffice.", flush=True)
            return
        # The fast forms are made for a GPU: on a CPU all experts of every row cost more than the chosen ones.
        with fast_forms() if options.device == "cuda" else nullcontext(), use_kernels("reference"):
            adapter = train_row(row, options, path.parent)
            trained = time.monotonic() - began
            source = options.drafter if adapter is None else adapter
            drafter = AutoDrafter.from_pretrained(source, dtype=torch.float32)
            result = {
                "row": asdict(row),
                "kinds": measure(drafter, target, texts),
                "steps": row.budget * options.steps,
            }
            result["commit"] = current_commit(options.commit)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result))
        longest = max(longest, time.monotonic() - began)
        print(f"{row.name}: {trained:.0f} s trained, {time.monotonic() - began:.0f} s in all", flush=True)


def main(command_line: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="tiny")
    parser.add_argument("--drafter", default="tiny-dspark", help="pretrained DSpark")
    parser.add_argument("--dataset", type=Path, default=Path("training/configs/tiny_conversations.jsonl"))
    parser.add_argument("--config", type=Path, default=Path("training/configs/tiny_ft.yaml"))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps of a row, all stages together")
    parser.add_argument("--batch", type=int, default=64, help="sequences of a step")
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="of stages ft and joint")
    parser.add_argument("--reader-learning-rate", type=float, default=1e-3, help="of stage reader")
    parser.add_argument("--part", default="0/1", help="I/N: this process's share of the rows")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--prompts", type=int, default=40, help="held-out prompts of each kind")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--rows", nargs="*", default=["*"], help="patterns of rows, as headline-*-seed0; default all")
    parser.add_argument("--summarise", action="store_true", help="only write the table and the results")
    parser.add_argument("--table", type=Path, help="Markdown to write")
    parser.add_argument("--section", default="ready", help="of the Markdown, after <!-- results:NAME -->")
    parser.add_argument("--results", type=Path, help="JSON to write the headline into")
    parser.add_argument("--commit", help="the commit measured, where the files have no git history")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--train-arguments", nargs=argparse.REMAINDER, default=[], help="for train_ready.py; last")
    options = parser.parse_args(command_line)
    if not options.summarise:
        rows = [row for row in all_rows() if any(fnmatchcase(row.name, pattern) for pattern in options.rows)]
        run(options, part_of(rows, options.part))
    else:
        write_summary(options.output, options.table, options.results, options.section)


if __name__ == "__main__":
    main()
