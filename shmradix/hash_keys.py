"""The keys of the block hash: derived from the segment's seed, the same for compiled and plain readers."""

import numpy as np

_GOLDEN = 0x9E37_79B9_7F4A_7C15
_MASK = (1 << 64) - 1


def hash_keys(seed: int, count: int) -> np.ndarray:
    """`count` keys below 2^32, int64, from the segment's seed, by SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    keys = np.empty(count, np.int64)
    for i in range(count):
        seed = (seed + _GOLDEN) & _MASK
        x = seed
        x = ((x ^ (x >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK
        keys[i] = (x ^ (x >> 31)) >> 32
    return keys
