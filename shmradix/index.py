"""Finding and linking nodes: the hash index, the children of a node, the records' free lists."""

import numpy as np

from shmradix.atomics import store_release
from shmradix.compile import inlined, kernel
from shmradix.hashing import root_hash
from shmradix.layout import NO_BLOCK, NO_DISK, NODE, words_of
from shmradix.views import FAULT, bounded, node_at

WORDS = words_of(NODE)  # of a node record; its first is `born`


@inlined
def same_tokens(seg, node, tokens, start):
    """Whether the node holds exactly the block of `tokens` that begins at `start`."""
    difference, first = np.uint32(0), np.uint64(start)
    for i in range(np.uint64(seg.block_size)):
        difference |= seg.tokens[node, i] ^ tokens[first + i]
    return difference == 0


@inlined
def find_child(seg, parent, hash_, tokens, start, block_key):
    """The child of `parent` with exactly this block and block key, or 0."""
    nodes = seg.nodes
    node = node_at(seg, seg.buckets[hash_ & seg.bucket_mask])
    for _ in range(seg.node_count):
        if node == 0:
            return node
        if nodes["born"][node] == 0:
            break
        is_candidate = nodes["hash"][node] == hash_ and nodes["parent"][node] == parent
        if is_candidate and nodes["block_key"][node] == block_key and same_tokens(seg, node, tokens, start):
            return node
        node = node_at(seg, nodes["hash_next"][node])
    seg.private[FAULT] = 1  # a dead node in the chain, or more than there are: a cycle
    return np.uint32(0)


@inlined
def key_of(block_keys, i):
    """The key of block `i`: 0 where none is given."""
    if i < len(block_keys):
        return block_keys[i]
    return np.uint64(0)


@kernel
def root_above(seg, node, depth, tokens, block_keys):
    """Climb from `node`, `depth` blocks deep, comparing with `tokens`. Returns the root, 0 where they differ.

    0 also where something on the way is dead, as only damage can make it.
    """
    while depth > 0:
        depth -= 1
        if node < seg.first_block_node or seg.nodes["born"][node] == 0:
            return np.uint32(0)
        if seg.nodes["block_key"][node] != key_of(block_keys, depth):
            return np.uint32(0)
        if not same_tokens(seg, node, tokens, depth * seg.block_size):
            return np.uint32(0)
        node = node_at(seg, seg.nodes["parent"][node])
    if node >= seg.first_block_node or seg.nodes["born"][node] == 0:
        return np.uint32(0)
    return node


@kernel
def is_namespace(seg, root, namespace):
    """Whether the root's namespace is exactly this adapter and salt, of whatever epoch."""
    record = seg.namespaces
    if record["adapter_id"][root] != namespace[0]:
        return False
    for i in range(4):
        if record["salt"][root][i] != namespace[1 + i]:
            return False
    return True


@kernel
def find_root(seg, namespace):
    """The root of the namespace in the current epoch, or 0."""
    nodes = seg.nodes
    hash_ = root_hash(seg, namespace[0], namespace[1:])
    node = node_at(seg, seg.buckets[hash_ & seg.bucket_mask])
    for _ in range(seg.node_count):
        if node == 0:
            return node
        if nodes["born"][node] == 0:
            break
        is_candidate = nodes["hash"][node] == hash_ and node < seg.first_block_node
        is_current = is_candidate and seg.namespaces["epoch"][node] == seg.state["epoch"][0]
        if is_current and is_namespace(seg, node, namespace):
            return node
        node = node_at(seg, nodes["hash_next"][node])
    seg.private[FAULT] = 1
    return np.uint32(0)


@kernel
def record_hash(seg, root):
    """The hash of a root's namespace, from its record."""
    return root_hash(seg, seg.namespaces["adapter_id"][root], seg.namespaces["salt"][root])


@kernel
def enter(seg, node, hash_):
    """Let the hash index find the node."""
    bucket = hash_ & seg.bucket_mask
    seg.nodes["hash"][node] = hash_
    seg.nodes["hash_next"][node] = seg.buckets[bucket]
    seg.buckets[bucket] = node


@kernel
def _leave(seg, node):
    nodes = seg.nodes
    bucket = nodes["hash"][node] & seg.bucket_mask
    at = node_at(seg, seg.buckets[bucket])
    if at == node:
        seg.buckets[bucket] = nodes["hash_next"][node]
        return
    for _ in range(seg.node_count):
        if at == 0:
            break
        following = node_at(seg, nodes["hash_next"][at])
        if following == node:
            nodes["hash_next"][at] = nodes["hash_next"][node]
            return
        at = following
    seg.private[FAULT] = 1  # not in its bucket


