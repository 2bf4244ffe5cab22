"""Arguments from Python turned into what the kernels take. What is wrong with one is said before anything changes."""

import hashlib
import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.ma  # now: numba would at its first array, and a child forked meanwhile could never

from shmradix.layout import NO_BLOCK, TOKEN_MAX

Ids: TypeAlias = np.ndarray | Sequence[int] | memoryview
"""Token ids, block ids or block keys: any one-dimensional array-like or buffer of integers."""

_U32 = np.dtype(np.uint32)
_U64 = np.dtype(np.uint64)
NO_KEYS = np.empty(0, _U64)
NO_IDS = np.empty(0, _U32)
BASE_NAMESPACE = np.zeros(5, _U64)


def _integers(name: str, values: Any, dtype: np.dtype[Any], what: str) -> np.ndarray:
    """`values` as a C-contiguous 1-D array of the unsigned `dtype`; no copy where it is one already."""
    if type(values) is np.ndarray and values.dtype is dtype and values.ndim == 1 and values.flags.c_contiguous:
        return values
    limit = int(np.iinfo(dtype).max)
    if isinstance(values, (str, bytes, bytearray, numpy.ma.MaskedArray)):
        raise TypeError(f"{name}={values!r:.80}: expected {what}, not {type(values).__name__}")
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{name}={values!r:.80}: expected {what}, from 0 to {limit}: {error}") from None
    if array.ndim == 0:
        raise TypeError(f"{name}={values!r:.80}: expected a sequence of {what}")
    if array.ndim != 1:
        raise ValueError(f"{name} has {array.ndim} dimensions (shape {array.shape}): expected one dimension of {what}")
    if array.size == 0:
        return np.empty(0, dtype)
    if array.dtype.kind in "fO" and isinstance(values, Sequence) and all(type(value) is int for value in values):
        array = np.array(values, object)  # numpy makes floats of integers on both sides of 2^63
        low, high = min(values), max(values)
    elif array.dtype.kind in "iu":
        low, high = int(array.min()), int(array.max())
    else:
        raise TypeError(f"{name} has dtype {array.dtype} ({values!r:.60}): expected {what}")
    if low < 0 or high > limit:
        worst = low if low < 0 else high
        at = int(np.flatnonzero(array == worst)[0])
        raise ValueError(f"{name}[{at}]={worst}: expected {what}, from 0 to {limit}")
    return np.ascontiguousarray(array, dtype)


def as_tokens(tokens: Ids) -> np.ndarray:
    """Token ids as uint32[n], n > 0; a C-contiguous uint32 array is used as it is."""
    array = _integers("tokens", tokens, _U32, "token ids")
    if array.size == 0:
        raise ValueError("tokens is empty: expected at least one token id")
    return array


def as_block_keys(block_keys: Ids | None, tokens: np.ndarray, block_size: int) -> np.ndarray:
    """Block keys as uint64[k]: one for each full block of `tokens`, and perhaps one for the trailing partial block."""
    if block_keys is None:
        return NO_KEYS
    array = _integers("block_keys", block_keys, _U64, "block keys")
    full, started = len(tokens) // block_size, -(-len(tokens) // block_size)
    if not full <= len(array) <= started:
        raise ValueError(
            f"block_keys has {len(array)} entries: expected {full} (one for each full block of {len(tokens)} tokens)"
            + (f" or {started}" if started > full else "")
        )
    return array


def as_block_table(block_table: Ids, blocks: int) -> np.ndarray:
    """The block ids of the first `blocks` blocks as uint32[blocks], all different, none NO_BLOCK."""
    array = _integers("block_table", block_table, _U32, "block ids")
    if len(array) < blocks:
        raise ValueError(
            f"block_table has {len(array)} entries: expected at least {blocks}, one for each full block of tokens"
        )
    return _all_different("block_table", array[:blocks])


def as_blocks(blocks: Ids) -> np.ndarray:
    """Block ids as uint32[n], all different, none NO_BLOCK."""
    return _all_different("blocks", _integers("blocks", blocks, _U32, "block ids"))


def as_block_ids(blocks: Ids, num_blocks: int) -> np.ndarray:
    """Ids of managed blocks as uint32[n], each below `num_blocks`; one may come more than once."""
    array = _integers("blocks", blocks, _U32, "block ids")
    beyond = np.flatnonzero(array >= num_blocks)
    if beyond.size:
        at = int(beyond[0])
        raise ValueError(f"blocks[{at}]={array[at]}: expected block ids, from 0 to {num_blocks - 1}")
    return array


def _all_different(name: str, array: np.ndarray) -> np.ndarray:
    ordered = np.sort(array)
    if array.size and ordered[-1] == NO_BLOCK:
        raise ValueError(f"{name} holds {NO_BLOCK}, which stands for no block: expected block ids below it")
    same = np.flatnonzero(ordered[1:] == ordered[:-1])
    if same.size:
        raise ValueError(f"{name} holds block {ordered[same[0]]} more than once: expected a block of its own for each")
    return array


def as_disk_table(disk_block_ids: Ids | None, block_table: Ids, blocks: int) -> np.ndarray:
    """Disk block ids as uint32[blocks], parallel to the block table, or empty where none are given."""
    if disk_block_ids is None:
        return NO_IDS
    array = _integers("disk_block_ids", disk_block_ids, _U32, "disk block ids")
    if len(array) not in (0, len(block_table)):
        raise ValueError(
            f"disk_block_ids has {len(array)} entries, block_table {len(block_table)}: expected as many, or none at all"
        )
    return array[:blocks]


def as_count(name: str, value: Any, high: int | None = None, limit: str = "") -> int:
    """`value` as an int that is not negative and at most `high`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r}: expected an integer") from None
    if isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: expected an integer")
    if number < 0 or (high is not None and number > high):
        bound = f" from 0 to {high}{limit}" if high is not None else " that is not negative"
        raise ValueError(f"{name}={number}: expected an integer{bound}")
    return number


def as_session(session: int) -> int:
    """A session's hash, from 0 (none) to 2^64 - 1."""
    if type(session) is int and session == 0:  # what most lookups have
        return 0
    return as_count("session", session, TOKEN_MAX << 32 | TOKEN_MAX)


def as_namespace(adapter_id: int, salt: bytes | None) -> np.ndarray:
    """The namespace's key, uint64[5]: adapter id, then the blake2b-256 digest of the salt, zeros if none."""
    key = np.zeros(5, _U64)
    key[0] = as_count("adapter_id", adapter_id, TOKEN_MAX << 32 | TOKEN_MAX)
    if salt is not None:
        if not isinstance(salt, bytes):
            raise TypeError(f"salt={salt!r}: expected bytes or None")
        if not salt:
            raise ValueError("salt is empty: expected at least one byte, or None for no salt")
        key[1:] = np.frombuffer(hashlib.blake2b(salt, digest_size=32).digest(), "<u8")
    return key
