"""The package as a whole: its size, its imports, its public names, and that the texts about it are true."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hf_hybridspec
from benchmarks.readme import TABLES, with_tables

REPOSITORY = Path(__file__).parent.parent
PACKAGE = sorted((REPOSITORY / "hf_hybridspec").rglob("*.py"))
OURS = [path for folder in ("hf_hybridspec", "training", "benchmarks") for path in (REPOSITORY / folder).rglob("*.py")]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def names_of(paths):
    return [str(path.relative_to(REPOSITORY)) for path in paths]


def imports_of(path):
    """Top-level names of all packages that a file imports, at any place in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.split(".")[0]


def test_files_are_found():
    assert len(PACKAGE) > 50 and len(OURS) > len(PACKAGE)


def test_files_are_short():
    limits = {path: 400 if path.stem.endswith("_triton") else 300 for path in OURS}
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in OURS}
    too_long = {
        name: lengths[path] for path, name in zip(OURS, names_of(OURS), strict=True) if lengths[path] > limits[path]
    }
    assert not too_long


def test_only_triton_files_import_triton():
    importing = [path for path in PACKAGE if "triton" in imports_of(path)]
    assert importing and all(path.stem.endswith("_triton") for path in importing)


def test_kernel_references_import_no_more_than_torch():
    for path in PACKAGE:
        if path.stem.endswith("_reference"):
            assert set(imports_of(path)) <= {"torch", "dataclasses", "math", "collections", "typing", "__future__"}, (
                path
            )


def test_one_file_reads_the_environment():
    reading = [path.name for path in PACKAGE if re.search(r"\benviron\b|\bgetenv\b", path.read_text(encoding="utf-8"))]
    assert reading == ["dispatch.py"]


@pytest.mark.parametrize("path", OURS, ids=names_of(OURS))
def test_no_error_is_swallowed_and_nothing_is_left_to_do(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"TODO|FIXME|NotImplementedError", text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler):
            caught = (
                [] if node.type is None else [name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)]
            )
            reraises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
            assert reraises or (caught and not {"Exception", "BaseException"} & set(caught))


def test_public_names():
    assert len(hf_hybridspec.__all__) <= 10
    assert list(hf_hybridspec.__all__) == sorted(hf_hybridspec.__all__)
    assert all(getattr(hf_hybridspec, name).__doc__ for name in hf_hybridspec.__all__)


def test_importing_changes_nothing():
    script = """
import sys, warnings, logging
import torch, transformers, peft
from transformers import AutoConfig, AutoModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

def observed():
    return {
        "configs": sorted(CONFIG_MAPPING._extra_content),
        "attention": sorted(ALL_ATTENTION_FUNCTIONS),
        "masks": sorted(ALL_MASK_ATTENTION_FUNCTIONS),
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "cudnn": torch.backends.cuda.matmul.allow_tf32,
        "random": torch.get_rng_state().sum().item(),
        "filters": list(warnings.filters),
        "handlers": list(logging.getLogger().handlers),
        "verbosity": transformers.utils.logging.get_verbosity(),
        "triton": "triton" in sys.modules,
        "generate": transformers.GenerationMixin.generate,
    }

before = observed()
import hf_hybridspec
after = observed()
changed = [name for name in before if before[name] != after[name]]
assert not changed, changed
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_every_module_is_in_the_structure_page():
    page = (REPOSITORY / "docs" / "STRUCTURE.md").read_text(encoding="utf-8")
    told = [path for path in OURS if ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))]
    # A package's own file may do no more than pass names on.
    assert not [path for path in set(OURS) - set(told) if path.name != "__init__.py"], "every module has a docstring"
    missing = [name for name in names_of(told) if f"`{name}`" not in page]
    assert not missing, "run `make structure`"
    stale = [name for name in re.findall(r"^- `(.+?)`", page, re.MULTILINE) if not (REPOSITORY / name).is_file()]
    assert not stale, "run `make structure`"


def test_the_readme_shows_the_committed_results():
    assert all(f"<!-- results:{name} -->" in README for name in TABLES)
    assert with_tables(README) == README, "run `make readme`"


def test_the_readme_has_the_commands_that_ci_runs():
    blocks = dict(re.findall(r"^<!-- (generate|test) -->\n```bash\n(.+?)\n```$", README, re.MULTILINE | re.DOTALL))
    assert blocks.keys() == {"generate", "test"}
    assert "hf-hybridspec generate" in blocks["generate"] and "--compare" in blocks["generate"]
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    test_target = re.search(r"^test:\n\t\$\(PYTHON\) -m (.+)$", makefile, re.MULTILINE).group(1)
    assert blocks["test"].splitlines()[-1] == test_target


def test_links_of_the_texts_lead_somewhere():
    for text in (REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md")):
        for link in re.findall(r"\]\(([^)#]+)\)", text.read_text(encoding="utf-8")):
            assert link.startswith("https://") or (REPOSITORY / link).exists(), f"{link} in {text.name}"


def test_contributing_is_short():
    assert len((REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()) < 120
