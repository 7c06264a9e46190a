"""The network of a drafter: fused features as context, block rows through the layers. Knows no target."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from .drafter_config import AttentionSpan, DrafterConfig
from .drafter_layers import BlockInput, DrafterLayer, DrafterRMSNorm, KeyValues, Rotation, block_mask


class DrafterBackbone(PreTrainedModel):
    """Modules named as the published tensors, and the pure forward that drafting and training share.

    Attributes:
        target_layer_ids: 0-based target layers whose OUTPUT (residual stream after the layer) is tapped.
        recurrent_layer_ids: target GDN layers whose committed recurrent state is read; empty but for ReaDy.
        spans: what each layer sees.
    """

    config_class = DrafterConfig
    base_model_prefix = ""
    _supports_sdpa = True
    _no_split_modules: ClassVar[list[str]] = ["DrafterLayer"]
    layer_class: ClassVar[type[DrafterLayer]] = DrafterLayer
    recurrent_layer_ids: tuple[int, ...] = ()

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        features = len(config.target_layer_ids) * config.hidden_size
        self.fc = nn.Linear(features, config.hidden_size, bias=False)
        self.hidden_norm = DrafterRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList([self.layer_class(config, i) for i in range(config.num_hidden_layers)])
        self.norm = DrafterRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        if config.draft_vocab_size is not None:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
            # Target id of draft id i is i + d2t[i], as speculators stores it.
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.target_layer_ids = tuple(config.target_layer_ids)
        self.spans = config.attention_spans

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def compute_device(self) -> torch.device:
        return self.fc.weight.device

    def fuse(self, features: Tensor) -> Tensor:
        """features [S, K*H], the taps concatenated in listed order -> the one context row that all layers share,
        [1, S, H], in the drafter's dtype."""
        width = self.fc.in_features
        if features.dim() != 2 or features.shape[1] != width:
            taps = f"{len(self.target_layer_ids)} taps of {self.config.hidden_size}"
            raise ValueError(
                f"features must be [positions, {width}] of one sequence ({taps}), got {tuple(features.shape)}."
            )
        features = features.to(self.compute_device, self.compute_dtype)
        return self.hidden_norm(self.fc(features)).unsqueeze(0)

    def rotation(self, positions: Tensor) -> Rotation:
        """cos and sin of positions [R] in the drafter's dtype."""
        cos, sin = self.rotary_emb(self.fc.weight, positions.unsqueeze(0))
        return Rotation(cos.unsqueeze(1), sin.unsqueeze(1))

    def project_context(self, features: Tensor, positions: Tensor) -> list[KeyValues]:
        """Every layer's keys and values of all given positions (no window is applied here; masks do that).

        features [S, K*H], positions [S] int64. Differentiable.
        """
        fused, rotation = self.fuse(features), self.rotation(positions)
        return [layer.self_attn.keys_values(fused, rotation) for layer in self.layers]

    def block_masks(
        self, positions: Tensor, context_positions: Tensor, rows_per_block: int
    ) -> dict[AttentionSpan, Tensor]:
        """The mask of every kind of layer, [R, S + R] bool; see `drafter_layers.block_mask` for the rule."""
        return {span: block_mask(span, positions, context_positions, rows_per_block) for span in set(self.spans)}

    def forward(
        self,
        inputs_embeds: Tensor,
        positions: Tensor,
        context: Sequence[KeyValues],
        masks: Mapping[AttentionSpan, Tensor | None],
        rows_per_block: int | None = None,
        recurrent_states: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        """Hidden rows of one or many blocks, after the final norm.

        Args:
            inputs_embeds: [1, R, H], from `embed_block`.
            positions: [R] int64, absolute.
            context: per layer, S rows of keys and values (S may differ between kinds of layers).
            masks: per span, [R, S + R] bool, or None where every row sees everything.
            rows_per_block: R is N blocks of this many rows; None means one block.
            recurrent_states: target layer -> [N, HV, K, V], the committed state before each block's anchor. Only
                ReaDy reads it.

        Returns [1, R, H].
        """
        rows_per_block = rows_per_block or positions.shape[0]
        rotation = self.rotation(positions)
        states = self.gather_states(recurrent_states)
        hidden = inputs_embeds
        for layer, span, key_values in zip(self.layers, self.spans, context, strict=True):
            hidden = layer(hidden, BlockInput(rotation, key_values, masks[span], rows_per_block, states))
        return self.norm(hidden)

    def gather_states(self, recurrent_states: Mapping[int, Tensor] | None) -> Tensor | None:
        """The recurrent states that the layers read; None in families that read none."""
        return None

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Target ids of columns of the logits (the same, unless the drafter has a reduced vocabulary)."""
        if self.config.draft_vocab_size is None:
            return draft_ids
        return draft_ids + self.d2t[draft_ids]

    @classmethod
    def adapt_config(cls, config: DrafterConfig, shapes: Mapping[str, tuple[int, ...]]) -> DrafterConfig:
        """Lets tensor shapes (name -> shape) decide what published configurations leave open; may mutate config."""
        return config

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self and self.config.draft_vocab_size is not None:
            init.zeros_(self.d2t)
