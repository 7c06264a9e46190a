"""The command: what it prints, what it refuses, and that it leaves nothing behind."""

import json
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config
from transformers.utils import logging

from hf_hybridspec import AutoDrafter, attach
from hf_hybridspec.cli import main
from hf_hybridspec.cli.pair_arguments import load_pair
from hf_hybridspec.cli.timing import Request, first_difference, tokens_per_second
from hf_hybridspec.modeling.dflash import DFlashDrafter
from tests.conftest import character_tokenizer
from tests.profiles import make_profile, profile_of
from tests.support import drafter_config

JSON_KEYS = {
    "text",
    "tokens",
    "rounds",
    "acceptance_length",
    "mean_verification_length",
    "path",
    "tokens_per_second",
}


@pytest.fixture
def hybridspec(saved_pair, capsys):
    """Runs a command line; `generate` gets the saved pair and a prompt unless it names others."""

    def run(command, *arguments):
        given = {
            "--target": str(saved_pair.target),
            "--drafter": str(saved_pair.drafter),
            "--prompt": "Hello there.",
            "--max-new-tokens": "12",
            "--device": "cpu",
        }
        defaults = [word for name, value in given.items() if name not in arguments for word in (name, value)]
        # What a test's own models printed is no output of the command.
        capsys.readouterr()
        try:
            code = main([command, *(defaults if command == "generate" else []), *map(str, arguments)])
        except SystemExit as exit_of_parser:
            code = exit_of_parser.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def is_refused(outcome, *words):
    """Exit code 2, nothing on standard output, and one line on standard error that holds all words."""
    code, out, err = outcome
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1 and err.endswith("\n"), err
    assert "Traceback" not in err
    missing = [word for word in words if word not in err]
    assert not missing, f"{missing} not in {err!r}"
    return True


def plain_text(saved_pair, prompt="user: Hello there.\nassistant: ", num_tokens=12):
    """What the target writes by stock generate()."""
    tokenizer = AutoTokenizer.from_pretrained(saved_pair.target)
    inputs = tokenizer(prompt, return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(saved_pair.target)
    output = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
    return tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)


# ---------------------------------------------------------------------------------------------------- generate


def test_streams_the_targets_own_text_and_a_line_of_statistics(hybridspec, saved_pair):
    code, out, err = hybridspec("generate")
    assert (code, err) == (0, "")
    text, statistics = out.rstrip("\n").rsplit("\n\n", 1)
    assert text == plain_text(saved_pair)
    assert statistics.startswith("12 tokens in ")
    for word in ("rounds", "acceptance length", "mean verification length", "round path", "static:6", "tokens/s"):
        assert word in statistics


def test_json_is_one_object_with_consistent_counts(hybridspec, saved_pair):
    code, out, err = hybridspec("generate", "--json", "--policy", "full")
    record = json.loads(out)
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert record.keys() == JSON_KEYS
    assert record["text"] == plain_text(saved_pair)
    assert record["tokens"] == 12 and record["path"] == "round"
    # The first token is the prefill's.
    assert record["rounds"] * record["acceptance_length"] == pytest.approx(11)
    assert 1 <= record["acceptance_length"] <= record["mean_verification_length"] <= 16
    assert record["tokens_per_second"] > 0


def test_compare_finds_identical_tokens_and_both_speeds(hybridspec):
    code, out, _ = hybridspec("generate", "--compare")
    assert code == 0
    assert "identical tokens" in out and "NOT" not in out and "times as fast" in out
    record = json.loads(hybridspec("generate", "--compare", "--json")[1])
    assert record.keys() == JSON_KEYS | {"autoregressive_tokens_per_second", "identical_to_autoregressive"}
    assert record["identical_to_autoregressive"] is True
    assert record["autoregressive_tokens_per_second"] > 0


def test_compare_reports_a_difference(hybridspec, monkeypatch):
    decode = Request.decode

    def corrupted(self, drafter=None, *args, **kwargs):
        run = decode(self, drafter, *args, **kwargs)
        if drafter is None:
            return run
        tokens = list(run.token_ids)
        tokens[4] += 1
        return replace(run, token_ids=tuple(tokens))

    monkeypatch.setattr(Request, "decode", corrupted)
    assert "NOT identical from token 5 of 12" in hybridspec("generate", "--compare")[1]
    assert json.loads(hybridspec("generate", "--compare", "--json")[1])["identical_to_autoregressive"] is False


