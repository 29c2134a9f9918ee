"""Random numbers as a pure function of (seed, position), so that a replayed request draws the same ones on any worker.

Philox4x32-10 (Salmon et al., SC 2011): the key is the seed, the counter the position.
"""

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)

Words = NDArray[np.uint64]  # each below 2**32


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """Four random words for each counter and key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (second >> _WORD) ^ c1 ^ k0, second & _LOW
        c2, c3 = (first >> _WORD) ^ c3 ^ k1, first & _LOW
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1), a multiple of 2**-53, for each (seed, position)."""
    seed, position = seeds.view(np.uint64), positions.view(np.uint64)
    zero = np.zeros_like(position)
    key = (seed & _LOW, seed >> _WORD)
    high, low, _, _ = philox((position & _LOW, position >> _WORD, zero, zero), key)
    mantissa = (high >> np.uint64(5) << np.uint64(26)) | (low >> np.uint64(6))
    return mantissa.astype(np.float64) * 2.0**-53
