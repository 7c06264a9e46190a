"""Checkpoints load by published names and shapes, and anything else is refused with the whole list."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_hybridspec.modeling.auto import AutoDrafter

from .drafter_helpers import (
    CLASSES,
    HIDDEN,
    MASK,
    VOCABULARY,
    bind,
    config_values,
    features,
    make_drafter,
    observed,
    states_for,
)

ANCHOR = torch.tensor([11])


def rewrite(folder, change):
    """Replaces the saved tensors by change(tensors)."""
    tensors = change(load_file(folder / "model.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


@pytest.fixture
def saved(tmp_path):
    def save(family, **changes):
        drafter = make_drafter(family, **changes)
        drafter.save_pretrained(tmp_path)
        return drafter, tmp_path

    return save


def same_proposals(first, second):
    drafts = []
    for drafter in (first, second):
        bind(drafter)
        context = observed(drafter, 9)
        drafts.append(drafter.propose(context, ANCHOR, 9, recurrent_states=states_for(drafter)))
    return torch.equal(drafts[0].tokens, drafts[1].tokens) and torch.equal(drafts[0].confidence, drafts[1].confidence)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("dflash", {}),
        ("dflash2", {}),
        ("dspark", {}),
        ("dspark", {"markov_head_type": "gated", "enable_confidence_head": False}),
        ("dspark", {"markov_head_type": "rnn", "confidence_head_with_markov": False, "confidence_head_bias": False}),
        ("dspark", {"markov_rank": 0, "confidence_head_with_markov": False, "sample_from_anchor": False}),
        ("ready", {"reader_injection": "pre_attention", "reader_injection_layers": [0, 2]}),
    ],
)
def test_every_family_survives_saving_and_loading(saved, family, changes):
    drafter, folder = saved(family, **changes)
    loaded = AutoDrafter.from_pretrained(folder)
    assert type(loaded) is type(drafter) and not loaded.training
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in drafter.state_dict().items())
    assert loaded.config.published_form() == drafter.config.published_form()
    assert same_proposals(drafter, loaded)
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    assert not any(tensor.is_meta for tensor in [*loaded.parameters(), *loaded.buffers()])


def test_saved_names_and_config_are_the_published_ones(saved):
    _, folder = saved("dflash2")
    names = set(load_file(folder / "model.safetensors"))
    assert {"fc.weight", "hidden_norm.weight", "norm.weight", "candidate_selector.predecessor_codebook"} <= names
    assert {"layers.0.self_attn.q_norm.weight", "layers.2.mlp_conv.base_kernel"} <= names
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["DFlash2DraftModel"] and config["model_type"] == "qwen3"
    assert config["dflash_config"]["mask_token_id"] == MASK and "mask_token_id" not in config


def test_a_sharded_checkpoint_loads(tmp_path):
    drafter = make_drafter("dflash")
    drafter.save_pretrained(tmp_path, max_shard_size="40KB")
    assert not (tmp_path / "model.safetensors").exists()
    assert same_proposals(drafter, AutoDrafter.from_pretrained(tmp_path))


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: "model." + name,
        lambda name: "logit_head." + name,
        lambda name: {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}.get(
            name, name
        ),
        lambda name: name + ".weight" if name.endswith("codebook") else name,
    ],
    ids=["model prefix", "legacy prefix", "encoder names", "codebook weights"],
)
def test_published_aliases_load(saved, rename):
    drafter, folder = saved("dflash2")
    rewrite(folder, lambda tensors: {rename(name): tensor for name, tensor in tensors.items()})
    assert same_proposals(drafter, AutoDrafter.from_pretrained(folder))


def test_fused_projections_are_split(saved):
    drafter, folder = saved("dflash")

    def fuse(tensors):
        for layer in range(3):
            attention, mlp = f"layers.{layer}.self_attn.", f"layers.{layer}.mlp."
            parts = [tensors.pop(f"{attention}{letter}_proj.weight") for letter in "qkv"]
            tensors[attention + "qkv_proj.weight"] = torch.cat(parts)
            parts = [tensors.pop(f"{mlp}{word}_proj.weight") for word in ("gate", "up")]
            tensors[mlp + "gate_up_proj.weight"] = torch.cat(parts)
        return tensors

    rewrite(folder, fuse)
    assert same_proposals(drafter, AutoDrafter.from_pretrained(folder))


def test_copies_of_the_targets_embedding_and_head_are_dropped(saved):
    drafter, folder = saved("dspark")
    copies = {name: torch.zeros(VOCABULARY, HIDDEN) for name in ("embed_tokens.weight", "lm_head.weight")}
    rewrite(folder, lambda tensors: tensors | copies | {"rotary_emb.inv_freq": torch.zeros(8)})
    assert same_proposals(drafter, AutoDrafter.from_pretrained(folder))
    rewrite(folder, lambda tensors: tensors | {"lm_head.weight": torch.zeros(9, HIDDEN)})
    with pytest.raises(
        ValueError, match=r"lm_head.weight is \(9, 32\) but a copy of the target's would be \(53, 32\)"
    ):
        AutoDrafter.from_pretrained(folder)


def test_tensors_decide_the_dspark_heads(saved):
    drafter, folder = saved("dspark", confidence_head_with_markov=False)
    config = json.loads((folder / "config.json").read_text())
    for name in ("markov_rank", "enable_confidence_head", "confidence_head_with_markov"):
        del config["dflash_config"][name]
    (folder / "config.json").write_text(json.dumps(config))
    assert same_proposals(drafter, AutoDrafter.from_pretrained(folder))


def test_missing_unexpected_and_misshaped_tensors_are_listed_together(saved):
    _, folder = saved("dflash")

    def spoil(tensors):
        del tensors["norm.weight"], tensors["layers.1.mlp.up_proj.weight"]
        return tensors | {"extra.weight": torch.zeros(2), "fc.weight": torch.zeros(HIDDEN, 64)}

    rewrite(folder, spoil)
    with pytest.raises(ValueError) as refusal:
        AutoDrafter.from_pretrained(folder)
    message = str(refusal.value)
    assert "missing tensors ['layers.1.mlp.up_proj.weight', 'norm.weight']" in message
    assert "unexpected tensors ['extra.weight']" in message
    assert "fc.weight is (32, 64), the configuration asks for (32, 96)" in message


def test_two_tensors_for_one_name_are_refused(saved):
    _, folder = saved("dflash")
    rewrite(folder, lambda tensors: tensors | {"model.fc.weight": tensors["fc.weight"].clone()})
    with pytest.raises(ValueError, match=r"two tensors for fc.weight"):
        AutoDrafter.from_pretrained(folder)


def test_a_dflash_checkpoint_with_an_unannounced_markov_head_is_refused(saved):
    _, folder = saved("dflash")
    head = {"markov_head.markov_w1.weight": torch.zeros(VOCABULARY, 8)}
    rewrite(folder, lambda tensors: tensors | head)
    with pytest.raises(ValueError, match="Add markov_rank and sample_from_anchor"):
        AutoDrafter.from_pretrained(folder)


def test_a_ready_checkpoint_from_elsewhere_is_refused_with_its_tensors(saved):
    _, folder = saved("ready")
    rewrite(folder, lambda t: {name.replace("state_reader", "ready_adapter"): tensor for name, tensor in t.items()})
    with pytest.raises(ValueError, match=r"(?s)missing tensors .*state_reader.*unexpected tensors .*ready_adapter"):
        AutoDrafter.from_pretrained(folder)


@pytest.mark.parametrize("keep", [0, 5, 200, -1000])
def test_truncated_weights_are_refused(saved, keep):
    _, folder = saved("dflash")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model.safetensors is (empty|truncated or corrupted)"):
        AutoDrafter.from_pretrained(folder)


def test_corrupted_weights_are_refused(saved):
    _, folder = saved("dflash")
    file = folder / "model.safetensors"
    file.write_bytes(b"\xff" * len(file.read_bytes()))
    with pytest.raises(ValueError, match="truncated or corrupted"):
        AutoDrafter.from_pretrained(folder)


# ------------------------------------------------------------------------------------------ speculators layout


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_speculators_checkpoint_with_a_reduced_vocabulary(tmp_path, kind):
    """Draft ids map to target ids; taps are one lower; the drafter's own head is used."""
    drafter = make_drafter(kind, draft_vocab_size=20, window_from_anchor=True)
    ids = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(5))[:20].sort().values
    ids[3] = MASK
    drafter.d2t.copy_(ids - torch.arange(20))
    tensors = drafter.state_dict() | {"t2d": torch.isin(torch.arange(VOCABULARY), ids)}
    save_file(tensors, tmp_path / "model.safetensors")
    values = config_values(kind)
    moved = ("target_layer_ids", "block_size", "mask_token_id", "num_target_layers", "markov_rank")
    raw = {
        "architectures": ["DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"],
        "speculators_model_type": kind,
        "transformer_layer_config": {
            name: value for name, value in values.items() if name not in (*moved, "enable_confidence_head")
        },
        "aux_hidden_state_layer_ids": [layer + 1 for layer in values["target_layer_ids"]],
        "sliding_window_non_causal": False,
        "sample_from_anchor": kind == "dspark",
        "draft_vocab_size": 20,
        "block_size": 5,
        "mask_token_id": MASK,
        "dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    loaded = bind(AutoDrafter.from_pretrained(tmp_path))
    assert loaded.target_layer_ids == (1, 4, 6)
    assert same_proposals(drafter, loaded)
    seen = set()
    for position in range(1, 20):
        context = loaded.new_context()
        loaded.observe(context, features(position, seed=position), torch.arange(position))
        seen |= set(loaded.propose(context, torch.tensor([position]), position).tokens.tolist())
    assert seen <= set(ids.tolist()) - {MASK} and len(seen) > 1
    loaded.save_pretrained(tmp_path / "again")
    assert same_proposals(loaded, AutoDrafter.from_pretrained(tmp_path / "again"))


def test_classes_load_their_own_checkpoints_only(saved):
    _, folder = saved("dflash")
    assert type(CLASSES["dflash"][1].from_pretrained(folder)) is CLASSES["dflash"][1]
    with pytest.raises(ValueError, match="holds a DFlashDrafter, not a DSparkDrafter"):
        CLASSES["dspark"][1].from_pretrained(folder)
