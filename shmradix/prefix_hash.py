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


def prefix_hashes(
    seed: int, tokens: np.ndarray, block_keys: np.ndarray, block_size: int, depths: Sequence[int]
) -> np.ndarray:
    """The hashes of the first `d` tokens for each d of `depths`, which rises: uint64[k, 2], low and high half.

    `tokens` uint32[n] and `block_keys` uint64[m] are C-contiguous. One pass over the tokens. Where a block that the
    prefix reaches into has a key other than 0, the hash is that of the tokens' hash and those keys, little-endian.
    """
    given = np.flatnonzero(block_keys) if len(block_keys) else block_keys
    if not given.size and len(depths) == 1:
        value = xxhash.xxh3_128_intdigest(tokens.data[: depths[0]], seed=seed)  # at once: twice as fast as by a stream
        return np.array([(value & _MASK, value >> 64)], np.uint64)
    first_keyed = int(given[0]) if given.size else len(block_keys)
    data, stream, done, hashes = memoryview(tokens.data).cast("B"), xxhash.xxh3_128(seed=seed), 0, []
    for depth in depths:
        stream.update(data[4 * done : 4 * depth])
        done = depth
        blocks = -(-depth // block_size)
        value = stream.intdigest()
        if given.size and blocks > first_keyed:
            keys = np.zeros(blocks, "<u8")
            keys[: len(block_keys)] = block_keys[:blocks]
            value = xxhash.xxh3_128_intdigest(stream.digest() + keys.tobytes(), seed=seed ^ _KEYED)
        hashes.append((value & _MASK, value >> 64))
    return np.array(hashes, np.uint64).reshape(-1, 2)
