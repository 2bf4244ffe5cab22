"""Which snapshot goes when a slot is needed: two policies, one of them chosen at creation.

*session*: the snapshots of the session that was used least recently go first, among them the one with the smallest
`recency + alpha * depth`, both scaled to 0..1 over all that may go. A session's tail and sibling are leased: they stay
while anything else may go, for `tail_lease` evictions since that session last looked something up.

*chain*: every snapshot belongs to the conversation of its deepest ancestor, the snapshot of a prefix of its tokens.
What one snapshot continues is history and goes first, then finish leaves, then, least recently used first, what
nothing continues and what several continue. A finish leaf continues nothing until something continues it: the next
prompt often has the answer in other tokens, and resumes from before it. No session is needed.

Before all of them go those that were displaced or hidden by a clear() while a match had them.
"""

import numpy as np

from shmradix.compile import kernel
from shmradix.hashing import mix
from shmradix.layout import BRANCH, LEAF, PENDING, SIBLING, TAIL
from shmradix.snapshots import (
    is_committed,
    is_current,
    is_resident,
    is_tail_leased,
    pins_used,
    same_namespace,
    snapshots_used,
)

HIDDEN_CLASS, HISTORY, FINISH, FRONTIER = range(4)


@kernel
def mark_pinned(seg, marks):
    """Set marks[at] to 1 for every snapshot that a match has, to 0 for the others; `marks` is int64[snapshots]."""
    marks[:] = 0
    for pin in range(1, pins_used(seg)):
        at = np.int64(seg.pins["snapshot"][pin])
        is_live = seg.pins["born"][pin] != 0 and at < len(seg.snapshots)
        if is_live and seg.snapshots["born"][at] == seg.pins["snapshot_born"][pin]:
            marks[at] = 1


@kernel
def oldest_hidden(seg, marks):
    """The displaced or cleared snapshot that was used longest ago and that no match has any more, or 0."""
    record, found = seg.snapshots, 0
    for at in range(1, snapshots_used(seg)):
        if record["born"][at] == 0 or is_current(seg, at) or record["flags"][at] & PENDING or marks[at]:
            continue
        if is_resident(seg, at) and (found == 0 or record["last_use"][at] < record["last_use"][found]):
            found = at
    return found


@kernel
def _may_go(seg, at, marks):
    return is_committed(seg, at) and is_resident(seg, at) and not marks[at]


@kernel
def _place_of(sessions, session):
    """Where the session is in this table of a power of two entries, or is to be entered."""
    mask = np.uint64(len(sessions) - 1)
    at = mix(session) & mask
    while sessions[at, 0] >= 0 and sessions[at, 1] != np.int64(session):
        at = (at + np.uint64(1)) & mask
    return at


@kernel
def _scaled(value, low, high):
    return (value - low) / (high - low) if high > low else 0.0


@kernel
def victim_by_session(seg, marks, sessions):
    """The snapshot that goes first by the session policy, or 0.

    `marks` as from mark_pinned; `sessions` is int64[n, 2], n a power of two of at least twice the snapshots: scratch
    for each session's freshness, its latest use, negative where there is none, and its name.
    """
    record, mark = seg.snapshots, snapshots_used(seg)
    sessions[:] = -1
    candidates, all_leased = 0, True
    low_use = high_use = low_depth = high_depth = np.int64(0)
    for at in range(1, mark):
        if not _may_go(seg, at, marks):
            continue
        use, depth = record["last_use"][at], np.int64(record["token_count"][at])
        place = _place_of(sessions, record["session"][at])
        sessions[place, 0] = max(sessions[place, 0], use)
        sessions[place, 1] = np.int64(record["session"][at])
        if candidates == 0:
            low_use, high_use, low_depth, high_depth = use, use, depth, depth
        low_use, high_use = min(low_use, use), max(high_use, use)
        low_depth, high_depth = min(low_depth, depth), max(high_depth, depth)
        candidates += 1
        all_leased &= is_tail_leased(seg, at)
    best, best_freshness, best_score = 0, np.int64(0), 0.0
    for at in range(1, mark):
        if not _may_go(seg, at, marks) or (not all_leased and is_tail_leased(seg, at)):
            continue
        freshness = sessions[_place_of(sessions, record["session"][at]), 0]
        recency = _scaled(record["last_use"][at], low_use, high_use)
        score = recency + seg.alpha * _scaled(np.int64(record["token_count"][at]), low_depth, high_depth)
        is_better = freshness < best_freshness or (freshness == best_freshness and score < best_score)
        if best == 0 or is_better:
            best, best_freshness, best_score = at, freshness, score
    return best


