"""What tests of calls on fixed buffers share."""

import torch
from transformers.generation.stopping_criteria import StoppingCriteria

from hf_hybridspec.generation.round_engine import RoundEngine
from hf_hybridspec.modeling.dflash import DFlashDrafter
from hf_hybridspec.modeling.dspark import DSparkConfig, DSparkDrafter
from hf_hybridspec.modeling.ready import ReadyConfig, ReadyDrafter
from tests.generation.test_exactness import MARKOV, READER, dflash_values
from tests.support import drafter_config

PROMPT_LENGTH = 9


class StopAt(StoppingCriteria):
    """Stops when the sequence has a length, like a stop string that ends there."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((1,), input_ids.shape[1] >= self.length, device=input_ids.device)


def expected_of(pair, num_new: int) -> torch.Tensor:
    return pair.reference[:, : PROMPT_LENGTH + num_new]


def unpadded(input_ids: torch.Tensor) -> dict:
    """Keywords of a prompt of which no token is padding, although one may be the token that the host pads with."""
    return {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}


def engines_of(model) -> list[RoundEngine]:
    return model._hybridspec.engines.engines


def real_drafter(name: str = "dflash"):
    """A random drafter of a family that is fused, not told what to draft."""
    torch.manual_seed(3)
    drafter = {
        "dflash": lambda: DFlashDrafter(drafter_config()),
        "dspark": lambda: DSparkDrafter(DSparkConfig(**dflash_values(**MARKOV, markov_head_type="vanilla"))),
        "ready": lambda: ReadyDrafter(ReadyConfig(**dflash_values(**MARKOV, **READER))),
    }[name]()
    return drafter.eval()
