"""The sizes that `RadixCache.create` takes, turned into a geometry."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shmradix.inputs import as_count
from shmradix.layout import RETENTIONS, Geometry

STORED_AS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
"""Of what numpy has no dtype for: which one holds it."""
_NUMBERS = {np.dtype(code).name for code in "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]}


def stored_as(name: str) -> np.dtype[Any]:
    """The numpy dtype that holds what `name` says: of the same size, for those that numpy does not know."""
    return np.dtype(STORED_AS.get(name, name))


def is_consistent(geometry: Geometry) -> bool:
    """Whether a block's shape, dtype and bytes, read from a header, are such as `as_geometry` makes."""
    shape, name = geometry.block_shape, geometry.block_dtype
    if not shape or not name:
        return not shape and not name
    if name not in STORED_AS and name not in _NUMBERS:
        return False
    return math.prod(shape) * stored_as(name).itemsize == geometry.block_nbytes


def as_geometry(
    *,
    max_blocks: int | None,
    num_blocks: int,
    retention: str,
    block_nbytes: int,
    block_shape: Sequence[int],
    dtype: Any,
    checksums: bool,
    huge_pages: bool,
    **sizes: Any,
) -> Geometry:
    """Raises TypeError or ValueError where they make no sense together."""
    if max_blocks is None:
        if not num_blocks:
            raise TypeError("max_blocks=None and no num_blocks: expected how many blocks the cache is to hold")
        max_blocks = num_blocks
    if retention not in RETENTIONS:
        raise ValueError(f"retention={retention!r}: expected one of {', '.join(RETENTIONS)}")
    shape, name, nbytes = _as_block(block_nbytes, block_shape, dtype)
    return Geometry(
        max_blocks=max_blocks, num_blocks=num_blocks, retention=RETENTIONS.index(retention), block_nbytes=nbytes,
        block_shape=shape, block_dtype=name, checksums=int(bool(checksums)), huge_pages=int(bool(huge_pages)), **sizes,
    )  # fmt: skip


def _as_block(block_nbytes: int, block_shape: Sequence[int], dtype: Any) -> tuple[tuple[int, ...], str, int]:
    """A block's shape, the name of its dtype, and its bytes."""
    nbytes = as_count("block_nbytes", block_nbytes)
    if dtype is None and not len(block_shape):
        return (), "", nbytes
    if dtype is None or not len(block_shape):
        raise ValueError(f"block_shape={block_shape!r}, dtype={dtype!r}: expected both, or block_nbytes alone")
    shape = tuple(as_count("block_shape", length) for length in block_shape)
    name = str(dtype).removeprefix("torch.")
    try:
        known = np.dtype(STORED_AS[name]) if name in STORED_AS else np.dtype(dtype if name == str(dtype) else name)
    except TypeError:
        raise TypeError(f"dtype={dtype!r}: expected a numpy dtype, a torch one, or {', '.join(STORED_AS)}") from None
    name = name if name in STORED_AS else known.name
    total = int(np.prod(shape, dtype=np.int64)) * known.itemsize
    if total == 0 or known.name not in _NUMBERS or not known.isnative:
        raise ValueError(
            f"block_shape={shape}, dtype={dtype!r}: expected numbers in the machine's byte order, and at least one"
        )
    if nbytes not in (0, total):
        raise ValueError(f"block_nbytes={nbytes} beside block_shape={shape} and dtype={name}: those make {total}")
    return shape, name, total
