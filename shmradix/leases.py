"""Leases: one record for each request's hold on a path. It pins one node, and through it all above."""

import numpy as np

from shmradix.atomics import store_release
from shmradix.compile import kernel
from shmradix.heap import offer
from shmradix.index import is_namespace, key_of, root_above
from shmradix.layout import LEASE, words_of
from shmradix.views import FAULT, SLOT, bounded, lease_at, node_at

WORDS = words_of(LEASE)  # of a lease record; its first is `born`


@kernel
def has_free_lease(seg):
    """Whether one more lease fits."""
    capacity = seg.lease_count - 1
    return bounded(seg, seg.state["live_leases"][0], capacity) < capacity


@kernel
def used_leases(seg):
    """One more than the highest lease index that was ever used."""
    used = np.int64(seg.state["leases_used"][0])
    if 0 < used <= seg.lease_count:
        return used
    seg.private[FAULT] = 1
    return np.int64(1)


@kernel
def take_lease(seg, node, anchor, depth, partial_tokens, by_tokens, now):
    """Pin `node` for this worker; there must be a free lease. Returns the lease's index."""
    state, leases = seg.state, seg.leases
    lease = lease_at(seg, state["free_lease"][0])
    if lease != 0:
        state["free_lease"][0] = leases["next_free"][lease]
    else:
        lease = lease_at(seg, state["leases_used"][0])
        state["leases_used"][0] += 1
    if lease == 0 or leases["born"][lease] != 0:
        seg.private[FAULT] = 1
        return np.uint32(0)
    slot = seg.private[SLOT]
    leases["taken_ns"][lease] = now
    leases["epoch"][lease] = state["epoch"][0]
    leases["generation"][lease] = seg.workers["generation"][slot]
    leases["worker"][lease] = slot + 1
    leases["node"][lease] = node
    leases["anchor"][lease] = anchor
    leases["depth"][lease] = depth
    leases["partial_tokens"][lease] = partial_tokens
    leases["by_tokens"][lease] = by_tokens
    state["clock"][0] += 1
    store_release(seg.lease_words, lease * WORDS, state["clock"][0])
    seg.nodes["leases"][node] += 1
    state["live_leases"][0] += 1
    return lease


@kernel
def is_held(seg, lease, born):
    """Whether the lease is live, the one born then, and this worker's."""
    return (
        0 < lease < seg.lease_count
        and born != 0
        and seg.leases["born"][lease] == born
        and np.int64(seg.leases["worker"][lease]) == seg.private[SLOT] + 1
    )


@kernel
def _unpin(seg, node):
    if seg.nodes["leases"][node] == 0:
        seg.private[FAULT] = 1
        return
    seg.nodes["leases"][node] -= 1
    offer(seg, node)


@kernel
def move_lease(seg, lease, node, depth, by_tokens):
    """Let the lease pin `node`, at this depth, instead of what it pinned."""
    leases = seg.leases
    before = node_at(seg, leases["node"][lease])
    seg.nodes["leases"][node] += 1
    leases["node"][lease] = node
    leases["anchor"][lease] = node
    leases["depth"][lease] = depth
    leases["partial_tokens"][lease] = 0
    leases["by_tokens"][lease] = by_tokens
    _unpin(seg, before)


@kernel
def free_lease(seg, lease):
    """Put a dead lease's record on the free list."""
    seg.leases["next_free"][lease] = seg.state["free_lease"][0]
    seg.state["free_lease"][0] = lease


@kernel
def drop_lease(seg, lease):
    """Free the lease and what it alone pinned."""
    node = node_at(seg, seg.leases["node"][lease])
    store_release(seg.lease_words, lease * WORDS, 0)
    free_lease(seg, lease)
    seg.state["live_leases"][0] -= 1
    _unpin(seg, node)


@kernel
def drop_all_of(seg, slot, generation):
    """Free every lease of the slot's holders up to this generation."""
    leases = seg.leases
    for lease in range(1, used_leases(seg)):
        is_theirs = np.int64(leases["worker"][lease]) == slot + 1 and leases["generation"][lease] <= generation
        if is_theirs and leases["born"][lease] != 0:
            drop_lease(seg, lease)


@kernel
def _agrees_with_partial(seg, lease, depth, tokens, block_keys):
    """Whether `tokens` agree with the partly matching child that the lease may pin, as far as its prompt did."""
    leases, start = seg.leases, depth * seg.block_size
    node, agreed = node_at(seg, leases["node"][lease]), np.int64(leases["partial_tokens"][lease])
    if agreed == 0:
        return True
    if agreed > min(seg.block_size, len(tokens) - start) or seg.nodes["block_key"][node] != key_of(block_keys, depth):
        return False
    for i in range(agreed):
        if seg.tokens[node, i] != tokens[start + i]:
            return False
    return True


@kernel
def _is_better(seg, lease, other, by_tokens, oldest):
    """Which lease to find first: of the newest epoch (or the oldest), the deepest, taken this way, the most partial,
    the youngest."""
    leases = seg.leases
    if leases["epoch"][lease] != leases["epoch"][other]:
        return (leases["epoch"][lease] < leases["epoch"][other]) == oldest
    if leases["depth"][lease] != leases["depth"][other]:
        return leases["depth"][lease] > leases["depth"][other]
    if leases["by_tokens"][lease] != leases["by_tokens"][other]:
        return (leases["by_tokens"][lease] != 0) == by_tokens
    if leases["partial_tokens"][lease] != leases["partial_tokens"][other]:
        return leases["partial_tokens"][lease] > leases["partial_tokens"][other]
    return leases["born"][lease] > leases["born"][other]


@kernel
def find_lease(seg, namespace, tokens, block_keys, shallowest, deepest, by_tokens, oldest):
    """This worker's best lease on the path of `tokens`, its depth within the two bounds, or 0; see `_is_better`."""
    leases, found = seg.leases, np.uint32(0)
    deepest = min(deepest, len(tokens) // seg.block_size)
    for lease in range(1, used_leases(seg)):
        depth = np.int64(leases["depth"][lease])
        if not is_held(seg, lease, leases["born"][lease]) or depth < shallowest or depth > deepest:
            continue
        if found != 0 and not _is_better(seg, lease, found, by_tokens, oldest):
            continue
        root = root_above(seg, node_at(seg, leases["anchor"][lease]), depth, tokens, block_keys)
        if root == 0 or not is_namespace(seg, root, namespace):
            continue
        if _agrees_with_partial(seg, lease, depth, tokens, block_keys):
            found = np.uint32(lease)
    return found
