"""Blocks for a prefill, with leaves evicted for them where too few are free."""

import numpy as np

from shmradix import pool, tree
from shmradix.compile import kernel
from shmradix.layout import LATEST
from shmradix.leases import used_leases
from shmradix.status import BLOCKS_FULL, OK, UNSURE
from shmradix.views import FAULT, bounded


@kernel
def _surely_evictable(seg, wanted):
    """Whether `wanted` blocks would be evictable even if no two leased paths had a block in common."""
    room = bounded(seg, seg.state["live_blocks"][0], len(seg.blocks)) - wanted
    for lease in range(1, used_leases(seg)):
        if room < 0:
            break
        if seg.leases["born"][lease] != 0:
            room -= np.int64(seg.leases["depth"][lease]) + 1  # one more: the partly matching child
    return room >= 0


@kernel
def allocate(seg, seen, out, evicted, counts):
    """Make len(out) blocks this worker's, or none.

    BLOCKS_FULL: fewer are free or evictable. UNSURE: it takes `seen`, uint8[node_count], zero, to tell.
    What was evicted goes to `evicted`, block ids and disk block ids; counts[0] says how many those are, and counts[1]
    how many of `out` are filled.
    """
    missing = len(out) - pool.free_count(seg)
    if missing > 0 and not _surely_evictable(seg, missing):
        if len(seen) == 0:
            return UNSURE
        live = bounded(seg, seg.state["live_blocks"][0], len(seg.blocks))
        if live - tree.leased_blocks(seg, seen) < missing:
            return BLOCKS_FULL
    if missing > 0:
        tree.evict(seg, missing, LATEST, evicted, counts)
        if counts[0] < missing:
            seg.private[FAULT] = 1  # a heap that lacks leaves
            return BLOCKS_FULL
    for i in range(len(out)):
        out[i] = pool.take(seg)
        if seg.private[FAULT] != 0:
            break
        counts[1] = i + 1
    return OK