def test_ids_beyond_the_tokenizer_are_never_proposed(hybridspec, saved_pair, tmp_path, monkeypatch):
    """The reserved rows of an embedding; the whole of generate, and what calibrate and bench load."""
    propose, proposed = DFlashDrafter.propose, []

    def record(*arguments):
        draft = propose(*arguments)
        proposed.append(int(draft.tokens.max()))
        return draft

    monkeypatch.setattr(DFlashDrafter, "propose", record)
    target = tmp_path / "target"
    shutil.copytree(saved_pair.target, target)
    character_tokenizer(92).save_pretrained(target)
    size = len(AutoTokenizer.from_pretrained(target))
    hybridspec("generate")
    assert max(proposed) >= size
    for policy in ((), ("--policy", "full")):
        proposed.clear()
        assert hybridspec("generate", "--target", target, *policy)[0] == 0
        assert proposed and max(proposed) < size
    pair = load_pair(Namespace(target=str(target), drafter=str(saved_pair.drafter), device="cpu", dtype="auto"))
    assert len(pair.tokenizer) == size and pair.drafter.target.forbidden[size:].all()
    assert not pair.drafter.target.forbidden[:size].any()


def test_sampling_follows_its_seed_and_expects_no_identity(hybridspec):
    options = ("generate", "--temperature", "1.0", "--top-p", "0.95", "--top-k", "40", "--seed")
    first, again, other = (json.loads(hybridspec(*options, seed, "--json")[1])["text"] for seed in (7, 7, 8))
    assert first == again != other
    assert "other tokens are expected when sampling" in hybridspec(*options, 7, "--compare")[1]
    assert json.loads(hybridspec(*options, 7, "--compare", "--json")[1])["identical_to_autoregressive"] is None


def test_a_profile_chooses_lengths_and_must_fit(hybridspec, saved_pair, tmp_path):
    target = attach(AutoModelForCausalLM.from_pretrained(saved_pair.target))
    drafter = AutoDrafter.from_pretrained(saved_pair.drafter)
    drafter.bind(target.get_input_embeddings(), target.get_output_embeddings(), target.config)
    fitting, foreign, broken = (tmp_path / name for name in ("fitting.json", "foreign.json", "broken.json"))
    profile_of(target, drafter).save(fitting)
    make_profile().save(foreign)
    broken.write_text("{")
    code, out, _ = hybridspec("generate", "--profile", fitting)
    assert code == 0 and "hybridspec" in out
    assert out.rsplit("\n\n", 1)[0] == plain_text(saved_pair)
    assert "dcut" in hybridspec("generate", "--profile", fitting, "--policy", "dcut")[1]
    assert is_refused(hybridspec("generate", "--profile", foreign), "does not fit")
    assert is_refused(hybridspec("generate", "--profile", broken), "broken.json", "JSON")
    assert is_refused(hybridspec("generate", "--profile", tmp_path / "absent.json"), "absent.json", "cannot be read")
    assert is_refused(hybridspec("generate", "--policy", "hybridspec"), "needs a calibration profile")


def test_top_k_of_one_is_greedy_whatever_the_temperature(hybridspec, saved_pair):
    out = hybridspec("generate", "--temperature", "2", "--top-k", "1", "--json")[1]
    assert json.loads(out)["text"] == plain_text(saved_pair)


def test_filters_without_a_temperature_are_noted_and_change_nothing(hybridspec, saved_pair):
    code, out, err = hybridspec("generate", "--top-p", "0.5", "--temperature", "0", "--json")
    assert code == 0 and "do nothing" in err
    assert json.loads(out)["text"] == plain_text(saved_pair)


def test_raw_prompts_and_the_thinking_switch(hybridspec, saved_pair):
    raw = json.loads(hybridspec("generate", "--raw", "--json")[1])["text"]
    assert raw == plain_text(saved_pair, "Hello there.")
    answer = json.loads(hybridspec("generate", "--no-thinking", "--json")[1])["text"]
    assert answer == plain_text(saved_pair, "user: Hello there.\nassistant: (no thinking) ")
    assert is_refused(hybridspec("generate", "--raw", "--no-thinking"), "--raw", "template")


def test_one_new_token_needs_no_round(hybridspec):
    record = json.loads(hybridspec("generate", "--max-new-tokens", 1, "--json", "--compare")[1])
    assert (record["tokens"], record["rounds"], record["tokens_per_second"]) == (1, 0, 0.0)
    assert record["identical_to_autoregressive"] is True


