"""Chooses prompts: training prompts for regenerated answers, and the held-out prompts that ship with the package.

    python -m training.tiny.build_prompts --corpus runs/corpus --tokenizer runs/tokenizer \\
        --training-prompts runs/train_prompts.jsonl.xz --heldout-prompts hf_hybridspec/bundled/prompts

Training prompts are rendered text, one JSON object a line (`kind`, `text`); held-out prompts are `{"kind", "turns"}`
in one JSONL file for each of gsm, code, dialogue and prose.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from random import Random

from transformers import AutoTokenizer

from training.tiny.documents import Dialogue, read_dialogues

# Kind -> (pattern of dialogue files, training prompts, times each is used, held-out prompts).
CHOICES = {
    "gsm": (("chat_gsm", 15_000, 1, 40), ("chat_problems", 15_000, 1, 0)),
    "code": (("chat_codeio", 3_000, 2, 20), ("code_", 12_000, 1, 20)),
    "dialogue": (("chat_factbook", 6_000, 1, 20), ("chat_chatterbot", 900, 2, 20)),
    "prose": (("prose_", 6_000, 1, 40),),
}
LONGEST_PROMPT = 2_000


def _dialogues(folder: Path, prefix: str, rng: Random) -> list[Dialogue]:
    """The dialogues of every file that starts with `prefix`, shuffled, without very long questions."""
    paths = [path for path in sorted(folder.glob("*.jsonl.xz")) if path.name.startswith(prefix)]
    dialogues = [dialogue for path in paths for dialogue in read_dialogues(path)]
    rng.shuffle(dialogues)
    return [dialogue for dialogue in dialogues if sum(map(len, dialogue.user_turns)) <= LONGEST_PROMPT]


def training_prompts(corpus: Path, tokenizer, scale: float, seed: int) -> Iterator[dict[str, str]]:
    """Prompts from training dialogues, the last answer taken away; `scale` shrinks their number."""
    for kind, parts in CHOICES.items():
        for prefix, count, repeats, _ in parts:
            rng = Random(f"{seed}-{prefix}")
            for dialogue in _dialogues(corpus / "train", prefix, rng)[: max(1, int(count * scale))]:
                for _ in range(repeats):
                    text = tokenizer.apply_chat_template(
                        dialogue.messages[:-1],
                        tokenize=False,
                        add_generation_prompt=True,
                        enable_thinking=dialogue.enable_thinking,
                    )
                    yield {"kind": kind, "text": text}


def heldout_prompts(corpus: Path, kind: str, seed: int) -> list[dict]:
    """The held-out prompts of one kind, without repeats."""
    prompts = []
    for prefix, _, _, count in CHOICES[kind]:
        seen = {}
        for dialogue in _dialogues(corpus / "heldout", prefix, Random(f"{seed}-{prefix}")):
            # The chat corpus also holds remarks, some of them rude; its questions make better prompts.
            if prefix != "chat_chatterbot" or dialogue.user_turns[0].endswith("?"):
                seen.setdefault(dialogue.user_turns[0], {"kind": kind, "turns": dialogue.user_turns})
        prompts.extend(list(seen.values())[:count])
    return prompts


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--training-prompts", type=Path, required=True)
    parser.add_argument("--heldout-prompts", type=Path, required=True)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the training prompts to make")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    with lzma.open(options.training_prompts, "wt", encoding="utf-8", preset=4) as file:
        for prompt in training_prompts(options.corpus, tokenizer, options.scale, options.seed):
            file.write(json.dumps(prompt, ensure_ascii=False) + "\n")
    options.heldout_prompts.mkdir(parents=True, exist_ok=True)
    for kind in CHOICES:
        prompts = heldout_prompts(options.corpus, kind, options.seed)
        lines = "".join(json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in prompts)
        (options.heldout_prompts / f"{kind}.jsonl").write_text(lines, encoding="utf-8")
        print(kind, len(prompts), "held-out prompts")


if __name__ == "__main__":
    main()
