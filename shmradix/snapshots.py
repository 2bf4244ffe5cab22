"""The snapshot index: which saved states of recurrent layers there are, and in which slots.

All of it is truth, nothing is derived: there are thousands of snapshots at most, of tens of megabytes each, and what is
needed is found by looking through them. So a worker may die anywhere in here and nothing has to be rebuilt; its pins,
its pending snapshots and its slots are freed by whoever buries it.

Where the segment manages the slots, a slot is its worker's if its record names one, also while a pending snapshot of
that worker's has it, else in the index if a live resident snapshot has it, else free. It is taken from the index before
it is anybody's, and is nobody's before it gets there: at no store is a slot both a worker's and a committed snapshot's.
Where the segment does not manage them, slot ids are the callers'.

Of a live snapshot, plain stores change what its other fields say is without meaning (the slot of a spilled one, the
owner of a committed one), and what only retention reads: its last use, its parent, BRANCH. All else is one word, stored
so that what comes before it in the text is stored before it.

Each function here is run by one worker that holds the snapshots' guard.
"""

import numpy as np

from shmradix import layout
from shmradix.atomics import store_release
from shmradix.compile import kernel
from shmradix.hashing import mix
from shmradix.layout import (
    BRANCH,
    COUNTERS,
    HIDDEN,
    LEAF,
    PENDING,
    SIBLING,
    SNAPSHOT,
    SNAPSHOT_STATE,
    TAIL,
    word_of,
)
from shmradix.snapshot_views import PIN_WORDS, SLOT_WORDS, SNAPSHOT_WORDS, used
from shmradix.status import NOT_FOUND, NOT_HELD, OK, SLOT_NOT_HELD, SNAPSHOTS_FULL, STALE
from shmradix.views import FAULT, SLOT

SAVES, EVICTIONS, SPILLS, FAULT_INS, REAPS = (
    COUNTERS.index(name)
    for name in ("snapshot_saves", "snapshot_evictions", "tier_spills", "tier_fault_ins", "tier_reaps")
)
_PROBES = 8  # records of the sessions' table that one session may be in
_RESIDENT = np.uint64(0)  # a tier key
_NOT_LEAF = np.uint32(0xFFFF_FFFF ^ LEAF)
_NOT_PENDING = np.uint32(0xFFFF_FFFF ^ PENDING)
_CLOCK, _FLAGS, _TIER_KEY = word_of(SNAPSHOT_STATE, "clock"), word_of(SNAPSHOT, "flags"), word_of(SNAPSHOT, "tier_key")
_WORKER = word_of(layout.SLOT, "worker")


@kernel
def count(seg, counter, amount):
    """Add to one of this worker's counters."""
    seg.workers["counters"][seg.private[SLOT]][counter] += amount


@kernel
def tick(seg):
    """The next time of the index's clock."""
    clock = seg.state["clock"][0] + 1
    store_release(seg.state_words, _CLOCK, clock)
    return clock


@kernel
def snapshots_used(seg):
    """One more than the highest snapshot that was ever used."""
    return used(seg.state["snapshots_used"][0], len(seg.snapshots))


@kernel
def pins_used(seg):
    """One more than the highest pin that was ever used."""
    return used(seg.state["pins_used"][0], len(seg.pins))


# --- what a snapshot is -------------------------------------------------------------------------------------------


@kernel
def is_current(seg, at):
    """Whether the snapshot lives, was not displaced, and is younger than the last clear()."""
    record = seg.snapshots
    return record["born"][at] != 0 and not record["flags"][at] & HIDDEN and record["epoch"][at] == seg.tree["epoch"][0]


@kernel
def is_committed(seg, at):
    """Whether lookups may find the snapshot."""
    return is_current(seg, at) and not seg.snapshots["flags"][at] & PENDING


@kernel
def is_resident(seg, at):
    """Whether the snapshot's state is in its slot, not in a tier."""
    return seg.snapshots["tier_key"][at] == _RESIDENT


@kernel
def is_in(seg, at, namespace):
    """Whether the snapshot is of this namespace."""
    record = seg.snapshots
    if record["adapter_id"][at] != namespace[0]:
        return False
    for i in range(4):
        if record["salt"][at][i] != namespace[1 + i]:
            return False
    return True


