"""What every drafter is: the base class of the families.

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

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig

from .draft import FORBIDDEN, Draft
from .draft_context import DraftContext
from .drafter_backbone import DrafterBackbone
from .drafter_config import Alignment, AttentionSpan, DrafterConfig
from .drafter_layers import block_mask
from .reader_guard import refuse_unread_reader


@dataclass(frozen=True)
class BoundTarget:
    """What a drafter borrows. forbidden: [columns of the logits] bool, ids that must never be proposed."""

    embedding: nn.Module
    head: nn.Module
    forbidden: Tensor
    tokenizer_size: int | None


class Drafter(DrafterBackbone):
    """Base of the block drafters; see the module docstring for its life."""

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        self._block_size = config.block_size
        self._target: BoundTarget | None = None
        self.register_load_state_dict_pre_hook(refuse_unread_reader)

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
            tokenizer_size: ids at or beyond it are reserved rows of the embedding and never proposed. None keeps what
                an earlier binding to the same head said; without one, the target's vocab_size is all that is known.

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
        if tokenizer_size is None and self._target is not None and self._target.head is head:
            tokenizer_size = self._target.tokenizer_size
        limit = min(text_config.vocab_size, tokenizer_size or text_config.vocab_size)
        self._target = BoundTarget(embedding, head, self._forbidden(head, limit), tokenizer_size)
        return self

    def _forbidden(self, head: nn.Module, limit: int) -> Tensor:
        if self.config.draft_vocab_size is not None:
            ids = self.target_ids(torch.arange(self.config.draft_vocab_size, device=self.device))
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

    def embed_block(self, anchors: Tensor, rows_per_block: int) -> Tensor:
        """Input rows of N blocks: each anchor [N] int64 followed by mask tokens -> [1, N * rows_per_block, H]."""
        embedding = self.target.embedding.weight
        ids = torch.full((anchors.shape[0], rows_per_block), self.config.mask_token_id, device=embedding.device)
        ids[:, 0] = anchors
        rows = F.embedding(ids.flatten(), embedding).to(device=self.compute_device, dtype=self.compute_dtype)
        return rows.unsqueeze(0) * self.config.input_embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [.., H] -> fp32 logits [.., V] of the borrowed head (or of the own reduced head), scaled and capped
        as the checkpoint asks. Ids that must not be proposed are not masked here."""
        head = self.lm_head if self.config.draft_vocab_size is not None else self.target.head
        weight = getattr(head, "weight", None)
        if weight is not None and weight.is_floating_point():
            hidden = hidden.to(device=weight.device, dtype=weight.dtype)
        logits = head(hidden).to(self.compute_device).float() * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return torch.tanh(logits / cap) * cap if cap else logits

    def proposal_logits(self, hidden: Tensor) -> Tensor:
        """`logits` with `FORBIDDEN` at the mask token and at ids outside the target's real vocabulary."""
        return self.logits(hidden).masked_fill(self.target.forbidden.to(hidden.device), FORBIDDEN)

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
        count = features.shape[0]
        reachable = [span.context_rows for span in self.spans]
        if None not in reachable:
            start = max(0, count - max(reachable))
            features, positions = features[start:], positions[start:]
        fused, positions = self.fuse(features), positions.to(self.compute_device)
        starts = [0 if rows is None else max(0, positions.shape[0] - rows) for rows in reachable]
        rotations = {start: self.rotation(positions[start:]) for start in set(starts)}
        for layer, start, kept in zip(self.layers, starts, context.layers, strict=True):
            kept.append(layer.self_attn.keys_values(fused[:, start:], rotations[start]), positions[start:])
        context.length += count

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
        offsets = torch.arange(rows, device=self.compute_device)
        positions = offsets + (position.to(offsets.device) if isinstance(position, Tensor) else position)
        hidden = self(
            self.embed_block(anchor.view(1), rows),
            positions,
            [layer.key_values for layer in context.layers],
            {span: self._mask_after(context, span, positions) for span in set(self.spans)},
            recurrent_states=recurrent_states,
        )
        draft = self.choose(hidden[0, self.alignment.first_draft_row :], anchor.view(1).to(hidden.device))
        return draft.to(anchor.device)

    def _mask_after(self, context: DraftContext, span: AttentionSpan, positions: Tensor) -> Tensor | None:
        if span == AttentionSpan(causal=False):
            return None
        return block_mask(span, positions, context.positions_of(span), positions.shape[0])

    def choose(self, hidden: Tensor, anchor: Tensor) -> Draft:
        """Top-1 tokens of the draft rows: hidden [D, H] (after the final norm), anchor [1] int64."""
        logits = self.proposal_logits(hidden)
        tokens = logits.argmax(-1)
        return Draft.of(self.target_ids(tokens), tokens, logits)

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
