"""The part of RadixCache that hands out blocks which the cache manages."""

from functools import cached_property
from typing import Any

import numpy as np

from shmradix.block_bytes import BlockBytes
from shmradix.errors import BlockError, NoFreeBlocks
from shmradix.handle import Handle
from shmradix.inputs import Ids, as_blocks, as_count
from shmradix.layout import NO_DISK
from shmradix.status import BLOCKS_FULL, UNSURE

_NOTHING_SEEN = np.empty(0, np.uint8)


class BlockMethods(Handle):
    """What `num_blocks` adds: each block is free, one worker's, or in one node of the tree."""

    def allocate(self, num_blocks: int) -> np.ndarray:
        """So many block ids, uint32, this worker's from now: to be filled, and then inserted or freed.

        Where too few are free, least recently used blocks that no lease needs are evicted for the rest. All or nothing:
        raises NoFreeBlocks, having evicted nothing, where free and evictable ones together are too few.
        """
        entries = self._block_entries()
        count = as_count("num_blocks", num_blocks, self._segment.geometry.num_blocks, ", the cache's num_blocks")
        blocks: np.ndarray = self._worker.locked(self._allocate, entries, count)
        return blocks

    def free(self, blocks: Ids) -> None:
        """Give back blocks of this worker's.

        Raises BlockError where one is not its own, ValueError where one is named twice: none is free then.
        """
        array = as_blocks(blocks)
        if self._worker.run(self._block_entries().free, array)[0]:
            raise BlockError(
                f"blocks={array[:8].tolist()} holds one that is in the tree, or not this worker's: expected blocks "
                "from allocate() that were not inserted"
            )

    def evicted_disk_blocks(self) -> np.ndarray:
        """The disk blocks, uint32, of what `allocate` evicted since the last call of this: the caller's to delete."""
        self._block_entries()
        taken: np.ndarray = self._worker.locked(self._take_disk_blocks)
        return taken

    @cached_property
    def kv(self) -> BlockBytes:
        """The bytes of the blocks. ValueError where the cache holds none."""
        if not self._segment.geometry.block_nbytes:
            raise ValueError(
                f"cache {self.name!r} holds no KV: create it with num_blocks and block_nbytes, or block_shape and dtype"
            )
        return BlockBytes(self._worker)

    def _block_entries(self) -> Any:
        if self._worker.blocks is None:
            raise ValueError(f"cache {self.name!r} manages no blocks: create it with num_blocks")
        return self._worker.blocks

    def _allocate(self, entries: Any, count: int) -> np.ndarray:
        worker = self._worker
        for out, counts in worker.undelivered:  # of calls that a signal handler cut short
            worker.call(entries.free, out[: counts[1]])
        worker.undelivered = []
        for has_reaped in (False, True):
            out, evicted, counts = np.empty(count, np.uint32), np.empty((2, count), np.uint32), np.zeros(2, np.int64)
            worker.undelivered.append((out, counts))
            worker.evicted.append((evicted, counts))
            status = worker.call(entries.allocate, _NOTHING_SEEN, out, evicted, counts)[0]
            if status == UNSURE:
                seen = np.zeros(self._segment.geometry.node_count, np.uint8)
                status = worker.call(entries.allocate, seen, out, evicted, counts)[0]
            if not (evicted[1, : counts[0]] != NO_DISK).any():
                worker.evicted.pop()
            if status != BLOCKS_FULL or has_reaped or not worker.reap():
                break
        worker.undelivered = []
        if status:
            raise self._no_free_blocks(count)
        if self._segment.geometry.checksums:
            self._segment.views.checksums[out] = 0  # what they hold is not what they will be inserted for
        return out

    def _take_disk_blocks(self) -> np.ndarray:
        parts, self._worker.evicted = self._worker.evicted, []
        disk = np.concatenate([np.empty(0, np.uint32), *(rows[1, : counts[0]] for rows, counts in parts)])
        return disk[disk != NO_DISK]

    def _no_free_blocks(self, count: int) -> NoFreeBlocks:
        worker, geometry = self._worker, self._segment.geometry
        totals = worker.call(worker.entries.totals, np.zeros(geometry.node_count, np.uint8))
        live, leased, free, private = totals[2], totals[3], totals[6], totals[7]
        owners = count_owners(self._segment.views.blocks["worker"], geometry.max_workers)
        most = [slot for slot in np.argsort(-owners, kind="stable")[:8].tolist() if owners[slot]]
        by = ", ".join(f"{owners[slot]} by {worker.describe(slot)}" for slot in most)
        error = NoFreeBlocks(
            f"cache {self.name!r}: {count} blocks asked for, of num_blocks={geometry.num_blocks} {free} are free, "
            f"{live - leased} evictable, {leased} leased, {private} private" + (f" ({by})" if by else "")
            + ": release matches, free blocks, or create the cache with more"
        )  # fmt: skip
        error.free, error.evictable, error.leased, error.private = free, live - leased, leased, private
        return error


def count_owners(named: np.ndarray, max_workers: int) -> np.ndarray:
    """How many blocks each worker slot has, int64[n], n > 0; for people: read without the guard."""
    now = np.array(named)  # others go on writing to `named`
    return np.bincount(now[now <= max_workers], minlength=2)[1:]
