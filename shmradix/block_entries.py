"""The compiled entry points of managed blocks; see `entries.py` for what they have in common."""

import numpy as np
from numba.types import Array, UniTuple, int64, uint8, uint32

from shmradix import allocation, pool, sections
from shmradix.compile import entry
from shmradix.status import BLOCK_NOT_HELD, BUSY, OK
from shmradix.views import SLOT, open_views

_ids = Array(uint32, 1, "C")
_read_ids = Array(uint32, 1, "C", readonly=True)
_rows = Array(uint32, 2, "C")
_counts = Array(int64, 1, "C")
_bytes = Array(uint8, 1, "C")


@entry(UniTuple(int64, 2)(int64, int64, int64, _bytes, _ids, _rows, _counts))
def allocate(handle, tag, now, seen, out, evicted, counts):
    """(status, wake); see allocation.allocate."""
    seg = open_views(handle)
    if not sections.begin(seg, tag, now):
        return BUSY, 0
    return sections.end(seg, allocation.allocate(seg, seen, out, evicted, counts))


@entry(UniTuple(int64, 2)(int64, int64, int64, _read_ids))
def free(handle, tag, now, blocks):
    """(status, wake): the blocks, all of which must be this worker's and named once, are free."""
    seg = open_views(handle)
    if not sections.begin(seg, tag, now):
        return BUSY, 0
    status = OK
    if pool.are_mine(seg, blocks, 0, len(blocks)):
        for i in range(len(blocks)):
            pool.put(seg, blocks[i], np.uint32(seg.private[SLOT] + 1))
    else:
        status = BLOCK_NOT_HELD
    return sections.end(seg, status)
