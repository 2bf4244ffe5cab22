"""The compiled entry points: one call from Python is one critical section.

Each takes a handle's address, the worker's tag and the monotonic time, acquires, works, releases. Each returns int64s,
the first a status, the second 1 + the guard whose waiters are to be woken, or 0.
"""

import numpy as np
from numba.types import Array, UniTuple, int64, uint8, uint32, uint64

from shmradix import claims, guard, leases, pool, recovery, sections, tree
from shmradix.compile import entry
from shmradix.guard import TREE
from shmradix.status import BUSY, MISMATCH, NOT_HELD, OK
from shmradix.views import FAULT, bounded, copy_segment, open_views

_ids = Array(uint32, 1, "C", readonly=True)
_keys = Array(uint64, 1, "C", readonly=True)
_rows = Array(uint32, 2, "C")
_counts = Array(int64, 1, "C")
_bytes = Array(uint8, 1, "C")


@entry(UniTuple(int64, 8)(int64, int64, int64, _keys, _ids, _keys, _rows))
def lookup(handle, tag, now, namespace, tokens, block_keys, out):
    """(status, wake, depth, lease, birth, partial block, partial tokens, epoch); see tree.lookup."""
    seg = open_views(handle)
    if not sections.begin(seg, tag, now):
        return BUSY, 0, 0, 0, 0, 0, 0, 0
    status, depth, lease, born, block, agree, epoch = tree.lookup(seg, now, namespace, tokens, block_keys, out)
    status, wake = sections.end(seg, status)
    return status, wake, depth, lease, born, block, agree, epoch


@entry(UniTuple(int64, 3)(int64, int64, int64, _keys, _ids, _keys, _rows))
def peek(handle, tag, now, namespace, tokens, block_keys, out):
    """(status, wake, depth in blocks)."""
    seg = open_views(handle)
    if not guard.acquire(seg, TREE, tag, now):
        return BUSY, 0, 0
    depth = tree.peek(seg, namespace, tokens, block_keys, out)
    status, wake = sections.end(seg, OK)
    return status, wake, depth


@entry(
    UniTuple(int64, 5)(
        int64, int64, int64, _keys, _ids, _keys, _ids, _ids, int64, int64, int64, int64, _rows, _counts
    )
)  # fmt: skip
def insert(
    handle, tag, now, namespace, tokens, block_keys, table, disk_table, matched, lease, born, epoch, out, counts
):
    """(status, wake, depth reached, lease, its birth); see tree.insert. `epoch` is that of the match, -1 if none."""
    seg = open_views(handle)
    depth, differs = np.int64(0), False
    if lease != 0:
        if not leases.is_held(seg, lease, born):
            return NOT_HELD, 0, 0, 0, 0
        depth, differs = tree.climb(seg, lease, tokens, block_keys, table, disk_table, out)
        if depth < 0:
            return sections.checked(seg, MISMATCH), 0, 0, 0, 0
    if not sections.begin(seg, tag, now):
        return BUSY, 0, 0, 0, 0
    status = OK
    if matched > 0:
        # The oldest epoch's first: what was computed before a clear() must not come back through another's lease.
        covered = matched // seg.block_size
        lease = leases.find_lease(seg, namespace, tokens, block_keys, covered, covered, False, True)
        born = seg.leases["born"][lease]
        if lease == 0:
            status = NOT_HELD
        else:
            depth, differs = tree.climb(seg, lease, tokens, block_keys, table, disk_table, out)
    if status == OK:
        status = tree.may_insert(seg, lease, born, epoch)
    if status == OK:
        status, depth, lease = tree.insert(
            seg, now, namespace, tokens, block_keys, table, disk_table, lease, depth, differs, epoch < 0, out, counts
        )
        born = seg.leases["born"][lease]
    status, wake = sections.end(seg, status)
    return status, wake, depth, lease, born


@entry(UniTuple(int64, 2)(int64, int64, int64, int64, int64))
def release(handle, tag, now, lease, born):
    """(status, wake): drop the lease if it is this worker's and was born then."""
    seg = open_views(handle)
    if not sections.begin(seg, tag, now):
        return BUSY, 0
    status = OK
    if leases.is_held(seg, lease, born):
        leases.drop_lease(seg, lease)
    else:
        status = NOT_HELD
    return sections.end(seg, status)


@entry(UniTuple(int64, 2)(int64, int64, int64, int64, int64, int64))
def shorten(handle, tag, now, lease, born, depth):
    """(status, wake): let the lookup's lease hold no more than its first `depth` blocks; see tree.shorten."""
    seg = open_views(handle)
    if not sections.begin(seg, tag, now):
        return BUSY, 0
    status = OK
    if leases.is_held(seg, lease, born) and depth <= seg.leases["depth"][lease]:
        tree.shorten(seg, lease, depth)
    else:
        status = NOT_HELD
    return sections.end(seg, status)


