"""The bundled DSpark's script, a few steps on the bundled target."""

import json

import pytest
import torch

from hf_hybridspec import AutoDrafter
from hf_hybridspec.bundled import resolve
from hf_hybridspec.modeling.dspark import DSparkDrafter
from training.target_features import FrozenTarget
from training.tiny import train_dspark
from training.tiny.regenerate import load_answers, save_answers


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, 4000, (40 + 5 * n,), generator=generator).tolist() for n in range(4)]
    path = tmp_path_factory.mktemp("answers") / "answers.npz"
    save_answers(path, rows, [12] * 4)
    return path


def run(answers, output, *extra):
    arguments = ["--target", resolve("tiny"), "--tokenizer", resolve("tiny"), "--answers", str(answers)]
    arguments += ["--output", str(output), "--rows", "2", "--anchors", "3", "--longest", "64", "--device", "cpu"]
    train_dspark.main([*arguments, "--max-steps", "2", "--save-seconds", "0", *extra])


def test_a_checkpoint_of_the_bundled_shape_comes_out(answers, tmp_path):
    run(answers, tmp_path / "out")
    drafter = AutoDrafter.from_pretrained(tmp_path / "out")
    assert isinstance(drafter, DSparkDrafter) and drafter.num_draft_tokens == 7
    assert (drafter.config.markov_rank, drafter.confidence_head is not None) == (64, True)
    assert (tmp_path / "out" / "model.safetensors").stat().st_size < 6 * 2**20
    log = json.loads((tmp_path / "out" / "train_log.json").read_text())
    assert len(log) == 2 and all(entry["loss"] > 0 for entry in log)
    run(answers, tmp_path / "again", "--initial", str(tmp_path / "out"))
    assert not torch.equal(AutoDrafter.from_pretrained(tmp_path / "again").fc.weight, drafter.fc.weight)


def test_a_run_of_given_steps_ends_annealed(answers, tmp_path, monkeypatch):
    progress, schedule = [], train_dspark.schedule
    monkeypatch.setattr(train_dspark, "schedule", lambda share: progress.append(share) or schedule(share))
    run(answers, tmp_path / "out", "--max-steps", "4", "--seconds", "1000000")
    assert progress == pytest.approx([0, 0.25, 0.5, 0.75], abs=0.01)


def test_a_dflash_backbone_is_taken_over_and_a_foreign_one_refused(answers, tmp_path):
    run(answers, tmp_path / "out", "--initial", resolve("tiny-dflash"), "--max-steps", "0")
    backbone = AutoDrafter.from_pretrained("tiny-dflash").state_dict()
    drafter = AutoDrafter.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(drafter[name], tensor) for name, tensor in backbone.items())
    with pytest.raises(ValueError, match="has another backbone"):
        run(answers, tmp_path / "bad", "--initial", resolve("tiny-dflash"), "--config", '{"num_hidden_layers": 2}')


def test_the_store_gives_what_the_frozen_target_gives(answers):
    arguments = [
        "--target",
        resolve("tiny"),
        "--tokenizer",
        resolve("tiny"),
        "--answers",
        str(answers),
        "--output",
        "x",
    ]
    options = train_dspark.parse_arguments([*arguments, "--device", "cpu"])
    target, drafter = train_dspark.load_models(options)
    store = train_dspark.DSparkStore(target, load_answers(answers), list(drafter.target_layer_ids), 64)
    batch, record = store.batch(3, 4)
    expected = FrozenTarget(target, drafter).run(batch.tokens, batch.anchors)
    inside = batch.answer_mask
    torch.testing.assert_close(record.features[inside], expected.features[inside], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(record.last_hidden[inside], expected.last_hidden[inside], rtol=1e-3, atol=1e-3)