@kernel
def is_open_to(seg, at, session, hermetic):
    """The gate: a tail, or in hermetic mode any snapshot, is its own session's only."""
    if hermetic or seg.snapshots["flags"][at] & TAIL:
        return session != np.uint64(0) and seg.snapshots["session"][at] == session
    return True


@kernel
def is_mine(seg, worker, generation):
    """Whether a record's owner is this worker."""
    slot = seg.private[SLOT]
    return np.int64(worker) == slot + 1 and generation == seg.workers["generation"][slot]


@kernel
def is_pinned(seg, at):
    """Whether a match has the snapshot."""
    born = seg.snapshots["born"][at]
    for pin in range(1, pins_used(seg)):
        if seg.pins["born"][pin] != 0 and seg.pins["snapshot"][pin] == at and seg.pins["snapshot_born"][pin] == born:
            return True
    return False


@kernel
def is_of(seg, at, namespace, depth, low, high):
    """Whether it is a snapshot of exactly this prefix that lookups find, or would if it were not being spilled."""
    record = seg.snapshots
    if record["token_count"][at] != depth or record["prefix_hash"][at][0] != low:
        return False
    if record["prefix_hash"][at][1] != high or not is_current(seg, at) or not is_in(seg, at, namespace):
        return False
    return is_committed(seg, at) or not is_resident(seg, at)


@kernel
def find(seg, namespace, depth, low, high):
    """That snapshot, or 0."""
    for at in range(1, snapshots_used(seg)):
        if is_of(seg, at, namespace, depth, low, high):
            return at
    return 0


# --- slots --------------------------------------------------------------------------------------------------------


@kernel
def holder_of(seg, slot):
    """The live resident snapshot that has the slot, pending or displaced ones too, or 0."""
    for at in range(1, snapshots_used(seg)):
        if seg.snapshots["born"][at] != 0 and seg.snapshots["slot"][at] == slot and is_resident(seg, at):
            return at
    return 0


@kernel
def may_use(seg, slot):
    """Whether the caller may put the slot into the index: it is not there, and is this worker's where we manage it."""
    if len(seg.slots) > 0 and slot >= len(seg.slots):
        return False
    if len(seg.slots) > 0 and not is_mine(seg, seg.slots["worker"][slot], seg.slots["generation"][slot]):
        return False
    return holder_of(seg, slot) == 0


@kernel
def free_slot(seg, marks):
    """The lowest free slot, -1 if there is none. `marks` is int64, scratch, at least as long as the slots."""
    marks[:] = 0
    for at in range(1, snapshots_used(seg)):
        slot = np.int64(seg.snapshots["slot"][at])
        if seg.snapshots["born"][at] != 0 and is_resident(seg, at) and slot < len(seg.slots):
            marks[slot] = 1
    for slot in range(len(seg.slots)):
        if seg.slots["worker"][slot] == 0 and not marks[slot]:
            return np.int64(slot)
    return np.int64(-1)


@kernel
def own(seg, slot):
    """Make the slot, which is nobody's, this worker's; nothing where slots are the callers' own business."""
    if slot < len(seg.slots):
        seg.slots["generation"][slot] = seg.workers["generation"][seg.private[SLOT]]
        store_release(seg.slot_words, np.int64(slot) * SLOT_WORDS + _WORKER, seg.private[SLOT] + 1)


@kernel
def disown(seg, slot):
    """The slot is not this worker's any more: it is free, or in the index."""
    if slot < len(seg.slots):
        store_release(seg.slot_words, np.int64(slot) * SLOT_WORDS + _WORKER, 0)


@kernel
def take_slot(seg, slot):
    """Make a slot that has just left the index this worker's. False, and a fault is noted, if it is another's, too."""
    is_there = len(seg.slots) == 0 or (slot < len(seg.slots) and seg.slots["worker"][slot] == 0)
    if not is_there or holder_of(seg, slot) != 0:
        seg.private[FAULT] = 1
        return False
    own(seg, slot)
    return True


