"""Tiny random targets of every supported class, and a drafter that proposes what a test tells it to."""

from collections.abc import Callable
from functools import cached_property

import torch
from transformers import (
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

import hf_hybridspec
from hf_hybridspec.modeling.dflash.configuration_dflash import DFlashConfig
from hf_hybridspec.modeling.dflash.modeling_dflash import DFlashDrafter
from hf_hybridspec.modeling.drafter import Draft

VOCAB_SIZE = 128
HIDDEN_SIZE = 32
MASK_TOKEN_ID = VOCAB_SIZE - 1

_DECODER = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}
_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_ROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [1, 1, 0],
        "partial_rotary_factor": 0.25,
    }
}


def _vision_language_config() -> Qwen3_5MoeConfig:
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": HIDDEN_SIZE,
        "num_position_embeddings": 16,
    }
    return Qwen3_5MoeConfig(
        text_config={**_DECODER, **_EXPERTS, **_ROPE},
        vision_config=vision,
        image_token_id=100,
        video_token_id=101,
        vision_start_token_id=102,
        vision_end_token_id=103,
        pad_token_id=0,
        eos_token_id=None,
    )


_BUILDERS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3_5_moe": lambda: Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**_DECODER, **_EXPERTS, **_ROPE)),
    "qwen3_5": lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**_DECODER, **_ROPE, intermediate_size=32)),
    "qwen3_next": lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**_DECODER, **_EXPERTS, intermediate_size=32)),
    "qwen3_5_moe_vl": lambda: Qwen3_5MoeForConditionalGeneration(_vision_language_config()),
}
TARGETS = tuple(_BUILDERS)


def random_target(kind: str = "qwen3_5_moe", seed: int = 0) -> PreTrainedModel:
    """A tiny random target in fp32; `kind` is one of TARGETS."""
    torch.manual_seed(seed)
    return _BUILDERS[kind]().eval()


def random_prompt(length: int, seed: int = 0) -> torch.Tensor:
    """`[1, length]` token ids, none of them special."""
    return torch.randint(1, 99, (1, length), generator=torch.Generator().manual_seed(seed))


class TargetPair:
    """A stock target and an attached one of the same weights, and what the stock one generates.

    Attributes:
        kind: one of TARGETS.
        prompt: `[1, 9]`, the prompt of `reference`. Its continuation does not repeat itself in 500 tokens, its closest
            two logits differ by 2e-4, and its token 17 has not occurred before.
    """

    def __init__(self, kind: str):
        self.kind = kind
        self.stock = random_target(kind)
        self.attached = hf_hybridspec.attach(random_target(kind))
        self.prompt = random_prompt(9, seed=1)
        self._references: dict[tuple, torch.Tensor] = {}

    @cached_property
    def reference(self) -> torch.Tensor:
        """`[1, 509]`, the prompt and 500 tokens of plain greedy decoding with the stock model."""
        return self.stock.generate(self.prompt, max_new_tokens=500, do_sample=False)

    def generate_plainly(self, prompt: torch.Tensor, **options) -> torch.Tensor:
        """What the stock model generates greedily with options of numbers and strings, `[1, n]`; computed once."""
        key = (tuple(prompt[0].tolist()), *sorted(options.items()))
        if key not in self._references:
            self._references[key] = self.stock.generate(prompt, do_sample=False, **options)
        return self._references[key]


class ScriptedDrafter(DFlashDrafter):
    """Proposes the continuation it is told, with errors where it is told.

    Attributes:
        continuation: `[n]` tokens of the whole sequence that the target would produce.
        num_right: for each proposal in turn, how many drafts are right (the last entry repeats).
        proposals: positions at which blocks were asked for.
        sees_every_row: False allows a cache that holds rows of which the drafter was not told.
    """

    continuation: torch.Tensor
    num_right: list[int]
    sees_every_row = True

    def script(self, continuation: torch.Tensor, num_right: list[int]) -> "ScriptedDrafter":
        self.continuation, self.num_right, self.proposals = continuation, list(num_right), []
        return self

    def propose(self, context, anchor, position, recurrent_states=None) -> Draft:
        real = super().propose(context, anchor, position, recurrent_states)
        # Every committed row has been observed once.
        assert context.length == position or not self.sees_every_row
        turn = min(len(self.proposals), len(self.num_right) - 1)
        self.proposals.append(int(position))
        start = int(position) + 1
        right = self.continuation[start : start + min(self.num_right[turn], self.num_draft_tokens)]
        tokens = real.tokens.clone()
        tokens[: right.shape[0]] = right
        wrong = self.continuation[start + right.shape[0] : start + right.shape[0] + 1]
        if right.shape[0] < tokens.shape[0]:
            avoided = int(wrong[0]) if wrong.shape[0] else 0
            tokens[right.shape[0]] = 1 + avoided % (MASK_TOKEN_ID - 1)
        return Draft(tokens, real.confidence, real.entropy)


def drafter_config(block_size: int = 16, **overrides) -> DFlashConfig:
    """Config of a tiny DFlash drafter that fits every target of this module."""
    values = {
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": VOCAB_SIZE,
        "block_size": block_size,
        "mask_token_id": MASK_TOKEN_ID,
        "target_layer_ids": [0, 2],
        "num_target_layers": 4,
    }
    return DFlashConfig(**{**values, **overrides})


def scripted_drafter(block_size: int = 16, seed: int = 1) -> ScriptedDrafter:
    """A ScriptedDrafter with random weights; call `script` before use."""
    torch.manual_seed(seed)
    return ScriptedDrafter(drafter_config(block_size)).eval()
