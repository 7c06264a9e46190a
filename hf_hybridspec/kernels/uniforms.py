"""Uniform random numbers from a counter: the same seed and round give the same numbers in eager code and in graphs.

torch's own generators cannot run inside the bodies of a conditional graph, and their numbers depend on what else was
drawn. Here number i of a round is a function of (seed, round, i) alone: Philox4x32 with ten rounds (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011), in `uniforms_reference.py`.
"""

import torch

from .dispatch import implementation


def fill_uniforms(uniforms: torch.Tensor, seed: torch.Tensor, round_index: torch.Tensor) -> None:
    """Writes numbers 0..n - 1 of a round, uniform in [0, 1) in steps of 2^-53.

    Args:
        uniforms: `[n]` fp64, n at most 2^32, contiguous; written. A float's 24 bits would never draw a rare token.
        seed: `[1]` int64.
        round_index: `[1]` int64 on the same device; rounds of one seed must differ in it.

    Raises:
        ValueError: a shape or dtype differs from the above.
    """
    if uniforms.dim() != 1 or uniforms.dtype != torch.float64 or not uniforms.is_contiguous():
        raise ValueError(
            f"uniforms must be [n] fp64 and contiguous, got {uniforms.dtype} {tuple(uniforms.shape)}, strides "
            f"{uniforms.stride()}."
        )
    for name, scalar in (("seed", seed), ("round_index", round_index)):
        if scalar.numel() != 1 or scalar.dtype != torch.int64 or scalar.device != uniforms.device:
            raise ValueError(
                f"{name} must be one int64 on {uniforms.device}, got {scalar.dtype} {tuple(scalar.shape)} on "
                f"{scalar.device}."
            )
    implementation("uniforms", uniforms.device).fill_uniforms(uniforms, seed, round_index)