@kernel
def set_flags(seg, at, flags):
    """Change a live snapshot's flags, after all that was stored before."""
    word = np.int64(flags) << 32 | np.int64(seg.snapshots["token_count"][at])
    store_release(seg.snapshot_words, at * SNAPSHOT_WORDS + _FLAGS, word)


# --- coming and going ---------------------------------------------------------------------------------------------


@kernel
def _bequeath(seg, at, parent, parent_born):
    """What continues the snapshot continues `parent` now."""
    record = seg.snapshots
    born = record["born"][at]
    for child in range(1, snapshots_used(seg)):
        if record["parent"][child] == at and record["parent_born"][child] == born:
            record["parent_born"][child] = 0
            record["parent"][child] = parent
            record["parent_born"][child] = parent_born


@kernel
def remove(seg, at):
    """Take the snapshot out; what descends from it descends from its parent now."""
    _bequeath(seg, at, seg.snapshots["parent"][at], seg.snapshots["parent_born"][at])
    store_release(seg.snapshot_words, at * SNAPSHOT_WORDS, 0)


@kernel
def displace(seg, at, out, counts):
    """Take the snapshot out and its slot for the caller; if a match has it, hide it: it goes once it is let go."""
    if is_pinned(seg, at):
        _bequeath(seg, at, seg.snapshots["parent"][at], seg.snapshots["parent_born"][at])
        set_flags(seg, at, seg.snapshots["flags"][at] | np.uint32(HIDDEN))
        return
    slot, had_slot = seg.snapshots["slot"][at], is_resident(seg, at)
    remove(seg, at)
    if had_slot and take_slot(seg, slot):
        out[counts[0]] = slot
        counts[0] += 1


@kernel
def _free_record(seg):
    """A record to use, if need be that of the tiered snapshot that was not used for longest; 0 if there is none."""
    record, coldest = seg.snapshots, 0
    mark = snapshots_used(seg)
    for at in range(1, mark):
        if record["born"][at] == 0:
            return at
        is_idle = not is_resident(seg, at) and not (record["flags"][at] & PENDING and is_current(seg, at))
        if is_idle and (coldest == 0 or record["last_use"][at] < record["last_use"][coldest]):
            coldest = at
    if mark < len(record):
        seg.state["snapshots_used"][0] = mark + 1
        return mark
    if coldest != 0:
        remove(seg, coldest)
    return coldest


@kernel
def register(seg, namespace, depth, check, low, high, slot, session, kind, epoch):
    """Make a pending snapshot. Returns (status, where it is)."""
    now = seg.tree["epoch"][0]  # once: a clear() may come in between, whose guard is another
    if not may_use(seg, slot):
        return SLOT_NOT_HELD, 0
    if epoch >= 0 and epoch != now:
        return STALE, 0
    at = _free_record(seg)
    if at == 0:
        return SNAPSHOTS_FULL, 0
    record = seg.snapshots
    record["epoch"][at] = now
    record["adapter_id"][at] = namespace[0]
    for i in range(4):
        record["salt"][at][i] = namespace[1 + i]
    record["session"][at] = session
    record["token_count"][at] = depth
    record["flags"][at] = kind | PENDING
    record["check"][at] = check
    record["slot"][at] = slot
    record["tier_key"][at] = 0
    record["prefix_hash"][at][0] = low
    record["prefix_hash"][at][1] = high
    record["generation"][at] = seg.workers["generation"][seg.private[SLOT]]
    record["worker"][at] = seg.private[SLOT] + 1
    record["parent"][at] = 0
    record["parent_born"][at] = 0
    born = tick(seg)
    record["last_use"][at] = born
    store_release(seg.snapshot_words, at * SNAPSHOT_WORDS, born)
    return OK, at


@kernel
def is_pending_of_mine(seg, at, born):
    """Whether it is the pending snapshot born then, and this worker's."""
    record = seg.snapshots
    is_it = 0 < at < len(record) and born != 0 and record["born"][at] == born
    return is_it and record["flags"][at] & PENDING and is_mine(seg, record["worker"][at], record["generation"][at])


