"""AutoDrafter: which class, which dtype and device, and what it refuses before reading a tensor."""

import json
import logging

import pytest
import torch

from hf_hybridspec.bundled import BUNDLED_MODELS
from hf_hybridspec.modeling.auto import DRAFTER_CLASSES, AutoDrafter

from .drafter_helpers import CLASSES, make_drafter


@pytest.fixture
def folder(tmp_path):
    make_drafter("dflash").to(torch.bfloat16).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("family", CLASSES)
def test_the_architecture_picks_the_class(tmp_path, family):
    make_drafter(family).save_pretrained(tmp_path)
    assert type(AutoDrafter.from_pretrained(tmp_path)) is DRAFTER_CLASSES[family] is CLASSES[family][1]


def test_a_subfolder_and_a_string_path_load(tmp_path):
    make_drafter("dflash").save_pretrained(tmp_path / "inner")
    assert AutoDrafter.from_pretrained(str(tmp_path), subfolder="inner").config.family == "dflash"


def test_a_bundled_name_loads_its_folder(folder, monkeypatch):
    monkeypatch.setitem(BUNDLED_MODELS, "tiny-for-this-test", folder)
    assert AutoDrafter.from_pretrained("tiny-for-this-test").config.family == "dflash"


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        ("auto", torch.bfloat16),
        ("float32", torch.float32),
        (torch.float32, torch.float32),
        ("bfloat16", torch.bfloat16),
        (torch.float16, torch.bfloat16),
        ("float16", torch.bfloat16),
    ],
)
def test_dtype_is_the_checkpoints_or_the_requested_one_but_never_fp16(folder, requested, expected):
    drafter = AutoDrafter.from_pretrained(folder, dtype=requested)
    assert {parameter.dtype for parameter in drafter.parameters()} == {expected}
    assert drafter.config.dtype == expected
    assert drafter.rotary_emb.inv_freq.dtype == torch.float32


def test_fp16_is_replaced_with_one_log_line(folder, monkeypatch):
    lines = []
    logger = logging.getLogger("hf_hybridspec.modeling.auto")
    monkeypatch.setattr(logger, "warning", lambda message, *args: lines.append(message))
    AutoDrafter.from_pretrained(folder, dtype="float16")
    assert len(lines) == 1 and "bfloat16 instead of float16" in lines[0]


@pytest.mark.parametrize("key", ["torch_dtype", None])
def test_older_configurations_state_their_dtype_elsewhere_or_nowhere(folder, key):
    config = json.loads((folder / "config.json").read_text())
    stated = config.pop("dtype")
    (folder / "config.json").write_text(json.dumps(config | ({key: stated} if key else {})))
    assert AutoDrafter.from_pretrained(folder).dtype == torch.bfloat16


def test_a_checkpoint_stored_in_fp16_computes_in_bf16(tmp_path):
    make_drafter("dflash").to(torch.float16).save_pretrained(tmp_path)
    assert AutoDrafter.from_pretrained(tmp_path).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["int8", "nonsense", torch.int32])
def test_other_dtypes_are_refused(folder, dtype):
    with pytest.raises(ValueError, match='dtype must be "auto" or a floating torch dtype, got'):
        AutoDrafter.from_pretrained(folder, dtype=dtype)


@pytest.mark.parametrize("device_map", [None, "cpu", "auto", torch.device("cpu"), {"": "cpu"}])
def test_device_maps_of_one_device(folder, device_map):
    expected = "cuda" if device_map == "auto" and torch.cuda.is_available() else "cpu"
    assert AutoDrafter.from_pretrained(folder, device_map=device_map).device.type == expected


def test_a_device_map_of_several_devices_is_refused(folder):
    with pytest.raises(ValueError, match="lives on one device"):
        AutoDrafter.from_pretrained(folder, device_map={"layers.0": "cpu", "layers.1": "cpu"})


def test_unknown_arguments_are_refused(folder):
    with pytest.raises(ValueError, match=r"does not take \['trust_remote_code'\]"):
        AutoDrafter.from_pretrained(folder, trust_remote_code=True)


def test_overrides_reach_the_configuration(folder):
    drafter = AutoDrafter.from_pretrained(folder, is_causal=False, sample_from_anchor=True)
    assert not any(span.causal for span in drafter.spans)
    assert drafter.alignment.name == "shifted" and drafter.num_draft_tokens == 5


def write_config(folder, **config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_target_folder_is_named_as_such(tmp_path):
    write_config(tmp_path, architectures=["Qwen3_5MoeForCausalLM"], model_type="qwen3_5_moe_text")
    with pytest.raises(ValueError, match="looks like a target model, not a drafter"):
        AutoDrafter.from_pretrained(tmp_path)


def test_an_adapter_folder_is_named_as_such(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"lacks adapter_model.safetensors, so it is no adapter"):
        AutoDrafter.from_pretrained(tmp_path)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no config.json"):
        AutoDrafter.from_pretrained(tmp_path)


def test_a_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds neither model.safetensors nor"):
        AutoDrafter.from_pretrained(folder)


@pytest.mark.parametrize("text", ["{", "[]", "\xff\xfe"])
def test_an_unreadable_configuration_is_refused(folder, text):
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config.json of .* (is not JSON|must hold an object)"):
        AutoDrafter.from_pretrained(folder)


def test_a_broken_index_is_refused(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a safetensors index"):
        AutoDrafter.from_pretrained(folder)


def test_a_name_that_is_neither_folder_nor_reachable_repository(tmp_path):
    with pytest.raises(OSError, match="no-such-drafter"):
        AutoDrafter.from_pretrained("nobody/no-such-drafter", cache_dir=tmp_path, local_files_only=True)
