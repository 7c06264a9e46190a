"""Whole runs of train_ready.py on tiny random models."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_hybridspec import AutoDrafter
from hf_hybridspec.modeling.dspark import DSparkDrafter
from hf_hybridspec.modeling.ready import ReadyDrafter
from tests.training.runs import losses_of, write_config, write_rows, write_setup
from training import drafting
from training import trainer as trainer_module
from training.train_ready import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def setup(tmp_path):
    return write_setup(tmp_path)


def run(tmp_path, setup, *extra, **changes):
    return main(["--config", str(write_config(tmp_path, setup | changes)), *map(str, extra)])


def adapter(folder):
    return load_file(Path(folder) / "adapter_model.safetensors")


def test_stage_1_trains_the_reader_alone_and_stage_2_goes_on_with_it(tmp_path, setup, capsys):
    assert run(tmp_path, setup) == 0
    first = adapter(setup["output_dir"])
    lora_b = {name: value for name, value in first.items() if "lora_B" in name}
    assert lora_b and all(not value.any() for value in lora_b.values())
    up = next(value for name, value in first.items() if name.endswith("up_proj.weight") and "state_reader" in name)
    assert up.any()
    printed = capsys.readouterr().out
    assert "16 of 16 rows kept" in printed and "tokens/s, estimated acceptance length" in printed
    second = {"stage": "joint", "adapter": setup["output_dir"], "output_dir": str(tmp_path / "second")}
    assert run(tmp_path, setup, **second) == 0
    trained = adapter(tmp_path / "second")
    assert trained.keys() == first.keys()
    assert all(value.any() for name, value in trained.items() if "lora_B" in name)
    assert not torch.equal(trained[next(n for n in first if "query_projection" in n)], up)
    drafter = AutoDrafter.from_pretrained(tmp_path / "second")
    assert isinstance(drafter, ReadyDrafter) and drafter.recurrent_layer_ids == (1, 2)
    card = (tmp_path / "second" / "README.md").read_text()
    assert setup["target"] in card and "estimated_acceptance_length" in card


def test_the_loss_falls_and_the_estimate_rises_where_there_is_something_to_learn(tmp_path, setup):
    # One row, over and over: what follows each anchor can be learnt by heart.
    write_rows(Path(setup["dataset"]), 1)
    changes = {"stage": "ft", "reader_state_layers": None, "max_steps": 60, "lora_rank": 16, "ce_weight": 1.0}
    changes |= {"logging_steps": 20, "per_device_train_batch_size": 1, "save_strategy": "no", "l1_weight": 0.0}
    assert run(tmp_path, setup, **changes) == 0
    losses = losses_of(setup["output_dir"])
    assert losses[-1] < 0.8 * losses[0]
    assert type(AutoDrafter.from_pretrained(setup["output_dir"])) is DSparkDrafter


def test_a_resumed_run_has_the_loss_curve_of_a_whole_one(tmp_path, setup):
    # Three epochs, cut in the middle of the second.
    changes = {"max_steps": 12, "save_steps": 6}
    assert run(tmp_path, setup, **changes) == 0
    checkpoint = Path(setup["output_dir"], "checkpoint-6")
    again = {"output_dir": str(tmp_path / "again")}
    assert run(tmp_path, setup, "--resume_from_checkpoint", checkpoint, **changes, **again) == 0
    assert losses_of(tmp_path / "again") == losses_of(setup["output_dir"])
    old, new = adapter(setup["output_dir"]), adapter(tmp_path / "again")
    assert all(torch.equal(old[name], new[name]) for name in old)


def test_gradient_accumulation_1_x_8_equals_4_x_2(tmp_path, setup):
    losses = []
    for size, steps in ((1, 8), (4, 2)):
        split = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps, "max_steps": 3}
        assert run(tmp_path, setup, stage="joint", output_dir=str(tmp_path / f"split-{size}"), **split) == 0
        losses.append(losses_of(tmp_path / f"split-{size}"))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    one, four = adapter(tmp_path / "split-1"), adapter(tmp_path / "split-4")
    for name in one:
        torch.testing.assert_close(one[name], four[name], rtol=1e-3, atol=2e-4)


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path, setup):
    assert run(tmp_path, setup, per_device_train_batch_size=4, max_steps=3) == 0
    config = write_config(
        tmp_path, setup | {"per_device_train_batch_size": 2, "max_steps": 3, "output_dir": str(tmp_path / "two")}
    )
    command = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "training/train_ready.py",
        "--config",
        str(config),
    ]
    subprocess.run(
        [sys.executable, *command, "--ddp_backend", "gloo"],
        cwd=ROOT,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=300,
    )
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(setup["output_dir"]), rel=1e-4)
    one, two = adapter(setup["output_dir"]), adapter(tmp_path / "two")
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-3, atol=2e-4)


def test_activation_checkpointing_is_the_objectives_own_and_changes_no_loss(tmp_path, setup, monkeypatch):
    run(tmp_path, setup, max_steps=1, output_dir=str(tmp_path / "kept"))
    recomputed = []
    checkpoint = drafting.checkpoint
    monkeypatch.setattr(
        drafting, "checkpoint", lambda *args, **kwargs: recomputed.append(1) or checkpoint(*args, **kwargs)
    )
    # The Trainer's own would refuse the objective, which is no transformers model.
    assert run(tmp_path, setup, max_steps=1, activation_checkpointing=True) == 0
    assert recomputed
    assert losses_of(setup["output_dir"]) == pytest.approx(losses_of(tmp_path / "kept"), rel=1e-5)


def test_bf16_keeps_fp32_masters(tmp_path, setup):
    """C36: what is trained is fp32 whatever the drafter's dtype, and the loss stays a number."""
    assert run(tmp_path, setup, stage="joint", bf16=True, max_steps=20, logging_steps=5) == 0
    assert {value.dtype for value in adapter(setup["output_dir"]).values()} == {torch.float32}
    assert all(torch.isfinite(torch.tensor(losses_of(setup["output_dir"]))))


