"""The invariants of a segment, checked on an image of it with numpy alone; docs/invariants.md tells why each holds."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from shmradix import claim_invariants
from shmradix.hash_keys import hash_keys
from shmradix.layout import NO_BLOCK, Geometry, Views
from shmradix.pool_invariants import CHECKS as POOL_CHECKS
from shmradix.pool_invariants import image_of as pool_image_of
from shmradix.snapshot_invariants import CHECKS as SNAPSHOT_CHECKS
from shmradix.snapshot_invariants import LAST_OF_BOUNDS as SNAPSHOT_BOUNDS
from shmradix.snapshot_invariants import few, image_of, mix


class Violation(NamedTuple):
    """One invariant that does not hold: its number, its name, and where."""

    number: int
    name: str
    detail: str


class Image(NamedTuple):
    """What the checks share: the views, the geometry, and the live records' indexes."""

    views: Views
    geometry: Geometry
    first_block_node: int
    blocks: np.ndarray  # live block nodes
    roots: np.ndarray  # live namespaces' roots
    leases: np.ndarray  # live leases


Check = Callable[[Image], Iterator[str]]
_CHECKS: list[tuple[str, Check]] = []


def _invariant(name: str) -> Callable[[Check], Check]:
    """Register a check; their order is their number, from 1, which docs/invariants.md and comments cite."""

    def register(check: Check) -> Check:
        _CHECKS.append((name, check))
        return check

    return register


def names() -> list[str]:
    """The invariants' names; the first is number 1."""
    return [name for name, _ in [*_CHECKS, *SNAPSHOT_CHECKS, *POOL_CHECKS]] + [claim_invariants.NAME]


def check(views: Views, geometry: Geometry) -> list[Violation]:
    """Every violation in a consistent image of a segment: a copy, or a segment that nobody changes meanwhile."""
    first = 1 + geometry.max_namespaces
    live = np.flatnonzero(views.nodes["born"])
    image = Image(
        views,
        geometry,
        first,
        live[live >= first],
        live[(live > 0) & (live < first)],
        1 + np.flatnonzero(views.leases["born"][1:]),
    )
    found = _run(_CHECKS, image, 1, _LAST_OF_BOUNDS)
    found += _run(SNAPSHOT_CHECKS, image_of(views, geometry), 1 + len(_CHECKS), SNAPSHOT_BOUNDS)
    claims = claim_invariants.violations(views, geometry)
    found += [Violation(len(names()), claim_invariants.NAME, detail) for detail in claims]
    if any(violation.number <= _LAST_OF_BOUNDS for violation in found):
        return found  # which nodes there are, nobody knows
    return found + _run(POOL_CHECKS, pool_image_of(views, geometry), 1 + len(_CHECKS) + len(SNAPSHOT_CHECKS), 0)


def _run(checks: list[tuple[str, Any]], image: Any, first: int, last_of_bounds: int) -> list[Violation]:
    """The violations of one part; its invariants are numbered from `first`."""
    found = []
    for at, (name, run) in enumerate(checks):
        found += [Violation(first + at, name, detail) for detail in run(image)]
        if at + 1 == last_of_bounds and found:
            break  # the rest follows indexes that are known to be in bounds
    return found


def _outside(name: str, indexes: np.ndarray, values: np.ndarray, limit: int) -> Iterator[str]:
    bad = indexes[values[indexes] >= limit]
    if bad.size:
        yield f"{name} of {few(bad)} is not below {limit}"


# --- bounds: 1 to 3 ---------------------------------------------------------------------------------------------


@_invariant("high-water marks lie within their tables, and nothing lives beyond them")
def _marks(image: Image) -> Iterator[str]:
    state, geometry = image.views.state[0], image.geometry
    for field, low, high, live in (
        ("nodes_used", image.first_block_node, geometry.node_count, image.blocks),
        ("namespaces_used", 1, image.first_block_node, image.roots),
        ("leases_used", 1, 1 + geometry.max_leases, image.leases),
    ):
        used = int(state[field])
        if not low <= used <= high:
            yield f"{field} is {used}, not from {low} to {high}"
        elif live.size and live[-1] >= used:
            yield f"{field} is {used}, but {few(live[live >= used])} lives"


