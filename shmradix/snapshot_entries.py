"""The compiled entry points of the snapshot index: one call from Python is one critical section of its guard.

As in `entries.py`: each takes a handle's address, the worker's tag and the monotonic time and returns int64s, the first
a status, the second which guard's waiters to wake. Where one takes no guard, it says so.
"""

import numpy as np
from numba.types import Array, UniTuple, int64, uint8, uint32, uint64

from shmradix import anchors, guard, retention, snapshots
from shmradix.compile import entry, kernel
from shmradix.guard import SNAPSHOTS
from shmradix.layout import PENDING
from shmradix.retention import FRONTIER, HIDDEN_CLASS
from shmradix.snapshot_views import copy_index, open_index
from shmradix.status import BUSY_SNAPSHOTS, CORRUPT, LEASES_FULL, NOT_FOUND, NOT_HELD, OK, SLOT_NOT_HELD, SLOTS_FULL
from shmradix.views import FAULT

_ids = Array(uint32, 1, "C", readonly=True)
_keys = Array(uint64, 1, "C", readonly=True)
_candidates = Array(uint64, 2, "C")
_slots = Array(uint32, 1, "C")
_counts = Array(int64, 1, "C")
_marks = Array(int64, 1, "C")
_sessions = Array(int64, 2, "C")
_bytes = Array(uint8, 1, "C")


@kernel
def _end(seg, status):
    """Release the guard. Returns the status, CORRUPT where a fault was noted, and which guard's waiters to wake."""
    if seg.private[FAULT] != 0:
        seg.private[FAULT] = 0
        status = CORRUPT
    return np.int64(status), (1 + SNAPSHOTS) * np.int64(guard.release(seg, SNAPSHOTS))


@kernel
def _check_of(tokens):
    return np.int64(anchors.check_of(tokens, np.uint64(len(tokens))))


@kernel
def _count_evicted(seg, its_class):
    """Count a snapshot that went to make room, unless it was displaced or cleared before."""
    if its_class != HIDDEN_CLASS:
        seg.state["evictions"][0] += 1
        snapshots.count(seg, snapshots.EVICTIONS, 1)


@entry(UniTuple(int64, 4)(int64, _keys, _ids, int64, uint64, int64))
def deepest(handle, namespace, tokens, limit, session, hermetic):
    """(depth, snapshot, reason, check of all tokens), without the guard; see anchors.deepest."""
    depth, at, reason = anchors.deepest(open_index(handle), namespace, tokens, limit, session, hermetic)
    return np.int64(depth), np.int64(at), np.int64(reason), _check_of(tokens)


@entry(int64(int64, _ids))
def check(handle, tokens):
    """The check of all tokens, without the guard; see anchors.check_of."""
    return _check_of(tokens)


@entry(int64(int64, _keys, _ids, int64, uint64, int64, _candidates))
def all_within(handle, namespace, tokens, limit, session, hermetic, out):
    """How many rows of `out` are filled, without the guard; see anchors.all_within."""
    return anchors.all_within(open_index(handle), namespace, tokens, limit, session, hermetic, out)


@entry(
    UniTuple(int64, 7)(int64, int64, int64, _keys, int64, int64, uint64, uint64, int64, uint64, int64, int64)
)  # fmt: skip
def take(handle, tag, now, namespace, depth, at, low, high, limit, session, hermetic, epoch):
    """(status, wake, slot, tier key, flags, pin, its birth); see anchors.take."""
    seg = open_index(handle)
    if not guard.acquire(seg, SNAPSHOTS, tag, now):
        return BUSY_SNAPSHOTS, 0, 0, 0, 0, 0, 0
    status, pin, born = anchors.take(seg, namespace, depth, at, low, high, limit, session, hermetic, epoch)
    slot = key = flags = np.int64(0)
    if status == OK:
        record = seg.snapshots
        slot, key, flags = np.int64(record["slot"][at]), np.int64(record["tier_key"][at]), np.int64(record["flags"][at])
    status, wake = _end(seg, status)
    return status, wake, slot, key, flags, pin, born


