"""The compiled entry points of claims; see `entries.py` for what they have in common."""

import numpy as np
from numba.types import Array, UniTuple, int64, uint32, uint64

from shmradix import claims, sections, tree
from shmradix.compile import entry
from shmradix.status import BUSY, STALE
from shmradix.views import open_views

_ids = Array(uint32, 1, "C", readonly=True)
_keys = Array(uint64, 1, "C", readonly=True)
_rows = Array(uint32, 2, "C")


@entry(UniTuple(int64, 7)(int64, int64, int64, _keys, _ids, _keys, int64, uint64, uint64, _rows))
def take(handle, tag, now, namespace, tokens, block_keys, depth, low, high, out):
    """(status, wake, claim, its birth, its owner's slot and generation, when it was taken); see claims.take.

    It is for the block behind the first `depth` ones; STALE: other than so many of the prompt's are in the tree.
    """
    seg = open_views(handle)
    if not sections.begin(seg, tag, now):
        return BUSY, 0, 0, 0, 0, 0, 0
    status, claim, born = np.int64(STALE), 0, np.int64(0)
    if tree.peek(seg, namespace, tokens, block_keys, out) == depth:
        status, claim, born = claims.take(seg, now, namespace, low, high, (depth + 1) * seg.block_size)
    slot, generation = np.int64(seg.claims["worker"][claim]) - 1, seg.claims["generation"][claim]
    taken = seg.claims["taken_ns"][claim]
    status, wake = sections.end(seg, status)
    return status, wake, np.int64(claim), born, slot, generation, taken


@entry(UniTuple(int64, 3)(int64, int64, int64, int64, int64, uint64, uint64, int64))
def advance(handle, tag, now, claim, born, low, high, tokens):
    """(status, wake, how many may wait for it); see claims.advance."""
    seg = open_views(handle)
    if not sections.begin(seg, tag, now):
        return BUSY, 0, 0
    status, waiters = claims.advance(seg, claim, born, low, high, tokens)
    status, wake = sections.end(seg, status)
    return status, wake, waiters


@entry(UniTuple(int64, 3)(int64, int64, int64, int64, int64))
def drop(handle, tag, now, claim, born):
    """(status, wake, how many may wait for it); see claims.drop."""
    seg = open_views(handle)
    if not sections.begin(seg, tag, now):
        return BUSY, 0, 0
    status, waiters = claims.drop(seg, claim, born)
    status, wake = sections.end(seg, status)
    return status, wake, waiters
