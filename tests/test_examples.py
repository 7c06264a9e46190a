"""Every example runs, and writes what the target alone would write."""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLES = Path(__file__).parent.parent / "examples"
NUM_TOKENS = 10


def load(name):
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def pair(saved_pair):
    return {"target": str(saved_pair.target), "drafter": str(saved_pair.drafter), "max_new_tokens": NUM_TOKENS}


def plain(saved_pair, text):
    """What stock generate() appends to a text, greedily."""
    tokenizer = AutoTokenizer.from_pretrained(saved_pair.target)
    model = AutoModelForCausalLM.from_pretrained(saved_pair.target, dtype=torch.float32)
    inputs = tokenizer(text, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
    return tokenizer.decode(output[0, inputs.input_ids.shape[1] :])


def test_all_examples_are_tested():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"chat", "pipeline", "sampling", "streaming"}


def test_streaming(pair, saved_pair, capsys):
    output = load("streaming").main("Hi.", **pair)
    expected = plain(saved_pair, "user: Hi.\nassistant: ")
    assert capsys.readouterr().out.startswith(expected + "\n")
    assert output.statistics.path == "round"


def test_chat_reuses_the_cache_over_turns(pair, saved_pair):
    first, second = load("chat").main(("Hi.", "And?"), **pair)
    stock = AutoModelForCausalLM.from_pretrained(saved_pair.target, dtype=torch.float32)
    assert torch.equal(second[:, : first.shape[1]], first)
    for sequence in (first, second):
        expected = stock.generate(sequence[:, :-NUM_TOKENS], max_new_tokens=NUM_TOKENS, do_sample=False)
        assert torch.equal(sequence, expected)


def test_sampling_follows_its_seed(pair):
    main = load("sampling").main
    assert main(seed=1, **pair) == main(seed=1, **pair) != main(seed=2, **pair)


def test_pipeline_drafts_without_being_told(pair, saved_pair, capsys):
    text = load("pipeline").main("Hi.", **pair)
    assert text == plain(saved_pair, "user: Hi.\nassistant: ")
    assert "'policy': 'static:6'" in capsys.readouterr().out
