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
_SAMPLES = 16
_FACTORS = np.uint64(0x9E37_79B9_7F4A_7C15), np.uint64(0xC2B2_AE3D_27D4_EB4F), np.uint64(0xFF51_AFD7_ED55_8CCD)
_HALF, _HIGH, _LOW = np.uint64(16), np.uint64(48), np.uint64(0xFFFF)


@kernel
def last_tokens_check(tokens, depth):
    """16 bits of the last two of the first `depth` tokens, and of `depth`."""
    x = np.uint64(tokens[depth - 1]) * _FACTORS[0] + np.uint64(depth) * _FACTORS[1]
    if depth > 1:
        x += np.uint64(tokens[depth - 2]) * _FACTORS[2]
    return np.uint32(x >> _HIGH)


@kernel
def check_of(tokens, depth):
    """32 bits of some of the first `depth` tokens: the low half of the last ones, the high half of a sample of all."""
    x = np.uint64(depth)
    for i in range(_SAMPLES):
        x = (x ^ np.uint64(tokens[(depth * i) // _SAMPLES])) * _FACTORS[0]
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
    """The deepest snapshot within `limit` that may be of a prefix: (its depth, 0 if none; it; why none is deeper)."""
    record, best, found, reason = seg.snapshots, np.int64(0), 0, NONE
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
            best, found = depth, at
    return best, found, reason


@kernel
def all_within(seg, namespace, tokens, limit, session, hermetic, out):
    """All snapshots within `limit` that may be of a prefix, as (depth, snapshot) in no order; how many there are."""
    record, count_ = seg.snapshots, 0
    for at in range(1, snapshots_used(seg)):
        depth = np.int64(record["token_count"][at])  # read once: a record may change while this looks at it
        if depth > limit or not is_committed(seg, at) or count_ == len(out):
            continue
        if is_open_to(seg, at, session, hermetic) and _seems_prefix(seg, at, namespace, tokens):
            out[count_, 0], out[count_, 1] = depth, at
            count_ += 1
    return count_


@kernel
def is_there(seg, namespace, candidate, hash_):
    """Whether lookups may find this snapshot, at this depth, and it is of exactly the prefix with this hash."""
    depth, at = candidate[0], candidate[1]
    if not 0 < at < len(seg.snapshots) or not is_of(seg, at, namespace, depth, hash_[0], hash_[1]):
        return False
    return is_committed(seg, at)


@kernel
def parent_of(seg, namespace, candidates, hashes):
    """The first of the candidates that is there, or 0. Under the guard."""
    for k in range(len(candidates)):
        if is_there(seg, namespace, candidates[k], hashes[k]):
            return candidates[k, 1]
    return np.int64(0)


@kernel
def take(seg, namespace, candidates, hashes, limit, session, hermetic, epoch, reason):
    """Pin the first of the candidates that is there, deepest first, and count the lookup. Under the guard.

    It is of the match's `epoch`: else a clear() came in between, and the state would not belong to the blocks.
    Returns (status, depth, snapshot, pin, its birth). `reason` says why there may be none; if it is negative, not
    finding any is not the last word and counts for nothing.
    """
    see(seg, session)
    for k in range(len(candidates)):
        depth, at = candidates[k, 0], candidates[k, 1]
        if not is_there(seg, namespace, candidates[k], hashes[k]) or not is_open_to(seg, at, session, hermetic):
            continue
        if seg.snapshots["epoch"][at] != epoch:
            continue
        held, born = 0, np.int64(0)
        if is_resident(seg, at) and 0 < len(seg.slots) <= seg.snapshots["slot"][at]:
            seg.private[FAULT] = 1
            continue
        if is_resident(seg, at):
            held, born = pin(seg, at)
            if held == 0:
                return LEASES_FULL, np.int64(0), np.int64(0), 0, np.int64(0)
        else:
            count(seg, TIER_HITS, 1)
        seg.snapshots["last_use"][at] = tick(seg)
        count(seg, LOOKUPS, 1)
        count(seg, HITS, 1)
        count(seg, HIT_TOKENS, depth)
        count(seg, ON_HIT, limit - depth)
        return OK, depth, at, held, born
    if reason >= 0:
        count(seg, LOOKUPS, 1)
        count(seg, ON_MISS, limit)
        count(seg, NO_SNAPSHOT + reason, 1)
    return NOT_FOUND, np.int64(0), np.int64(0), 0, np.int64(0)
