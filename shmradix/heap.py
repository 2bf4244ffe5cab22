"""The order of eviction: a binary heap of leaves by last use.

Keys are lazy. A leaf that is used or leased stays where it is; only when it comes to the top is its key brought up to
date, or the leaf dropped if it may not go (it comes back when it may). A key is never later than the node's last use,
so the top, once up to date, is the least recently used of all. A lookup and its release cost the heap nothing.
"""

import numpy as np

from shmradix.compile import kernel
from shmradix.views import FAULT, node_at


@kernel
def is_evictable(seg, node):
    """Whether nothing depends on the node: no child, no lease."""
    return seg.nodes["first_child"][node] == 0 and seg.nodes["leases"][node] == 0


@kernel
def _put(seg, position, last_use, node):
    seg.heap["last_use"][position] = last_use
    seg.heap["node"][position] = node


@kernel
def _sift_up(seg, position, last_use, node):
    heap = seg.heap
    while position > 1:
        above = position >> 1
        if heap["last_use"][above] <= last_use:
            break
        _put(seg, position, heap["last_use"][above], node_at(seg, heap["node"][above]))
        position = above
    _put(seg, position, last_use, node)


@kernel
def _sift_down(seg, size, last_use, node):
    heap = seg.heap
    position = 1
    while True:
        below = position * 2
        if below > size:
            break
        if below < size and heap["last_use"][below + 1] < heap["last_use"][below]:
            below += 1
        if heap["last_use"][below] >= last_use:
            break
        _put(seg, position, heap["last_use"][below], node_at(seg, heap["node"][below]))
        position = below
    _put(seg, position, last_use, node)


@kernel
def heap_size(seg):
    """Entries in the heap, never more than there are blocks."""
    size = np.int64(seg.state["heap_size"][0])
    if size >= len(seg.heap):
        seg.private[FAULT] = 1
        return np.int64(0)
    return size


@kernel
def push(seg, key, node):
    """Enter the node under this key; it must not be in the heap."""
    size = heap_size(seg) + 1
    if size >= len(seg.heap):
        seg.private[FAULT] = 1
        return
    seg.state["heap_size"][0] = size
    seg.nodes["in_heap"][node] = 1
    _sift_up(seg, size, key, node)


@kernel
def offer(seg, node):
    """Let the node be evicted if nothing depends on it; namespaces' roots and entries already there are left alone."""
    if node >= seg.first_block_node and seg.nodes["in_heap"][node] == 0 and is_evictable(seg, node):
        push(seg, seg.nodes["last_use"][node], node)


@kernel
def drop_top(seg):
    """Take out the entry with the smallest key; there must be one."""
    heap, size = seg.heap, heap_size(seg)
    if size == 0:
        return
    seg.nodes["in_heap"][node_at(seg, heap["node"][1])] = 0
    seg.state["heap_size"][0] = size - 1
    if size > 1:
        _sift_down(seg, size - 1, heap["last_use"][size], node_at(seg, heap["node"][size]))


@kernel
def put_on_top(seg, key, node):
    """Enter the node, which is not in the heap, in the place of the entry with the smallest key; there must be one."""
    seg.nodes["in_heap"][node_at(seg, seg.heap["node"][1])] = 0
    seg.nodes["in_heap"][node] = 1
    _sift_down(seg, heap_size(seg), key, node)


@kernel
def oldest(seg, latest):
    """The least recently used leaf that may go, now at the top, if its last use is not after `latest`; else 0."""
    while True:
        size = heap_size(seg)
        if size == 0 or seg.heap["last_use"][1] > latest:
            return np.uint32(0)
        node = node_at(seg, seg.heap["node"][1])
        last_use = seg.nodes["last_use"][node]
        if seg.nodes["born"][node] == 0:
            seg.private[FAULT] = 1
            drop_top(seg)
        elif not is_evictable(seg, node):
            drop_top(seg)
        elif last_use > seg.heap["last_use"][1]:
            _sift_down(seg, size, last_use, node)
        else:
            return node


@kernel
def replace_top(seg, node):
    """Take out the top, and let `node` be evicted instead if nothing depends on it: often it stays at the top."""
    if node >= seg.first_block_node and seg.nodes["in_heap"][node] == 0 and is_evictable(seg, node):
        put_on_top(seg, seg.nodes["last_use"][node], node)
    else:
        drop_top(seg)