@_invariant("every index of a live record names a record")
def _indexes(image: Image) -> Iterator[str]:
    views, limit = image.views, image.geometry.node_count
    live = np.concatenate([image.roots, image.blocks])
    for field in ("parent", "first_child", "next_sibling", "hash_next"):
        yield from _outside(field, live, views.nodes[field], limit)
    yield from _outside("prev_sibling", image.blocks, views.nodes["prev_sibling"], limit)
    yield from _outside("in_heap", image.blocks, views.nodes["in_heap"], 2)
    for field in ("node", "anchor"):
        yield from _outside(f"{field} of lease", image.leases, views.leases[field], limit)
    yield from _outside("bucket", np.arange(len(views.buckets)), views.buckets, limit)


@_invariant("the heap is no larger than its table and holds nodes")
def _heap_bounds(image: Image) -> Iterator[str]:
    size = int(image.views.state["heap_size"][0])
    if size >= len(image.views.heap):
        yield f"heap_size is {size}, not below {len(image.views.heap)}"
    else:
        yield from _outside("heap entry", np.arange(1, size + 1), image.views.heap["node"], image.geometry.node_count)


_LAST_OF_BOUNDS = len(_CHECKS)


# --- truth ------------------------------------------------------------------------------------------------------


@_invariant("births are unique and not after the clock, and so are last uses")
def _births(image: Image) -> Iterator[str]:
    clock = int(image.views.state["clock"][0])
    born = np.concatenate(
        [
            image.views.nodes["born"][image.roots],
            image.views.nodes["born"][image.blocks],
            image.views.leases["born"][image.leases],
        ]
    )
    if len(np.unique(born)) != len(born):
        yield "two records were born at once"
    if born.size and (born.min() < 0 or born.max() > clock):
        yield f"a birth lies before 0 or after the clock, {clock}"
    used = image.views.nodes["last_use"][image.blocks]
    if used.size and used.max() > clock:
        yield f"a last use lies after the clock, {clock}"


@_invariant("a block's parent lives and is older; a root has none")
def _parents(image: Image) -> Iterator[str]:
    nodes = image.views.nodes
    parent = nodes["parent"][image.blocks]
    bad = image.blocks[
        (parent == 0) | (nodes["born"][parent] == 0) | (nodes["born"][parent] >= nodes["born"][image.blocks])
    ]
    if bad.size:
        yield f"parent of {few(bad)}"
    bad = image.roots[nodes["parent"][image.roots] != 0]
    if bad.size:
        yield f"roots {few(bad)} have a parent"


@_invariant("a live node has a block, a root has none")
def _blocks(image: Image) -> Iterator[str]:
    block = image.views.nodes["block"]
    for live, bad in ((image.blocks, block[image.blocks] == NO_BLOCK), (image.roots, block[image.roots] != NO_BLOCK)):
        if bad.any():
            yield f"nodes {few(live[bad])}"


@_invariant("siblings differ in their tokens or block key")
def _twins(image: Image) -> Iterator[str]:
    nodes = image.views.nodes
    seen: dict[tuple[int, int, bytes], int] = {}
    for node in image.blocks.tolist():
        key = int(nodes["parent"][node]), int(nodes["block_key"][node]), image.views.tokens[node].tobytes()
        if key in seen:
            yield f"nodes {seen[key]} and {node} are the same block"
        seen[key] = node


@_invariant("no two namespaces of an epoch are the same, and none is of a later epoch")
def _namespaces(image: Image) -> Iterator[str]:
    records = image.views.namespaces[image.roots]
    keys = [record.tobytes() for record in np.ascontiguousarray(records[["adapter_id", "salt", "epoch"]])]
    if len(set(keys)) != len(keys):
        yield "two roots have the same adapter, salt and epoch"
    if records.size and records["epoch"].max() > image.views.state["epoch"][0]:
        yield "a namespace is of a later epoch than the tree"


