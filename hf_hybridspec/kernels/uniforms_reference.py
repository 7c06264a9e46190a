"""Philox4x32-10 in int64 arithmetic.

The counter is (i, 0, low word of the round, high word of the round), the key the two words of the seed. Ten times:

    (c0, c1, c2, c3) <- (high(M1 c2) ^ c1 ^ k0, low(M1 c2), high(M0 c0) ^ c3 ^ k1, low(M0 c0))
    (k0, k1)         <- (k0 + W0, k1 + W1)

where high and low are the words of the 64-bit product of two 32-bit words, and sums drop their carry. The uniform is
the upper 53 bits of (c0, c1) times 2^-53.
"""

import torch

MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
NUM_ROUNDS = 10
WORD = 0xFFFFFFFF


def fill_uniforms(uniforms: torch.Tensor, seed: torch.Tensor, round_index: torch.Tensor) -> None:
    """As `uniforms.fill_uniforms`."""
    index = torch.arange(uniforms.shape[0], device=uniforms.device)
    seed, round_index = seed.view(1), round_index.view(1)
    zeros = torch.zeros_like(index)
    counter = (index, zeros, (round_index & WORD) + zeros, ((round_index >> 32) & WORD) + zeros)
    c0, c1, _, _ = philox(counter, (seed & WORD, (seed >> 32) & WORD))
    uniforms.copy_(((c0 << 21) | (c1 >> 11)).double() * 2.0**-53)


def philox(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Four words for each of n counters; words are int64 in [0, 2^32), counter words `[n]` and key words `[1]`."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        # A product may exceed int64: its bits are right, and the mask takes the sign's copies away.
        first, second = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        c0, c1, c2, c3 = (
            ((second >> 32) & WORD) ^ c1 ^ k0,
            second & WORD,
            ((first >> 32) & WORD) ^ c3 ^ k1,
            first & WORD,
        )
        k0, k1 = (k0 + WEYL_0) & WORD, (k1 + WEYL_1) & WORD
    return c0, c1, c2, c3
