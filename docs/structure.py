"""Writes docs/STRUCTURE.md: every module with the first sentence of its docstring, what it imports before it.

python docs/structure.py
"""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
# Lowest layer first, as in pyproject.toml.
SECTIONS = {
    "hf_hybridspec.kernels": "tensors in, tensors out; knows no model, cache or config",
    "hf_hybridspec.bundled": "small trained models and held-out prompts",
    "hf_hybridspec.modeling": "modules and caches",
    "hf_hybridspec.generation": "the two loops, and how generate() reaches them; reads profiles only of calibration",
    "hf_hybridspec.calibration": "measuring a pair",
    "hf_hybridspec.bench": "comparing decoding systems",
    "hf_hybridspec.cli": "the command hf-hybridspec",
    "hf_hybridspec": "the public names",
    "training": "scripts that train ReaDy adapters; `tiny/` builds the bundled models",
    "benchmarks": "what produced the numbers in README and `results/`",
}
HEAD = """\
# Structure

One sentence per module; within a section, a module comes after those of the section that it imports. A section
may import those above it. Written by `make structure` from the modules' docstrings.
"""


def sentence(path: Path) -> str:
    """The first sentence of a module's docstring, on one line; empty without a docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    end = paragraph.find(". ")
    return paragraph if end < 0 else paragraph[: end + 1]


def imported(module: str, path: Path) -> set[str]:
    """What a module names in its imports at the top level, as absolute dotted names."""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    names = set()
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ImportFrom):
            base = package[: len(package) - statement.level + 1] if statement.level else []
            source = ".".join([*base, *([statement.module] if statement.module else [])])
            members = {f"{source}.{alias.name}" for alias in statement.names}
            # `from . import module` needs the module, not its package.
            names |= {member for member in members if path_of(member).is_file()} or {source}
        elif isinstance(statement, ast.Import):
            names |= {alias.name for alias in statement.names}
    return names


def modules_of(section: str) -> list[str]:
    """Modules of a section, imported ones first, else by name."""
    folder = REPOSITORY / section.replace(".", "/")
    # The package's own section does not repeat those of its folders.
    files = folder.glob("*.py") if section == "hf_hybridspec" else folder.rglob("*.py")
    paths = {module_of(path): path for path in files}
    sorter = TopologicalSorter(
        {module: imported(module, path) & paths.keys() - {module} for module, path in paths.items()}
    )
    sorter.prepare()
    ordered = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        ordered += ready
        sorter.done(*ready)
    return ordered


def module_of(path: Path) -> str:
    """A file's dotted name."""
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def path_of(module: str) -> Path:
    """A module's file."""
    path = REPOSITORY.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def structure() -> str:
    """The whole page."""
    lines = [HEAD]
    for section, purpose in SECTIONS.items():
        lines += [f"## {section}", "", f"{purpose[0].upper()}{purpose[1:]}.", ""]
        for module in modules_of(section):
            if text := sentence(path_of(module)):
                lines.append(f"- `{path_of(module).relative_to(REPOSITORY)}`: {text}")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    (REPOSITORY / "docs" / "STRUCTURE.md").write_text(structure(), encoding="utf-8")


if __name__ == "__main__":
    main()
