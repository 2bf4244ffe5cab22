"""The operations on the tree, each run by one worker that holds the tree guard (but for `climb`, which needs none)."""

import numpy as np

from shmradix import pool
from shmradix.compile import kernel
from shmradix.hashing import block_hash
from shmradix.heap import oldest, replace_top
from shmradix.index import (
    add_node,
    add_root,
    find_child,
    find_root,
    free_blocks,
    has_free_namespace,
    key_of,
    remove_node,
    root_above,
)
from shmradix.layout import IN_TREE, NO_DISK
from shmradix.leases import drop_lease, has_free_lease, is_held, move_lease, take_lease, used_leases
from shmradix.status import BLOCK_NOT_HELD, LEASES_FULL, NAMESPACES_FULL, NOT_HELD, OK, STALE
from shmradix.views import FAULT, SLOT, node_at

(  # the first of layout.COUNTERS
    LOOKUPS, HITS, HIT_TOKENS, LOOKUP_TOKENS, INSERTS, INSERTED_BLOCKS, DUPLICATE_BLOCKS, EVICTED_BLOCKS, LOCK_WAITS,
    REBUILDS, REBUILD_NS,
) = range(11)  # fmt: skip

PARTIAL_CHILDREN = 64  # a lookup that ends at a node with more children looks at the oldest ones only
NEW, NEW_DISK, DUPLICATE, DUPLICATE_DISK, PATH = range(5)  # rows of insert's output


@kernel
def count(seg, counter, amount):
    """Add to one of this worker's counters."""
    seg.workers["counters"][seg.private[SLOT]][counter] += amount


@kernel
def touch(seg, node):
    """Make the node the most recently used."""
    seg.state["clock"][0] += 1
    seg.nodes["last_use"][node] = seg.state["clock"][0]


