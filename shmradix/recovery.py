"""Rebuild: all derived data once more from the truth, after the owner of the tree guard died with its section dirty.

Truth is what one aligned store made true: the birth of a node, of a namespace's root, of a lease, and what was written
before it. Everything else is derived from that here, in one pass that may itself be cut short and begun again.
"""

import numpy as np

from shmradix import claims, pool
from shmradix.atomics import store_release
from shmradix.compile import kernel
from shmradix.hashing import block_hash
from shmradix.heap import drop_top, heap_size, is_evictable, offer, push, put_on_top
from shmradix.index import WORDS as NODE_WORDS
from shmradix.index import append_child, enter, free_node, free_root, record_hash, remove_root
from shmradix.leases import WORDS as LEASE_WORDS
from shmradix.leases import free_lease
from shmradix.views import node_at


@kernel
def _used(count, first, limit):
    """A high-water mark from the segment, put within its bounds."""
    return min(max(np.int64(count), np.int64(first)), np.int64(limit))


@kernel
def _forget_derived(seg):
    """Empty the index, the heap, the lists and the totals."""
    state, nodes = seg.state, seg.nodes
    state["namespaces_used"][0] = _used(state["namespaces_used"][0], 1, seg.first_block_node)
    state["nodes_used"][0] = _used(state["nodes_used"][0], seg.first_block_node, seg.node_count)
    state["leases_used"][0] = _used(state["leases_used"][0], 1, seg.lease_count)
    state["free_node"][0] = state["free_namespace"][0] = state["free_lease"][0] = 0
    state["live_blocks"][0] = state["live_namespaces"][0] = state["live_leases"][0] = 0
    state["heap_size"][0] = 0
    seg.buckets[:] = 0
    for node in range(1, np.int64(state["nodes_used"][0])):
        nodes["leases"][node] = nodes["first_child"][node] = nodes["hash_next"][node] = 0
        nodes["next_sibling"][node] = nodes["prev_sibling"][node] = nodes["in_heap"][node] = 0
        state["clock"][0] = max(state["clock"][0], nodes["born"][node], nodes["last_use"][node])


@kernel
def _is_lost(seg, node):
    """Whether the node is none, does not live, or is a block that `_link` found no parent for."""
    return (
        node == 0 or seg.nodes["born"][node] == 0 or (node >= seg.first_block_node and seg.nodes["parent"][node] == 0)
    )


@kernel
def _link(seg, node):
    """Link a live node under its parent, which was born, and so linked, before; else mark it lost: no parent."""
    nodes = seg.nodes
    parent = node_at(seg, nodes["parent"][node])
    if _is_lost(seg, parent) or nodes["born"][parent] >= nodes["born"][node]:
        nodes["parent"][node] = 0
        return
    enter(seg, node, block_hash(seg, nodes["hash"][parent], seg.tokens[node], 0, nodes["block_key"][node]))
    append_child(seg, parent, node)
    seg.state["live_blocks"][0] += 1


@kernel
def _next_live(seg, node):
    """The live node that comes next in the table, or 0."""
    for following in range(np.int64(node) + 1, np.int64(seg.state["nodes_used"][0])):
        if seg.nodes["born"][following] != 0:
            return node_at(seg, following)
    return np.uint32(0)


@kernel
def _link_all(seg):
    """Link the live nodes, oldest first: parents before children, older siblings before younger.

    A merge of the runs in which births rise along the table; the heap, empty as yet, holds each run's next node.
    """
    born, last = seg.nodes["born"], np.int64(0)
    for node in range(seg.first_block_node, np.int64(seg.state["nodes_used"][0])):
        if born[node] != 0:
            if born[node] <= last or last == 0:
                push(seg, born[node], node)
            last = born[node]
    while heap_size(seg) > 0:
        node = node_at(seg, seg.heap["node"][1])
        _link(seg, node)
        following = _next_live(seg, node)
        if following != 0 and born[following] > born[node]:
            put_on_top(seg, born[following], following)
        else:
            drop_top(seg)


@kernel
def _restore_leases(seg):
    for lease in range(np.int64(seg.state["leases_used"][0]) - 1, 0, -1):
        node = node_at(seg, seg.leases["node"][lease])
        if seg.leases["born"][lease] != 0 and node >= seg.first_block_node and not _is_lost(seg, node):
            seg.nodes["leases"][node] += 1
            seg.state["live_leases"][0] += 1
        else:
            store_release(seg.lease_words, lease * LEASE_WORDS, 0)
            free_lease(seg, lease)
        seg.state["clock"][0] = max(seg.state["clock"][0], seg.leases["born"][lease])


@kernel
def rebuild(seg):
    """Make all derived data anew. The caller holds the tree guard, and its section stays dirty until this is done."""
    state, nodes = seg.state, seg.nodes
    _forget_derived(seg)
    roots = np.int64(state["namespaces_used"][0])
    for root in range(1, roots):
        if nodes["born"][root] != 0:
            nodes["parent"][root] = 0
            enter(seg, root, record_hash(seg, root))
    _link_all(seg)
    _restore_leases(seg)
    for node in range(np.int64(state["nodes_used"][0]) - 1, seg.first_block_node - 1, -1):
        if _is_lost(seg, node):
            store_release(seg.node_words, node * NODE_WORDS, 0)
            free_node(seg, node)
        elif is_evictable(seg, node):
            offer(seg, node)
    for root in range(roots - 1, 0, -1):
        if nodes["born"][root] == 0:
            free_root(seg, root)
            continue
        state["live_namespaces"][0] += 1
        if nodes["first_child"][root] == 0:
            remove_root(seg, root)
    pool.rebuild(seg)
    claims.rebuild(seg)