@entry(UniTuple(int64, 2)(int64, int64, int64, int64, uint64, int64))
def miss(handle, tag, now, limit, session, reason):
    """(status, wake): count a lookup that found no snapshot; see anchors.miss."""
    seg = open_index(handle)
    if not guard.acquire(seg, SNAPSHOTS, tag, now):
        return BUSY_SNAPSHOTS, 0
    anchors.miss(seg, limit, session, reason)
    return _end(seg, OK)


@entry(UniTuple(int64, 2)(int64, int64, int64, _keys, _candidates, uint64, int64, _counts))
def which(handle, tag, now, namespace, candidates, session, hermetic, out):
    """(status, wake): set out[k] to 1 where the k-th candidate is there, and the session may resume from it."""
    seg = open_index(handle)
    if not guard.acquire(seg, SNAPSHOTS, tag, now):
        return BUSY_SNAPSHOTS, 0
    for k in range(len(candidates)):
        is_there = anchors.is_candidate_there(seg, namespace, candidates[k])
        out[k] = np.int64(is_there and snapshots.is_open_to(seg, candidates[k, 1], session, hermetic))
    return _end(seg, OK)


@entry(UniTuple(int64, 2)(int64, int64, int64, int64, int64))
def unpin(handle, tag, now, pin, born):
    """(status, wake); see snapshots.unpin."""
    seg = open_index(handle)
    if not guard.acquire(seg, SNAPSHOTS, tag, now):
        return BUSY_SNAPSHOTS, 0
    return _end(seg, snapshots.unpin(seg, pin, born))


@kernel
def _commit(seg, at, namespace, parents, out, counts):
    status = snapshots.commit(seg, at, namespace, out, counts)
    if status == OK and seg.retention != 0:
        retention.adopt(seg, at, anchors.parent_of(seg, namespace, parents))
    return status


@entry(
    UniTuple(int64, 4)(
        int64, int64, int64, _keys, _ids, uint64, uint64, uint32, uint64, int64, int64, int64, _candidates, _slots,
        _counts,
    )
)  # fmt: skip
def save(
    handle, tag, now, namespace, tokens, low, high, slot, session, kind, epoch, pending, parents, out, counts,
):  # fmt: skip
    """(status, wake, snapshot, its birth): register a snapshot of all `tokens`, and commit it unless `pending`."""
    seg = open_index(handle)
    check_ = _check_of(tokens)
    if not guard.acquire(seg, SNAPSHOTS, tag, now):
        return BUSY_SNAPSHOTS, 0, 0, 0
    status, at = snapshots.register(seg, namespace, len(tokens), check_, low, high, slot, session, kind, epoch)
    born = seg.snapshots["born"][at]
    if status == OK and not pending:
        status = _commit(seg, at, namespace, parents, out, counts)
    status, wake = _end(seg, status)
    return status, wake, np.int64(at), born


@entry(UniTuple(int64, 2)(int64, int64, int64, _keys, int64, int64, _candidates, _slots, _counts))
def commit(handle, tag, now, namespace, at, born, parents, out, counts):
    """(status, wake): commit the pending snapshot born then; see snapshots.commit."""
    seg = open_index(handle)
    if not guard.acquire(seg, SNAPSHOTS, tag, now):
        return BUSY_SNAPSHOTS, 0
    status = NOT_HELD
    if snapshots.is_pending_of_mine(seg, at, born):
        status = _commit(seg, at, namespace, parents, out, counts)
    return _end(seg, status)


@entry(UniTuple(int64, 2)(int64, int64, int64, int64, int64))
def abort(handle, tag, now, at, born):
    """(status, wake): forget the pending snapshot born then."""
    seg = open_index(handle)
    if not guard.acquire(seg, SNAPSHOTS, tag, now):
        return BUSY_SNAPSHOTS, 0
    status = NOT_HELD
    if snapshots.is_pending_of_mine(seg, at, born):
        snapshots.abort(seg, at)
        status = OK
    return _end(seg, status)