@_invariant("a lease pins a live node: its anchor or a child of it, at the depth it says, for a worker there is")
def _leases(image: Image) -> Iterator[str]:
    nodes, leases, workers = image.views.nodes, image.views.leases[image.leases], image.views.workers
    node, anchor, slot = leases["node"], leases["anchor"], leases["worker"].astype(np.int64) - 1
    is_pinned = (node >= image.first_block_node) & (nodes["born"][node] != 0)
    bad = ~is_pinned | ((node != anchor) & (nodes["parent"][node] != anchor))
    bad |= _depths(image)[anchor] != leases["depth"]
    bad |= (slot < 0) | (slot >= len(workers))
    bad[~bad] |= leases["generation"][~bad] > workers["generation"][slot[~bad]]
    if bad.any():
        yield f"leases {few(image.leases[bad])}"


def _depths(image: Image) -> np.ndarray:
    """Each live node's distance from its root, -1 where it has none."""
    depths = np.full(image.geometry.node_count, -1, np.int64)
    depths[image.roots] = 0
    order = image.blocks[np.argsort(image.views.nodes["born"][image.blocks], kind="stable")]
    for node, parent in zip(order.tolist(), image.views.nodes["parent"][order].tolist()):
        if depths[parent] >= 0:
            depths[node] = depths[parent] + 1
    return depths


# --- derived ----------------------------------------------------------------------------------------------------


@_invariant("the totals count the live records")
def _totals(image: Image) -> Iterator[str]:
    state = image.views.state[0]
    for field, live in (
        ("live_blocks", image.blocks),
        ("live_namespaces", image.roots),
        ("live_leases", image.leases),
    ):
        if state[field] != len(live):
            yield f"{field} is {state[field]}, there are {len(live)}"


@_invariant("the free lists hold every free record below the high-water marks, once")
def _free_lists(image: Image) -> Iterator[str]:
    state, nodes, leases = image.views.state[0], image.views.nodes, image.views.leases
    for head, following, born, low, used in (
        ("free_node", nodes["hash_next"], nodes["born"], image.first_block_node, "nodes_used"),
        ("free_namespace", nodes["hash_next"], nodes["born"], 1, "namespaces_used"),
        ("free_lease", leases["next_free"], leases["born"], 1, "leases_used"),
    ):
        high = int(state[used])
        expected = low + np.flatnonzero(born[low:high] == 0)
        listed: list[int] = []
        at = int(state[head])
        while at and low <= at < high and len(listed) <= len(expected):
            listed.append(at)
            at = int(following[at])
        if at or sorted(listed) != expected.tolist():
            yield f"{head}: {len(listed)} listed, {len(expected)} free"


@_invariant("the hash index finds every live node, once, under its hash")
def _index(image: Image) -> Iterator[str]:
    nodes, buckets = image.views.nodes, image.views.buckets
    live = np.concatenate([image.roots, image.blocks])
    bad = live[nodes["hash"][live] != np.concatenate([_root_hashes(image), _block_hashes(image)])]
    if bad.size:
        yield f"hash of {few(bad)}"
    times = np.zeros(len(nodes), np.int64)
    bucket, at = np.flatnonzero(buckets), buckets[buckets != 0]
    for _ in range(len(live) + 1):
        if not at.size:
            break
        np.add.at(times, at, 1)
        bad = at[(nodes["hash"][at] & (len(buckets) - 1)) != bucket]
        if bad.size:
            yield f"nodes {few(bad)} are in another's bucket"
        at = nodes["hash_next"][at]
        bucket, at = bucket[at != 0], at[at != 0]
        if at.size and at.max() >= len(nodes):
            yield "a chain leaves the table"
            return
    expected = np.zeros(len(nodes), np.int64)
    expected[live] = 1
    bad = np.flatnonzero(times != expected)
    if at.size or bad.size:
        yield f"nodes {few(bad)} are not in the index, or not once"