@kernel
def _class_of(seg, at, children):
    continuing = children[at, 0] - children[at, 1]
    if continuing == 1 and not seg.snapshots["flags"][at] & BRANCH:
        return HISTORY
    if continuing == 0 and seg.snapshots["flags"][at] & LEAF:
        return FINISH
    return FRONTIER


@kernel
def _has_parent(seg, at):
    record, parent = seg.snapshots, np.int64(seg.snapshots["parent"][at])
    if not is_committed(seg, at) or parent == 0 or parent >= len(record):
        return False
    return record["born"][parent] == record["parent_born"][at]


@kernel
def victim_by_chain(seg, marks, children):
    """(the snapshot that goes first by the chain policy, or 0; its class).

    `children` is int64[n, 2], n more than the snapshots: scratch for how many continue each, and how many of those are
    finish leaves that nothing continues.
    """
    record, mark = seg.snapshots, snapshots_used(seg)
    children[:] = 0
    for at in range(1, mark):
        if _has_parent(seg, at):
            children[np.int64(record["parent"][at]), 0] += 1
    for at in range(1, mark):
        if _has_parent(seg, at) and record["flags"][at] & LEAF and children[at, 0] == 0:
            children[np.int64(record["parent"][at]), 1] += 1
    best, best_class = 0, FRONTIER
    for at in range(1, mark):
        if not _may_go(seg, at, marks):
            continue
        its_class = _class_of(seg, at, children)
        is_older = its_class == best_class and record["last_use"][at] < record["last_use"][best]
        if best == 0 or its_class < best_class or is_older:
            best, best_class = at, its_class
    return best, best_class


@kernel
def victim(seg, marks, sessions):
    """(the snapshot to take the slot of, or 0; its class, FINISH by the session policy). Both arrays are scratch."""
    mark_pinned(seg, marks)
    hidden = oldest_hidden(seg, marks)
    if hidden != 0:
        return hidden, HIDDEN_CLASS
    if seg.retention == 0:
        return victim_by_session(seg, marks, sessions), FINISH
    return victim_by_chain(seg, marks, sessions)


@kernel
def _is_own_tail(seg, at, other):
    """Whether `at` is a sibling, and `other` the tail of its session, which is deeper."""
    record = seg.snapshots
    if not record["flags"][at] & SIBLING or not record["flags"][other] & TAIL:
        return False
    if record["session"][other] != record["session"][at] or not same_namespace(seg, at, other):
        return False
    return record["token_count"][other] > record["token_count"][at]


@kernel
def adopt(seg, at, parent):
    """Let a new snapshot continue `parent`, the deepest there is of a prefix of its tokens, or 0."""
    record = seg.snapshots
    for other in range(1, snapshots_used(seg)):
        continues = record["parent"][other] == parent and record["parent_born"][other] == record["born"][parent]
        if other == at or not continues or not is_committed(seg, other):
            continue
        if _is_own_tail(seg, at, other):  # saved before what it continues
            record["parent_born"][other] = 0
            record["parent"][other] = at
            record["parent_born"][other] = record["born"][at]
        elif parent != 0 and not (record["flags"][at] | record["flags"][other]) & LEAF:
            record["flags"][parent] |= np.uint32(BRANCH)
    record["parent_born"][at] = 0
    record["parent"][at] = parent
    record["parent_born"][at] = record["born"][parent]
