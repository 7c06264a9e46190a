"""Sampled acceptance: the point-mass rule on the target's distribution after temperature, top-k, top-p and min-p.

Settings and uniforms are in device memory and nothing is read on the host, so that a captured graph serves any
settings. The distribution is that of `sampling.py`, the rule that of `acceptance.py`.
"""

import torch

from .dispatch import implementation
from .round_steps import MAX_ROWS, RoundState
from .sampling import SamplingSettings


def accept_sampled(
    logits: torch.Tensor, uniforms: torch.Tensor, settings: SamplingSettings, is_filtered: bool, state: RoundState
) -> None:
    """Writes A and the token that follows the accepted drafts, drawn by the point-mass rule (HybridSpec, Prop. 2).

    Of tokens with equal scores, top-p keeps the last, as a stable sort does.

    Args:
        logits: `[w, vocabulary]` fp32, bf16 or fp16, after each row of the block, 1 <= w <= 16.
        uniforms: `[w]` fp64 in [0, 1), independent of everything else.
        is_filtered: whether `settings` may drop tokens; otherwise the temperature alone is applied.
        state: `block_tokens` holds the anchor and the drafts; `num_accepted` and `next_token` are written.

    Raises:
        ValueError: a shape or dtype differs from the above.
    """
    if logits.dim() != 2 or not logits.is_floating_point() or not 1 <= logits.shape[0] <= MAX_ROWS:
        raise ValueError(
            f"logits must be [w, vocabulary], floating, with 1 <= w <= {MAX_ROWS}, got {logits.dtype} "
            f"{tuple(logits.shape)}."
        )
    if tuple(uniforms.shape) != (logits.shape[0],) or uniforms.dtype != torch.float64:
        raise ValueError(
            f"uniforms must be {(logits.shape[0],)} of fp64, one per row of logits, got {uniforms.dtype} "
            f"{tuple(uniforms.shape)}."
        )
    kernels = implementation("sampled_acceptance", logits.device)
    kernels.accept_sampled(logits, uniforms, settings, is_filtered, state)
