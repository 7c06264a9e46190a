"""Arguments, shipped configurations, merging and regenerating."""

import json
import warnings
from pathlib import Path

import pytest
import torch
import yaml

from hf_hybridspec import AutoDrafter
from hf_hybridspec.modeling.ready import ReadyDrafter
from tests.training.runs import write_config, write_setup
from training import regenerate
from training.arguments import parse_arguments
from training.merge_ready import main as merge
from training.train_ready import main as train

CONFIGS = Path(__file__).resolve().parents[2] / "training" / "configs"
RECIPES = sorted(path for path in CONFIGS.glob("*.yaml") if not path.name.startswith("accelerate"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_are_read(path):
    with warnings.catch_warnings():
        # No key is one that transformers is about to drop.
        warnings.simplefilter("error", FutureWarning)
        arguments, training = parse_arguments(["--config", str(path), "--bf16", "false"])
    assert training.activation_checkpointing == (path.stem in ("dspark_ft", "ready_stage2"))
    assert training.weight_decay == 0 and training.max_grad_norm == 1
    assert (arguments.ce_weight, arguments.l1_weight, arguments.position_decay) == (0.1, 0.9, 4.0)
    assert (arguments.reader_state_layers is not None) == path.stem.endswith("stage1")
    assert (arguments.adapter is not None) == path.stem.endswith("stage2")


def test_the_papers_settings():
    one, first = parse_arguments(["--config", str(CONFIGS / "ready_stage1.yaml"), "--bf16", "false"])
    two, second = parse_arguments(["--config", str(CONFIGS / "ready_stage2.yaml"), "--bf16", "false"])
    assert (one.max_samples, two.max_samples) == (20_000, 50_000)
    assert (first.learning_rate, second.learning_rate) == (1e-4, 5e-5)
    assert (one.reader_state_layers, one.reader_rank, one.reader_injection) == ([30, 62], 8, "post_attention")
    assert (first.adam_beta1, first.adam_beta2, first.adam_epsilon) == (0.9, 0.999, 1e-8)


def test_accelerate_configurations_are_read():
    from accelerate.commands.config.config_args import load_config_from_file

    kinds = {
        path.stem: str(load_config_from_file(str(path)).distributed_type) for path in CONFIGS.glob("accelerate_*.yaml")
    }
    assert {name: kind.rpartition(".")[2] for name, kind in kinds.items()} == {
        "accelerate_single": "NO",
        "accelerate_ddp": "MULTI_GPU",
        "accelerate_fsdp": "FSDP",
        "accelerate_deepspeed": "DEEPSPEED",
    }


def test_the_command_line_wins_over_the_file(tmp_path):
    config = write_config(tmp_path, {**MINIMAL, "learning_rate": 0.5, "reader_state_layers": [0, 1]})
    arguments, training = parse_arguments(["--config", str(config), "--learning_rate", "0.25"])
    assert training.learning_rate == 0.25 and arguments.reader_state_layers == [0, 1]


MINIMAL = {
    "target": "t",
    "drafter": "d",
    "dataset": "x.jsonl",
    "stage": "reader",
    "reader_state_layers": [1],
    "output_dir": "o",
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rat": 1.0}, "unknown key 'learning_rat'. Did you mean 'learning_rate'"),
        ({"stage": "third"}, "stage must be one of reader, joint, ft, got 'third'"),
        ({"stage": "ft"}, "stage ft has no reader"),
        ({"reader_state_layers": None}, "stage reader needs reader_state_layers"),
        ({"num_anchors": 0}, "num_anchors must be positive"),
    ],
)
def test_bad_arguments_are_refused(tmp_path, capsys, changes, message):
    assert train(["--config", str(write_config(tmp_path, MINIMAL | changes))]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_or_shapeless_file_is_refused(tmp_path, capsys):
    assert train(["--config", str(tmp_path / "none.yaml")]) == 2
    (tmp_path / "list.yaml").write_text("- 1\n")
    assert train(["--config", str(tmp_path / "list.yaml")]) == 2
    assert "does not exist" in (errors := capsys.readouterr().err) and "must hold keys" in errors


@pytest.fixture
def setup(tmp_path):
    return write_setup(tmp_path, rows=4, max_steps=1)


def test_models_that_do_not_fit_are_refused(tmp_path, setup, capsys):
    def error(**changes):
        assert train(["--config", str(write_config(tmp_path, setup | changes))]) == 2
        return capsys.readouterr().err

    assert "holds no config.json" in error(drafter=str(tmp_path))
    assert "hold no recurrent state" in error(reader_state_layers=[3])
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(config | {"num_target_layers": 8}))
    assert "num_hidden_layers is 4, the drafter expects 8" in error()


def test_an_adapter_of_another_kind_or_drafter_is_refused(tmp_path, setup, capsys):
    def error(**changes):
        assert train(["--config", str(write_config(tmp_path, setup | changes))]) == 2
        return capsys.readouterr().err

    assert train(["--config", str(write_config(tmp_path, setup))]) == 0
    second = {"stage": "joint", "adapter": setup["output_dir"], "output_dir": str(tmp_path / "second")}
    assert "has a reader, which does not fit stage ft" in error(
        **second | {"stage": "ft", "reader_state_layers": None}
    )
    assert "training starts from a DSpark drafter" in error(**second, drafter=setup["output_dir"])
    assert "has no reader_config.json" in error(**second | {"adapter": str(tmp_path)})
    from tests.training.helpers import make_dspark

    make_dspark(seed=9).save_pretrained(tmp_path / "other")
    assert "was trained on another drafter" in error(**second, drafter=str(tmp_path / "other"))


def test_merging_writes_a_plain_checkpoint(tmp_path, setup, capsys):
    assert train(["--config", str(write_config(tmp_path, setup))]) == 0
    assert merge(["--adapter", setup["output_dir"], "--output", str(tmp_path / "merged")]) == 0
    merged, adapted = (
        AutoDrafter.from_pretrained(tmp_path / "merged"),
        AutoDrafter.from_pretrained(setup["output_dir"]),
    )
    assert isinstance(merged, ReadyDrafter)
    for name, tensor in adapted.state_dict().items():
        assert torch.equal(merged.state_dict()[name], tensor), name
    assert merge(["--adapter", setup["output_dir"], "--output", str(tmp_path / "merged")]) == 2
    assert merge(["--adapter", str(tmp_path), "--output", str(tmp_path / "new")]) == 2
    assert "is not empty" in (errors := capsys.readouterr().err) and "is no adapter" in errors


def test_answers_are_the_targets_and_the_run_resumes(tmp_path, capsys):
    write_setup(tmp_path)
    template = yaml.safe_load("'{% for m in messages %}{{ m.content }}.{% endfor %}'")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "target")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "target")
    rows = [
        {"conversations": [{"from": "human", "value": "abc" * (n + 1)}, {"from": "gpt", "value": "x"}]}
        for n in range(5)
    ]
    rows.insert(2, {"conversations": []})
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["--target", str(tmp_path / "target"), "--dataset", str(tmp_path / "prompts.jsonl"), "--batch-size", "2"]
    command += ["--output", str(tmp_path / "answers.jsonl"), "--max-new-tokens", "6", "--device", "cpu"]
    assert regenerate.main(command) == 0
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert sorted(line["row"] for line in lines) == [0, 1, 3, 4, 5]
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target").eval()
    for line in lines:
        length = line["assistant_mask"].index(1)
        prompt = torch.tensor([line["input_ids"][:length]])
        assert tokenizer.decode(prompt[0]) == "abc" * (length // 3) + "."
        with torch.no_grad():
            alone = target.generate(prompt, max_new_tokens=6, do_sample=False)
        assert alone[0].tolist() == line["input_ids"]
    # Stopped in the middle of a line: that answer is written again, the others are kept.
    text = (tmp_path / "answers.jsonl").read_text()
    kept = text.splitlines(keepends=True)
    (tmp_path / "answers.jsonl").write_text("".join(kept[:3]) + kept[3][:20])
    capsys.readouterr()
    assert regenerate.main(command) == 0
    assert "3 of them answered before" in capsys.readouterr().out
    again = (tmp_path / "answers.jsonl").read_text().splitlines(keepends=True)
    assert again[:3] == kept[:3] and sorted(again) == sorted(kept)
    assert regenerate.main([*command, "--max-prompt-length", "1"]) == 2
