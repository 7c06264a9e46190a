"""Trains the tiny models' tokenizer: 4,096 entries, Qwen3.5's pre-tokenizer, a chat template with a thinking switch.

    python -m training.tiny.build_tokenizer --corpus runs/corpus --output runs/tokenizer

Byte-level BPE fills the first ids; the special tokens below are the last ones, so that every id has an embedding row.
The template marks what the model itself writes with `{% generation %}`, so `return_assistant_tokens_mask` is right.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX, Qwen3_5Tokenizer

from training.tiny.documents import read_dialogues, read_documents

END_OF_TEXT, TURN_START, TURN_END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
# (text, hidden from decoding with skip_special_tokens)
SPECIAL_TOKENS = (
    (END_OF_TEXT, True),
    (TURN_START, True),
    (TURN_END, True),
    ("<think>", False),
    ("</think>", False),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<tool_response>", False),
    ("</tool_response>", False),
    (MASK, True),
    *((f"<|reserved_{i}|>", True) for i in range(6)),
)
CHAT_TEMPLATE_PATH = Path(__file__).with_name("chat_template.jinja")


def corpus_sample(corpus: Path, characters_per_file: int, seed: int) -> Iterator[str]:
    """Up to `characters_per_file` of every training file's documents and dialogues, in random order."""
    for path in sorted((corpus / "train").iterdir()):
        if path.name.endswith(".jsonl.xz"):
            texts = [message["content"] for dialogue in read_dialogues(path) for message in dialogue.messages]
        else:
            texts = read_documents(path)
        Random(seed).shuffle(texts)
        budget = characters_per_file
        for text in texts:
            yield text[:20_000]
            budget -= len(text[:20_000])
            if budget <= 0:
                break


def train_bpe(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of `vocab_size` entries over Qwen3.5's pre-tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def build_tokenizer(bpe: Tokenizer, vocab_size: int) -> Qwen3_5Tokenizer:
    """The chat tokenizer around `bpe`; raises ValueError when the ids do not fill `vocab_size` exactly."""
    model = json.loads(bpe.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Qwen3_5Tokenizer(vocab=model["vocab"], merges=merges, eos_token=TURN_END)
    tokenizer.add_tokens([AddedToken(text, special=hidden, normalized=False) for text, hidden in SPECIAL_TOKENS])
    tokenizer.mask_token = MASK
    tokenizer.chat_template = CHAT_TEMPLATE_PATH.read_text()
    if len(tokenizer) != vocab_size:
        raise ValueError(
            f"vocabulary must fill {vocab_size} ids, got {len(tokenizer)}: use more text or fewer entries"
        )
    return tokenizer


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--characters-per-file", type=int, default=800_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    sample = corpus_sample(options.corpus, options.characters_per_file, options.seed)
    bpe = train_bpe(sample, options.vocab_size - len(SPECIAL_TOKENS))
    tokenizer = build_tokenizer(bpe, options.vocab_size)
    tokenizer.save_pretrained(options.output)
    print(f"{len(tokenizer)} entries saved to {options.output}")


if __name__ == "__main__":
    main()