def test_the_context_bounds_prompt_and_answer(hybridspec):
    # The tiny target has 2048 positions.
    code, out, err = hybridspec("generate", "--raw", "--prompt", "a" * 2044, "--json")
    assert code == 0 and json.loads(out)["tokens"] == 4
    assert "room for 4 new tokens" in err
    outcome = hybridspec("generate", "--raw", "--prompt", "a" * 2048)
    assert is_refused(outcome, "2048 tokens", "context", "Shorten the prompt")


def test_libraries_keep_their_verbosity(hybridspec):
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hybridspec("generate")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--prompt", "", ["prompt is empty"]),
        ("--prompt", " \n", ["prompt is empty"]),
        ("--prompt", "\udcff", ["UTF-8"]),
        ("--policy", "fastest", ["fastest", "full", "static:W"]),
        ("--policy", "static:1", ["at least 2", "got 1"]),
        ("--policy", "static:17", ["[2, 16]", "got 17"]),
        ("--policy", "static:", ["static:"]),
        ("--max-new-tokens", "0", ["1 or more", "'0'"]),
        ("--max-new-tokens", "many", ["1 or more", "'many'"]),
        ("--temperature", "-0.1", ["0 or more", "'-0.1'"]),
        ("--temperature", "nan", ["0 or more", "'nan'"]),
        ("--temperature", "inf", ["0 or more", "'inf'"]),
        ("--top-p", "0", ["above 0 and at most 1", "'0'"]),
        ("--top-p", "1.01", ["above 0 and at most 1", "'1.01'"]),
        ("--top-k", "-1", ["0 or more", "'-1'"]),
        ("--seed", "-1", ["0 to", "'-1'"]),
        ("--device", "tpu0", ["cpu, cuda", "'tpu0'"]),
        ("--device", "cuda:99", ["cuda:99", "--device cpu"]),
        ("--dtype", "int8", ["int8", "float32"]),
        ("--target", "no-such-model", ["no-such-model", "tiny-dflash", "folder"]),
        ("--drafter", "nobody/no-such-drafter", ["nobody/no-such-drafter", "Check its spelling"]),
    ],
)
def test_bad_options_are_one_sentence(hybridspec, option, value, words):
    assert is_refused(hybridspec("generate", f"{option}={value}" if value.startswith("-") else option, value), *words)


def test_unknown_commands_and_options(hybridspec):
    assert is_refused(hybridspec("invent"), "invent", "generate")
    assert is_refused(hybridspec("generate", "--fast"), "--fast")


# ------------------------------------------------------------------------------------------------- checkpoints


def test_a_target_is_no_drafter_and_the_other_way_round(hybridspec, saved_pair):
    assert is_refused(hybridspec("generate", "--drafter", saved_pair.target), "is not a drafter")
    assert is_refused(hybridspec("generate", "--target", saved_pair.drafter), "is a drafter, not a target")


def test_the_drafter_of_another_target(hybridspec, tmp_path):
    DFlashDrafter(drafter_config(hidden_size=48, target_layer_ids=[0, 9], num_target_layers=12)).save_pretrained(
        tmp_path
    )
    outcome = hybridspec("generate", "--drafter", tmp_path)
    assert is_refused(outcome, "does not fit", "hidden_size is 32, the drafter expects 48", "num_hidden_layers is 4")


def test_a_model_of_another_family(hybridspec, tmp_path):
    GPT2Config().save_pretrained(tmp_path)
    assert is_refused(hybridspec("generate", "--target", tmp_path), "'gpt2'", "Qwen3-Next")


def test_a_folder_without_a_config(hybridspec, tmp_path):
    assert is_refused(hybridspec("generate", "--target", tmp_path), "no config.json")


@pytest.mark.parametrize("role", ["target", "drafter"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "garbage", "gone", "tensor missing", "config broken"])
def test_damaged_checkpoints(hybridspec, saved_pair, tmp_path, role, damage):
    folder = tmp_path / "damaged"
    shutil.copytree(getattr(saved_pair, role), folder)
    _damage(folder, damage)
    assert is_refused(hybridspec("generate", f"--{role}", folder), "damaged" if damage != "config broken" else "JSON")
    # The intact pair still works in the same process.
    assert hybridspec("generate")[0] == 0


def _damage(folder, damage):
    weights = folder / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "empty":
        weights.write_bytes(b"")
    elif damage == "garbage":
        weights.write_bytes(bytes(range(256)) * 20)
    elif damage == "gone":
        weights.unlink()
    elif damage == "tensor missing":
        tensors = load_file(weights)
        tensors.pop(sorted(tensors)[0])
        save_file(tensors, weights, metadata={"format": "pt"})
    else:
        (folder / "config.json").write_text("{")


