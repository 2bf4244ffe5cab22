"""The KV of managed blocks: copied in by the worker that has them, copied out by any, with checksums if wished.

Copies are one `memcpy` a block: from 256 KiB on as fast as copying one area (tools/benchmark_bytes.py).
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from shmradix.errors import BlockError, CorruptBlock
from shmradix.inputs import Ids, as_block_ids, as_blocks
from shmradix.layout import IN_TREE, PAGE, Views
from shmradix.payload import Payload, block_rows

if TYPE_CHECKING:
    from shmradix.workers import Worker


class BlockBytes(Payload):
    """The KV of all blocks: `kv[block]` and `kv.array` in place, `gather` and `scatter` by copy.

    A block's bytes are stable while it is leased, and its worker's to write from `allocate` to `insert`. Created with
    `checksums`, `scatter` seals what it wrote, `gather` refuses what is not as it was sealed; what was written in place
    is sealed by `seal`, before the insert. `allocate` breaks the seals, so that stale bytes never pass.
    """

    def __init__(self, worker: "Worker") -> None:
        geometry = worker.segment.geometry
        super().__init__(worker, block_rows(geometry))
        self._is_sealing = bool(geometry.checksums)

    def gather(self, blocks: Ids, out: np.ndarray | None = None) -> np.ndarray:
        """Copy the KV of `blocks`, in this order, to `out`, a C-contiguous array (n, *block_shape); a new one if None.

        A block may come twice. Raises ValueError or TypeError with nothing copied; CorruptBlock where a checksum is not
        that of the bytes, which are in `out` then. An `out` of your own is fastest at a page boundary.
        """
        ids = as_block_ids(blocks, len(self))
        if out is None:
            out = _empty((len(ids), *self._rows.shape), self._rows.dtype)
        else:
            self._check_out(out, len(ids))
        source, target = self._bytes(), self._as_bytes(out)
        for row, block in zip(target, ids.tolist()):
            row[:] = source[block]
        if self._is_sealing:
            self._verify(ids, target)
        return out

    def scatter(self, blocks: Ids, src: np.ndarray) -> None:
        """Copy `src`, an array (n, *block_shape) of the cache's dtype, to `blocks`, all of them this worker's.

        They stay so until the call returns: no other thread may insert or free them meanwhile. Raises ValueError,
        TypeError, or BlockError where a block is not this worker's, with nothing written.
        """
        ids = as_blocks(as_block_ids(blocks, len(self)))
        self._check_array("src", src, len(ids))
        self._require_mine(ids)
        target, source = self._bytes(), self._as_bytes(np.ascontiguousarray(src))
        if np.may_share_memory(source, target):
            source = source.copy()  # it may hold blocks that are about to be written
        for row, block in zip(source, ids.tolist()):
            target[block] = row
        if self._is_sealing:
            self._seal(ids)

    def seal(self, blocks: Ids) -> None:
        """Store the checksums of blocks of this worker's that it has written in place.

        Raises ValueError, TypeError, BlockError, with nothing sealed.
        """
        self._need_checksums()
        ids = as_blocks(as_block_ids(blocks, len(self)))
        self._require_mine(ids)
        self._seal(ids)

    def check(self, blocks: Ids) -> None:
        """Compare blocks, where they are, with their checksums. Raises CorruptBlock with the first that differs."""
        self._need_checksums()
        ids = as_block_ids(blocks, len(self))
        rows = self._bytes()
        self._verify(ids, (rows[block] for block in ids.tolist()))

    # --- arrays -------------------------------------------------------------------------------------------

    def _check_array(self, name: str, array: np.ndarray, count: int) -> None:
        rows = self._rows
        stored = f", as which {rows.dtype_name} is stored" if rows.dtype_name != rows.dtype.name else ""
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name} is of {type(array).__name__}: expected a numpy array of {rows.dtype}{stored}")
        if array.dtype != rows.dtype:
            raise TypeError(f"{name} has dtype {array.dtype}: expected {rows.dtype}{stored}; convert it first")
        expected = (count, *rows.shape)
        if array.shape != expected:
            raise ValueError(f"{name} has shape {array.shape}: expected {expected}, blocks first")

    def _check_out(self, out: np.ndarray, count: int) -> None:
        self._check_array("out", out, count)
        if not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError("out is read-only or not C-contiguous: expected an array such as numpy.empty makes")
        if np.may_share_memory(out, self._bytes()):
            raise ValueError("out lies in the cache: expected memory of your own; scatter() writes blocks")

    def _as_bytes(self, array: np.ndarray) -> np.ndarray:
        """A C-contiguous array of n blocks as uint8[n, bytes of a block]."""
        return array.reshape(-1).view(np.uint8).reshape(len(array), self._rows.nbytes)

    # --- owners -------------------------------------------------------------------------------------------

    def _require_mine(self, blocks: np.ndarray) -> None:
        self._worker.locked(self._check_mine, blocks)

    def _check_mine(self, blocks: np.ndarray) -> None:
        """Within `locked`: no call of another thread's changes meanwhile which blocks are this worker's."""
        worker = self._worker
        views = worker.segment.views
        foreign = blocks[~are_mine(views, worker.slot, blocks)]
        if foreign.size:
            raise BlockError(
                f"cache {worker.segment.name!r}: block {foreign[0]} is {where_is(views, foreign[0], worker.describe)}: "
                "expected blocks that allocate() gave to this worker and that it has not inserted; nothing was written"
            )

    # --- checksums ----------------------------------------------------------------------------------------

    def _need_checksums(self) -> None:
        if not self._is_sealing:
            name = self._worker.segment.name
            raise ValueError(f"cache {name!r} has no checksums: create it with checksums=True")

    def _seal(self, blocks: np.ndarray) -> None:
        rows = self._bytes()
        seals = np.array([_checksum(rows[block]) for block in blocks.tolist()], np.uint64)
        self._worker.locked(self._store_seals, blocks, seals)

    def _store_seals(self, blocks: np.ndarray, seals: np.ndarray) -> None:
        self._worker.segment.views.checksums[blocks] = seals

    def _verify(self, blocks: np.ndarray, rows: Iterable[np.ndarray]) -> None:
        seals = self._worker.locked(self._seals_of, blocks)
        for block, seal, row in zip(blocks.tolist(), seals.tolist(), rows):
            if _checksum(row) != seal:
                why = "holds other bytes than it was sealed with" if seal else "was not sealed since it was allocated"
                raise CorruptBlock(
                    f"cache {self._worker.segment.name!r}: block {block} {why}: compute its tokens' KV anew; seal() "
                    "what is written in place, clear() drops all that is cached"
                )

    def _seals_of(self, blocks: np.ndarray) -> np.ndarray:
        return self._worker.segment.views.checksums[blocks]


def are_mine(views: Views, slot: int, blocks: np.ndarray) -> np.ndarray:
    """Which of `blocks` are the worker's in this slot, bool[n]: what `pool.is_mine` says of one, to that worker."""
    owners, generations = views.blocks["worker"][blocks], views.blocks["generation"][blocks]
    return (owners == slot + 1) & (generations == views.workers["generation"][slot])


def where_is(views: Views, block: int, describe: Callable[[int], str]) -> str:
    """Who has a block, for people: read without the guard."""
    owner, generation = views.blocks["worker"][block], views.blocks["generation"][block]
    if owner == IN_TREE:
        return "in the tree"
    if owner == 0:
        return "free"
    is_there = owner <= len(views.workers) and generation == views.workers["generation"][owner - 1]
    return f"private to {describe(int(owner) - 1) if is_there else 'a worker that is gone'}"


def _checksum(row: np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(row.data)


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """As numpy.empty, but at a page boundary.

    numpy's own large arrays begin 16 bytes behind one: copying whole pages there took four times as long (AMD EPYC).
    """
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.empty(nbytes + PAGE, np.uint8)
    start = -memory.ctypes.data % PAGE
    return memory[start : start + nbytes].view(dtype).reshape(shape)
