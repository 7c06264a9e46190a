"""What the drafter families share in a configuration: backbone sizes, taps, the block, and what a layer may see.

`DrafterConfig` holds one normalised view of every published layout (`published_config.py` reads them), and
`published_form` is the way back, the JSON that is written next to saved weights.
"""

import json
import os
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from .published_config import read_published_config

SLIDING = "sliding_attention"
FULL = "full_attention"

POSITIVE_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "block_size",
)


@dataclass(frozen=True)
class Alignment:
    """Which rows of the drafter's block are draft tokens.

    Row k of a block with its anchor at position p stands at position p + k and predicts the token of position
    p + k + label_offset; rows before first_draft_row predict nothing.
    """

    name: str
    first_draft_row: int
    label_offset: int


SAME_POSITION = Alignment("same_position", first_draft_row=1, label_offset=0)
SHIFTED = Alignment("shifted", first_draft_row=0, label_offset=1)


@dataclass(frozen=True)
class AttentionSpan:
    """What the rows of one layer see of the context and of their own block.

    causal: rows see no later row of the block. window: None, or how many positions back a row sees, itself counted.
    window_from_anchor: the window's lower bound is anchor - window for every row (the speculators rule) instead of
    row - window + 1.
    """

    causal: bool
    window: int | None = None
    window_from_anchor: bool = False

    @property
    def context_rows(self) -> int | None:
        """How many of the newest committed positions a block can still see; None where it sees all."""
        if self.window is None:
            return None
        return self.window if self.window_from_anchor else self.window - 1