@_invariant("a node's children are listed from the oldest to the youngest, and back")
def _children(image: Image) -> Iterator[str]:
    nodes = image.views.nodes
    order = image.blocks[np.argsort(nodes["born"][image.blocks], kind="stable")]
    children: dict[int, list[int]] = {}
    for node, parent in zip(order.tolist(), nodes["parent"][order].tolist()):
        children.setdefault(parent, []).append(node)
    first, following, before = nodes["first_child"], nodes["next_sibling"], nodes["prev_sibling"]
    for parent in np.concatenate([image.roots, image.blocks]).tolist():
        expected = children.get(parent, [])
        listed = np.array([*expected, 0], np.int64)
        good = first[parent] == listed[0]
        good &= bool((following[listed[:-1]] == listed[1:]).all())
        good &= bool((before[listed[:-1]] == np.roll(listed[:-1], 1)).all())
        if not good:
            yield f"children of {parent}"


@_invariant("a node counts the leases that pin it")
def _pins(image: Image) -> Iterator[str]:
    counted = np.bincount(image.views.leases["node"][image.leases], minlength=image.geometry.node_count)
    bad = image.blocks[image.views.nodes["leases"][image.blocks] != counted[image.blocks]]
    if bad.size:
        yield f"leases of nodes {few(bad)}"


@_invariant("the heap is one, holds live nodes once, every evictable leaf among them, and no key after a last use")
def _heap(image: Image) -> Iterator[str]:
    nodes, size = image.views.nodes, int(image.views.state["heap_size"][0])
    node, key = image.views.heap["node"][1 : size + 1], image.views.heap["last_use"][1 : size + 1]
    entries = np.bincount(node, minlength=len(nodes))
    if (nodes["in_heap"][image.blocks] != entries[image.blocks]).any() or (entries > 1).any():
        yield "nodes that say they are in it are not, or the other way round, or an entry occurs twice"
    if (nodes["born"][node] == 0).any() or (node < image.first_block_node).any():
        yield "an entry is no live block"
    child = np.arange(2, size + 1)
    if (key[child - 1] < key[child // 2 - 1]).any():
        yield "a key is smaller than the one above it"
    if (key > nodes["last_use"][node]).any():
        yield "a key is later than its node's last use"
    evictable = image.blocks[(nodes["first_child"][image.blocks] == 0) & (nodes["leases"][image.blocks] == 0)]
    missing = evictable[entries[evictable] == 0]
    if missing.size:
        yield f"leaves {few(missing)} are not in it"


@_invariant("a namespace has at least one block")
def _inhabited(image: Image) -> Iterator[str]:
    empty = image.roots[image.views.nodes["first_child"][image.roots] == 0]
    if empty.size:
        yield f"roots {few(empty)}"


# --- the hashes, as in hashing.py ---------------------------------------------------------------------------------

_PARENT, _KEY = np.uint64(0x9E37_79B9_7F4A_7C15), np.uint64(0xC2B2_AE3D_27D4_EB4F)


def _block_hashes(image: Image) -> np.ndarray:
    nodes, size = image.views.nodes, image.geometry.block_size
    keys = hash_keys(int(image.views.header["hash_seed"][0]), size).astype(np.uint64)
    mask = np.uint64(0xFFFF_FFFF)
    with np.errstate(over="ignore"):
        total = nodes["hash"][nodes["parent"][image.blocks]].astype(np.uint64) * _PARENT
        total += nodes["block_key"][image.blocks] * _KEY
        for i in range(0, size - 1, 2):
            a = (image.views.tokens[image.blocks, i] + keys[i]) & mask
            b = (image.views.tokens[image.blocks, i + 1] + keys[i + 1]) & mask
            total += a * b
        if size & 1:
            total += (image.views.tokens[image.blocks, size - 1] + keys[size - 1]) * _KEY
        return mix(total) >> np.uint64(32)


def _root_hashes(image: Image) -> np.ndarray:
    records = image.views.namespaces[image.roots]
    first = hash_keys(int(image.views.header["hash_seed"][0]), 1).astype(np.uint64)[0]
    with np.errstate(over="ignore"):
        x = mix(first ^ records["adapter_id"]) * _PARENT
        for i in range(4):
            x = mix(x ^ records["salt"][:, i]) * _PARENT
        return mix(x) >> np.uint64(32)
