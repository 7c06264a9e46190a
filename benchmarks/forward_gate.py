"""Is the fused forward right? Each of its first layers against the host's modules, and rows against other lengths."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask

from benchmarks.full_target import noisy_cache
from hf_hybridspec.modeling.block_state import BlockState
from hf_hybridspec.modeling.fused_forward import FusedForward
from hf_hybridspec.modeling.target import text_config, text_model

CONTEXT, ROOM = 300, 64
# Rows of a block, and how many blocks of them: a median needs several rows.
BLOCKS = {1: 5, 5: 2, 16: 2}
# Relative Frobenius error of what a layer adds to the residual stream, for the median row: roundings of 16 bits of a
# stream several times as large, or fp32 sums in another order; a wrong expert is off by 0.3. A near-tie of the router
# gives single rows another expert, which the median leaves out.
LIMITS = {torch.bfloat16: 5e-2, torch.float32: 1e-4}


@dataclass(frozen=True)
class LayerErrors:
    """Of one layer: relative errors of its rows in all blocks of a length, worst and median."""

    layer: int
    length: int
    median: float
    worst: float


@torch.no_grad()
def check_layers(model: PreTrainedModel, num_layers: int, device: torch.device) -> list[LayerErrors]:
    """Errors of the first layers in blocks with a commit in between; each layer is given what ours was given.

    Raises:
        SystemExit: the median row of a layer is further off than rounding explains.
    """
    forward = FusedForward(model, tuple(range(num_layers)))
    generator = torch.Generator().manual_seed(0)
    errors = []
    for length, num_blocks in BLOCKS.items():
        found: list[list[Tensor]] = []
        cache, twin = (noisy_cache(model, CONTEXT, ROOM) for _ in range(2))
        state, offset = BlockState(cache), torch.zeros(1, dtype=torch.int64, device=device)
        for _ in range(num_blocks):
            token_ids = torch.randint(text_config(model).vocab_size, (length,), generator=generator).to(device)
            features = forward.stage1(forward.stage0(token_ids, offset, state), length, state).features
            ours = [text_model(model).embed_tokens(token_ids), *features.chunk(num_layers, dim=1)]
            found.append(_compare(model, twin, ours, length))
            commit_length = (length + 1) // 2
            state.commit(torch.tensor([commit_length], dtype=torch.int32, device=device))
            twin.commit(commit_length)
        for layer_idx, blocks in enumerate(zip(*found, strict=True)):
            rows = torch.cat(blocks)
            errors.append(LayerErrors(layer_idx, length, rows.median().item(), rows.max().item()))
    limit = LIMITS[features.dtype]
    for error in errors:
        # Not "error > limit": a NaN must not pass.
        if not error.median <= limit:
            raise SystemExit(
                f"Layer {error.layer} at {error.length} rows: relative error {error.median:.1e} exceeds {limit:.1e}."
            )
    return errors


def _compare(model: PreTrainedModel, twin, ours: list[Tensor], length: int) -> list[Tensor]:
    """Errors `[length]` of the host's layers in a block of the twin, each run on our input to it."""
    decoder = text_model(model)
    positions = torch.arange(length, device=ours[0].device)[None] + twin.committed_length
    twin.begin_block(length)
    mask = create_causal_mask(
        config=decoder.config, inputs_embeds=ours[0][None], attention_mask=None, cache=twin, position_ids=positions
    )
    embeddings = decoder.rotary_emb(ours[0][None], positions)
    errors = []
    for layer_idx, (given, result) in enumerate(pairwise(ours)):
        layer = decoder.layers[layer_idx]
        is_attention = layer.block_type == "full_attention"
        expected = layer(
            given[None], position_embeddings=embeddings, position_ids=positions, cache=twin, use_cache=True,
            attention_mask=mask if is_attention else None,
        )[0]  # fmt: skip
        added = (expected - given).float()
        errors.append((result.float() - expected.float()).norm(dim=1) / added.norm(dim=1))
    # Layers beyond those that are checked have recorded nothing.
    for buffers in twin._buffers.values():
        buffers.num_recorded = [length] * len(buffers.num_recorded)
    for layer in twin.layers[len(ours) - 1 :]:
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length.add_(length)
    return errors


@torch.no_grad()
def row_invariance(forward: FusedForward, model: PreTrainedModel, device: torch.device) -> dict[str, dict]:
    """For each length: whether its rows equal those of 16 rows bit by bit, and how often their argmax is the same."""
    state = BlockState(noisy_cache(model, CONTEXT, ROOM))
    offset = torch.zeros(1, dtype=torch.int64, device=device)
    token_ids = torch.randint(text_config(model).vocab_size, (16,), generator=torch.Generator().manual_seed(2))
    token_ids = token_ids.to(device)

    def run(length: int) -> Tensor:
        return forward.stage1(forward.stage0(token_ids[:length], offset, state), length, state).logits.float()

    longest, found = run(16), {}
    for length in range(1, 16):
        logits = run(length)
        is_same = logits.argmax(dim=1) == longest[:length].argmax(dim=1)
        found[str(length)] = {
            "is_bitwise_equal": torch.equal(logits, longest[:length]),
            "largest_difference": (logits - longest[:length]).abs().max().item(),
            "same_argmax": is_same.float().mean().item(),
        }
    return found
