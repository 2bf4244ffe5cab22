"""The hash that names a prefix in the snapshot index: seeded xxh3-128 over its tokens, and its block keys if any.

Snapshots outlive the nodes of the tree, so there are no tokens left to compare. 128 seeded bits, the number of tokens
and the namespace, compared exactly, stand for them: a chance collision is out of the question, and a forged one would
harm none but its own tenant.
"""

from collections.abc import Sequence

import numpy as np
import xxhash

_MASK = (1 << 64) - 1
_KEYED = 0x9E37_79B9_7F4A_7C15  # turns the seed for prefixes with block keys


def prefix_hash(seed: int, tokens: np.ndarray, block_keys: np.ndarray, block_size: int, depth: int) -> tuple[int, int]:
    """The hash of the first `depth` tokens, its low and high half.

    `tokens` uint32[n] and `block_keys` uint64[m] are C-contiguous. Where a block that the prefix reaches into has a key
    other than 0, the hash is that of the tokens' hash and those keys, little-endian.
    """
    value = xxhash.xxh3_128_intdigest(tokens.data[:depth], seed)  # at once: twice as fast as by a stream
    if len(block_keys):
        value = _with_keys(seed, value, block_keys, -(-depth // block_size))
    return value & _MASK, value >> 64


def prefix_hashes(
    seed: int, tokens: np.ndarray, block_keys: np.ndarray, block_size: int, depths: Sequence[int]
) -> np.ndarray:
    """The `prefix_hash` for each depth of `depths`, which rises, in one pass over the tokens: uint64[k, 2]."""
    if len(depths) == 1:
        return np.array([prefix_hash(seed, tokens, block_keys, block_size, depths[0])], np.uint64)
    data, stream, done, hashes = memoryview(tokens.data).cast("B"), xxhash.xxh3_128(seed=seed), 0, []
    for depth in depths:
        stream.update(data[4 * done : 4 * depth])
        done = depth
        value = stream.intdigest()
        if len(block_keys):
            value = _with_keys(seed, value, block_keys, -(-depth // block_size))
        hashes.append((value & _MASK, value >> 64))
    return np.array(hashes, np.uint64).reshape(-1, 2)


def _with_keys(seed: int, value: int, block_keys: np.ndarray, blocks: int) -> int:
    """The hash of a prefix of so many blocks, from that of its tokens and its blocks' keys."""
    keys = np.zeros(blocks, "<u8")
    keys[: len(block_keys)] = block_keys[:blocks]
    return xxhash.xxh3_128_intdigest(value.to_bytes(16, "big") + keys.tobytes(), seed ^ _KEYED) if keys.any() else value