def test_a_target_without_a_tokenizer(hybridspec, saved_pair, tmp_path):
    folder = tmp_path / "mute"
    shutil.copytree(saved_pair.target, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    assert is_refused(hybridspec("generate", "--target", folder), "tokenizer", "mute")


def test_a_tokenizer_without_a_template(hybridspec, saved_pair, tmp_path):
    folder = tmp_path / "plain"
    shutil.copytree(saved_pair.target, folder, ignore=shutil.ignore_patterns("chat_template*"))
    assert is_refused(hybridspec("generate", "--target", folder), "no chat template", "--raw")
    assert hybridspec("generate", "--target", folder, "--raw")[0] == 0


# -------------------------------------------------------------------------------------------------------- info


def test_info_describes_a_target_and_a_drafter(hybridspec, saved_pair):
    code, out, _ = hybridspec("info", saved_pair.target)
    assert code == 0
    for fact in ("(MoE)", "4 (3 GDN, 1 attention)", "8, 2 a token", "0.10 M", "float32", "2048 tokens"):
        assert fact in out
    code, out, _ = hybridspec("info", saved_pair.drafter)
    assert code == 0
    for fact in ("dflash", "DFlashDraftModel", "0, 2 of 4 target layers", "16 rows, 15 draft tokens", "same_position"):
        assert fact in out


def test_info_checks_a_pair_in_either_order(hybridspec, saved_pair, tmp_path):
    for pair in ((saved_pair.target, saved_pair.drafter), (saved_pair.drafter, saved_pair.target)):
        code, out, _ = hybridspec("info", pair[0], "--with", pair[1])
        assert code == 0 and out.endswith(f"{saved_pair.drafter} fits {saved_pair.target}.\n")
    DFlashDrafter(drafter_config(num_target_layers=12, target_layer_ids=[0, 9])).save_pretrained(tmp_path)
    code, out, err = hybridspec("info", saved_pair.target, "--with", tmp_path)
    assert code == 2 and "fits" not in out
    assert "num_hidden_layers is 4, the drafter expects 12" in err and err.count("\n") == 1
    assert is_refused(hybridspec("info", tmp_path, "--with", saved_pair.drafter), "both drafters")


def test_info_of_nothing(hybridspec):
    assert is_refused(hybridspec("info", "no-such-model"), "no-such-model")


# ----------------------------------------------------------------------------------------------------- process


def _hear_interrupts():
    """A job started in the background ignores SIGINT, and so would its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _process(saved_pair, *arguments):
    command = [sys.executable, "-m", "hf_hybridspec", "generate", "--prompt", "Hello.", "--device", "cpu"]
    pair = ["--target", str(saved_pair.target), "--drafter", str(saved_pair.drafter)]
    return subprocess.Popen(
        [*command, *pair, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_hear_interrupts,
    )


def test_an_interrupt_ends_with_130_and_no_traceback(saved_pair):
    process = _process(saved_pair, "--max-new-tokens", "2000", "--compare")
    # It is decoding as soon as there is text.
    assert process.stdout.read(1)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "\nhf-hybridspec: interrupted\n"


def test_a_reader_that_leaves_ends_it_quietly(saved_pair):
    process = _process(saved_pair, "--max-new-tokens", "1000")
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 141


def test_the_first_difference_of_two_texts():
    assert first_difference((1, 2, 3), (1, 2, 3)) is None
    assert first_difference((1, 2, 3), (1, 5, 3)) == 1
    assert first_difference((1, 2, 3), (1, 2)) == 2


def test_speed_leaves_the_prefill_out(saved_pair):
    tokenizer = AutoTokenizer.from_pretrained(saved_pair.target)
    model = AutoModelForCausalLM.from_pretrained(saved_pair.target, dtype=torch.float32)
    inputs = dict(tokenizer("Hello", return_tensors="pt"))
    inputs.pop("token_type_ids", None)
    config = model.generation_config
    config.max_new_tokens = 5
    started = time.perf_counter()
    run = Request(attach(model), inputs, config).decode()
    whole = time.perf_counter() - started
    assert len(run.token_ids) == 5 and run.statistics is None
    assert 0 < run.seconds < whole
    assert tokens_per_second(run) == pytest.approx(4 / run.seconds)
