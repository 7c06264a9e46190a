"""A corpus of a few documents and everything built from it, once a session, by the real scripts at tiny size."""

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoTokenizer

from training.tiny import build_corpus, build_prompts, pack, regenerate, train_dflash, train_target, vary_words
from training.tiny.build_tokenizer import SPECIAL_TOKENS, build_tokenizer, train_bpe
from training.tiny.documents import write_documents

TINY_TARGET = {
    "hidden_size": 32,
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}


def _function(i: int) -> str:
    lines = "\n".join(f"    total_{j} = value * {i + j} + offset" for j in range(12))
    head = f'def scale_{i}(value, offset):\n    """Scales a value by {i}."""\n'
    return f"{head}{lines}\n    return total_0 + total_{i % 12}\n"


def _problem(rng: Random, difficulty: float) -> dict:
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    return {
        "question": f"Ann has {a} boxes of {b} pens. How many pens has she?",
        "answer": str(a * b),
        "metadata": {"answer_cot": f"She has {a} * {b} = {a * b} pens.\n#### {a * b}"},
    }


@dataclass(frozen=True)
class TinyRun:
    """Folders and files of one run of all scripts."""

    root: Path

    @property
    def corpus(self) -> Path:
        return self.root / "corpus"

    @property
    def tokenizer(self) -> Path:
        return self.root / "tokenizer"

    @property
    def packed(self) -> Path:
        return self.root / "packed"

    @property
    def target(self) -> Path:
        return self.root / "target"

    @property
    def answers(self) -> Path:
        return self.root / "answers.npz"

    @property
    def drafter(self) -> Path:
        return self.root / "dflash"


@pytest.fixture(scope="session")
def problem_generators():
    """Stands for reasoning-gym's generators: by number, the held-out ones among them."""
    return dict.fromkeys(range(100), _problem)


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory, problem_generators) -> TinyRun:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    run = TinyRun(tmp_path_factory.mktemp("tiny"))
    texts = run.root / "texts"
    write_documents(texts / "code_rich.txt.xz", [_function(i) + "\n\n" + _function(i + 1) for i in range(0, 120, 2)])
    passages = [" ".join(f"The whale number {i} swam past mile {j}." for j in range(80)) for i in range(40)]
    write_documents(texts / "prose_moby.txt.xz", passages)
    chats = [
        f"<|im_start|>user\nWhat is {i}?<|im_end|>\n<|im_start|>assistant\nA number.<|im_end|>" for i in range(60)
    ]
    write_documents(texts / "chat_chatterbot.txt.xz", chats)
    letters = "abcdefghij"
    entries = [f"word{one}{two}like\n    n 1: a word {two}" for one in letters for two in letters]
    write_documents(texts / "dict_wn.txt.xz", entries)
    sources = ["code_rich", "prose_moby", "chat_chatterbot", "dict_wn"]
    sizes = ["--gsm-train", "0", "--word-problems", "40"]
    build_corpus.main(["--output", str(run.corpus), "--from-folder", str(texts), *sizes, "--sources", *sources])
    build_corpus.write_gsm(problem_generators, run.corpus, train_count=60, heldout_count=10, seed=0)
    vary_words.main(["--corpus", str(run.corpus), "--count", "30"])
    sample = [_function(i) for i in range(40)] + passages[:5] + chats + [_problem(Random(0), 1.0)["question"]]
    build_tokenizer(train_bpe(iter(sample), 320), 320 + len(SPECIAL_TOKENS)).save_pretrained(run.tokenizer)
    common = ["--corpus", str(run.corpus), "--tokenizer", str(run.tokenizer)]
    pack.main([*common, "--output", str(run.packed), "--length", "64", "--heldout-rows", "4"])
    models = ["--tokenizer", str(run.tokenizer), "--device", "cpu", "--seconds", "600"]
    train_target.main(
        [
            "--packed",
            str(run.packed),
            "--output",
            str(run.target),
            *models,
            "--max-steps",
            "20",
            "--rows",
            "4",
            "--heldout-rows",
            "2",
            "--config",
            json.dumps(TINY_TARGET),
        ]
    )
    prompts = run.root / "train_prompts.jsonl.xz"
    build_prompts.main(
        [
            *common,
            "--training-prompts",
            str(prompts),
            "--heldout-prompts",
            str(run.root / "prompts"),
            "--scale",
            "0.0005",
        ]
    )
    regenerate.main(
        [
            "--target",
            str(run.target),
            "--tokenizer",
            str(run.tokenizer),
            "--prompts",
            str(prompts),
            "--device",
            "cpu",
            "--output",
            str(run.answers),
            "--batch-size",
            "8",
            "--max-new-tokens",
            "12",
        ]
    )
    train_dflash.main(
        [
            "--target",
            str(run.target),
            "--answers",
            str(run.answers),
            "--output",
            str(run.drafter),
            *models,
            "--max-steps",
            "8",
            "--rows",
            "2",
            "--anchors",
            "3",
            "--longest",
            "128",
            "--packed",
            str(run.packed),
            "--corpus-rows",
            "4",
        ]
    )
    torch.set_num_threads(threads)
    return run


@pytest.fixture(scope="session")
def tokenizer(tiny_run):
    return AutoTokenizer.from_pretrained(tiny_run.tokenizer)