@kernel
def _sweep(seg, at, out, counts):
    """Displace what the session's new tail, or its new sibling, takes the place of."""
    record = seg.snapshots
    kinds = TAIL | SIBLING if record["flags"][at] & TAIL else SIBLING
    if record["session"][at] == np.uint64(0) or not record["flags"][at] & kinds:
        return
    for other in range(1, snapshots_used(seg)):
        if other == at or record["session"][other] != record["session"][at] or not record["flags"][other] & kinds:
            continue
        is_there = is_committed(seg, other) or (is_current(seg, other) and not is_resident(seg, other))
        if is_there and same_namespace(seg, at, other) and counts[0] < len(out):
            displace(seg, other, out, counts)


@kernel
def same_namespace(seg, at, other):
    """Whether two snapshots are of one namespace."""
    record = seg.snapshots
    if record["adapter_id"][at] != record["adapter_id"][other]:
        return False
    for i in range(4):
        if record["salt"][at][i] != record["salt"][other][i]:
            return False
    return True


@kernel
def commit(seg, at, namespace, out, counts):
    """Let lookups find the pending snapshot, in the place of what it supersedes; their slots go to `out`."""
    record = seg.snapshots
    if record["epoch"][at] != seg.tree["epoch"][0]:
        remove(seg, at)
        return STALE
    _sweep(seg, at, out, counts)
    same = find(seg, namespace, record["token_count"][at], record["prefix_hash"][at][0], record["prefix_hash"][at][1])
    if same != 0 and counts[0] < len(out):
        _bequeath(seg, same, at, record["born"][at])
        record["flags"][at] |= record["flags"][same] & np.uint32(BRANCH)
        if not record["flags"][same] & LEAF:
            record["flags"][at] &= _NOT_LEAF
        displace(seg, same, out, counts)
    record["last_use"][at] = tick(seg)
    disown(seg, record["slot"][at])
    set_flags(seg, at, record["flags"][at] & _NOT_PENDING)
    count(seg, SAVES, 1)
    return OK


@kernel
def abort(seg, at):
    """Forget a pending snapshot; the slot stays this worker's."""
    store_release(seg.snapshot_words, at * SNAPSHOT_WORDS, 0)


# --- pins ---------------------------------------------------------------------------------------------------------


@kernel
def free_pin(seg):
    """A pin that nobody has, 0 if there is none left."""
    mark = pins_used(seg)
    for at in range(1, mark):
        if seg.pins["born"][at] == 0:
            return at
    return mark if mark < len(seg.pins) else 0


@kernel
def pin(seg, at):
    """Keep the snapshot's slot as it is. Returns the pin, 0 if there is none left, and its birth."""
    pins, free = seg.pins, free_pin(seg)
    if free == 0:
        return 0, np.int64(0)
    seg.state["pins_used"][0] = max(free + 1, pins_used(seg))
    pins["generation"][free] = seg.workers["generation"][seg.private[SLOT]]
    pins["worker"][free] = seg.private[SLOT] + 1
    pins["snapshot"][free] = at
    pins["snapshot_born"][free] = seg.snapshots["born"][at]
    born = tick(seg)
    store_release(seg.pin_words, free * PIN_WORDS, born)
    return free, born


@kernel
def unpin(seg, at, born):
    """Let a snapshot go. NOT_HELD if the pin is not the one born then, or not this worker's."""
    pins = seg.pins
    if not 0 < at < len(pins) or born == 0 or pins["born"][at] != born:
        return NOT_HELD
    if not is_mine(seg, pins["worker"][at], pins["generation"][at]):
        return NOT_HELD
    store_release(seg.pin_words, at * PIN_WORDS, 0)
    return OK


@kernel
def bury(seg, slot, generation):
    """Free the pins, pending snapshots and slots of the worker slot's holders up to this generation."""
    pins, record, slots = seg.pins, seg.snapshots, seg.slots
    for i in range(1, pins_used(seg)):
        if np.int64(pins["worker"][i]) == slot + 1 and pins["generation"][i] <= generation:
            store_release(seg.pin_words, i * PIN_WORDS, 0)
    for at in range(1, snapshots_used(seg)):
        is_theirs = np.int64(record["worker"][at]) == slot + 1 and record["generation"][at] <= generation
        if is_theirs and record["flags"][at] & PENDING:
            remove(seg, at)
    for i in range(len(slots)):
        if np.int64(slots["worker"][i]) == slot + 1 and slots["generation"][i] <= generation:
            disown(seg, i)


