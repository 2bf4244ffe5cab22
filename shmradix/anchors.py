"""Where a prompt can resume: the snapshots of its prefixes.

Looking for them needs no guard. What is found is a depth, from a check of a few tokens; whether there is a snapshot of
exactly this prefix is asked again, under the guard, with the prefix's hash.
"""

import numpy as np

from shmradix.compile import inlined, kernel
from shmradix.hashing import mix
from shmradix.layout import COUNTERS, PENDING
from shmradix.snapshots import (
    count,
    is_committed,
    is_current,
    is_in,
    is_of,
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
_SAMPLES = np.uint64(16)
_FACTORS = np.uint64(0x9E37_79B9_7F4A_7C15), np.uint64(0xC2B2_AE3D_27D4_EB4F), np.uint64(0xFF51_AFD7_ED55_8CCD)
_HALF, _HIGH, _LOW = np.uint64(16), np.uint64(48), np.uint64(0xFFFF)
_ONE, _TWO = np.uint64(1), np.uint64(2)


@inlined
def last_tokens_check(tokens, depth):
    """16 bits of the last two of the first `depth` tokens, and of `depth`, a uint64."""
    x = np.uint64(tokens[depth - _ONE]) * _FACTORS[0] + depth * _FACTORS[1]
    if depth > _ONE:
        x += np.uint64(tokens[depth - _TWO]) * _FACTORS[2]
    return x >> _HIGH


@kernel
def check_of(tokens, depth):
    """32 bits of some of the first `depth` tokens: the low half of the last ones, the high half of a sample of all."""
    x = depth
    for i in range(_SAMPLES):
        x = (x ^ np.uint64(tokens[depth * np.uint64(i) // _SAMPLES])) * _FACTORS[0]
    return np.uint32((mix(x) & _LOW) << _HALF | last_tokens_check(tokens, depth))


@inlined
def _seems_prefix(seg, at, depth, namespace, tokens):
    """Whether the snapshot, of `depth` tokens, may be of a prefix of `tokens`. What rules most of them out is first."""
    if not 0 < depth <= len(tokens):
        return False
    check = seg.snapshots["check"][at]
    if np.uint64(check) & _LOW != last_tokens_check(tokens, depth):
        return False
    return is_current(seg, at) and is_in(seg, at, namespace) and check == check_of(tokens, depth)


@kernel
def deepest(seg, namespace, tokens, limit, session, hermetic):
    """The deepest snapshot within `limit` that may be of a prefix: (its depth, 0 if none; it; why none is deeper)."""
    record, best, found, reason = seg.snapshots, np.uint64(0), np.uint64(0), NONE
    end = np.uint64(snapshots_used(seg))
    for i in range(_ONE, end):
        at = end - np.uint64(i)  # as a rule the youngest first
        depth = np.uint64(record["token_count"][at])
        if depth <= best or not _seems_prefix(seg, at, depth, namespace, tokens):
            continue
        if record["flags"][at] & PENDING:
            reason = IS_PENDING
        elif not is_open_to(seg, at, session, hermetic):
            reason = max(reason, ANOTHER_SESSION)
        elif depth > limit:
            reason = max(reason, TOO_DEEP)
        else:
            best, found = depth, at
    return best, found, reason


@kernel
def all_within(seg, namespace, tokens, limit, session, hermetic, out):
    """All snapshots within `limit` that may be of a prefix, in no order: rows of `out` begin with (depth, snapshot).

    Returns how many there are.
    """
    record, count_ = seg.snapshots, 0
    for i in range(_ONE, np.uint64(snapshots_used(seg))):
        at = np.uint64(i)
        depth = np.uint64(record["token_count"][at])  # read once: a record may change while this looks at it
        if depth > limit or not is_committed(seg, at) or count_ == len(out):
            continue
        if is_open_to(seg, at, session, hermetic) and _seems_prefix(seg, at, depth, namespace, tokens):
            out[count_, 0], out[count_, 1] = depth, at
            count_ += 1
    return count_


@kernel
def is_there(seg, namespace, depth, at, low, high):
    """Whether lookups may find this snapshot, at this depth, and it is of exactly the prefix with this hash."""
    return 0 < at < len(seg.snapshots) and is_of(seg, at, namespace, depth, low, high) and is_committed(seg, at)


@kernel
def is_candidate_there(seg, namespace, candidate):
    """The same for a candidate as uint64[4]: the depth, the snapshot, the low and the high half of the hash."""
    return is_there(seg, namespace, candidate[0], np.int64(candidate[1]), candidate[2], candidate[3])


@kernel
def parent_of(seg, namespace, candidates):
    """The first of the candidates that is there, or 0. Under the guard."""
    for k in range(len(candidates)):
        if is_candidate_there(seg, namespace, candidates[k]):
            return np.int64(candidates[k, 1])
    return np.int64(0)


@kernel
def take(seg, namespace, depth, at, low, high, limit, session, hermetic, epoch):
    """Pin the snapshot, if it is there, and count the lookup. Under the guard.

    It is of the match's `epoch`: else a clear() came in between, and the state would not belong to the blocks.
    Returns (status, pin, its birth).
    """
    see(seg, session)
    record = seg.snapshots
    nothing = held = born = np.int64(0)
    if not is_there(seg, namespace, depth, at, low, high) or not is_open_to(seg, at, session, hermetic):
        return NOT_FOUND, nothing, nothing
    if record["epoch"][at] != epoch:
        return NOT_FOUND, nothing, nothing
    if is_resident(seg, at) and 0 < len(seg.slots) <= record["slot"][at]:
        seg.private[FAULT] = 1
        return NOT_FOUND, nothing, nothing
    if is_resident(seg, at):
        held, born = pin(seg, at)
        if held == 0:
            return LEASES_FULL, nothing, nothing
    else:
        count(seg, TIER_HITS, 1)
    record["last_use"][at] = tick(seg)
    count(seg, LOOKUPS, 1)
    count(seg, HITS, 1)
    count(seg, HIT_TOKENS, depth)
    count(seg, ON_HIT, limit - depth)
    return OK, held, born


@kernel
def miss(seg, limit, session, reason):
    """Count a lookup that found no snapshot, and why. Under the guard."""
    see(seg, session)
    count(seg, LOOKUPS, 1)
    count(seg, ON_MISS, limit)
    count(seg, NO_SNAPSHOT + reason, 1)
