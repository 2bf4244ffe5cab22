"""From one integer to all arrays of a segment, inside compiled code.

Passing many arrays to a compiled function costs more than the function itself, so entry points take the address of a
small private array, the *handle*, and build the views from it. Addresses and counts come from the geometry that was
checked at attach, never from the segment.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import carray

from shmradix import layout
from shmradix.atomics import as_pointer
from shmradix.compile import inlined, kernel, opener
from shmradix.hash_keys import hash_keys
from shmradix.layout import Geometry

NODE_WORDS, LEASE_WORDS = layout.words_of(layout.NODE), layout.words_of(layout.LEASE)
GUARD_WORDS = len(layout.GUARDS) * layout.words_of(layout.GUARD)
BLOCK_WORDS, CLAIM_WORDS = layout.words_of(layout.BLOCK), layout.words_of(layout.CLAIM)
HANDLE_SIZE = 31  # of a handle without the keys of the block hash, which follow


class Tree(NamedTuple):
    """What the kernels work on: views of the segment, and private scalars of this handle."""

    state: Any
    workers: Any
    namespaces: Any
    leases: Any
    nodes: Any
    tokens: Any
    heap: Any
    buckets: Any
    blocks: Any  # none where the callers manage them
    claims: Any
    guard_words: Any  # the guards, and what follows once more, as int64 words for the atomics
    node_words: Any
    lease_words: Any
    block_words: Any
    claim_words: Any
    hash_keys: Any  # uint64[block_size], each below 2^32
    private: Any  # int64[2]: FAULT and SLOT, below
    block_size: Any
    node_count: Any
    first_block_node: Any  # nodes below are roots
    lease_count: Any
    bucket_mask: Any


FAULT = 0  # in `private`: set to 1 when an index read from the segment pointed nowhere
SLOT = 1  # in `private`: this worker's slot


def make_handle(views: layout.Views, geometry: Geometry) -> np.ndarray:
    """The handle of a mapped segment, int64; its address is what entry points take, so keep it alive."""
    handle = np.zeros(HANDLE_SIZE + geometry.block_size, np.int64)
    arrays = [views.guards, *(getattr(views, name) for name in Tree._fields[:8])]
    handle[2:11] = [array.ctypes.data for array in arrays]
    handle[18:23] = [
        getattr(views, name).ctypes.data for name in ("snapshot_state", "snapshots", "slots", "pins", "sessions")
    ]
    handle[23:27] = [1 + geometry.max_snapshots, geometry.snapshot_slots, geometry.pin_count, geometry.session_count]
    handle[11:18] = [
        geometry.block_size,
        geometry.node_count,
        geometry.max_namespaces,
        geometry.max_leases,
        geometry.max_workers,
        geometry.bucket_count,
        views.header.ctypes.data,
    ]
    handle[27:31] = [
        views.blocks.ctypes.data, views.claims.ctypes.data, geometry.num_blocks, 1 + geometry.max_claims,
    ]  # fmt: skip
    handle[HANDLE_SIZE:] = hash_keys(int(views.header["hash_seed"][0]), geometry.block_size)
    return handle


@opener
def copy_segment(handle, out):
    """Copy the segment behind a handle's address to uint8 `out`."""
    h = carray(as_pointer(handle), (HANDLE_SIZE,), np.int64)
    out[:] = carray(as_pointer(h[17]), (len(out),), np.uint8)


@opener
def open_views(handle):
    """The arrays behind a handle's address."""
    h = carray(as_pointer(handle), (HANDLE_SIZE,), np.int64)
    block_size, node_count, namespaces, leases, workers, buckets = h[11], h[12], h[13], h[14], h[15], h[16]
    blocks, claims = h[29], h[30]
    return Tree(
        carray(as_pointer(h[3]), (1,), layout.STATE),
        carray(as_pointer(h[4]), (workers,), layout.WORKER),
        carray(as_pointer(h[5]), (namespaces + 1,), layout.NAMESPACE),
        carray(as_pointer(h[6]), (leases + 1,), layout.LEASE),
        carray(as_pointer(h[7]), (node_count,), layout.NODE),
        carray(as_pointer(h[8]), (node_count, block_size), np.uint32),
        carray(as_pointer(h[9]), (node_count - namespaces,), layout.HEAP),
        carray(as_pointer(h[10]), (buckets,), np.uint32),
        carray(as_pointer(h[27]), (blocks,), layout.BLOCK),
        carray(as_pointer(h[28]), (claims,), layout.CLAIM),
        carray(as_pointer(h[2]), (GUARD_WORDS,), np.int64),
        carray(as_pointer(h[7]), (node_count * NODE_WORDS,), np.int64),
        carray(as_pointer(h[6]), ((leases + 1) * LEASE_WORDS,), np.int64),
        carray(as_pointer(h[27]), (blocks * BLOCK_WORDS,), np.int64),
        carray(as_pointer(h[28]), (claims * CLAIM_WORDS,), np.int64),
        carray(as_pointer(handle + 8 * HANDLE_SIZE), (block_size,), np.uint64),
        carray(as_pointer(handle), (2,), np.int64),
        block_size,
        node_count,
        namespaces + 1,
        leases + 1,
        buckets - 1,
    )


@inlined
def node_at(seg, index):
    """`index` if it names a node record, else 0 and the fault is noted: nothing read from a segment is trusted.

    Indexes are uint32 all through: an unsigned one spares the compiled code numpy's counting from the end.
    """
    if index < seg.node_count:
        return np.uint32(index)
    seg.private[FAULT] = 1
    return np.uint32(0)


@kernel
def bounded(seg, count, limit):
    """A count read from the segment as int64, if it is no more than `limit`, else 0 and the fault is noted."""
    if count <= limit:
        return np.int64(count)
    seg.private[FAULT] = 1
    return np.int64(0)


@inlined
def lease_at(seg, index):
    """`index` if it names a lease record, else 0 and the fault is noted."""
    if index < seg.lease_count:
        return np.uint32(index)
    seg.private[FAULT] = 1
    return np.uint32(0)
