"""What the drafters' scripts share: the same options, one backbone, and a bound drafter that trains beside a frozen
target."""

import torch

from training.tiny import train_dflash, train_dspark
from training.tiny.drafter_run import TAPS, answer_rows, load_target, save_drafter
from training.tiny.regenerate import load_answers


def words(tiny_run):
    named = {"target": tiny_run.target, "tokenizer": tiny_run.tokenizer, "answers": tiny_run.answers, "output": "out"}
    return [word for name, path in named.items() for word in (f"--{name}", str(path))] + ["--device", "cpu"]


def test_both_scripts_take_the_same_options_with_the_same_defaults(tiny_run):
    dflash, dspark = (vars(script.parse_arguments(words(tiny_run))) for script in (train_dflash, train_dspark))
    shared = dflash.keys() & dspark.keys()
    assert len(shared) > 14 and {name: dflash[name] for name in shared} == {name: dspark[name] for name in shared}
    assert dflash.keys() - shared == {"packed", "corpus_rows", "gamma", "survival_share"}
    assert dspark.keys() - shared == {"blocks_per_chunk"}


def test_both_drafters_have_one_backbone_and_train_beside_a_frozen_target(tiny_run, tmp_path):
    backbones = []
    for script in (train_dflash, train_dspark):
        torch.manual_seed(0)
        options = script.parse_arguments([*words(tiny_run), "--config", '{"target_layer_ids": [0, 2]}'])
        target, drafter = script.load_models(options)
        assert not any(parameter.requires_grad for parameter in target.parameters()) and not target.training
        assert drafter.training and all(parameter.requires_grad for parameter in drafter.parameters())
        assert drafter.target.head is target.lm_head and drafter.dtype == target.dtype == torch.float32
        backbones.append({name: tensor.shape for name, tensor in drafter.state_dict().items()})
        save_drafter(drafter, tmp_path / script.__name__)
        saved = type(drafter).from_pretrained(tmp_path / script.__name__)
        assert saved.dtype == torch.bfloat16 and tuple(saved.target_layer_ids) == (0, 2)
    assert backbones[0].items() < backbones[1].items()
    assert {name.split(".")[0] for name in backbones[1].keys() - backbones[0]} == {"markov_head", "confidence_head"}
    target, tokenizer = load_target(options)
    assert train_dflash.drafter_config(target, tokenizer.mask_token_id).target_layer_ids == TAPS


def test_rows_of_several_files_follow_each_other(tiny_run):
    options = train_dflash.parse_arguments(words(tiny_run))
    options.answers = [tiny_run.answers, tiny_run.answers]
    rows, once = answer_rows(options), load_answers(tiny_run.answers)
    assert len(rows) == 2 * len(once)
    for (tokens, start), (expected, expected_start) in zip(rows, once + once, strict=True):
        assert start == expected_start and torch.equal(tokens, expected)
