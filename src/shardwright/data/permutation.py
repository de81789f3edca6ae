"""A pseudo-random permutation of [0, n) that is computed position by position, so that nothing is stored.

A shuffled index array would take 8 n bytes on every rank and a pass over n at each epoch, and numpy does not promise that
its shuffles stay the same between versions. Here the permutation is integer arithmetic modulo 2^64: a balanced Feistel
network (Luby and Rackoff 1988) of 12 rounds over the smallest even number of bits that holds n, with SplitMix64's finaliser
(Steele, Lea and Flood 2014) as the round function. A result of n or more is permuted again until it falls below n (cycle
walking, Black and Rogaway 2002), which keeps the mapping one to one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardwright.data.arrays import Int64

UInt64 = npt.NDArray[np.uint64]

DOCUMENTS_EPOCH = 2**32
"""The epoch number that shuffles documents before packing. No run reaches it, so rows and documents differ in order."""
MEGABATCH_EPOCH = 2**33
"""Epoch numbers from here on shuffle the updates of megabatches. No run reaches them."""
_ROUNDS = 12
_MIN_HALF_BITS = 3  # over fewer bits a Feistel network reaches only some of the permutations
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK64 = 2**64 - 1


def permute(positions: Int64, rows: int, seed: int, epoch: int) -> Int64:
    """The values at `positions` (each in [0, rows)) of the permutation of [0, rows) for (seed, epoch)."""
    half = np.uint64(max(_MIN_HALF_BITS, (max(rows - 1, 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    stream = _mix(_mix(np.array([seed & _MASK64], np.uint64)) + np.uint64(epoch))
    keys = _mix(stream + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * _GOLDEN)
    result = positions.astype(np.uint64)
    walking = np.arange(len(result))
    while len(walking):
        values = result[walking]
        left, right = values >> half, values & mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        result[walking] = (left << half) | right
        walking = walking[result[walking] >= np.uint64(rows)]
    return result.astype(np.int64)


def _mix(x: UInt64) -> UInt64:
    """SplitMix64's finaliser: a bijection of 64 bits in which every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