@entry(UniTuple(int64, 2)(int64, int64, int64, _marks, _sessions, _slots, _counts))
def evict(handle, tag, now, marks, sessions, out, counts):
    """(status, wake): take out the snapshot that goes first; its slot, now the caller's, goes to `out`."""
    seg = open_index(handle)
    if not guard.acquire(seg, SNAPSHOTS, tag, now):
        return BUSY_SNAPSHOTS, 0
    at, its_class = retention.victim(seg, marks, sessions)
    if at == 0:
        return _end(seg, NOT_FOUND)
    snapshots.displace(seg, at, out, counts)
    _count_evicted(seg, its_class)
    return _end(seg, OK)


@entry(UniTuple(int64, 4)(int64, int64, int64, _marks, _sessions, int64, int64, _slots, _counts))
def spill(handle, tag, now, marks, sessions, min_tokens, pending, out, counts):
    """(status, wake, tier key, depth): make the snapshot that goes first tiered, its slot the caller's.

    One of fewer than `min_tokens` tokens is taken out instead: its key is 0.
    """
    seg = open_index(handle)
    if not guard.acquire(seg, SNAPSHOTS, tag, now):
        return BUSY_SNAPSHOTS, 0, 0, 0
    at, its_class = retention.victim(seg, marks, sessions)
    if at == 0:
        status, wake = _end(seg, NOT_FOUND)
        return status, wake, 0, 0
    depth, key = np.int64(seg.snapshots["token_count"][at]), np.uint64(0)
    if its_class == HIDDEN_CLASS or depth < min_tokens:
        snapshots.displace(seg, at, out, counts)
        _count_evicted(seg, its_class)
    else:
        key = snapshots.spill(seg, at, pending, out, counts)
        seg.state["evictions"][0] += 1
        snapshots.count(seg, snapshots.SPILLS, 1)
    status, wake = _end(seg, OK)
    return status, wake, np.int64(key), depth


@entry(UniTuple(int64, 2)(int64, int64, int64, uint64))
def commit_spill(handle, tag, now, key):
    """(status, wake); see snapshots.commit_spill."""
    seg = open_index(handle)
    if not guard.acquire(seg, SNAPSHOTS, tag, now):
        return BUSY_SNAPSHOTS, 0
    return _end(seg, snapshots.commit_spill(seg, key))


@entry(UniTuple(int64, 4)(int64, int64, int64, uint64, uint32, int64))
def promote(handle, tag, now, key, slot, pinned):
    """(status, wake, pin, its birth): see snapshots.promote; and pin the snapshot, if `pinned`."""
    seg = open_index(handle)
    if not guard.acquire(seg, SNAPSHOTS, tag, now):
        return BUSY_SNAPSHOTS, 0, 0, 0
    held, born = 0, np.int64(0)
    if pinned and snapshots.free_pin(seg) == 0:
        status, wake = _end(seg, LEASES_FULL)
        return status, wake, 0, 0
    status, at = snapshots.promote(seg, key, slot)
    if status == OK and pinned:
        held, born = snapshots.pin(seg, at)
    status, wake = _end(seg, status)
    return status, wake, np.int64(held), born


@entry(UniTuple(int64, 2)(int64, int64, int64, uint64))
def forget(handle, tag, now, key):
    """(status, wake); see snapshots.forget."""
    seg = open_index(handle)
    if not guard.acquire(seg, SNAPSHOTS, tag, now):
        return BUSY_SNAPSHOTS, 0
    return _end(seg, snapshots.forget(seg, key))