class DrafterConfig(PreTrainedConfig):
    """Configuration of a block drafter: a Qwen3-style backbone whose context is the target's tapped features.

    Fields that are not the backbone's own:
        target_layer_ids: 0-based target layers whose output is tapped, in the order in which taps are concatenated.
        num_target_layers: decoder layers of the target; None where the checkpoint does not say.
        block_size: rows of one drafter block, the anchor's row included.
        mask_token_id: id whose embedding fills every row but the anchor's; it is never proposed.
        sample_from_anchor: True when row 0 is a draft row (`SHIFTED`), False when it predicts nothing
            (`SAME_POSITION`).
        is_causal: overrides every layer's causality inside the block; None means sliding layers are causal and full
            layers bidirectional.
        sliding_window: positions that a sliding layer sees, the row itself counted.
        window_from_anchor: see `AttentionSpan`.
        draft_vocab_size: rows of the drafter's own reduced head; None when it borrows the target's head.

    Raises ValueError for inconsistent values, naming them.
    """

    model_type = "hybridspec_drafter"
    published_architecture: ClassVar[str] = ""
    family: ClassVar[str] = ""

    vocab_size: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 128
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    max_position_embeddings: int = 262144
    initializer_range: float = 0.02
    rope_parameters: dict | None = None
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    is_causal: bool | None = None
    window_from_anchor: bool = False
    num_target_layers: int | None = None
    target_layer_ids: list[int] | None = None
    block_size: int = 16
    mask_token_id: int | None = None
    sample_from_anchor: bool = False
    draft_vocab_size: int | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    tie_word_embeddings: bool = False
    eos_token_id: int | list[int] | None = None
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs):
        if self.layer_types is None:
            self.layer_types = [FULL] * self.num_hidden_layers
        self.layer_types = list(self.layer_types)
        if self.target_layer_ids is None and self.num_target_layers is not None and self.num_hidden_layers:
            self.target_layer_ids = default_target_layer_ids(self.num_target_layers, self.num_hidden_layers)
        if self.target_layer_ids is not None:
            self.target_layer_ids = list(self.target_layer_ids)
        super().__post_init__(**kwargs)
        # transformers builds every config class once without arguments, to see what differs from the defaults.
        if self.hidden_size:
            self._check()

    def _check(self) -> None:
        problems = []
        for name in POSITIVE_SIZES:
            if getattr(self, name) < 1:
                problems.append(f"{name} must be positive, got {getattr(self, name)}")
        taps = self.target_layer_ids or []
        if not taps:
            problems.append("target_layer_ids (or num_target_layers, from which they follow) is required")
        elif any(not isinstance(tap, int) or tap < 0 for tap in taps) or len(set(taps)) != len(taps):
            problems.append(f"target_layer_ids must be distinct integers from 0, got {taps}")
        if self.mask_token_id is None or self.mask_token_id < 0:
            problems.append(f"mask_token_id is required, got {self.mask_token_id}")
        problems = problems or self._check_relations() + self._check_family()
        if problems:
            raise ValueError(f"Not a usable {self.family or 'drafter'} configuration: " + "; ".join(problems) + ".")

    def _check_relations(self) -> list[str]:
        """Problems between fields that are each well-formed."""
        problems = []
        if self.num_attention_heads % self.num_key_value_heads:
            problems.append(
                f"num_attention_heads must be a multiple of num_key_value_heads, got {self.num_attention_heads} and "
                f"{self.num_key_value_heads}"
            )
        if len(self.layer_types) != self.num_hidden_layers:
            problems.append(f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} layers")
        unknown = sorted(set(self.layer_types) - {SLIDING, FULL})
        if unknown:
            problems.append(f"layer_types may hold {FULL!r} and {SLIDING!r}, got {unknown}")
        if SLIDING in self.layer_types and (self.sliding_window is None or self.sliding_window < 1):
            problems.append(f"sliding layers need a positive sliding_window, got {self.sliding_window}")
        if self.hidden_act != "silu":
            problems.append(f"hidden_act must be 'silu', got {self.hidden_act!r}")
        if self.block_size < 2:
            problems.append(f"block_size must be at least 2, got {self.block_size}")
        return problems

    def _check_family(self) -> list[str]:
        """Problems of the fields that only this family has."""
        return []

    @property
    def alignment(self) -> Alignment:
        return SHIFTED if self.sample_from_anchor else SAME_POSITION

    @property
    def attention_spans(self) -> tuple[AttentionSpan, ...]:
        """What each layer sees, in layer order."""
        return tuple(self._span(layer_type) for layer_type in self.layer_types)

    def _span(self, layer_type: str) -> AttentionSpan:
        causal = layer_type == SLIDING if self.is_causal is None else self.is_causal
        if layer_type == FULL:
            return AttentionSpan(causal)
        return AttentionSpan(causal, self.sliding_window, self.window_from_anchor)

    def published_form(self) -> dict[str, Any]:
        """This configuration as the JSON that is published with the family's checkpoints: backbone flat, the
        drafter's own keys in `dflash_config`. `AutoDrafter` reads it back to an equal configuration."""
        flat = [
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "attention_bias",
            "max_position_embeddings", "initializer_range", "rope_parameters", "layer_types", "sliding_window",
            "is_causal", "num_target_layers", "draft_vocab_size", "tie_word_embeddings", "eos_token_id",
            "bos_token_id", "pad_token_id",
        ]  # fmt: skip
        form = {"architectures": [self.published_architecture], "model_type": "qwen3"}
        form |= {name: getattr(self, name) for name in flat if getattr(self, name) is not None}
        form["use_sliding_window"] = SLIDING in self.layer_types
        if self.dtype is not None:
            form["dtype"] = str(self.dtype).removeprefix("torch.")
        form["dflash_config"] = self._published_block()
        return form

    def _published_block(self) -> dict[str, Any]:
        block = {
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": self.target_layer_ids,
        }
        neutral = {
            "sample_from_anchor": type(self).sample_from_anchor,
            "input_embedding_scale": 1.0,
            "output_multiplier": 1.0,
            "final_logit_softcapping": None,
            "window_from_anchor": False,
        }
        return block | {name: getattr(self, name) for name, value in neutral.items() if getattr(self, name) != value}

    def to_json_file(self, json_file_path: str | os.PathLike, use_diff: bool = True) -> None:
        with open(json_file_path, "w", encoding="utf-8") as file:
            file.write(json.dumps(self.published_form(), indent=2) + "\n")

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs) -> "DrafterConfig":
        """Reads any published layout (see `published_config.read_published_config`) and raises as that does."""
        return_unused = kwargs.pop("return_unused_kwargs", False)
        published = read_published_config(config_dict)
        if published.family != cls.family:
            raise ValueError(f"{cls.__name__} reads {cls.family} configurations, this one is {published.family}.")
        config = cls(**published.values)
        return (config, kwargs) if return_unused else config


def default_target_layer_ids(num_target_layers: int, num_layers: int) -> list[int]:
    """The taps of a DFlash checkpoint that lists none: evenly spread from layer 1 to the third last."""
    if num_layers == 1:
        return [num_target_layers // 2]
    return [round(1 + i * (num_target_layers - 4) / (num_layers - 1)) for i in range(num_layers)]
