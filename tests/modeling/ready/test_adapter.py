"""Adapters: what is saved is what drafts later, and nothing is lost silently."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from hf_hybridspec import AutoDrafter
from hf_hybridspec.modeling.ready import ReadyDrafter
from hf_hybridspec.modeling.ready import adapter as adapter_module
from hf_hybridspec.modeling.ready.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    READER_CONFIG,
    CardFacts,
    ReaderRecord,
    fingerprint,
    push_to_hub,
    save_adapter,
    write_model_card,
)

from ..drafter_helpers import FAMILY_VALUES, bind, make_drafter, observed, recurrent_states

READER = {name: value for name, value in FAMILY_VALUES["ready"].items() if name.startswith("reader_")}
ANCHOR = torch.tensor([11])
LINEARS = ["q_proj", "v_proj", "down_proj", "fc"]


def proposal(drafter):
    states = recurrent_states() if drafter.recurrent_layer_ids else None
    return drafter.propose(observed(drafter, 9), ANCHOR, 9, recurrent_states=states)


def trained(base, with_reader=True):
    """A PeftModel on a copy of `base` whose reader and LoRA hold random values."""
    drafter = make_drafter("dspark")
    drafter.load_state_dict(base.state_dict())
    if with_reader:
        drafter = ReadyDrafter.from_dspark(drafter, **READER)
    # `down_proj` names a module of the reader, too: PEFT leaves modules_to_save alone.
    config = LoraConfig(
        r=2,
        lora_alpha=6,
        target_modules=LINEARS,
        modules_to_save=["state_reader"] if with_reader else None,
    )
    model = get_peft_model(drafter, config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad or "lora_" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@pytest.fixture
def base(tmp_path):
    drafter = make_drafter("dspark")
    drafter.save_pretrained(tmp_path / "base")
    drafter.config.name_or_path = str(tmp_path / "base")
    return drafter


def saved(model, base, folder):
    record = ReaderRecord.of(model.get_base_model(), fingerprint(base))
    save_adapter(model, folder, base.config.name_or_path, record)
    return folder


@pytest.mark.parametrize("with_reader", [True, False])
def test_auto_drafter_gives_the_trained_drafter(base, tmp_path, with_reader):
    model = trained(base, with_reader)
    expected = proposal(bind(model.get_base_model()))
    loaded = AutoDrafter.from_pretrained(saved(model, base, tmp_path / "adapter"))
    assert isinstance(loaded, ReadyDrafter) == with_reader
    found = proposal(bind(loaded))
    assert torch.equal(found.tokens, expected.tokens)
    torch.testing.assert_close(found.confidence, expected.confidence, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found.confidence, proposal(bind(base)).confidence, rtol=1e-2)


def test_peft_restores_reader_and_lora_bit_for_bit_on_a_ready_drafter(base, tmp_path):
    model = trained(base)
    folder = saved(model, base, tmp_path / "adapter")
    fresh = ReadyDrafter.from_dspark(base, **READER)
    again = PeftModel.from_pretrained(fresh, folder).eval()
    expected = dict(model.named_parameters())
    assert not any("lora_" in name and "state_reader" in name for name in expected)
    for name, parameter in again.named_parameters():
        assert "original_module" in name or torch.equal(parameter, expected[name]), name
    assert torch.equal(proposal(bind(again.get_base_model())).tokens, proposal(bind(model.get_base_model())).tokens)


def test_peft_on_a_drafter_without_the_reader_is_refused(base, tmp_path):
    folder = saved(trained(base), base, tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"state reader in layers\.2.*would lose"):
        PeftModel.from_pretrained(base, folder)
    elsewhere = ReadyDrafter.from_dspark(make_drafter("dspark"), **READER, reader_injection_layers=[0])
    with pytest.raises((ValueError, KeyError), match="state_reader"):
        PeftModel.from_pretrained(elsewhere, folder)


def test_the_adapter_of_another_drafter_is_refused(base, tmp_path):
    folder = saved(trained(base), base, tmp_path / "adapter")
    other = make_drafter("dspark", seed=5)
    other.save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="trained on another drafter"):
        AutoDrafter.from_pretrained(folder)


def test_the_fingerprint_is_that_of_the_weights_whatever_the_dtype():
    drafter = make_drafter("dspark")
    half = make_drafter("dspark").to(torch.bfloat16)
    assert fingerprint(drafter) == fingerprint(half) == fingerprint(ReadyDrafter.from_dspark(drafter, **READER))
    assert fingerprint(drafter) != fingerprint(make_drafter("dspark", seed=1))


def edit_tensors(folder, change):
    tensors = load_file(folder / ADAPTER_WEIGHTS)
    change(tensors)
    save_file(tensors, folder / ADAPTER_WEIGHTS)


READER_KEY = "base_model.model.layers.2.state_reader.query_projection"
LORA_KEY = "base_model.model.layers.0.self_attn.q_proj.lora_A.weight"
TENSOR_DAMAGE = {
    "missing .*query_projection": lambda t: t.pop(READER_KEY),
    "lora_B.weight without its lora_A": lambda t: t.pop(LORA_KEY),
    "no place for layers.9": lambda t: t.update({READER_KEY.replace("layers.2", "layers.9"): torch.zeros(1)}),
    r"query_projection is \(1, 2\)": lambda t: t.update({READER_KEY: torch.zeros(1, 2)}),
    "are no adapter's": lambda t: t.update({"stray": torch.zeros(1)}),
}


@pytest.mark.parametrize("message", TENSOR_DAMAGE)
def test_a_tensor_without_a_place_is_refused(base, tmp_path, message):
    folder = saved(trained(base), base, tmp_path / "adapter")
    edit_tensors(folder, TENSOR_DAMAGE[message])
    with pytest.raises(ValueError, match=message):
        AutoDrafter.from_pretrained(folder)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (ADAPTER_CONFIG, {"use_dora": True}, "use_dora"),
        (ADAPTER_CONFIG, {"peft_type": "IA3"}, "IA3"),
        (READER_CONFIG, {"extra": 1}, "must hold reader and drafter_fingerprint"),
        (READER_CONFIG, {"reader": {"depth": 3}}, r"unknown reader keys \['depth'\]"),
    ],
)
def test_settings_that_are_not_ours_are_refused(base, tmp_path, file, change, message):
    folder = saved(trained(base), base, tmp_path / "adapter")
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(content | change))
    with pytest.raises(ValueError, match=message):
        AutoDrafter.from_pretrained(folder)


def test_an_incomplete_or_corrupted_folder_is_refused(base, tmp_path):
    folder = saved(trained(base), base, tmp_path / "adapter")
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / READER_CONFIG).unlink()
    with pytest.raises(ValueError, match=f"lacks {READER_CONFIG}"):
        AutoDrafter.from_pretrained(copy)
    with pytest.raises(ValueError, match=READER_CONFIG):
        push_to_hub(copy, "someone/adapter")
    for name, content, message in (
        (ADAPTER_WEIGHTS, b"\0" * 40, "truncated or corrupted"),
        (ADAPTER_CONFIG, b"{", f"{ADAPTER_CONFIG} is not JSON"),
    ):
        (folder / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            AutoDrafter.from_pretrained(folder)


class Hub:
    """The uploads of `HfApi`, kept in a folder."""

    def __init__(self, root):
        self.root, self.created = root, []

    def __call__(self, token=None):
        self.token = token
        return self

    def create_repo(self, repo_id, private=None, exist_ok=False):
        self.created.append((repo_id, private, exist_ok))
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(self, *, repo_id, folder_path, revision, commit_message, allow_patterns):
        destination = self.root / repo_id
        destination.mkdir(parents=True)
        for name in allow_patterns:
            shutil.copy(f"{folder_path}/{name}", destination / name)
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1")


def test_what_is_pushed_can_be_loaded_again(base, tmp_path, monkeypatch):
    model = trained(base)
    folder = saved(model, base, tmp_path / "adapter")
    (folder / "optimizer.pt").write_bytes(b"not to be uploaded")
    metrics = {"acceptance length": 3.25}
    write_model_card(folder, CardFacts("owner/dspark", "owner/target", "owner/data", "stage2", 50, metrics, "mit"))
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr(adapter_module, "HfApi", hub)
    assert push_to_hub(folder, "someone/ready", token="secret", private=True) == "https://hub/someone/ready/commit/1"
    assert hub.created == [("someone/ready", True, True)] and hub.token == "secret"
    uploaded = tmp_path / "hub" / "someone" / "ready"
    assert sorted(path.name for path in uploaded.iterdir()) == sorted(
        [ADAPTER_CONFIG, ADAPTER_WEIGHTS, READER_CONFIG, "README.md"]
    )
    card = (uploaded / "README.md").read_text()
    for fact in ("base_model: owner/dspark", "owner/target", "owner/data", "license: mit", "3.2500", "50 samples"):
        assert fact in card
    loaded = AutoDrafter.from_pretrained(uploaded)
    assert torch.equal(proposal(bind(loaded)).tokens, proposal(bind(model.get_base_model())).tokens)