@kernel
def walk(seg, root, tokens, block_keys, out):
    """Follow `tokens` down from `root`; block ids and disk block ids go to `out`. Returns (node, depth in blocks)."""
    nodes, size = seg.nodes, seg.block_size
    node, depth = root, 0
    hash_ = nodes["hash"][root]
    for i in range(len(tokens) // size):
        key = key_of(block_keys, i)
        hash_ = block_hash(seg, hash_, tokens, i * size, key)
        child = find_child(seg, node, hash_, tokens, i * size, key)
        if child == 0:
            break
        node, depth = child, i + 1
        out[0, i] = nodes["block"][child]
        out[1, i] = nodes["disk_block"][child]
    return node, depth


@kernel
def best_partial(seg, parent, tokens, start, block_key):
    """The child that agrees with the most tokens from `start` on, the oldest of several: (child, how many)."""
    nodes = seg.nodes
    limit = min(seg.block_size, len(tokens) - start)
    best, most = np.uint32(0), 0
    child = node_at(seg, nodes["first_child"][parent])
    for _ in range(PARTIAL_CHILDREN):
        if child == 0 or most >= limit:
            break
        if nodes["parent"][child] != parent or nodes["born"][child] == 0:
            seg.private[FAULT] = 1
            break
        if nodes["block_key"][child] == block_key:
            agree = 0
            while agree < limit and seg.tokens[child, agree] == tokens[start + agree]:
                agree += 1
            if agree > most:
                best, most = child, agree
        child = node_at(seg, nodes["next_sibling"][child])
    return best, most


@kernel
def lookup(seg, now, namespace, tokens, block_keys, out):
    """Match and lease. Returns (status, depth in blocks, lease, its birth, partial block, partial tokens, epoch)."""
    nodes, epoch = seg.nodes, seg.state["epoch"][0]
    node, depth, partial, agree = np.uint32(0), 0, np.uint32(0), 0
    root = find_root(seg, namespace)
    if root != 0:
        node, depth = walk(seg, root, tokens, block_keys, out)
        partial, agree = best_partial(seg, node, tokens, depth * seg.block_size, key_of(block_keys, depth))
    pinned = partial if partial != 0 else node
    lease, born = np.uint32(0), np.int64(0)
    if depth > 0 or partial != 0:
        if not has_free_lease(seg):
            return LEASES_FULL, 0, lease, born, 0, 0, epoch
        lease = take_lease(seg, pinned, node, depth, agree, False, now)
        born = seg.leases["born"][lease]
    if depth > 0:
        touch(seg, node)
        count(seg, HITS, 1)
        count(seg, HIT_TOKENS, depth * seg.block_size)
    count(seg, LOOKUPS, 1)
    count(seg, LOOKUP_TOKENS, len(tokens))
    return OK, depth, lease, born, np.int64(nodes["block"][partial]), agree, epoch


@kernel
def peek(seg, namespace, tokens, block_keys, out):
    """The depth in blocks that a lookup would match."""
    root = find_root(seg, namespace)
    if root == 0:
        return 0
    return walk(seg, root, tokens, block_keys, out)[1]


@kernel
def climb(seg, lease, tokens, block_keys, table, disk_table, out):
    """Check that `tokens` go through the lease's anchor, from there up to its root, and note the path.

    A leased path does not change, and other threads of this worker, who could move the lease, wait for their turn:
    so this needs no guard. Returns (depth, whether a table differs from the path);
    depth is -1 where the tokens do not go through the anchor.
    """
    nodes = seg.nodes
    node = node_at(seg, seg.leases["anchor"][lease])
    depth = np.int64(seg.leases["depth"][lease])
    if depth > len(tokens) // seg.block_size or root_above(seg, node, depth, tokens, block_keys) == 0:
        return np.int64(-1), False
    differs = len(disk_table) > 0
    for i in range(depth - 1, -1, -1):
        differs |= nodes["block"][node] != table[i]
        out[PATH, i] = node
        node = node_at(seg, nodes["parent"][node])
    return depth, differs


@kernel
def _adopt(seg, node, block, disk_block, out, counts):
    """Note what the cache does not take because it has the node; take a disk block where it had none."""
    nodes = seg.nodes
    if nodes["block"][node] != block:
        out[DUPLICATE, counts[DUPLICATE]] = block
        counts[DUPLICATE] += 1
    if disk_block == NO_DISK or nodes["disk_block"][node] == disk_block:
        return
    if nodes["disk_block"][node] == NO_DISK:
        nodes["disk_block"][node] = disk_block
        out[NEW_DISK, counts[NEW_DISK]] = disk_block
        counts[NEW_DISK] += 1
    else:
        out[DUPLICATE_DISK, counts[DUPLICATE_DISK]] = disk_block
        counts[DUPLICATE_DISK] += 1


@kernel
def insert(seg, now, namespace, tokens, block_keys, table, disk_table, lease, depth, differs, by_tokens, out, counts):
    """Store the blocks of `tokens` below the lease's anchor, below the root if `lease` is 0; move or take the lease.

    `depth` and `differs` are what `climb` said; its path is in `out`. `by_tokens`: no match is to have the lease.
    Returns (status, depth reached, lease); how many of each row of `out` are filled goes to `counts`.
    """
    nodes, size = seg.nodes, seg.block_size
    full = len(tokens) // size
    first = 0
    if lease != 0:
        node = node_at(seg, seg.leases["anchor"][lease])
        first = 0 if differs else depth
    else:
        node, depth = find_root(seg, namespace), np.int64(0)
    found, hash_ = node, nodes["hash"][node]
    while found != 0 and depth < full:
        key = key_of(block_keys, depth)
        hash_ = block_hash(seg, nodes["hash"][node], tokens, depth * size, key)
        found = find_child(seg, node, hash_, tokens, depth * size, key)
        if found != 0:
            out[PATH, depth] = found
            node, depth = found, depth + 1
    room = min(free_blocks(seg), full - depth)
    if depth == 0 and room == 0:
        return OK, depth, lease
    if lease == 0 and not has_free_lease(seg):
        return LEASES_FULL, depth, lease
    if node == 0 and not has_free_namespace(seg):
        return NAMESPACES_FULL, depth, lease
    is_managed = len(seg.blocks) > 0
    if is_managed and not pool.are_mine(seg, table, depth, depth + room):
        return BLOCK_NOT_HELD, depth, lease

    for i in range(first, depth):
        disk_block = disk_table[i] if len(disk_table) > 0 else np.uint32(NO_DISK)
        _adopt(seg, node_at(seg, out[PATH, i]), table[i], disk_block, out, counts)
    if node == 0:
        seg.state["clock"][0] += 1
        node = add_root(seg, namespace, seg.state["clock"][0])
        if node == 0:
            return OK, depth, lease  # a fault: there is nothing to store below
    for i in range(depth, depth + room):
        disk_block = disk_table[i] if len(disk_table) > 0 else np.uint32(NO_DISK)
        key = key_of(block_keys, i)
        hash_ = block_hash(seg, nodes["hash"][node], tokens, i * size, key)
        seg.state["clock"][0] += 1
        added = add_node(seg, node, hash_, tokens, i * size, key, table[i], disk_block, seg.state["clock"][0])
        if added == 0:
            room = i - depth  # a fault: what is stored stays
            break
        node = added
        if is_managed:
            pool.store(seg, table[i])
        out[NEW, counts[NEW]] = table[i]
        counts[NEW] += 1
        if disk_block != NO_DISK:
            out[NEW_DISK, counts[NEW_DISK]] = disk_block
            counts[NEW_DISK] += 1
    depth += room
    if depth > 0:
        touch(seg, node)
        if lease != 0:
            move_lease(seg, lease, node, depth, by_tokens)
        else:
            lease = take_lease(seg, node, node, depth, 0, by_tokens, now)
    count(seg, INSERTS, 1)
    count(seg, INSERTED_BLOCKS, room)
    count(seg, DUPLICATE_BLOCKS, counts[DUPLICATE])
    return OK, depth, lease


@kernel
def shorten(seg, lease, depth):
    """Let a lookup's lease pin the node `depth` blocks deep on its path, and the lookup count as one of that depth."""
    node, before = node_at(seg, seg.leases["anchor"][lease]), np.int64(seg.leases["depth"][lease])
    for _ in range(before - depth):
        node = node_at(seg, seg.nodes["parent"][node])
    count(seg, HIT_TOKENS, (depth - before) * seg.block_size)
    if depth > 0:
        move_lease(seg, lease, node, depth, False)
    else:
        count(seg, HITS, -np.int64(before > 0))
        drop_lease(seg, lease)


@kernel
def may_insert(seg, lease, born, epoch):
    """Whether what a match stands for is still there: OK, NOT_HELD, or STALE if it is older than the last clear()."""
    if lease != 0 and not is_held(seg, lease, born):
        return NOT_HELD
    current = seg.state["epoch"][0]
    if lease != 0:
        return OK if seg.leases["epoch"][lease] == current else STALE
    return STALE if epoch >= 0 and epoch != current else OK


@kernel
def evict(seg, limit, latest, out, counts):
    """Take out up to `limit` leaves, least recently used first, none used after `latest`; counts[0] says how many."""
    nodes = seg.nodes
    while counts[0] < limit:
        node = oldest(seg, latest)
        if node == 0:
            break
        block = nodes["block"][node]
        out[0, counts[0]] = block
        out[1, counts[0]] = nodes["disk_block"][node]
        counts[0] += 1
        parent = node_at(seg, nodes["parent"][node])
        # A lookup stamps its deepest node only: what was used below was used here, too.
        nodes["last_use"][parent] = max(nodes["last_use"][parent], nodes["last_use"][node])
        remove_node(seg, node)
        replace_top(seg, parent)
        if len(seg.blocks) > 0:
            pool.put(seg, block, np.uint32(IN_TREE))
    count(seg, EVICTED_BLOCKS, counts[0])


@kernel
def hide_all(seg):
    """Start a new epoch: no root of an older one is found again. Returns the clock until which everything is older."""
    seg.state["clock"][0] += 1
    seg.state["epoch"][0] += 1
    return seg.state["clock"][0]


@kernel
def leased_blocks(seg, seen):
    """How many blocks lie on leased paths; `seen` is uint8[node_count], zero.

    Without the guard: it is a figure for people, and a walk over all leased paths would hold everybody up.
    """
    leased = 0
    for lease in range(1, used_leases(seg)):
        if seg.leases["born"][lease] == 0:
            continue
        node = node_at(seg, seg.leases["node"][lease])
        while node >= seg.first_block_node and seen[node] == 0:
            seen[node] = 1
            leased += 1
            node = node_at(seg, seg.nodes["parent"][node])
    return leased
