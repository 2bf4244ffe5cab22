"""Managed blocks: each is free, one worker's, or in one node.

The truth is the live nodes and the owners' names: a block that a live node has is the tree's, whatever its record says;
else it is the worker's that its record names; else it is free. The list of free blocks, the totals and the records'
IN_TREE follow from that. Each function here is run by one worker that holds the tree guard. Where callers manage the
blocks, there are none here.
"""

import numpy as np

from shmradix.atomics import store_release
from shmradix.compile import kernel
from shmradix.layout import BLOCK, IN_TREE, NO_BLOCK, word_of
from shmradix.views import BLOCK_WORDS, FAULT, SLOT, bounded

_OWNER = word_of(BLOCK, "worker")  # in one word with next_free
_LIVE = 1  # in next_free, during a rebuild


@kernel
def free_count(seg):
    """How many blocks are free."""
    return bounded(seg, seg.state["free_blocks"][0], len(seg.blocks))


@kernel
def is_mine(seg, block):
    """Whether the block is this worker's."""
    if block >= len(seg.blocks):
        return False
    slot = seg.private[SLOT]
    is_named = np.int64(seg.blocks["worker"][block]) == slot + 1
    return is_named and seg.blocks["generation"][block] == seg.workers["generation"][slot]


@kernel
def are_mine(seg, blocks, first, last):
    """Whether those from `first` to before `last` are."""
    for i in range(first, last):
        if not is_mine(seg, blocks[i]):
            return False
    return True


@kernel
def _set_owner(seg, block, owner, next_free):
    word = np.int64(next_free) << 32 | np.int64(owner)
    store_release(seg.block_words, np.int64(block) * BLOCK_WORDS + _OWNER, word)


@kernel
def take(seg):
    """Make a free block, of which there must be one, this worker's. Returns it, NO_BLOCK after a fault."""
    head = np.int64(seg.state["free_block"][0])
    if not 0 < head <= len(seg.blocks) or seg.blocks["worker"][head - 1] != 0:
        seg.private[FAULT] = 1
        return np.uint32(NO_BLOCK)
    block, slot = np.uint32(head - 1), seg.private[SLOT]
    seg.state["free_block"][0] = seg.blocks["next_free"][block]
    seg.state["free_blocks"][0] -= 1
    seg.state["private_blocks"][0] += 1
    seg.blocks["generation"][block] = seg.workers["generation"][slot]
    _set_owner(seg, block, slot + 1, 0)
    return block


@kernel
def put(seg, block, owner):
    """The block is free, which had this owner: a worker's slot + 1, or IN_TREE where its node is gone."""
    if block >= len(seg.blocks) or seg.blocks["worker"][block] != owner:
        seg.private[FAULT] = 1
        return
    if owner != IN_TREE:
        seg.state["private_blocks"][0] -= 1
    _list(seg, block)


@kernel
def _list(seg, block):
    _set_owner(seg, block, 0, seg.state["free_block"][0])
    seg.state["free_block"][0] = block + 1
    seg.state["free_blocks"][0] += 1


@kernel
def store(seg, block):
    """A node has the block now, which was this worker's."""
    _set_owner(seg, block, IN_TREE, 0)
    seg.state["private_blocks"][0] -= 1


@kernel
def free_all_of(seg, slot, generation):
    """Free every block of the slot's holders up to this generation."""
    if seg.state["private_blocks"][0] == 0:
        return
    for block in range(len(seg.blocks)):
        if np.int64(seg.blocks["worker"][block]) == slot + 1 and seg.blocks["generation"][block] <= generation:
            put(seg, block, np.uint32(slot + 1))


@kernel
def rebuild(seg):
    """All that is derived once more; the nodes are put right already."""
    state, blocks = seg.state, seg.blocks
    state["free_block"][0] = state["free_blocks"][0] = state["private_blocks"][0] = 0
    blocks["next_free"][:] = 0
    for node in range(seg.first_block_node, np.int64(state["nodes_used"][0])):
        block = seg.nodes["block"][node]
        if seg.nodes["born"][node] != 0 and block < len(blocks):
            _set_owner(seg, block, IN_TREE, _LIVE)
    for block in range(len(blocks) - 1, -1, -1):
        if blocks["next_free"][block] == _LIVE:
            _set_owner(seg, block, IN_TREE, 0)
        elif 0 < blocks["worker"][block] <= len(seg.workers):
            state["private_blocks"][0] += 1
        else:
            _list(seg, np.uint32(block))
