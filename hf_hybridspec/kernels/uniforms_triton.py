"""Philox4x32-10 in Triton: one program for the numbers of a round."""

import torch
import triton
import triton.language as tl

from .common_triton import launch_device

MULTIPLIER_0, MULTIPLIER_1 = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)
WEYL_0, WEYL_1 = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)
NUM_ROUNDS = tl.constexpr(10)
WORD = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _fill_kernel(uniforms, seed, round_index, count, BN: tl.constexpr):
    o_n = tl.arange(0, BN)
    b_seed = tl.load(seed) + tl.zeros([BN], dtype=tl.int64)
    b_round = tl.load(round_index) + tl.zeros([BN], dtype=tl.int64)
    c0, c1 = o_n.to(tl.int64), tl.zeros([BN], dtype=tl.int64)
    c2, c3 = b_round & WORD, (b_round >> 32) & WORD
    k0, k1 = b_seed & WORD, (b_seed >> 32) & WORD
    for _ in tl.static_range(NUM_ROUNDS):
        first, second = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        c0, c2 = ((second >> 32) & WORD) ^ c1 ^ k0, ((first >> 32) & WORD) ^ c3 ^ k1
        c1, c3 = second & WORD, first & WORD
        k0, k1 = (k0 + WEYL_0) & WORD, (k1 + WEYL_1) & WORD
    b_uniform = ((c0 << 21) | (c1 >> 11)).to(tl.float64) * (1.0 / 9007199254740992.0)
    tl.store(uniforms + o_n, b_uniform, mask=o_n < count)


def fill_uniforms(uniforms: torch.Tensor, seed: torch.Tensor, round_index: torch.Tensor) -> None:
    """As `uniforms.fill_uniforms`."""
    count = uniforms.shape[0]
    with launch_device(uniforms):
        _fill_kernel[(1,)](uniforms, seed, round_index, count, BN=triton.next_power_of_2(count), num_warps=1)