@entry(UniTuple(int64, 3)(int64, int64, int64, _marks, _sessions, int64, int64))
def allocate(handle, tag, now, marks, sessions, evict, finish):
    """(status, wake, slot): a free slot for this worker, else, to `evict`, that of the snapshot that goes first.

    For a `finish` leaf no snapshot goes that the chain policy keeps.
    """
    seg = open_index(handle)
    if not guard.acquire(seg, SNAPSHOTS, tag, now):
        return BUSY_SNAPSHOTS, 0, 0
    slot = snapshots.free_slot(seg, marks)
    if slot >= 0:
        snapshots.own(seg, slot)
    elif evict:
        at, its_class = retention.victim(seg, marks, sessions)
        if at != 0 and not (finish and its_class == FRONTIER):
            slot = np.int64(seg.snapshots["slot"][at])
            snapshots.remove(seg, at)
            if not snapshots.take_slot(seg, slot):
                slot = np.int64(-1)
            _count_evicted(seg, its_class)
    status, wake = _end(seg, OK if slot >= 0 else SLOTS_FULL)
    return status, wake, slot


@entry(UniTuple(int64, 2)(int64, int64, int64, uint32))
def free(handle, tag, now, slot):
    """(status, wake): the slot, which must be this worker's and in no snapshot, is free."""
    seg = open_index(handle)
    if not guard.acquire(seg, SNAPSHOTS, tag, now):
        return BUSY_SNAPSHOTS, 0
    if not snapshots.may_use(seg, slot):
        return _end(seg, SLOT_NOT_HELD)
    snapshots.disown(seg, slot)
    return _end(seg, OK)


@entry(UniTuple(int64, 2)(int64, int64, int64, _marks, _slots, _counts))
def drop_hidden(handle, tag, now, marks, out, counts):
    """(status, wake): take out what a clear() hid and no match has. Where slots are the callers', they go to `out`."""
    seg = open_index(handle)
    if not guard.acquire(seg, SNAPSHOTS, tag, now):
        return BUSY_SNAPSHOTS, 0
    retention.mark_pinned(seg, marks)
    record = seg.snapshots
    for at in range(1, snapshots.snapshots_used(seg)):
        if record["born"][at] == 0 or snapshots.is_current(seg, at) or marks[at]:
            continue
        slot, had_slot = record["slot"][at], snapshots.is_resident(seg, at)
        if had_slot and record["flags"][at] & PENDING:
            continue  # its worker is told at the commit; a spill under way goes: its spiller won't find it again
        snapshots.remove(seg, at)
        if had_slot and len(seg.slots) == 0 and counts[0] < len(out) and snapshots.take_slot(seg, slot):
            out[counts[0]] = slot
            counts[0] += 1
    return _end(seg, OK)


@entry(UniTuple(int64, 4)(int64, int64, int64, _marks))
def totals(handle, tag, now, marks):
    """(status, wake, snapshots that lookups may find, those of them that are tiered)."""
    seg = open_index(handle)
    if not guard.acquire(seg, SNAPSHOTS, tag, now):
        return BUSY_SNAPSHOTS, 0, 0, 0
    committed = tiered = 0
    for at in range(1, snapshots.snapshots_used(seg)):
        if snapshots.is_committed(seg, at):
            committed += 1
            tiered += np.int64(not snapshots.is_resident(seg, at))
    status, wake = _end(seg, OK)
    return status, wake, np.int64(committed), np.int64(tiered)


@entry(UniTuple(int64, 2)(int64, int64, int64, _bytes))
def copy(handle, tag, now, out):
    """(status, wake): an image of the sections of the index at one instant."""
    seg = open_index(handle)
    if not guard.acquire(seg, SNAPSHOTS, tag, now):
        return BUSY_SNAPSHOTS, 0
    copy_index(handle, out)
    return _end(seg, OK)


@entry(UniTuple(int64, 2)(int64, int64, int64, int64, int64))
def bury(handle, tag, now, slot, generation):
    """(status, wake); see snapshots.bury."""
    seg = open_index(handle)
    if not guard.acquire(seg, SNAPSHOTS, tag, now):
        return BUSY_SNAPSHOTS, 0
    snapshots.bury(seg, slot, generation)
    return _end(seg, OK)
