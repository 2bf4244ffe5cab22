"""The hashes that find candidates; what they find is always compared, so a collision costs time and nothing else."""

import numpy as np

from shmradix.compile import inlined, kernel

_MASK = np.uint64(0xFFFF_FFFF)
_PARENT = np.uint64(0x9E37_79B9_7F4A_7C15)
_KEY = np.uint64(0xC2B2_AE3D_27D4_EB4F)  # a prime of XXH64
_MIX_1 = np.uint64(0xFF51_AFD7_ED55_8CCD)  # MurmurHash3's 64-bit finaliser
_MIX_2 = np.uint64(0xC4CE_B9FE_1A85_EC53)
_HALF = np.uint64(33)
_WORD = np.uint64(32)
_ZERO, _ONE, _TWO = np.uint64(0), np.uint64(1), np.uint64(2)


@inlined
def mix(x):
    """Spread all bits of the uint64 `x` over the result (MurmurHash3's finaliser, Appleby)."""
    x = (x ^ (x >> _HALF)) * _MIX_1
    x = (x ^ (x >> _HALF)) * _MIX_2
    return x ^ (x >> _HALF)


@inlined
def block_hash(seg, parent_hash, tokens, start, block_key):
    """The uint32 hash of a block under a parent: NH of UMAC (Black et al., CRYPTO 1999) over token pairs, seeded."""
    total = np.uint64(parent_hash) * _PARENT + block_key * _KEY
    keys, first, size = seg.hash_keys, np.uint64(start), np.uint64(seg.block_size)
    for i in range(_ZERO, size - _ONE, _TWO):  # unsigned: signed indexes make this loop six times slower
        a = (np.uint64(tokens[first + i]) + keys[i]) & _MASK
        b = (np.uint64(tokens[first + i + _ONE]) + keys[i + _ONE]) & _MASK
        total += a * b
    if size & _ONE:
        total += (np.uint64(tokens[first + size - _ONE]) + keys[size - _ONE]) * _KEY
    return np.uint32(mix(total) >> _WORD)


@kernel
def root_hash(seg, adapter_id, salt):
    """The uint32 hash of a namespace: its adapter id and the four uint64 words of its salt's digest."""
    x = mix(seg.hash_keys[0] ^ adapter_id) * _PARENT
    for i in range(4):
        x = mix(x ^ salt[i]) * _PARENT
    return np.uint32(mix(x) >> _WORD)
