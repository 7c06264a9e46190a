"""The commands of docs/tiny_models.md: scripts and options exist, and files are those that earlier steps made."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
COMMANDS = [
    shlex.split(command.replace("\\\n", " "))
    for command in re.findall(
        r"^python -m training\.tiny\.((?:.*\\\n)*.*)$",
        (REPOSITORY / "docs" / "tiny_models.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
]
RESULTS = ("--output", "--training-prompts", "--heldout-prompts")


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_scripts_and_their_options_exist(words, capsys):
    with pytest.raises(SystemExit) as ended:
        import_module(f"training.tiny.{words[0]}").main(["--help"])
    options = re.findall(r"--[a-z-]+", capsys.readouterr().out)
    assert ended.value.code == 0 and {word for word in words if word.startswith("--")} <= set(options)


def test_every_step_reads_what_earlier_ones_wrote():
    made: set[str] = set()
    for script, *words in COMMANDS:
        results = {words[i + 1] for i, word in enumerate(words) if word in RESULTS}
        used = {word for word in words if word.startswith("runs/")} - results
        assert used <= made, script
        made |= results
    assert {"runs/target", "runs/dflash", "runs/tiny_models.json"} <= made and len(COMMANDS) > 12
