"""`verify` names the damage: one field is changed, and the invariant that it breaks is reported by its number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shmradix import RadixCache, verify
from shmradix.layout import BRANCH, HIDDEN, LEAF, NO_BLOCK, PENDING, SIBLING, TAIL
from shmradix.results import Spill
from tests.conftest import fresh_name, remove_all
from tests.test_block_damage import DAMAGES as BLOCK_DAMAGES
from tests.test_claim_damage import DAMAGES as CLAIM_DAMAGES

WHOLE = 1 << 32
HUGE = 1 << 60
STEM, LEFT, RIGHT, LEASED = [1] * 4, [2] * 4, [3] * 4, [4] * 8
SESSION = 77


class Patient:
    """A cache with two namespaces, siblings, a lease, and free records of every kind; its nodes by their blocks.

    And snapshots of every kind, by their number of tokens.
    """

    def __init__(self) -> None:
        self.cache = cache = RadixCache.create(
            fresh_name(), block_size=4, max_blocks=12, max_leases=5, max_workers=3, max_namespaces=3,
            max_snapshots=9, snapshot_slots=7, retention="chain",
        )  # fmt: skip
        for tokens, table, salt in (
            ([8] * 8, [90, 91], None), ([9] * 4, [92], b"gone"), ([*STEM, *LEFT], [10, 11], None),
            ([*STEM, *RIGHT], [10, 12], None), (STEM, [30], b"salt"),
        ):  # fmt: skip
            cache.insert(tokens, table, salt=salt)
            cache.release(tokens, salt=salt)
        assert sorted(cache.evict(3).blocks.tolist()) == [90, 91, 92]
        cache.lookup(STEM)
        cache.insert(LEASED, [20, 21])
        slots = [cache.allocate_snapshot_slot() for _ in range(7)]
        cache.insert_intermediate_snapshot(LEASED[:1], slots[0])
        assert isinstance(cache.evict_snapshot_to_tier(), Spill)  # that of one token
        cache.insert_intermediate_snapshot(LEASED[:2], slots[1])
        cache.insert_tail_snapshot(LEASED[:3], slots[2], SESSION)
        cache.insert_tail_sibling_snapshot(LEASED[:4], slots[3], SESSION)
        self.pending = cache.reserve_snapshot(LEASED[:5], slots[4], kind="finish")
        self.pinned = cache.lookup(LEASED[:4], max_snapshot_tokens=2, session=SESSION)
        assert self.pinned.snapshot_tokens == 2
        cache.free_snapshot_slot(slots[6])
        self.private, self.unused = slots[5], slots[6]
        cache.lookup(STEM).release()
        self.views: Any = cache._segment.views
        self.bytes = np.ndarray(cache._segment.geometry.size, np.uint8, cache._segment._map)
        self.whole = self.bytes.copy()
        self.root = int(self.views.nodes["parent"][self.node(10)])
        self.other_root = int(self.views.nodes["parent"][self.node(30)])

    def node(self, block: int) -> int:
        (node,) = np.flatnonzero(self.views.nodes["block"] == block)
        return int(node)

    def snapshot(self, tokens: int) -> int:
        views = self.views.snapshots
        (at,) = np.flatnonzero((views["token_count"] == tokens) & (views["born"] != 0))
        return int(at)

    def slot_of(self, tokens: int) -> int:
        return int(self.views.snapshots["slot"][self.snapshot(tokens)])

    @property
    def lease(self) -> int:
        """That of the deepest node."""
        (lease,) = np.flatnonzero(self.views.leases["node"] * (self.views.leases["born"] != 0) == self.node(21))
        return int(lease)

    @property
    def free_node(self) -> int:
        return int(self.views.state["free_node"][0])


@pytest.fixture(scope="module")
def shared() -> Iterator[Patient]:
    patient = Patient()
    yield patient
    patient.bytes[:] = patient.whole
    patient.cache.close()
    remove_all(patient.cache.name)


@pytest.fixture
def patient(shared: Patient) -> Patient:
    shared.bytes[:] = shared.whole
    return shared


Where = Callable[[Patient], Any]  # the index of a record, or a value


def state(field: str, value: int | Where) -> Callable[[Patient], None]:
    return change("state", lambda p: 0, field, value)


def node(block: int, field: str, value: int | Where) -> Callable[[Patient], None]:
    return change("nodes", lambda p: p.node(block), field, value)


def lease(field: str, value: int | Where) -> Callable[[Patient], None]:
    return change("leases", lambda p: p.lease, field, value)


def change(section: str, at: Where, field: str, value: int | Where) -> Callable[[Patient], None]:
    def do(patient: Patient) -> None:
        records, index = getattr(patient.views, section), at(patient)
        before = records[field][index].copy()
        records[field][index] = value(patient) if callable(value) else value
        assert (records[field][index] != before).any()

    return do


def add(amount: int) -> Callable[[str], Callable[[Patient], None]]:
    return lambda field: state(field, lambda p: int(p.views.state[field][0]) + amount)


more, less = add(1), add(-1)


def bucket(value: int | Where) -> Callable[[Patient], None]:
    """Let the bucket of node 21 begin with another one."""

    def do(patient: Patient) -> None:
        buckets = patient.views.buckets
        at = int(patient.views.nodes["hash"][patient.node(21)]) & (len(buckets) - 1)
        buckets[at] = value(patient) if callable(value) else value

    return do


def tokens_of(block: int, like: int) -> Callable[[Patient], None]:
    def do(patient: Patient) -> None:
        patient.views.tokens[patient.node(block)] = patient.views.tokens[patient.node(like)]

    return do


def top(field: str, value: int | Where) -> Callable[[Patient], None]:
    return change("heap", lambda p: 1, field, value)


def snapshot(tokens: int, field: str, value: int | Where) -> Callable[[Patient], None]:
    return change("snapshots", lambda p: p.snapshot(tokens), field, value)


def like(tokens: int, other: int, *fields: str) -> Callable[[Patient], None]:
    """Let a snapshot be as another in these fields."""

    def do(patient: Patient) -> None:
        record = patient.views.snapshots
        at, model = patient.snapshot(tokens), patient.snapshot(other)
        for field in fields:
            record[field][at] = record[field][model]

    return do


def pin(field: str, value: int | Where) -> Callable[[Patient], None]:
    return change("pins", lambda p: 1, field, value)


def slot(at: Where, field: str, value: int | Where) -> Callable[[Patient], None]:
    return change("slots", at, field, value)


def seen(patient: Patient, record: int, session: int, evictions: int = 0) -> None:
    patient.views.sessions[record] = session, evictions


def session_record(patient: Patient) -> int:
    (at,) = np.flatnonzero(patient.views.sessions["session"] == SESSION)
    return int(at)


def index_state(field: str, value: int | Where) -> Callable[[Patient], None]:
    return change("snapshot_state", lambda p: 0, field, value)


DAMAGES: list[tuple[str, int, Callable[[Patient], None]]] = [
    ("nodes_used beyond the table", 1, state("nodes_used", 17)),
    ("nodes_used among the roots", 1, state("nodes_used", 3)),
    ("nodes_used below a live node", 1, state("nodes_used", lambda p: np.flatnonzero(p.views.nodes["born"])[-1])),
    ("namespaces_used beyond the roots", 1, state("namespaces_used", 5)),
    ("leases_used is 0", 1, state("leases_used", 0)),
    ("leases_used below a live lease", 1, state("leases_used", 1)),
    ("a parent beyond the table", 2, node(21, "parent", 16)),
    ("a first child nowhere", 2, node(10, "first_child", WHOLE - 1)),
    ("a sibling beyond the table", 2, node(11, "next_sibling", 16)),
    ("an older sibling nowhere", 2, node(12, "prev_sibling", WHOLE - 1)),
    ("a hash chain that leaves the table", 2, node(21, "hash_next", 1 << 31)),
    ("a node twice in the heap by its own account", 2, node(11, "in_heap", 2)),
    ("a lease of no node", 2, lease("node", WHOLE - 1)),
    ("an anchor beyond the table", 2, lease("anchor", 16)),
    ("a bucket of no node", 2, bucket(16)),
    ("heap_size beyond the heap", 3, state("heap_size", 13)),
    ("a heap entry of no node", 3, top("node", 16)),
    ("two nodes of one birth", 4, node(11, "born", lambda p: p.views.nodes["born"][p.node(12)])),
    ("a lease of a node's birth", 4, lease("born", lambda p: p.views.nodes["born"][p.node(12)])),
    ("a birth in the future", 4, node(11, "born", HUGE)),
    ("a negative birth", 4, node(10, "born", -5)),
    ("a use in the future", 4, node(11, "last_use", HUGE)),
    ("the clock set back", 4, state("clock", 2)),
    ("a block without a parent", 5, node(21, "parent", 0)),
    ("a dead parent", 5, node(21, "parent", lambda p: p.free_node)),
    ("a younger parent", 5, node(20, "parent", lambda p: p.node(21))),
    ("its own parent", 5, node(20, "parent", lambda p: p.node(20))),
    ("a dead ancestor", 5, node(10, "born", 0)),
    ("a root below another", 5, change("nodes", lambda p: p.other_root, "parent", lambda p: p.root)),
    ("no block", 6, node(21, "block", NO_BLOCK)),
    ("a root with a block", 6, change("nodes", lambda p: p.root, "block", 7)),
    ("twins", 7, tokens_of(12, like=11)),
    ("a namespace twice", 8, change("namespaces", lambda p: p.other_root, "salt", 0)),
    ("a namespace of tomorrow", 8, change("namespaces", lambda p: p.root, "epoch", 3)),
    ("a lease of a dead node", 9, lease("node", lambda p: p.free_node)),
    ("a lease of a root", 9, lease("node", lambda p: p.root)),
    ("a lease far below its anchor", 9, lease("anchor", lambda p: p.root)),
    ("a lease of a wrong depth", 9, lease("depth", 1)),
    ("a lease of nobody", 9, lease("worker", 0)),
    ("a lease of a slot that is none", 9, lease("worker", 4)),
    ("a lease of a generation to come", 9, lease("generation", HUGE)),
    ("one block more", 10, more("live_blocks")),
    ("one namespace less", 10, less("live_namespaces")),
    ("one lease more", 10, more("live_leases")),
    ("a free node lost", 11, state("free_node", 0)),
    (
        "a free list of nodes in a circle",
        11,
        change("nodes", lambda p: p.free_node, "hash_next", lambda p: p.free_node),
    ),
    ("a free list that leads to a live node", 11, state("free_node", lambda p: p.node(21))),
    ("a free list that leads to a root", 11, state("free_node", 1)),
    ("a free list that leads nowhere", 11, state("free_node", WHOLE - 1)),
    ("a free namespace lost", 11, state("free_namespace", 0)),
    ("a free lease lost", 11, state("free_lease", 0)),
    ("a node of another's hash", 12, node(11, "hash", lambda p: p.views.nodes["hash"][p.node(12)])),
    ("a root of a wrong hash", 12, change("nodes", lambda p: p.root, "hash", 5)),
    ("a chain that is empty", 12, bucket(0)),
    ("a chain in a circle", 12, node(21, "hash_next", lambda p: p.node(21))),
    ("a chain of a dead node", 12, node(21, "hash_next", lambda p: p.free_node)),
    ("other tokens", 12, lambda p: p.views.tokens[p.node(21)].fill(77)),
    ("another block key", 12, node(21, "block_key", 1)),
    ("another adapter", 12, change("namespaces", lambda p: p.other_root, "adapter_id", 9)),
    ("another seed", 12, change("header", lambda p: 0, "hash_seed", 9)),
    ("no child", 13, node(10, "first_child", 0)),
    ("the younger first", 13, node(10, "first_child", lambda p: p.node(12))),
    ("a lost sibling", 13, node(11, "next_sibling", 0)),
    ("siblings in a circle", 13, node(12, "next_sibling", lambda p: p.node(11))),
    ("an only child that has an older sibling", 13, node(21, "prev_sibling", lambda p: p.node(20))),
    ("a child of a leaf", 13, node(12, "first_child", lambda p: p.node(21))),
    ("a leased node that counts none", 14, node(21, "leases", 0)),
    ("a lease counted that is not there", 14, node(12, "leases", 1)),
    ("a heap that is too small", 15, less("heap_size")),
    ("a node of the heap that does not know", 15, node(11, "in_heap", 0)),
    ("a dead node in the heap", 15, top("node", lambda p: p.free_node)),
    ("a root in the heap", 15, top("node", 1)),
    ("none in the heap", 15, top("node", 0)),
    ("a node twice in the heap", 15, top("node", lambda p: p.views.heap["node"][2])),
    ("a top that is not the smallest", 15, top("last_use", HUGE)),
    ("a key after the last use", 15, node(11, "last_use", 1)),
    ("an empty namespace", 16, change("nodes", lambda p: p.other_root, "first_child", 0)),
    ("snapshots_used beyond the table", 17, index_state("snapshots_used", 11)),
    ("snapshots_used below a live snapshot", 17, index_state("snapshots_used", 2)),
    ("snapshots_used is 0", 17, index_state("snapshots_used", 0)),
    ("pins_used beyond the table", 17, index_state("pins_used", 7)),
    ("pins_used below a live pin", 17, index_state("pins_used", 1)),
    ("a slot beyond the table", 18, snapshot(2, "slot", 7)),
    ("a parent beyond the table", 18, snapshot(3, "parent", 10)),
    ("a pin of no snapshot that there is", 18, pin("snapshot", WHOLE - 1)),
    ("a snapshot of nobody", 18, snapshot(5, "worker", 0)),
    ("a snapshot of a worker that is none", 18, snapshot(5, "worker", 4)),
    ("a pin of nobody", 18, pin("worker", 0)),
    ("a slot of a worker that is none", 18, slot(lambda p: p.private, "worker", 4)),
    ("two snapshots of one birth", 19, like(2, 3, "born")),
    ("a pin of a snapshot's birth", 19, pin("born", lambda p: p.views.snapshots["born"][p.snapshot(3)])),
    ("a snapshot of the future", 19, snapshot(3, "born", HUGE)),
    ("a snapshot used in the future", 19, snapshot(3, "last_use", HUGE)),
    ("a negative birth of a pin", 19, pin("born", -1)),
    ("the snapshots' clock set back", 19, index_state("clock", 1)),
    ("a session that was seen tomorrow", 19, change("sessions", session_record, "evictions", HUGE)),
    ("a snapshot of no tokens", 20, snapshot(3, "token_count", 0)),
    ("an unknown flag", 20, snapshot(2, "flags", 64)),
    ("two kinds at once", 20, snapshot(3, "flags", TAIL | LEAF)),
    ("pending and hidden", 20, snapshot(5, "flags", LEAF | PENDING | HIDDEN)),
    ("a tail of no session", 20, snapshot(3, "session", 0)),
    ("a snapshot of tomorrow", 20, snapshot(2, "epoch", 1)),
    (
        "a tier key twice",
        20,
        snapshot(4, "tier_key", lambda p: p.views.snapshots["tier_key"][p.snapshot(1)]),
    ),
    ("a prefix twice", 21, like(2, 3, "token_count", "prefix_hash")),
    ("a spilled prefix once more", 21, like(2, 1, "token_count", "prefix_hash")),
    ("two tails", 22, snapshot(4, "flags", TAIL)),
    ("two siblings", 22, snapshot(3, "flags", SIBLING | BRANCH)),
    ("two snapshots in a slot", 23, snapshot(2, "slot", lambda p: p.slot_of(3))),
    ("a pending snapshot in another's slot", 23, snapshot(5, "slot", lambda p: p.slot_of(3))),
    ("a snapshot in a worker's slot", 24, snapshot(2, "slot", lambda p: p.private)),
    ("a worker has a snapshot's slot", 24, slot(lambda p: p.slot_of(3), "worker", 1)),
    ("another worker has a pending snapshot's slot", 24, slot(lambda p: p.slot_of(5), "worker", 2)),
    ("a pin of a generation to come", 25, pin("generation", HUGE)),
    ("a pending snapshot of a generation to come", 25, snapshot(5, "generation", HUGE)),
    ("a slot of a generation to come", 25, slot(lambda p: p.private, "generation", HUGE)),
    ("a pin of a dead snapshot", 26, snapshot(2, "born", 0)),
    ("a pin of one that came after", 26, pin("snapshot_born", lambda p: p.views.pins["snapshot_born"][1] + 1)),
    ("a pin of none", 26, pin("snapshot", 0)),
    ("a pinned snapshot that was spilled", 26, snapshot(2, "tier_key", 5)),
    ("a pinned snapshot that is pending", 26, snapshot(2, "flags", PENDING)),
    ("a session twice", 27, lambda p: seen(p, (session_record(p) + 1) % 32, SESSION)),
    ("a session far from its place", 27, lambda p: seen(p, (session_record(p) + 20) % 32, SESSION)),
]


def test_there_is_nothing_to_name_before(patient: Patient) -> None:
    assert patient.cache.verify() == []
    views, free = patient.views.state[0], ("free_node", "free_namespace", "free_lease")
    assert all(views[field] for field in (*free, "heap_size"))
    assert patient.views.state["heap_size"][0] >= 3
    record = patient.views.snapshots[1:6]
    assert sorted(record["token_count"].tolist()) == [1, 2, 3, 4, 5]
    assert record["born"].all()
    assert sorted(record["flags"].tolist()) == [0, 0, TAIL, SIBLING, LEAF | PENDING]
    assert np.count_nonzero(record["tier_key"]) == np.count_nonzero(patient.views.pins["born"]) == 1
    assert [int(patient.views.slots["worker"][at]) for at in (patient.private, patient.unused)] == [1, 0]


@pytest.mark.parametrize(("number", "damage"), [pytest.param(n, do, id=what) for what, n, do in DAMAGES])
def test_the_damage_is_named(patient: Patient, number: int, damage: Callable[[Patient], None]) -> None:
    damage(patient)
    found = patient.cache.verify()
    assert number in {violation.number for violation in found}, found
    assert all(violation.name == verify.names()[violation.number - 1] and violation.detail for violation in found)
    for last_of_bounds in (3, 18):
        assert number <= last_of_bounds or min(violation.number for violation in found) > last_of_bounds, found
    patient.bytes[:] = patient.whole
    assert patient.cache.verify() == []


def test_slots_that_are_the_callers_own_have_no_owner_and_no_bounds() -> None:
    with RadixCache.create(fresh_name(), max_blocks=4, max_snapshots=3) as cache:
        try:
            for tokens in (1, 2):
                cache.insert_intermediate_snapshot(LEASED[:tokens], WHOLE - tokens)
            assert cache.verify() == []
            cache._segment.views.snapshots["slot"][1:3] = WHOLE - 1
            assert [violation.number for violation in cache.verify()] == [23]
        finally:
            remove_all(cache.name)


def test_every_invariant_has_a_damage() -> None:
    damaged = {number for _, number, _ in [*DAMAGES, *BLOCK_DAMAGES, *CLAIM_DAMAGES]}
    assert damaged == set(range(1, len(verify.names()) + 1))