@kernel
def append_child(seg, parent, node):
    """Make the node its parent's youngest child."""
    nodes = seg.nodes
    oldest = node_at(seg, nodes["first_child"][parent])
    nodes["next_sibling"][node] = 0
    if oldest == 0:
        nodes["prev_sibling"][node] = node
        nodes["first_child"][parent] = node
    else:
        youngest = node_at(seg, nodes["prev_sibling"][oldest])
        nodes["prev_sibling"][node] = youngest
        nodes["next_sibling"][youngest] = node
        nodes["prev_sibling"][oldest] = node


@kernel
def _remove_child(seg, parent, node):
    nodes = seg.nodes
    oldest = node_at(seg, nodes["first_child"][parent])
    before = node_at(seg, nodes["prev_sibling"][node])
    after = node_at(seg, nodes["next_sibling"][node])
    if node == oldest:
        nodes["first_child"][parent] = after
    else:
        nodes["next_sibling"][before] = after
    if after != 0:
        nodes["prev_sibling"][after] = before
    elif node != oldest:
        nodes["prev_sibling"][oldest] = before


@kernel
def free_blocks(seg):
    """How many more nodes fit."""
    capacity = seg.node_count - seg.first_block_node
    return capacity - bounded(seg, seg.state["live_blocks"][0], capacity)


@kernel
def add_node(seg, parent, hash_, tokens, start, block_key, block, disk_block, clock):
    """Store a block under `parent`; there must be room. The node is true from the moment its birth is stored."""
    state, nodes = seg.state, seg.nodes
    node = node_at(seg, state["free_node"][0])
    if node != 0:
        state["free_node"][0] = nodes["hash_next"][node]
    else:
        node = node_at(seg, state["nodes_used"][0])
        state["nodes_used"][0] += 1
    if node < seg.first_block_node or nodes["born"][node] != 0:
        seg.private[FAULT] = 1
        return np.uint32(0)
    for i in range(seg.block_size):
        seg.tokens[node, i] = tokens[start + i]
    nodes["last_use"][node] = clock
    nodes["block_key"][node] = block_key
    nodes["parent"][node] = parent
    nodes["block"][node] = block
    nodes["disk_block"][node] = disk_block
    nodes["leases"][node] = 0
    nodes["first_child"][node] = 0
    nodes["in_heap"][node] = 0
    store_release(seg.node_words, node * WORDS, clock)
    append_child(seg, parent, node)
    enter(seg, node, hash_)
    state["live_blocks"][0] += 1
    return node


@kernel
def free_node(seg, node):
    """Put a dead node's record on the free list."""
    seg.nodes["block"][node] = NO_BLOCK
    seg.nodes["disk_block"][node] = NO_DISK
    seg.nodes["hash_next"][node] = seg.state["free_node"][0]
    seg.state["free_node"][0] = node


@kernel
def free_root(seg, root):
    """Put a dead root's record on the free list."""
    seg.nodes["hash_next"][root] = seg.state["free_namespace"][0]
    seg.state["free_namespace"][0] = root


@kernel
def remove_node(seg, node):
    """Take a leaf without a lease out, but for its place in the heap. Frees its namespace with the last node."""
    state, nodes = seg.state, seg.nodes
    parent = node_at(seg, nodes["parent"][node])
    store_release(seg.node_words, node * WORDS, 0)
    _leave(seg, node)
    _remove_child(seg, parent, node)
    free_node(seg, node)
    state["live_blocks"][0] -= 1
    if 0 < parent < seg.first_block_node and nodes["first_child"][parent] == 0:
        remove_root(seg, parent)


@kernel
def has_free_namespace(seg):
    """Whether one more namespace fits."""
    capacity = seg.first_block_node - 1
    return bounded(seg, seg.state["live_namespaces"][0], capacity) < capacity


@kernel
def add_root(seg, namespace, clock):
    """Make a namespace of the current epoch; there must be room. Returns its root."""
    state, nodes = seg.state, seg.nodes
    root = node_at(seg, state["free_namespace"][0])
    if root != 0:
        state["free_namespace"][0] = nodes["hash_next"][root]
    else:
        root = node_at(seg, state["namespaces_used"][0])
        state["namespaces_used"][0] += 1
    if root == 0 or root >= seg.first_block_node or nodes["born"][root] != 0:
        seg.private[FAULT] = 1
        return np.uint32(0)
    seg.namespaces["adapter_id"][root] = namespace[0]
    for i in range(4):
        seg.namespaces["salt"][root][i] = namespace[1 + i]
    seg.namespaces["epoch"][root] = state["epoch"][0]
    nodes["parent"][root] = 0
    nodes["block"][root] = NO_BLOCK
    nodes["disk_block"][root] = NO_DISK
    nodes["first_child"][root] = 0
    store_release(seg.node_words, root * WORDS, clock)
    enter(seg, root, record_hash(seg, root))
    state["live_namespaces"][0] += 1
    return root


@kernel
def remove_root(seg, root):
    """Free a namespace that has no node."""
    store_release(seg.node_words, root * WORDS, 0)
    _leave(seg, root)
    free_root(seg, root)
    seg.state["live_namespaces"][0] -= 1