def test_real_acceptance_length_is_measured_on_held_out_prompts(tmp_path, setup, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"Add {i} + 7"]}) + "\n" for i in range(3)))
    assert run(tmp_path, setup, eval_prompts=str(prompts), eval_max_new_tokens=12, max_steps=1) == 0
    assert "acceptance length (pooled)" in capsys.readouterr().out
    assert "prefix survival at 7" in Path(setup["output_dir"], "README.md").read_text()


def test_a_loss_that_is_no_number_stops_the_run_and_leaves_the_checkpoint(tmp_path, setup, capsys, monkeypatch):
    real = trainer_module.DraftingObjective.forward
    calls = []

    def broken(self, batch, record):
        output = real(self, batch, record)
        calls.append(1)
        return type(output)(output.loss * (float("nan") if len(calls) > 3 else 1), output.survived, output.observable)

    monkeypatch.setattr(trainer_module.DraftingObjective, "forward", broken)
    assert run(tmp_path, setup) == 2
    assert "loss became nan at step 4" in capsys.readouterr().err
    assert {bool(torch.isfinite(v).all()) for v in adapter(Path(setup["output_dir"], "checkpoint-2")).values()} == {
        True
    }
    monkeypatch.setattr(trainer_module.DraftingObjective, "forward", real)
    assert run(tmp_path, setup, "--resume_from_checkpoint", "true") == 0


def test_a_gradient_that_is_no_number_stops_before_the_update(tmp_path, setup, capsys, monkeypatch):
    real = trainer_module.DraftingObjective.forward

    def broken(self, batch, record):
        output = real(self, batch, record)
        # The loss itself is finite.
        poison = next(p for p in self.parameters() if p.requires_grad).sum()
        poison.register_hook(lambda gradient: gradient * float("inf"))
        return type(output)(output.loss + poison - poison.detach(), output.survived, output.observable)

    monkeypatch.setattr(trainer_module.DraftingObjective, "forward", broken)
    assert run(tmp_path, setup) == 2
    assert "gradient became" in capsys.readouterr().err


def test_a_full_disk_leaves_the_last_whole_checkpoint(tmp_path, setup, capsys, monkeypatch):
    real = trainer_module.Trainer._save_optimizer_and_scheduler

    def full(self, output_dir):
        if output_dir.endswith("checkpoint-4"):
            raise OSError(28, "No space left on device")
        real(self, output_dir)

    monkeypatch.setattr(trainer_module.Trainer, "_save_optimizer_and_scheduler", full)
    assert run(tmp_path, setup) == 2
    assert "checkpoint-4 could not be written" in capsys.readouterr().err
    assert not Path(setup["output_dir"], "checkpoint-4").exists()
    monkeypatch.setattr(trainer_module.Trainer, "_save_optimizer_and_scheduler", real)
    assert run(tmp_path, setup, "--resume_from_checkpoint", "true") == 0
    assert len(losses_of(setup["output_dir"])) == 4


def test_a_checkpoint_of_another_recipe_is_refused(tmp_path, setup, capsys):
    assert run(tmp_path, setup, max_steps=2) == 0
    assert run(tmp_path, setup, "--resume_from_checkpoint", "true", "--num_anchors", 5) == 2
    assert "another recipe: num_anchors was 6, is 5" in capsys.readouterr().err
    Path(setup["output_dir"], "checkpoint-2", "trainer_state.json").unlink()
    assert run(tmp_path, setup, "--resume_from_checkpoint", "true") == 2
    assert "no whole checkpoint to resume from" in capsys.readouterr().err


def test_the_target_is_left_as_it_was(tmp_path, setup):
    from training.arguments import parse_arguments
    from training.setup_model import load_models
    from training.target_features import checksum
    from training.train_ready import train

    arguments, training = parse_arguments(["--config", str(write_config(tmp_path, setup | {"stage": "joint"}))])
    before = checksum(load_models(arguments, torch.float32).target)
    trainer = train(arguments, training)
    assert checksum(trainer.models.target) == before
    names = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    assert names and all("lora_" in name or "state_reader" in name for name in names)