# --- sessions -----------------------------------------------------------------------------------------------------


@kernel
def _session_record(seg, session):
    """(whether it is there, the session's record, or the one to use for it: an unused one, or of the longest ago)."""
    mask = np.uint64(len(seg.sessions) - 1)
    first, oldest = mix(session) & mask, np.uint64(0)
    for i in range(_PROBES):
        at = (first + np.uint64(i)) & mask
        if seg.sessions["session"][at] == session or seg.sessions["session"][at] == np.uint64(0):
            return seg.sessions["session"][at] == session, at
        if i == 0 or seg.sessions["evictions"][at] < seg.sessions["evictions"][oldest]:
            oldest = at
    return False, oldest


@kernel
def see(seg, session):
    """Note that the session looked something up: its tail lease starts again."""
    if session != np.uint64(0):
        _, at = _session_record(seg, session)
        seg.sessions["session"][at] = session
        seg.sessions["evictions"][at] = seg.state["evictions"][0]


@kernel
def is_tail_leased(seg, at):
    """Whether it is a tail or sibling whose session looked something up less than `tail_lease` evictions ago."""
    record = seg.snapshots
    if not record["flags"][at] & (TAIL | SIBLING) or record["session"][at] == np.uint64(0):
        return False
    known, session = _session_record(seg, record["session"][at])
    return known and seg.state["evictions"][0] - seg.sessions["evictions"][session] < seg.tail_lease


# --- tiers --------------------------------------------------------------------------------------------------------


@kernel
def find_tiered(seg, key):
    """The spilled snapshot with this key, also one whose spill this worker has not committed yet, or 0."""
    record = seg.snapshots
    for at in range(1, snapshots_used(seg)):
        if key == _RESIDENT or record["tier_key"][at] != key or not is_current(seg, at):
            continue
        if is_committed(seg, at) or is_mine(seg, record["worker"][at], record["generation"][at]):
            return at
    return 0


@kernel
def spill(seg, at, pending, out, counts):
    """Make the snapshot tiered and its slot, which goes to `out`, this worker's. Returns its key."""
    record, slot = seg.snapshots, seg.snapshots["slot"][at]
    key = np.uint64(tick(seg)) + seg.incarnation
    if key == _RESIDENT:
        key = np.uint64(tick(seg)) + seg.incarnation
    if pending:
        record["generation"][at] = seg.workers["generation"][seg.private[SLOT]]
        record["worker"][at] = seg.private[SLOT] + 1
        set_flags(seg, at, record["flags"][at] | np.uint32(PENDING))
    store_release(seg.snapshot_words, at * SNAPSHOT_WORDS + _TIER_KEY, np.int64(key))
    if take_slot(seg, slot):
        out[counts[0]] = slot
        counts[0] += 1
    return key


@kernel
def commit_spill(seg, key):
    """The spilled state is in the tier: let lookups find it."""
    at = find_tiered(seg, key)
    if at == 0:
        return NOT_FOUND
    set_flags(seg, at, seg.snapshots["flags"][at] & _NOT_PENDING)
    return OK


@kernel
def promote(seg, key, slot):
    """The spilled snapshot is resident again, in this slot. Returns (status, where it is)."""
    at = find_tiered(seg, key)
    if at == 0 or seg.snapshots["flags"][at] & PENDING:
        return NOT_FOUND, 0
    if not may_use(seg, slot):
        return SLOT_NOT_HELD, 0
    seg.snapshots["slot"][at] = slot
    disown(seg, slot)
    store_release(seg.snapshot_words, at * SNAPSHOT_WORDS + _TIER_KEY, 0)
    count(seg, FAULT_INS, 1)
    return OK, at


@kernel
def forget(seg, key):
    """Take out the spilled snapshot with this key."""
    at = find_tiered(seg, key)
    if at == 0:
        return NOT_FOUND
    remove(seg, at)
    count(seg, REAPS, 1)
    return OK
