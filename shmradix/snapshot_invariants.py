"""The invariants of the snapshot index, checked with numpy alone; `verify.py` for the tree's, and for both."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from shmradix.layout import BRANCH, HIDDEN, LEAF, PENDING, SIBLING, TAIL, Geometry, Views

_PROBES = 8  # records of the sessions' table that one session may be in


class SnapshotImage(NamedTuple):
    """What the checks share: the views, the geometry, and the live records' indexes."""

    views: Views
    geometry: Geometry
    snapshots: np.ndarray
    pins: np.ndarray
    resident: np.ndarray  # those of the snapshots whose state is in a slot
    shown: np.ndarray  # those that lookups find, or did before a clear(), or would if they were not being spilled


Check = Callable[[SnapshotImage], Iterator[str]]
CHECKS: list[tuple[str, Check]] = []
"""Names and checks, in the order of their numbers."""


def _invariant(name: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        CHECKS.append((name, check))
        return check

    return register


def image_of(views: Views, geometry: Geometry) -> SnapshotImage:
    """The live records of a segment's image."""
    record = views.snapshots
    live = 1 + np.flatnonzero(record["born"][1:])
    is_resident, flags = record["tier_key"][live] == 0, record["flags"][live]
    is_shown = (flags & HIDDEN == 0) & ((flags & PENDING == 0) | ~is_resident)
    pins = 1 + np.flatnonzero(views.pins["born"][1:])
    return SnapshotImage(views, geometry, live, pins, live[is_resident], live[is_shown])


def few(indexes: np.ndarray) -> str:
    """The first of them, for people."""
    shown = ", ".join(map(str, indexes[:5].tolist()))
    return shown + (f" and {len(indexes) - 5} more" if len(indexes) > 5 else "")


def _repeated(indexes: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Those whose key is that of one before."""
    first = np.unique(keys, axis=0, return_index=True)[1]
    return np.delete(indexes, first)


def _words(records: np.ndarray, *fields: str) -> np.ndarray:
    """Fields of records side by side, uint64."""
    columns = [np.atleast_2d(records[field].T.astype(np.uint64)) for field in fields]
    return np.concatenate(columns).T


# --- bounds -----------------------------------------------------------------------------------------------------


@_invariant("the snapshots' and pins' high-water marks lie within their tables, and nothing lives beyond them")
def _marks(image: SnapshotImage) -> Iterator[str]:
    state = image.views.snapshot_state[0]
    for field, table, live in (
        ("snapshots_used", image.views.snapshots, image.snapshots),
        ("pins_used", image.views.pins, image.pins),
    ):
        used = int(state[field])
        if used > len(table):
            yield f"{field} is {used}, not from 0 to {len(table)}"
        elif live.size and live[-1] >= used:
            yield f"{field} is {used}, but {few(live[live >= used])} lives"


@_invariant("every slot, parent, pinned snapshot and owner in the snapshot index is one that there is")
def _indexes(image: SnapshotImage) -> Iterator[str]:
    views, slots = image.views, image.geometry.snapshot_slots
    record, workers = views.snapshots, len(views.workers)
    if slots:
        bad = image.resident[record["slot"][image.resident] >= slots]
        if bad.size:
            yield f"slot of snapshots {few(bad)} is not below {slots}"
    bad = image.snapshots[record["parent"][image.snapshots] >= len(record)]
    if bad.size:
        yield f"parent of snapshots {few(bad)} is not below {len(record)}"
    bad = image.pins[views.pins["snapshot"][image.pins] >= len(record)]
    if bad.size:
        yield f"snapshot of pins {few(bad)} is not below {len(record)}"
    for name, table, live, low in (
        ("snapshots", record, image.snapshots, 1),
        ("pins", views.pins, image.pins, 1),
        ("slots", views.slots, np.arange(slots), 0),
    ):
        worker = table["worker"][live]
        bad = live[(worker < low) | (worker > workers)]
        if bad.size:
            yield f"worker of {name} {few(bad)} is not from {low} to {workers}"


LAST_OF_BOUNDS = len(CHECKS)


# --- truth ------------------------------------------------------------------------------------------------------


@_invariant("births of snapshots and pins are unique and not after their clock, and no use or lookup is after now")
def _births(image: SnapshotImage) -> Iterator[str]:
    views, state = image.views, image.views.snapshot_state[0]
    clock = int(state["clock"])
    born = np.concatenate([views.snapshots["born"][image.snapshots], views.pins["born"][image.pins]])
    if len(np.unique(born)) != len(born):
        yield "two records were born at once"
    if born.size and (born.min() < 0 or born.max() > clock):
        yield f"a birth lies before 0 or after the clock, {clock}"
    used = views.snapshots["last_use"][image.snapshots]
    if used.size and used.max() > clock:
        yield f"a last use lies after the clock, {clock}"
    if views.sessions["evictions"].max() > state["evictions"]:
        yield f"a session looked something up after eviction {state['evictions']}"


@_invariant("a live snapshot has tokens, flags that go together, a session where it is one's, and no later epoch")
def _records(image: SnapshotImage) -> Iterator[str]:
    record, live = image.views.snapshots[image.snapshots], image.snapshots
    flags = record["flags"]
    kinds = [flags & kind != 0 for kind in (TAIL, SIBLING, LEAF)]
    is_own = kinds[0] | kinds[1]
    known = TAIL | SIBLING | LEAF | PENDING | HIDDEN | BRANCH
    for bad, what in (
        (record["token_count"] == 0, "have no tokens"),
        (flags & ~np.uint32(known) != 0, "have flags that are none"),
        (sum(kind.astype(int) for kind in kinds) > 1, "are of two kinds"),
        ((flags & PENDING != 0) & (flags & HIDDEN != 0), "are pending and displaced"),
        (is_own & (record["session"] == 0), "are a session's, which is 0"),
        (record["epoch"] > image.views.state["epoch"][0], "are of a later epoch than the tree"),
    ):
        if bad.any():
            yield f"snapshots {few(live[bad])} {what}"
    tiered = live[record["tier_key"] != 0]
    bad = _repeated(tiered, _words(image.views.snapshots[tiered], "tier_key"))
    if bad.size:
        yield f"snapshots {few(bad)} have another's tier key"


@_invariant("of a prefix there is at most one snapshot that lookups may find")
def _twins(image: SnapshotImage) -> Iterator[str]:
    prefix = _words(image.views.snapshots[image.shown], "epoch", "adapter_id", "salt", "token_count", "prefix_hash")
    bad = _repeated(image.shown, prefix)
    if bad.size:
        yield f"snapshots {few(bad)} are of the prefix of another"


@_invariant("a session has at most one tail and one sibling in a namespace")
def _tails(image: SnapshotImage) -> Iterator[str]:
    for kind, name in ((TAIL, "tail"), (SIBLING, "sibling")):
        its = image.shown[image.views.snapshots["flags"][image.shown] & kind != 0]
        bad = _repeated(its, _words(image.views.snapshots[its], "epoch", "adapter_id", "salt", "session"))
        if bad.size:
            yield f"snapshots {few(bad)} are a {name} beside another"


@_invariant("no slot is in two live resident snapshots")
def _slots(image: SnapshotImage) -> Iterator[str]:
    bad = _repeated(image.resident, _words(image.views.snapshots[image.resident], "slot"))
    if bad.size:
        yield f"snapshots {few(bad)} are in the slot of another"


@_invariant("a slot in the index is no worker's, but for a pending snapshot's, which is no other's")
def _owners(image: SnapshotImage) -> Iterator[str]:
    if not image.geometry.snapshot_slots:
        return
    record = image.views.snapshots[image.resident]
    slot = image.views.slots[record["slot"]]
    is_its = (record["flags"] & PENDING != 0) & (slot["worker"] == record["worker"])
    is_its &= slot["generation"] == record["generation"]
    bad = image.resident[(slot["worker"] != 0) & ~is_its]
    if bad.size:
        yield f"the slots of snapshots {few(bad)} are a worker's"


@_invariant("pins, pending snapshots and slots are of no generation to come of their worker")
def _generations(image: SnapshotImage) -> Iterator[str]:
    views = image.views
    pending = image.snapshots[views.snapshots["flags"][image.snapshots] & PENDING != 0]
    for name, table, theirs in (
        ("pins", views.pins, image.pins),
        ("pending snapshots", views.snapshots, pending),
        ("slots", views.slots, np.flatnonzero(views.slots["worker"])),
    ):
        worker = table["worker"][theirs].astype(np.int64) - 1
        bad = theirs[table["generation"][theirs] > views.workers["generation"][worker]]
        if bad.size:
            yield f"{name} {few(bad)}"


@_invariant("a live pin names a live, resident snapshot that is not pending")
def _pins(image: SnapshotImage) -> Iterator[str]:
    pins = image.views.pins[image.pins]
    record = image.views.snapshots[pins["snapshot"]]
    is_there = (pins["snapshot"] != 0) & (record["born"] == pins["snapshot_born"])
    is_there &= (record["tier_key"] == 0) & (record["flags"] & PENDING == 0)
    if not is_there.all():
        yield f"pins {few(image.pins[~is_there])}"


@_invariant("a session is in the table once, within eight records of its hash")
def _sessions(image: SnapshotImage) -> Iterator[str]:
    sessions = image.views.sessions["session"]
    theirs = np.flatnonzero(sessions)
    away = (theirs - (mix(sessions[theirs]) & np.uint64(len(sessions) - 1)).astype(np.int64)) % len(sessions)
    bad = theirs[away >= _PROBES]
    if bad.size:
        yield f"records {few(bad)} are another's"
    bad = _repeated(theirs, sessions[theirs])
    if bad.size:
        yield f"the sessions of records {few(bad)} are there twice"


def mix(x: np.ndarray) -> np.ndarray:
    """As hashing.mix."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(33))) * np.uint64(0xFF51_AFD7_ED55_8CCD)
        x = (x ^ (x >> np.uint64(33))) * np.uint64(0xC4CE_B9FE_1A85_EC53)
        return x ^ (x >> np.uint64(33))
