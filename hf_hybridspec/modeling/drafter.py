"""What every drafter is: the records it exchanges with the loop, and the base class of the three families.

A drafter never imports the loop and never sees a live target: it borrows the target's embedding and head when it is
bound (`Drafter.bind`), reads taps when tokens are committed (`observe`), and proposes a block after an anchor
(`propose`). All per-sequence state is in a `DraftContext`, so that one drafter object serves any number of caches.

Training uses the same pieces without a `DraftContext`, any number of blocks in one flat sequence::

    context = drafter.project_context(features, positions)               # one KeyValues per layer, differentiable
    rows = (anchor_positions[:, None] + torch.arange(B)).flatten()       # [N*B]
    masks = drafter.block_masks(rows, positions, rows_per_block=B)
    hidden = drafter(drafter.embed_block(anchors, B), rows, context, masks, rows_per_block=B)    # [1, N*B, H]
    logits = drafter.logits(hidden)                                      # [1, N*B, V]; row k: see drafter.alignment
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from .draft_context import DraftContext
from .drafter_config import Alignment, AttentionSpan, DrafterConfig
from .drafter_layers import BlockInput, DrafterLayer, DrafterRMSNorm, KeyValues, Rotation, block_mask


@dataclass(frozen=True)
class Draft:
    """One proposal block, the anchor excluded; D = `Drafter.num_draft_tokens`.

    tokens: [D] int64, the drafter's top-1 tokens. confidence: [D] fp32, the probability that the drafter gives each.
    entropy: [D] fp32, of the distribution the token was taken from, in nats. acceptance: [D] fp32 or None, a
    confidence head's estimate of P(accepted | the prefix was accepted).
    """

    tokens: Tensor
    confidence: Tensor
    entropy: Tensor
    acceptance: Tensor | None = None


@dataclass(frozen=True)
class BoundTarget:
    """What a drafter borrows. forbidden: [columns of the logits] bool, ids that must never be proposed."""

    embedding: nn.Module
    head: nn.Module
    forbidden: Tensor


class Drafter(PreTrainedModel):
    """Base of the block drafters; see the module docstring for its life.

    Attributes:
        target_layer_ids: 0-based target layers whose OUTPUT (residual stream after the layer) is tapped.
        recurrent_layer_ids: target GDN layers whose committed recurrent state `propose` needs; empty but for ReaDy.
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
        self._block_size = config.block_size
        self._target: BoundTarget | None = None

    # ------------------------------------------------------------------------------------------------ the block

    @property
    def alignment(self) -> Alignment:
        return self.config.alignment

    @property
    def block_size(self) -> int:
        """Rows of one block, the anchor's included. May be lowered to any of 2..config.block_size at run time."""
        return self._block_size

    @block_size.setter
    def block_size(self, rows: int) -> None:
        if not 2 <= rows <= self.config.block_size:
            raise ValueError(f"block_size must be in [2, {self.config.block_size}] for this drafter, got {rows}.")
        self._block_size = rows

    @property
    def num_draft_tokens(self) -> int:
        """D, the draft tokens of one proposal block."""
        return self.block_size - self.alignment.first_draft_row

    # ------------------------------------------------------------------------------------------------ the target

    def check_fit(self, target_config: PreTrainedConfig) -> None:
        """Raises ValueError naming every mismatch if this drafter was not made for such a target."""
        misfits = self._misfits(target_config.get_text_config())
        if misfits:
            raise ValueError(
                f"This {self.config.family} drafter does not fit the target ({target_config.model_type}): "
                + "; ".join(misfits)
                + ". Use the drafter that was trained for this target."
            )

    def _misfits(self, target: PreTrainedConfig) -> list[str]:
        config, layers = self.config, target.num_hidden_layers
        expected = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
        if config.num_target_layers is not None:
            expected["num_hidden_layers"] = config.num_target_layers
        misfits = [
            f"{name} is {getattr(target, name)}, the drafter expects {value}"
            for name, value in expected.items()
            if getattr(target, name) != value
        ]
        outside = [layer for layer in self.target_layer_ids if layer >= layers - 1]
        if outside:
            # The last layer's output exists only after the final norm.
            misfits.append(f"taps {outside} must be at most {layers - 2}, for the target has {layers} layers")
        return misfits

    def bind(
        self,
        embedding: nn.Module,
        head: nn.Module,
        target_config: PreTrainedConfig,
        tokenizer_size: int | None = None,
    ) -> "Drafter":
        """Borrows a target's embedding and head, without owning them; binding again replaces the target.

        Args:
            embedding: the target's input embedding; its raw `weight` [rows, H] is read.
            head: the target's output head, called on [.., H].
            target_config: checked by `check_fit`; its eos, bos and pad ids are copied into `self.config`.
            tokenizer_size: ids at or beyond it are reserved rows of the embedding and never proposed. Without it the
                target's vocab_size is all that is known.

        Returns self. Raises ValueError if the drafter does not fit.
        """
        self.check_fit(target_config)
        rows, width = embedding.weight.shape
        if width != self.config.hidden_size or rows <= self.config.mask_token_id:
            raise ValueError(
                f"The target's embedding is [{rows}, {width}]; this drafter needs width {self.config.hidden_size} and "
                f"a row for its mask token {self.config.mask_token_id}."
            )
        text_config = target_config.get_text_config()
        for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
            setattr(self.config, name, getattr(text_config, name, None))
        limit = min(text_config.vocab_size, tokenizer_size or text_config.vocab_size)
        self._target = BoundTarget(embedding, head, self._forbidden(head, limit))
        return self

    def _forbidden(self, head: nn.Module, limit: int) -> Tensor:
        if self.config.draft_vocab_size is not None:
            ids = self._target_ids(torch.arange(self.config.draft_vocab_size, device=self.device))
        else:
            # A head may be padded beyond the vocabulary.
            columns = getattr(head, "out_features", self.config.vocab_size)
            ids = torch.arange(columns, device=self.device)
        return (ids >= limit) | (ids == self.config.mask_token_id)

    @property
    def target(self) -> BoundTarget:
        if self._target is None:
            raise ValueError(
                "This drafter is not bound to a target yet. Pass it to attach(model, drafter=...) or call bind."
            )
        return self._target

    def _target_ids(self, draft_ids: Tensor) -> Tensor:
        """Target ids of columns of the logits."""
        if self.config.draft_vocab_size is None:
            return draft_ids
        return draft_ids + self.d2t[draft_ids]

    # ------------------------------------------------------------------------------------------------ pure forward

    def fuse(self, features: Tensor) -> Tensor:
        """features [S, K*H], the taps concatenated in listed order -> the one context row that all layers share,
        [1, S, H], in the drafter's dtype."""
        width = self.fc.in_features
        if features.dim() != 2 or features.shape[1] != width:
            raise ValueError(
                f"features must be [positions, {width}] ({len(self.target_layer_ids)} taps of {self.config.hidden_size}), "
                f"of one sequence; got {tuple(features.shape)}."
            )
        features = features.to(device=self.fc.weight.device, dtype=self.fc.weight.dtype)
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

    def embed_block(self, anchors: Tensor, rows_per_block: int) -> Tensor:
        """Input rows of N blocks: each anchor [N] int64 followed by mask tokens -> [1, N * rows_per_block, H]."""
        embedding = self.target.embedding.weight
        ids = torch.full((anchors.shape[0], rows_per_block), self.config.mask_token_id, device=embedding.device)
        ids[:, 0] = anchors
        rows = F.embedding(ids.flatten(), embedding).to(device=self.fc.weight.device, dtype=self.fc.weight.dtype)
        return rows.unsqueeze(0) * self.config.input_embedding_scale

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

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [.., H] -> fp32 logits [.., V] of the borrowed head (or of the own reduced head), scaled and capped
        as the checkpoint asks. Ids that must not be proposed are not masked here."""
        head = self.lm_head if self.config.draft_vocab_size is not None else self.target.head
        weight = getattr(head, "weight", None)
        if weight is not None and weight.is_floating_point():
            hidden = hidden.to(device=weight.device, dtype=weight.dtype)
        logits = head(hidden).to(self.fc.weight.device).float() * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return torch.tanh(logits / cap) * cap if cap else logits

    def proposal_logits(self, hidden: Tensor) -> Tensor:
        """`logits` with -inf at the mask token and at ids outside the target's real vocabulary."""
        return self.logits(hidden).masked_fill(self.target.forbidden.to(hidden.device), float("-inf"))

    # ------------------------------------------------------------------------------------------------ drafting

    def new_context(self) -> DraftContext:
        """An empty context for one sequence."""
        return DraftContext(self.spans)

    @torch.no_grad()
    def observe(self, context: DraftContext, features: Tensor, positions: Tensor) -> None:
        """Appends committed rows to the context (mutated); speculative rows must never be given.

        Args:
            features: [m, K*H], the taps of m newly committed positions, any floating dtype.
            positions: [m] int64, increasing and after all positions observed so far.

        Raises ValueError for a batch or a wrong feature width.
        """
        if positions.shape != features.shape[:1]:
            raise ValueError(f"positions must be [{features.shape[0]}], one per row, got {tuple(positions.shape)}.")
        context.length += features.shape[0]
        reachable = [span.context_rows for span in self.spans]
        if None not in reachable:
            start = max(0, features.shape[0] - max(reachable))
            features, positions = features[start:], positions[start:]
        fused, positions = self.fuse(features), positions.to(self.fc.weight.device)
        for layer, rows, kept in zip(self.layers, reachable, context.layers, strict=True):
            start = 0 if rows is None else max(0, positions.shape[0] - rows)
            rotation = self.rotation(positions[start:])
            kept.append(layer.self_attn.keys_values(fused[:, start:], rotation), positions[start:])

    @torch.no_grad()
    def propose(
        self,
        context: DraftContext,
        anchor: Tensor,
        position: int | Tensor,
        recurrent_states: Mapping[int, Tensor] | None = None,
    ) -> Draft:
        """Drafts the block after an anchor; the context is read only.

        Args:
            context: the positions before the anchor.
            anchor: [1] int64, the newest emitted token.
            position: the anchor's absolute position (int, or a tensor of one int64).
            recurrent_states: target layer -> committed state [1, HV, K, V] of every layer in `recurrent_layer_ids`.

        Returns the top-1 tokens (never the mask token, never an id outside the target's vocabulary), on the anchor's
        device. Raises ValueError for a batch, an empty context, or an unbound drafter.
        """
        if anchor.numel() != 1:
            raise ValueError(
                f"A drafter proposes for one sequence at a time: anchor must be [1], got {tuple(anchor.shape)}."
            )
        if context.length == 0:
            raise ValueError("The context is empty: observe the taps of the prompt before proposing.")
        rows = self.block_size
        offsets = torch.arange(rows, device=self.fc.weight.device)
        positions = offsets + (position.to(offsets.device) if isinstance(position, Tensor) else position)
        hidden = self(
            self.embed_block(anchor.view(1), rows),
            positions,
            [layer.key_values for layer in context.layers],
            {span: self._mask_after(context, span, positions) for span in set(self.spans)},
            recurrent_states=recurrent_states,
        )
        draft = self.choose(hidden[0, self.alignment.first_draft_row :], anchor.view(1).to(hidden.device))
        return _on_device(draft, anchor.device)

    def _mask_after(self, context: DraftContext, span: AttentionSpan, positions: Tensor) -> Tensor | None:
        if span == AttentionSpan(causal=False):
            return None
        return block_mask(span, positions, context.positions_of(span), positions.shape[0])

    def choose(self, hidden: Tensor, anchor: Tensor) -> Draft:
        """Top-1 tokens of the draft rows: hidden [D, H] (after the final norm), anchor [1] int64."""
        logits = self.proposal_logits(hidden)
        tokens = logits.argmax(-1)
        return draft_of(self._target_ids(tokens), tokens, logits)

    # ------------------------------------------------------------------------------------------------ bookkeeping

    def describe(self) -> dict[str, Any]:
        """Facts about this drafter for a report: family, sizes, taps, block, alignment, window, dtype."""
        config = self.config
        windows = sorted({span.window for span in self.spans if span.window is not None})
        return {
            "family": config.family,
            "architecture": config.published_architecture,
            "parameters": sum(parameter.numel() for parameter in self.parameters()),
            "dtype": str(self.dtype).removeprefix("torch."),
            "layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "block_size": self.block_size,
            "draft_tokens": self.num_draft_tokens,
            "alignment": self.alignment.name,
            "taps": list(self.target_layer_ids),
            "num_target_layers": config.num_target_layers,
            "sliding_layers": config.layer_types.count("sliding_attention"),
            "window": windows[0] if windows else None,
            "mask_token_id": config.mask_token_id,
        }

    @classmethod
    def adapt_config(cls, config: DrafterConfig, shapes: Mapping[str, tuple[int, ...]]) -> DrafterConfig:
        """The configuration with what published files leave to the tensors' shapes (name -> shape)."""
        return config

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | PathLike, **kwargs: Any) -> "Drafter":
        """As `AutoDrafter.from_pretrained`, for a checkpoint of this class; raises ValueError for another's."""
        # auto.py knows every family and so imports this module.
        from .auto import AutoDrafter

        drafter = AutoDrafter.from_pretrained(pretrained_model_name_or_path, **kwargs)
        if not isinstance(drafter, cls):
            raise ValueError(
                f"{pretrained_model_name_or_path} holds a {type(drafter).__name__}, not a {cls.__name__}. "
                "AutoDrafter.from_pretrained picks the class."
            )
        return drafter

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self and self.config.draft_vocab_size is not None:
            init.zeros_(self.d2t)


def draft_of(tokens: Tensor, columns: Tensor, logits: Tensor) -> Draft:
    """A Draft of tokens [D] that are the columns [D] of logits [D, C] (fp32, -inf where forbidden)."""
    probabilities = logits.softmax(-1)
    confidence = probabilities.gather(-1, columns.unsqueeze(-1)).squeeze(-1)
    return Draft(tokens, confidence, torch.special.entr(probabilities).sum(-1))


def _on_device(draft: Draft, device: torch.device) -> Draft:
    acceptance = None if draft.acceptance is None else draft.acceptance.to(device)
    return Draft(draft.tokens.to(device), draft.confidence.to(device), draft.entropy.to(device), acceptance)
