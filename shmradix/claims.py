"""Claims: who computes which block. Each function here is run by one worker that holds the tree guard.

A claim is on the block with which its owner goes on, and on the one it goes on with after its next insert, so that a
prompt which is inserted in parts stays claimed all the time. A block stands for the prompt up to its end: by a hash and
the number of tokens, see `prefix_hash.py`, in a namespace of an epoch. All of it is truth, nothing is derived.
"""

import numpy as np

from shmradix.atomics import store_release
from shmradix.compile import kernel
from shmradix.layout import CLAIM, words_of
from shmradix.status import CLAIMED, CLAIMS_FULL, NOT_HELD, OK
from shmradix.views import FAULT, SLOT

WORDS = words_of(CLAIM)  # of a claim record; its first is `born`


@kernel
def _used(seg):
    """One more than the highest claim index that was ever used."""
    used = np.int64(seg.state["claims_used"][0])
    if 0 < used <= len(seg.claims):
        return used
    seg.private[FAULT] = 1
    return np.int64(1)


@kernel
def _is_in(seg, claim, namespace):
    """Whether the claim is live, and in this namespace as it is since the last clear()."""
    record = seg.claims
    if record["born"][claim] == 0 or record["epoch"][claim] != seg.state["epoch"][0]:
        return False
    if record["adapter_id"][claim] != namespace[0]:
        return False
    for i in range(4):
        if record["salt"][claim][i] != namespace[1 + i]:
            return False
    return True


@kernel
def _is_on(seg, claim, low, high, tokens):
    """Whether the claim is on the block that ends after so many tokens, with this hash."""
    record = seg.claims
    is_now = record["prefix_hash"][claim][0] == low and record["prefix_hash"][claim][1] == high
    is_next = record["next_hash"][claim][0] == low and record["next_hash"][claim][1] == high
    return (is_now and record["token_count"][claim] == tokens) or (is_next and record["next_count"][claim] == tokens)


@kernel
def _has_owner(seg, claim):
    """Whether the claim names a worker there is or was; else the fault is noted."""
    slot = np.int64(seg.claims["worker"][claim]) - 1
    if 0 <= slot < len(seg.workers) and seg.claims["generation"][claim] <= seg.workers["generation"][slot]:
        return True
    seg.private[FAULT] = 1
    return False


@kernel
def _set_next(seg, claim, low, high, tokens):
    record = seg.claims
    record["next_hash"][claim][0] = low
    record["next_hash"][claim][1] = high
    record["next_count"][claim] = tokens


@kernel
def _move_on(seg, claim):
    """The owner goes on with the next block."""
    record = seg.claims
    record["prefix_hash"][claim][0] = record["next_hash"][claim][0]
    record["prefix_hash"][claim][1] = record["next_hash"][claim][1]
    record["token_count"][claim] = record["next_count"][claim]


@kernel
def take(seg, now, namespace, low, high, tokens):
    """Claim a block for this worker. Returns (status, claim, its birth); CLAIMED: it is that of another's claim."""
    state, record = seg.state, seg.claims
    free = 0
    for claim in range(_used(seg) - 1, 0, -1):
        if record["born"][claim] == 0:
            free = claim
        elif _is_in(seg, claim, namespace) and _is_on(seg, claim, low, high, tokens) and _has_owner(seg, claim):
            record["waiters"][claim] += 1
            return CLAIMED, claim, record["born"][claim]
    if free == 0:
        free = _used(seg)
        if free >= len(record):
            return CLAIMS_FULL, 0, np.int64(0)
        state["claims_used"][0] = free + 1
    slot = seg.private[SLOT]
    record["taken_ns"][free] = now
    record["epoch"][free] = state["epoch"][0]
    record["generation"][free] = seg.workers["generation"][slot]
    record["worker"][free] = slot + 1
    record["waiters"][free] = 0
    record["adapter_id"][free] = namespace[0]
    for i in range(4):
        record["salt"][free][i] = namespace[1 + i]
    _set_next(seg, free, low, high, tokens)
    _move_on(seg, free)
    state["clock"][0] += 1
    store_release(seg.claim_words, free * WORDS, state["clock"][0])
    return OK, free, state["clock"][0]


@kernel
def _is_mine(seg, claim, born):
    if not 0 < claim < len(seg.claims) or born == 0 or seg.claims["born"][claim] != born:
        return False
    slot = seg.private[SLOT]
    is_named = np.int64(seg.claims["worker"][claim]) == slot + 1
    return is_named and seg.claims["generation"][claim] == seg.workers["generation"][slot]


@kernel
def advance(seg, claim, born, low, high, tokens):
    """Extend this worker's claim to a further block, and give up the first of those it is on.

    Returns (OK or NOT_HELD, how many may wait for it); those are to be woken, and come again.
    """
    if not _is_mine(seg, claim, born):
        return NOT_HELD, np.int64(0)
    _move_on(seg, claim)
    _set_next(seg, claim, low, high, tokens)
    waiters = np.int64(seg.claims["waiters"][claim])
    seg.claims["waiters"][claim] = 0
    return OK, waiters


@kernel
def drop(seg, claim, born):
    """End this worker's claim. Returns (OK or NOT_HELD, how many may wait for it)."""
    if not _is_mine(seg, claim, born):
        return NOT_HELD, np.int64(0)
    store_release(seg.claim_words, claim * WORDS, 0)
    return OK, np.int64(seg.claims["waiters"][claim])


@kernel
def drop_all_of(seg, slot, generation):
    """End every claim of the slot's holders up to this generation."""
    record = seg.claims
    for claim in range(1, _used(seg)):
        is_theirs = np.int64(record["worker"][claim]) == slot + 1 and record["generation"][claim] <= generation
        if is_theirs and record["born"][claim] != 0:
            store_release(seg.claim_words, claim * WORDS, 0)


@kernel
def rebuild(seg):
    """Put the bounds of the claims right."""
    state = seg.state
    state["claims_used"][0] = min(max(np.int64(state["claims_used"][0]), 1), len(seg.claims))
    for claim in range(1, np.int64(state["claims_used"][0])):
        state["clock"][0] = max(state["clock"][0], seg.claims["born"][claim])
