"""The invariants of managed blocks, checked with numpy alone; `verify.py` for the tree's, and for all."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from shmradix.layout import IN_TREE, Geometry, Views
from shmradix.snapshot_invariants import few


class PoolImage(NamedTuple):
    """What the checks share: the views, the geometry, the live nodes' blocks, and the blocks with an owner."""

    views: Views
    geometry: Geometry
    stored: np.ndarray
    private: np.ndarray


Check = Callable[[PoolImage], Iterator[str]]
CHECKS: list[tuple[str, Check]] = []
"""Names and checks, in the order of their numbers."""


def _invariant(name: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        CHECKS.append((name, check))
        return check

    return register


def image_of(views: Views, geometry: Geometry) -> PoolImage:
    """The blocks of a segment's image that are not free; none where callers manage them."""
    first = 1 + geometry.max_namespaces
    nodes = views.nodes[first:]
    stored = nodes["block"][nodes["born"] != 0] if geometry.num_blocks else np.empty(0, np.uint32)
    owners = views.blocks["worker"]
    return PoolImage(views, geometry, stored, np.flatnonzero((owners != 0) & (owners != IN_TREE)))


@_invariant("a managed block is one of those there are, in no two nodes, and a node's is no worker's")
def _owners(image: PoolImage) -> Iterator[str]:
    limit = image.geometry.num_blocks
    outside = image.stored[image.stored >= limit]
    if outside.size:
        yield f"nodes have blocks {few(outside)}, there are {limit}"
    times = np.bincount(image.stored[image.stored < limit], minlength=limit)
    if (times > 1).any():
        yield f"blocks {few(np.flatnonzero(times > 1))} are in more than one node"
    both = image.private[times[image.private] > 0]
    if both.size:
        yield f"blocks {few(both)} are in a node and a worker's"


@_invariant("a private block's owner is a worker there is")
def _workers(image: PoolImage) -> Iterator[str]:
    workers, record = image.views.workers, image.views.blocks[image.private]
    slot = record["worker"].astype(np.int64) - 1
    bad = slot >= len(workers)
    bad[~bad] |= record["generation"][~bad] > workers["generation"][slot[~bad]]
    if bad.any():
        yield f"blocks {few(image.private[bad])}"


@_invariant("free blocks are listed once, stored ones known as such, and the totals count them")
def _free_list(image: PoolImage) -> Iterator[str]:
    state, blocks = image.views.state[0], image.views.blocks
    is_free = np.ones(len(blocks), bool)
    is_free[image.stored[image.stored < len(blocks)]] = False
    is_free[image.private] = False
    listed: list[int] = []
    at = int(state["free_block"])
    while 0 < at <= len(blocks) and len(listed) <= len(blocks):
        listed.append(at - 1)
        at = int(blocks["next_free"][at - 1])
    known = np.flatnonzero(blocks["worker"] == IN_TREE)
    if known.tolist() != sorted({*image.stored.tolist()} - {*image.private.tolist()}):
        yield f"{len(known)} blocks are known as stored, {len(image.stored)} are"
    if at or sorted(listed) != np.flatnonzero(is_free).tolist():
        yield f"{len(listed)} blocks are listed, {is_free.sum()} free"
    for field, count in (("free_blocks", is_free.sum()), ("private_blocks", len(image.private))):
        if state[field] != count:
            yield f"{field} is {state[field]}, there are {count}"
