"""Where a prompt can resume: the snapshots of its prefixes.

Looking for them needs no guard. What is found is a depth, from a check of a few tokens; whether there is a snapshot of
exactly this prefix is asked again, under the guard, with the prefix's hash.
"""

import numpy as np

from shmradix.compile import kernel
from shmradix.hashing import mix
from shmradix.layout import COUNTERS, PENDING
from shmradix.snapshots import (
    count,
    find,
    is_committed,
    is_current,
    is_in,
    is_open_to,
    is_resident,
    pin,
    see,
    snapshots_used,
    tick,
)
from shmradix.status import LEASES_FULL, NOT_FOUND, OK
from shmradix.views import FAULT

NONE, TOO_DEEP, ANOTHER_SESSION, IS_PENDING = range(4)  # why there is no snapshot, the last word first

LOOKUPS, HITS, HIT_TOKENS, ON_HIT, ON_MISS, TIER_HITS, NO_SNAPSHOT = (
    COUNTERS.index(name)
    for name in (
        "snapshot_lookups",
        "snapshot_hits",
        "snapshot_hit_tokens",
        "recompute_tokens_on_hit",
        "recompute_tokens_on_miss",
        "tier_hits",
        "no_snapshot",
    )
)
_LAST_TOKENS, _SAMPLES = 4, 16
_FACTOR = np.uint64(0x9E37_79B9_7F4A_7C15)
_HALF, _LOW = np.uint64(16), np.uint64(0xFFFF)


@kernel
def last_tokens_check(tokens, depth):
    """16 bits of the last few of the first `depth` tokens."""
    x = np.uint64(depth)
    for i in range(max(0, depth - _LAST_TOKENS), depth):
        x = mix(x ^ np.uint64(tokens[i])) * _FACTOR
    return np.uint32(mix(x) & _LOW)


@kernel
def check_of(tokens, depth):
    """32 bits of some of the first `depth` tokens: the low half of the last ones, the high half of a sample of all."""
    x = np.uint64(depth)
    for i in range(_SAMPLES):
        x = (x ^ np.uint64(tokens[(depth * i) // _SAMPLES])) * _FACTOR
    return np.uint32((mix(x) & _LOW) << _HALF | np.uint64(last_tokens_check(tokens, depth)))


@kernel
def _seems_prefix(seg, at, namespace, tokens):
    """Whether the snapshot may be of a prefix of `tokens`."""
    record, depth = seg.snapshots, np.int64(seg.snapshots["token_count"][at])
    if not is_current(seg, at) or record["adapter_id"][at] != namespace[0] or not 0 < depth <= len(tokens):
        return False
    check = record["check"][at]
    if np.uint32(check & 0xFFFF) != last_tokens_check(tokens, depth):
        return False
    return is_in(seg, at, namespace) and check == check_of(tokens, depth)


@kernel
def deepest(seg, namespace, tokens, limit, session, hermetic):
    """The depth of the deepest snapshot within `limit` that may be a prefix's, or 0, and why there is no deeper one."""
    record, best, reason = seg.snapshots, np.int64(0), NONE
    for at in range(snapshots_used(seg) - 1, 0, -1):
        depth = np.int64(record["token_count"][at])
        if depth <= best or not _seems_prefix(seg, at, namespace, tokens):
            continue
        if record["flags"][at] & PENDING:
            reason = IS_PENDING
        elif not is_open_to(seg, at, session, hermetic):
            reason = max(reason, ANOTHER_SESSION)
        elif depth > limit:
            reason = max(reason, TOO_DEEP)
        else:
            best = depth
    return best, reason


@kernel
def depths(seg, namespace, tokens, limit, session, hermetic, out):
    """All depths within `limit` of snapshots that may be a prefix's, in no order; how many `out` has now."""
    record, found = seg.snapshots, 0
    for at in range(1, snapshots_used(seg)):
        if np.int64(record["token_count"][at]) > limit or not is_committed(seg, at):
            continue
        if found < len(out) and is_open_to(seg, at, session, hermetic) and _seems_prefix(seg, at, namespace, tokens):
            out[found] = record["token_count"][at]
            found += 1
    return found


@kernel
def deepest_of(seg, namespace, depths, hashes):
    """(the first of these prefixes of which there is a snapshot, that snapshot, 0 if none); under the guard."""
    for k in range(len(depths)):
        at = find(seg, namespace, depths[k], hashes[k, 0], hashes[k, 1])
        if at != 0 and is_committed(seg, at):
            return k, at
    return 0, 0


@kernel
def take(seg, namespace, depths, hashes, limit, session, hermetic, reason):
    """Pin the first snapshot of these prefixes, deepest first, and count the lookup. Under the guard.

    Returns (status, depth, snapshot, pin, its birth). `reason` says why there may be none; if it is negative, not
    finding any is not the last word and counts for nothing.
    """
    see(seg, session)
    for k in range(len(depths)):
        at = find(seg, namespace, depths[k], hashes[k, 0], hashes[k, 1])
        if at == 0 or not is_committed(seg, at) or not is_open_to(seg, at, session, hermetic):
            continue
        held, born = 0, np.int64(0)
        if is_resident(seg, at) and 0 < len(seg.slots) <= seg.snapshots["slot"][at]:
            seg.private[FAULT] = 1
            continue
        if is_resident(seg, at):
            held, born = pin(seg, at)
            if held == 0:
                return LEASES_FULL, np.int64(0), 0, 0, np.int64(0)
        else:
            count(seg, TIER_HITS, 1)
        seg.snapshots["last_use"][at] = tick(seg)
        count(seg, LOOKUPS, 1)
        count(seg, HITS, 1)
        count(seg, HIT_TOKENS, depths[k])
        count(seg, ON_HIT, limit - depths[k])
        return OK, depths[k], at, held, born
    if reason >= 0:
        count(seg, LOOKUPS, 1)
        count(seg, ON_MISS, limit)
        count(seg, NO_SNAPSHOT + reason, 1)
    return NOT_FOUND, np.int64(0), 0, 0, np.int64(0)