@entry(UniTuple(int64, 4)(int64, int64, int64, _keys, _ids, _keys, int64, int64, int64))
def release_path(handle, tag, now, namespace, tokens, block_keys, shallowest, deepest, by_tokens):
    """(status, wake, lease, its birth): drop this worker's deepest lease on the path, its depth within the bounds.

    Of equally deep ones, what an insert `by_tokens` took, or, if that is 0, what a lookup took.
    """
    seg = open_views(handle)
    if not sections.begin(seg, tag, now):
        return BUSY, 0, 0, 0
    status = OK
    lease = leases.find_lease(seg, namespace, tokens, block_keys, shallowest, deepest, by_tokens != 0, False)
    born = seg.leases["born"][lease]
    if lease != 0:
        leases.drop_lease(seg, lease)
    else:
        status = NOT_HELD
    status, wake = sections.end(seg, status)
    return status, wake, np.int64(lease), born


@entry(UniTuple(int64, 2)(int64, int64, int64, int64, int64, _rows, _counts))
def evict(handle, tag, now, limit, latest, out, counts):
    """(status, wake), and in counts[0] the blocks taken out, where no exception can lose it; see tree.evict."""
    seg = open_views(handle)
    if not sections.begin(seg, tag, now):
        return BUSY, 0
    tree.evict(seg, limit, latest, out, counts)
    return sections.end(seg, OK)


@entry(UniTuple(int64, 3)(int64, int64, int64))
def hide_all(handle, tag, now):
    """(status, wake, clock); see tree.hide_all."""
    seg = open_views(handle)
    if not sections.begin(seg, tag, now):
        return BUSY, 0, 0
    clock = tree.hide_all(seg)
    status, wake = sections.end(seg, OK)
    return status, wake, clock


@entry(UniTuple(int64, 8)(int64, int64, int64, _bytes))
def totals(handle, tag, now, seen):
    """(status, wake, live blocks, leased blocks, leases, namespaces, free blocks, private ones).

    The last two are of managed blocks. See tree.leased_blocks for `seen`.
    """
    seg = open_views(handle)
    if not guard.acquire(seg, TREE, tag, now):
        return BUSY, 0, 0, 0, 0, 0, 0, 0
    state = seg.state
    blocks = bounded(seg, state["live_blocks"][0], seg.node_count - seg.first_block_node)
    live_leases = bounded(seg, state["live_leases"][0], seg.lease_count - 1)
    namespaces = bounded(seg, state["live_namespaces"][0], seg.first_block_node - 1)
    free, private = pool.free_count(seg), bounded(seg, state["private_blocks"][0], len(seg.blocks))
    wake = np.int64(guard.release(seg, TREE))
    leased = min(tree.leased_blocks(seg, seen), blocks)
    return sections.checked(seg, OK), wake, blocks, leased, live_leases, namespaces, free, private


@entry(UniTuple(int64, 2)(int64, int64, int64, _bytes))
def copy(handle, tag, now, out):
    """(status, wake): an image of the whole segment, consistent because nobody changes the tree meanwhile."""
    seg = open_views(handle)
    if not guard.acquire(seg, TREE, tag, now):
        return BUSY, 0
    copy_segment(handle, out)
    return sections.end(seg, OK)


@entry(UniTuple(int64, 2)(int64, int64, int64, int64, int64))
def bury(handle, tag, now, slot, generation):
    """(status, wake): free all that the slot's holders up to this generation hold, and its pid if none came after."""
    seg = open_views(handle)
    if not sections.begin(seg, tag, now):
        return BUSY, 0
    leases.drop_all_of(seg, slot, generation)
    pool.free_all_of(seg, slot, generation)
    claims.drop_all_of(seg, slot, generation)
    if seg.workers["generation"][slot] == generation:
        seg.workers["pid"][slot] = 0
    return sections.end(seg, OK)


@entry(int64(int64, int64))
def announce(handle, which):
    """The owner word of a guard after asking its owner to wake us; 0 if it is free. See guard.announce."""
    return guard.announce(open_views(handle), which)


@entry(UniTuple(int64, 2)(int64, int64, int64, int64, int64))
def take_over(handle, tag, now, which, dead):
    """(what we did, wake): take a guard from a dead owner, put right what it left, and give the guard back.

    0: somebody else was quicker. 1: the owner had changed nothing. 2: all derived data was rebuilt.
    """
    seg = open_views(handle)
    if not guard.take_over(seg, which, dead, tag, now):
        return 0, 0
    done = 1
    if which == TREE and guard.is_dirty(seg, which):
        recovery.rebuild(seg)
        seg.private[FAULT] = 0  # what it met on the way is put right
        done = 2
    return done, (1 + which) * np.int64(guard.release(seg, which))
