"""Known evaluation sets: their columns, and how a row becomes a prompt."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REASONING = "Please reason step by step, and put your final answer within \\boxed{}."
# What the published rows of SPEED-Bench hold in place of text that its publisher may not give out.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


@dataclass(frozen=True)
class EvaluationSet:
    """An evaluation set.

    Attributes:
        hub_id, config, split: as `datasets.load_dataset` takes them.
        to_prompt: from a row to `(kind, prompt)`; raises KeyError for a row without the set's columns.
        files: JSONL files to read instead of the Hub's script, for sets that are scripts.
    """

    hub_id: str
    config: str | None
    split: str
    to_prompt: Callable[[dict[str, Any]], tuple[str, str]]
    files: tuple[str, ...] = ()


def _humaneval(row: dict[str, Any]) -> tuple[str, str]:
    instruction = "Write a solution to the following problem and make sure that it passes the tests:"
    return "humaneval", f"{instruction}\n```python\n{row['prompt']}\n```"


def _alpaca(row: dict[str, Any]) -> tuple[str, str]:
    text = row["instruction"]
    return "alpaca", f"{text}\n\nInput:\n{row['input']}" if row.get("input") else text


def _livecodebench(row: dict[str, Any]) -> tuple[str, str]:
    parts = [
        "You are an expert Python programmer. Write a correct Python program for the problem below that passes all "
        "tests.",
        f"Problem:\n{row['question_content']}",
    ]
    if row.get("starter_code"):
        parts.append(f"Complete this starter code and give the whole program:\n```python\n{row['starter_code']}\n```")
    else:
        parts.append("Read the input from standard input and write the answer to standard output.")
    return "livecodebench", "\n\n".join([*parts, "Answer with one fenced Python block."])


def _speed_bench(row: dict[str, Any]) -> tuple[str, str]:
    turn = row["turns"][0]
    if is_placeholder(turn):
        raise ValueError(
            f"SPEED-Bench question {row.get('question_id')} is a placeholder: the publisher gives out this text by "
            "reference to its source only. Fill it in with `prepare_data.py` of NVIDIA's Model-Optimizer "
            "(examples/specdec_bench), as the data set's card says, and give the result as speed-bench=FILE."
        )
    return str(row["category"]), turn


def is_placeholder(turn: str) -> bool:
    """Whether a turn of SPEED-Bench stands for text that the publisher's script must fetch."""
    return not turn.strip() or PLACEHOLDER in turn


EVALUATION_SETS: dict[str, EvaluationSet] = {
    "gsm8k": EvaluationSet("openai/gsm8k", "main", "test", lambda row: ("gsm8k", f"{row['question']}\n{REASONING}")),
    "math500": EvaluationSet(
        "HuggingFaceH4/MATH-500", None, "test", lambda row: ("math500", f"{row['problem']}\n{REASONING}")
    ),
    "mbpp": EvaluationSet("google-research-datasets/mbpp", "sanitized", "test", lambda row: ("mbpp", row["prompt"])),
    "humaneval": EvaluationSet("openai/openai_humaneval", None, "test", _humaneval),
    "livecodebench": EvaluationSet(
        "livecodebench/code_generation_lite",
        None,
        "test",
        _livecodebench,
        ("test.jsonl", *(f"test{number}.jsonl" for number in range(2, 7))),
    ),
    "mt-bench": EvaluationSet(
        "HuggingFaceH4/mt_bench_prompts", None, "train", lambda row: (str(row["category"]), row["prompt"][0])
    ),
    "alpaca": EvaluationSet("tatsu-lab/alpaca", None, "train", _alpaca),
    "speed-bench": EvaluationSet("nvidia/SPEED-Bench", "qualitative", "test", _speed_bench),
}


def is_known(source: str) -> bool:
    """Whether `source` names a data set, by name or Hub id, or is NAME=FILE for one."""
    return _find(source.partition("=")[0]) is not None


def load_rows(source: str) -> Iterator[tuple[str, str]]:
    """`(kind, prompt)` of every row of a known data set, from the Hub or from the file of NAME=FILE.

    Raises:
        ValueError: the file or the Hub cannot be read, columns are missing, or a prompt is a placeholder.
    """
    name, _, path = source.partition("=")
    dataset = _find(name)
    rows = _local_rows(path) if path else _hub_rows(dataset)
    for number, row in enumerate(rows, start=1):
        try:
            yield dataset.to_prompt(row)
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"Row {number} of {source} has not the columns of {dataset.hub_id}: {error} is missing. Give a JSONL "
                "file with the columns that the Hub's data set has."
            ) from error


def _find(name: str) -> EvaluationSet | None:
    by_id = {dataset.hub_id.lower(): dataset for dataset in EVALUATION_SETS.values()}
    return EVALUATION_SETS.get(name.lower()) or by_id.get(name.lower())


def _local_rows(path: str) -> Iterator[dict[str, Any]]:
    try:
        content = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}). Give a JSONL file.") from error
    for number, line in enumerate(content.splitlines(), start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"Line {number} of {path} is no JSON ({error}). Give a JSONL file.") from error


def _hub_rows(dataset: EvaluationSet) -> Iterator[dict[str, Any]]:
    # A heavy package that local files do without.
    import datasets
    from huggingface_hub import hf_hub_download

    try:
        if dataset.files:
            for file in dataset.files:
                yield from _local_rows(hf_hub_download(dataset.hub_id, file, repo_type="dataset"))
        else:
            yield from datasets.load_dataset(dataset.hub_id, dataset.config, split=dataset.split)
    except (OSError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"{dataset.hub_id} cannot be read from the Hub ({type(error).__name__}). Download it, and give "
            f"NAME=FILE with its rows as JSONL."
        ) from error
