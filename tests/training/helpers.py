"""Tiny random pairs of a target and a drafter that training can run on."""

import torch
from transformers import PreTrainedModel

from hf_hybridspec.modeling.dflash import DFlashDrafter
from hf_hybridspec.modeling.drafter import Drafter
from hf_hybridspec.modeling.dspark import DSparkConfig, DSparkDrafter
from hf_hybridspec.modeling.ready import ReadyDrafter
from hf_hybridspec.modeling.target import input_embedding
from tests.support import drafter_config, random_target

READER = {
    "reader_rank": 4,
    "reader_state_layers": [1, 2],
    "reader_num_heads": 4,
    "reader_key_dim": 8,
    "reader_value_dim": 16,
}


def bound(drafter: Drafter, target: PreTrainedModel) -> Drafter:
    return drafter.bind(input_embedding(target), target.get_output_embeddings(), target.config)


def make_dflash(seed: int = 1) -> DFlashDrafter:
    torch.manual_seed(seed)
    return DFlashDrafter(drafter_config()).eval()


def make_dspark(seed: int = 1, **changes) -> DSparkDrafter:
    values = drafter_config(block_size=7).to_dict()
    names = DSparkConfig.__dataclass_fields__
    values = {name: value for name, value in values.items() if name in names}
    values |= {"sample_from_anchor": True, "markov_rank": 8, "enable_confidence_head": True} | changes
    torch.manual_seed(seed)
    drafter = DSparkDrafter(DSparkConfig(**values)).eval()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return drafter


def make_ready(seed: int = 1, trained: bool = True, **reader) -> ReadyDrafter:
    torch.manual_seed(seed)
    drafter = ReadyDrafter.from_dspark(make_dspark(seed), **(READER | reader))
    if trained:
        with torch.no_grad():
            for layer in drafter.layers:
                if layer.state_reader is not None:
                    layer.state_reader.up_proj.weight.normal_(std=0.3)
    return drafter.eval()


def make_pair(family: str, kind: str = "qwen3_5_moe") -> tuple[PreTrainedModel, Drafter]:
    """A target and a bound drafter of `dflash`, `dspark` or `ready`."""
    target = random_target(kind)
    drafter = {"dflash": make_dflash, "dspark": make_dspark, "ready": make_ready}[family]()
    return target, bound(drafter, target)
