"""Tokenises a corpus and packs it into rows of one length, by domain.

    python -m training.tiny.pack --corpus runs/corpus --tokenizer runs/tokenizer --output runs/packed

With `--answers` instead of a corpus, what a target wrote (prompt and answer) is packed as the one domain `answers`:
text for a target of another shape.

Training rows start at the start of a document whenever one fits, since the recurrent state at inference starts empty
too; held-out rows hold one document each. `train/DOMAIN.bin.xz` is uint16 ids, `heldout/DOMAIN.bin.xz` the same, and
`index.json` gives the row length and the number of rows.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from training.tiny.documents import read_dialogues, read_documents
from training.tiny.regenerate import load_answers
from training.tiny.restate import restated

# File name prefix -> domain, the longest prefix first.
DOMAINS = {
    "chat_gsm": "gsm",
    "chat_problems": "problems",
    "chat_varied": "varied",
    "chat_restated": "restated",
    "chat_codeio": "codeio",
    "chat_factbook": "factbook",
    "chat_chatterbot": "chatter",
    "code_": "code",
    "prose_": "prose",
    "dict_": "dictionary",
    "doc_": "documentation",
}
WORKED_PROBLEMS = ("gsm", "problems", "varied")
# Two-byte ids compress better when the byte position is known.
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 3, "lp": 1, "pb": 1, "lc": 3}]


def domain_of(path: Path) -> str:
    """`gsm`, `code`, `code_chat`, ...: dialogues made from code or prose are domains of their own."""
    prefix = next(prefix for prefix in DOMAINS if path.name.startswith(prefix))
    made = path.name.endswith(".jsonl.xz") and not prefix.startswith("chat_")
    return DOMAINS[prefix] + ("_chat" if made else "")


def texts_of(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The documents of a corpus file as text; dialogues through the chat template, worked problems restated."""
    if path.name.endswith(".txt.xz"):
        return read_documents(path)
    dialogues = read_dialogues(path)
    if domain_of(path) in WORKED_PROBLEMS:
        dialogues = map(restated, dialogues)
    return [tokenizer.apply_chat_template(dialogue.messages, tokenize=False) for dialogue in dialogues]


def tokenize(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[np.ndarray]:
    """uint16 ids of each text, the end-of-text token last."""
    end = np.array([tokenizer.convert_tokens_to_ids("<|endoftext|>")], dtype=np.uint16)
    for start in range(0, len(texts), 2000):
        for ids in tokenizer(texts[start : start + 2000], add_special_tokens=False)["input_ids"]:
            yield np.concatenate([np.array(ids, dtype=np.uint16), end])


def pack_rows(documents: Iterator[np.ndarray], length: int, whole: bool) -> np.ndarray:
    """uint16 [rows, length]: documents one after another, without padding.

    A document that crosses a row's end goes on in the next row, or, if it is to stay `whole` and fits into a row,
    starts again there: its first part is then seen twice, and nothing is cut off. The last, incomplete row is dropped.
    """
    rows, row, used = [], np.empty(length, dtype=np.uint16), 0
    for document in documents:
        position = 0
        while position < len(document):
            taken = min(length - used, len(document) - position)
            row[used : used + taken] = document[position : position + taken]
            used, position = used + taken, position + taken
            if used == length:
                rows.append(row.copy())
                used = 0
                if whole and position < len(document) <= length:
                    position = 0
    return np.stack(rows) if rows else np.empty((0, length), dtype=np.uint16)


def one_per_row(documents: Iterator[np.ndarray], length: int, padding: int, limit: int) -> np.ndarray:
    """uint16 [at most `limit`, length]: one document a row, cut or padded."""
    rows = []
    for document in documents:
        row = np.full(length, padding, dtype=np.uint16)
        row[: min(length, len(document))] = document[:length]
        rows.append(row)
        if len(rows) == limit:
            break
    return np.stack(rows) if rows else np.empty((0, length), dtype=np.uint16)


def write_rows(path: Path, rows: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(path, "wb", format=lzma.FORMAT_XZ, filters=_FILTERS) as file:
        file.write(rows.tobytes())


def read_rows(folder: Path, half: str, domain: str) -> np.ndarray:
    """uint16 [rows, length] of one domain, as `pack` wrote it."""
    entry = json.loads((folder / "index.json").read_text())
    with lzma.open(folder / half / f"{domain}.bin.xz", "rb") as file:
        rows = np.frombuffer(file.read(), dtype=np.uint16)
    return rows.reshape(entry[half][domain], entry["length"])


def corpus_documents(
    corpus: Path, tokenizer: PreTrainedTokenizerBase, seed: int
) -> Iterator[tuple[str, str, Iterator[np.ndarray]]]:
    """Half, domain, and the domain's documents as ids, shuffled."""
    for half in ("train", "heldout"):
        files: dict[str, list[Path]] = {}
        for path in sorted((corpus / half).iterdir()):
            files.setdefault(domain_of(path), []).append(path)
        for domain, paths in files.items():
            texts = [text for path in paths for text in texts_of(path, tokenizer)]
            Random(f"{seed}-{domain}").shuffle(texts)
            yield half, domain, tokenize(texts, tokenizer)


def answer_documents(
    paths: list[Path], padding: int, heldout: int, seed: int
) -> Iterator[tuple[str, str, Iterator[np.ndarray]]]:
    """As `corpus_documents`, of regenerated answers with their prompts; the first `heldout` of them are held out."""
    rows = [tokens.numpy() for path in paths for tokens, _ in load_answers(path)]
    Random(seed).shuffle(rows)
    for half, part in (("train", rows[heldout:]), ("heldout", rows[:heldout])):
        yield half, "answers", (np.append(row, padding).astype(np.uint16) for row in part)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--corpus", type=Path)
    source.add_argument("--answers", type=Path, nargs="+", help="one or more answers.npz")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--heldout-rows", type=int, default=192)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    padding = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    index: dict = {"length": options.length, "train": {}, "heldout": {}}
    if options.answers is None:
        parts = corpus_documents(options.corpus, tokenizer, options.seed)
    else:
        parts = answer_documents(options.answers, padding, options.heldout_rows, options.seed)
    for half, domain, documents in parts:
        if half == "train":
            whole = domain not in ("code", "prose", "documentation")
            rows = pack_rows(documents, options.length, whole)
        else:
            rows = one_per_row(documents, options.length, padding, options.heldout_rows)
        write_rows(options.output / half / f"{domain}.bin.xz", rows)
        index[half][domain] = len(rows)
        print(half, domain, f"{len(rows)} rows, {rows.size / 1e6:.2f} M tokens", flush=True)
    (options.output / "index.json").write_text(json.dumps(index, indent=1))


if __name__ == "__main__":
    main()
