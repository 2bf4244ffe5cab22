"""Damaged images of small segments, each made again from a seed and its number."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from shmradix import layout
from shmradix.layout import Geometry, Views
from shmradix.owner_word import MAX_GENERATION, tag_of
from tests.hostile_bases import Base, bases

WHOLE = 1 << 32
LAST = (1 << 63) - 1
PAGE = 4096


# --- one image --------------------------------------------------------------------------------------------------


@dataclass
class Image:
    """A base's bytes, on the way to be damaged."""

    number: int
    base: Base
    chance: np.random.Generator
    kind: str = ""
    are_alive: bool = False  # the base's workers, and so their leases
    is_dirty: bool = False  # a worker died while it changed derived data
    is_rebuilt: bool = False  # likewise, and all that is damaged is derived

    def __post_init__(self) -> None:
        self.data = self.base.image.copy()

    @property
    def views(self) -> Any:
        return self.base.geometry.views(self.data)

    def live(self, section: str) -> list[int]:
        """The records in use, or all of them where none is, or none can be."""
        records = getattr(self.views, section)
        if "born" not in (records.dtype.names or ()):
            return list(range(1, len(records)))
        return np.flatnonzero(records["born"]).tolist() or [1]

    def any_of(self, choices: Any) -> Any:
        return choices[int(self.chance.integers(len(choices)))]

    def die(self, dirty: bool = True) -> None:
        """Leave the guard in the hands of a worker that is dead."""
        self.views.guards["owner"][0] = tag_of(self.any_of([0, 1, 2]), 1 << 40)
        self.views.guards["dirty"][0] = int(dirty)
        self.is_dirty = dirty


class Change(NamedTuple):
    """One damage to one base."""

    kind: str
    base: int
    do: Callable[[Image], None]
    derived: bool = False  # only what a rebuild makes anew


def _byte(at: int, value: int | None, image: Image) -> None:
    image.data[at] = image.chance.integers(256) if value is None else value


def _unused(at: int, image: Image) -> None:
    image.data[at : at + 64] = image.chance.integers(0, 256, 64, np.uint8)


def _field(section: str, field: str | None, value: int, one: bool, image: Image) -> None:
    records = getattr(image.views, section)
    column = records if field is None else records[field]
    column[image.any_of(image.live(section)) if one and len(records) > 1 else slice(None)] = value


def _add(field: str, amount: int, image: Image) -> None:
    state = image.views.state
    state[field][0] = (int(state[field][0]) + amount) % WHOLE


def _section(name: str, how: str, image: Image) -> None:
    section = next(s for s in image.base.geometry.sections() if s.name == name)
    part = image.data[section.offset : section.offset + section.nbytes]
    part[:] = {"zero": 0, "ones": 0xFF}[how] if how != "random" else image.chance.integers(0, 256, len(part), np.uint8)


def _noise(name: str, how: str, image: Image) -> None:
    """Bits or bytes of one section, 1 to 64 of them."""
    section = next(s for s in image.base.geometry.sections() if s.name == name)
    count = int(image.chance.choice([1, 1, 1, 2, 3, 8, 64, image.chance.integers(1, 65)]))
    for at in (section.offset + image.chance.integers(section.nbytes, size=count)).tolist():
        if how == "bits":
            image.data[at] ^= 1 << int(image.chance.integers(8))
        else:
            image.data[at] = image.chance.integers(256)


CHAINS = ("hash_next", "next_sibling", "prev_sibling", "parent", "free_node", "free_namespace", "free_lease")


def _cycle(chain: str, length: int, image: Image) -> None:
    """Let a chain lead in a circle of so many records, where it has as many."""
    views = image.views
    records, field = views.nodes, chain
    live = [node for node in image.live("nodes") if chain == "hash_next" or node > image.base.geometry.max_namespaces]
    if chain.startswith("free_"):
        section = "leases" if chain == "free_lease" else "nodes"
        records, field = getattr(views, section), "next_free" if chain == "free_lease" else "hash_next"
        low, used = {"free_node": (1 + image.base.geometry.max_namespaces, "nodes_used"),
                     "free_namespace": (1, "namespaces_used"), "free_lease": (1, "leases_used")}[chain]  # fmt: skip
        free = np.flatnonzero(records["born"][low : int(views.state[used][0])] == 0) + low
        live = free.tolist() or [low]
        views.state[chain][0] = live[0]
    ring = image.chance.permutation(live or [1])[:length].tolist()
    for node, following in zip(ring, [*ring[1:], *ring[:1]]):
        records[field][node] = following
    if chain == "hash_next":
        views.buckets[int(views.nodes["hash"][ring[0]]) & (len(views.buckets) - 1)] = ring[0]
    if chain == "next_sibling" and image.chance.integers(2):
        views.nodes["first_child"][int(views.nodes["parent"][ring[0]]) % len(views.nodes)] = ring[0]


HEAPS = ("twice", "all one", "none", "roots", "dead", "shuffled", "upside down", "early", "late", "positions", "empty",
         "larger", "full")  # fmt: skip


def _heap(how: str, image: Image) -> None:
    views, size = image.views, int(image.views.state["heap_size"][0])
    entries = views.heap[1 : max(size, 2) + 1]
    first = 1 + image.base.geometry.max_namespaces
    if how == "twice":
        entries["node"][-1] = entries["node"][0]
    elif how in ("all one", "none", "roots", "dead"):
        dead = np.flatnonzero(views.nodes["born"][first:] == 0)
        entries["node"] = {"all one": entries["node"][0], "none": 0, "roots": 1,
                           "dead": first + dead[-1] if len(dead) else 0}[how]  # fmt: skip
    elif how == "shuffled":
        entries["node"] = image.chance.permutation(entries["node"])
    elif how == "upside down":
        entries["last_use"] = entries["last_use"][::-1].copy()
    elif how in ("early", "late"):
        entries["last_use"] = -LAST - 1 if how == "early" else LAST
    elif how == "positions":
        views.nodes["in_heap"][first:] = image.chance.integers(0, 3, len(views.nodes) - first)
    elif how == "empty":
        views.nodes["in_heap"] = 0
        views.state["heap_size"] = 0
    else:
        views.state["heap_size"] = min(size + 1, WHOLE - 1) if how == "larger" else len(views.heap) - 1


BIRTHS = ("equal", "negative", "least", "huge", "last", "one", "older child", "like a lease", "used later",
          "used never", "clock 0", "clock back", "clock last", "clock least", "epoch on", "epoch back", "epoch last",
          "no root", "all dead", "all alive")  # fmt: skip


def _births(how: str, image: Image) -> None:
    views = image.views
    nodes, state = views.nodes, views.state
    node, other = image.any_of(image.live("nodes")), image.any_of(image.live("nodes"))
    lease, clock, epoch = image.any_of(image.live("leases")), int(state["clock"][0]), int(state["epoch"][0])
    born = {"equal": nodes["born"][other], "negative": min(-int(nodes["born"][node]), LAST), "least": -LAST - 1,
            "huge": 1 << 60, "last": LAST, "one": 1, "like a lease": views.leases["born"][lease]}  # fmt: skip
    values = {"0": 0, "on": min(epoch + 1, LAST), "last": LAST, "least": -LAST - 1}
    if how in born:
        nodes["born"][node] = born[how]
    elif how == "older child":
        nodes["born"][nodes["parent"][node] % len(nodes)] = min(int(nodes["born"][node]) + 1, LAST)
    elif how.startswith("used"):
        nodes["last_use"][node] = LAST if how == "used later" else -LAST - 1
    elif how == "no root":
        nodes["born"][1 : 1 + image.base.geometry.max_namespaces] = 0
    elif how.startswith("all"):
        nodes["born"][1:] = 0 if how == "all dead" else np.arange(1, len(nodes))
    elif how == "epoch back":
        state["epoch"] = max(epoch - 1, -LAST - 1)
    elif how == "clock back":
        state["clock"] = clock // 2
    else:
        field, value = how.split()
        state[field] = values[value]


def _owner(guard: int, word: int, dirty: int, image: Image) -> None:
    image.views.guards["owner"][guard], image.views.guards["dirty"][guard] = word, dirty


SNAPSHOTS = ("born alike", "born like a pin", "all alive", "all dead", "one prefix", "one slot", "a worker's slot",
             "all spilled", "none spilled", "one key", "all pending", "all pending alike", "all hidden",
             "parents in a circle", "all pinned", "pins of nothing", "pins of the spilled", "all slots a worker's",
             "all slots free", "one session", "later sessions", "clock 0", "clock last")  # fmt: skip


def _snapshots(how: str, image: Image) -> None:
    """What no worker leaves in the snapshot index."""
    views = image.views
    record, pins, slots, sessions = views.snapshots[1:], views.pins[1:], views.slots, views.sessions
    live = record["born"] != 0
    if not live.any():
        return
    if how in ("born alike", "born like a pin"):
        record["born"][live] = record["born"][live][0] if how == "born alike" else pins["born"].max()
    elif how.startswith("all alive"):
        record["born"], views.snapshot_state["snapshots_used"] = np.arange(1, 1 + len(record)), len(record) + 1
    elif how == "all dead":
        record["born"] = 0
    elif how == "one prefix":
        for field in ("token_count", "prefix_hash", "check"):
            record[field] = record[field][-1 - int(np.argmax(live[::-1]))]
    elif how == "one slot":
        record["slot"] = record["slot"][int(np.argmax(live))]
    elif how == "a worker's slot":
        record["slot"] = int(np.argmax(slots["worker"])) if len(slots) else 0
    elif how in ("all spilled", "none spilled", "one key"):
        record["tier_key"] = {"all spilled": 1 + np.arange(len(record)), "none spilled": 0, "one key": 5}[how]
    elif how.startswith("all pending"):
        record["flags"] |= layout.PENDING
        record["worker"][:] = record["worker"] if how == "all pending" else 1
    elif how == "all hidden":
        record["flags"] |= layout.HIDDEN
    elif how == "parents in a circle":
        record["parent"] = 1 + (np.arange(len(record)) + 1) % len(record)
        record["parent_born"] = views.snapshots["born"][record["parent"]]
    elif how in ("all pinned", "pins of nothing", "pins of the spilled"):
        which = np.flatnonzero(live if how == "all pinned" else record["tier_key"] != 0)
        at = np.resize(which, len(pins)) + 1
        pins["snapshot"], pins["born"] = at, np.arange(1, 1 + len(pins)) + 1000
        pins["snapshot_born"] = views.snapshots["born"][at] + (how == "pins of nothing")
        pins["worker"], views.snapshot_state["pins_used"] = 1, len(pins) + 1
    elif how.startswith("all slots"):
        slots["worker"] = 2 if how == "all slots a worker's" else 0
    elif how == "one session":
        sessions["session"] = sessions["session"].max()
    elif how == "later sessions":
        sessions["evictions"] = LAST
    else:
        views.snapshot_state["clock"] = 0 if how == "clock 0" else LAST


def _stored(how: str, image: Image) -> None:
    """Nodes with blocks that they can't have together."""
    blocks, live = image.views.nodes["block"], image.live("nodes")
    owners = image.views.blocks["worker"]
    some = {"one": blocks[live[-1]], "free": owners.argmin(), "private": int((owners == 1).argmax()), "none": 20}[how]
    blocks[[node for node in live if node > image.base.geometry.max_namespaces][: 2 if how == "one" else 1]] = some


def _resize(size: int, image: Image) -> None:
    more = max(size - len(image.data), 0)
    image.data = np.concatenate([image.data[:size], np.zeros(more, np.uint8)])


def _other_geometry(changed: dict[str, int], image: Image) -> None:
    """A header that is right for other sizes than those that the rest was written with."""
    sizes = {field: getattr(image.base.geometry, field) for field in layout.LIMITS}
    geometry = Geometry(**{**sizes, **changed})
    for field in layout.LIMITS:
        image.views.header[field] = getattr(geometry, field)
    image.views.header["bucket_count"], image.views.header["size"] = geometry.bucket_count, geometry.file_size
    _resize(geometry.file_size, image)


# --- all of them ------------------------------------------------------------------------------------------------

MARKS = ("nodes_used", "namespaces_used", "leases_used")
TOTALS = ("free_node", "free_namespace", "free_lease", "live_blocks", "live_namespaces", "live_leases", "heap_size")
DERIVED = {"hash", "leases", "first_child", "next_sibling", "prev_sibling", "hash_next", "in_heap", "next_free"}
INDEXES = {
    "nodes": ("parent", "first_child", "next_sibling", "prev_sibling", "hash_next", "in_heap", "leases", "hash"),
    "leases": ("worker", "node", "anchor", "depth", "next_free", "partial_tokens"),
    "heap": ("node",), "buckets": (None,),
}  # fmt: skip
SNAPSHOT_INDEXES = {
    "snapshots": ("slot", "parent", "worker", "flags", "token_count", "born", "last_use", "epoch", "generation"),
    "pins": ("snapshot", "worker", "born", "snapshot_born", "generation"), "slots": ("worker", "generation"),
    "sessions": ("session", "evictions"),
}  # fmt: skip
BLOCK_INDEXES = {"blocks": ("worker", "next_free", "generation")}
CLAIM_INDEXES = {"claims": ("worker", "generation", "born", "epoch", "token_count", "waiters")}
POOL_TOTALS = ("free_block", "free_blocks", "private_blocks")
SNAPSHOT_MARKS = ("snapshots_used", "pins_used")
OWNERS = [0, 1, 3, 4, 0xFFFF, 1 << 16, (1 << 16) + 4, (1 << 40) + 0xFFFF, 1 << 62, (1 << 62) + 1, -1, -(1 << 63), LAST,
          tag_of(0, 1), tag_of(0, 2), tag_of(2, 1), tag_of(1, MAX_GENERATION - 1)]  # fmt: skip
GEOMETRIES = [{"max_blocks": 200}, {"max_blocks": 1}, {"block_size": 64}, {"block_size": 1}, {"max_leases": 500},
              {"max_leases": 1}, {"max_workers": 200}, {"max_workers": 1}, {"max_namespaces": 100},
              {"max_namespaces": 1}, {"max_snapshots": 50}, {"max_snapshots": 50, "snapshot_slots": 40, "retention": 1},
              {"max_snapshots": 9, "snapshot_slots": 0}, {"max_blocks": 1, "max_namespaces": 26},
              {"num_blocks": 0}, {"num_blocks": 1}, {"num_blocks": 500}, {"num_blocks": 5, "block_nbytes": 9},
              {"max_claims": 0}, {"max_claims": 1000},
              {"num_blocks": 9, "block_nbytes": 4097, "checksums": 1}]  # fmt: skip


def systematic(all_bases: list[Base]) -> Iterator[Change]:
    """Every damage of which there is a list."""
    for at, value in itertools.product(range(208), (0, 1, 0x7F, 0x80, 0xFF, None)):
        yield Change("header byte", at % len(all_bases), partial(_byte, at, value))
    for at in range(208, PAGE - 63, 64):
        yield Change("header byte, unused", at % len(all_bases), partial(_unused, at))
    for b, base in enumerate(all_bases):
        geometry = base.geometry
        most = {"nodes": geometry.node_count, "leases": geometry.node_count, "heap": geometry.node_count,
                "buckets": geometry.node_count, "in_heap": 2,
                "next_free": 1 + geometry.max_leases, "worker": geometry.max_workers}  # fmt: skip
        for section, fields in INDEXES.items():
            for field, one, value in itertools.product(fields, (True, False), (-1, 0, 1, WHOLE)):
                top = most.get(field or section, most[section])
                bad = WHOLE - 1 if value == WHOLE else top + value
                is_derived = section in ("heap", "buckets") or field in DERIVED
                yield Change(f"index {section}", b, partial(_field, section, field, bad, one), is_derived)
        for field, value in itertools.product(TOTALS + MARKS, (0, 1, 7, 24, 25, 28, 29, 1 << 31, WHOLE - 1)):
            yield Change("total or mark", b, partial(_field, "state", field, value, False), field in TOTALS)
        for field, amount in itertools.product(TOTALS + MARKS, (1, -1)):
            yield Change("total or mark", b, partial(_add, field, amount), field in TOTALS)
        for chain, length in itertools.product(CHAINS, (1, 2, 3, 30)):
            yield Change(f"cycle {chain}", b, partial(_cycle, chain, length), chain != "parent")
        for how in HEAPS:
            yield Change("heap", b, partial(_heap, how), True)
        for how in BIRTHS:
            yield Change("births and clock", b, partial(_births, how))
        for word, dirty in itertools.product(OWNERS, (0, 1, -1)):
            yield Change("owner word", b, partial(_owner, 0, word, dirty))
        if geometry.max_snapshots:
            yield from _of_snapshots(b, geometry)
        if geometry.num_blocks:
            yield from _of_blocks(b, geometry)
        if geometry.max_claims:
            yield from _of_claims(b, geometry)
        for section, how in itertools.product(Views._fields, ("zero", "ones", "random")):
            yield Change(f"section {how}", b, partial(_section, section, how), section in ("heap", "buckets"))
        edges = {s.offset + d for s in geometry.sections() for d in (-1, 0, 1)} | {geometry.size + d for d in (-1, 1)}
        for size in sorted({*edges, *range(0, geometry.size + PAGE, PAGE), PAGE - 1, 8, 2 * geometry.size} - {-1}):
            if size != geometry.size:
                yield Change("size", b, partial(_resize, size))
        for changed in GEOMETRIES:
            yield Change("other geometry", b, partial(_other_geometry, changed))
    for value in (0, 0xFF):
        yield Change("whole", 0, partial(_fill, value))


def _of_blocks(b: int, geometry: Geometry) -> Iterator[Change]:
    """Those of managed blocks."""
    most, few = geometry.num_blocks, (0, 1, 2, 3, 4, WHOLE - 2, WHOLE - 1)
    for field, one in itertools.product(BLOCK_INDEXES["blocks"], (True, False)):
        values = (0, 1, 1 << 60, LAST, -LAST - 1) if field == "generation" else (*few, most - 1, most, most + 1)
        for value in values:
            yield Change("index blocks", b, partial(_field, "blocks", field, value, one), field == "next_free")
    for field, value in itertools.product(POOL_TOTALS, (*few, most - 1, most, most + 1)):
        yield Change("total or mark", b, partial(_field, "state", field, value, False), True)
    for how in ("one", "free", "private", "none"):
        yield Change("stored blocks", b, partial(_stored, how))


def _of_claims(b: int, geometry: Geometry) -> Iterator[Change]:
    """Those of claims."""
    for field, one in itertools.product(CLAIM_INDEXES["claims"], (True, False)):
        is_wide = field in ("generation", "born", "epoch")
        for value in (0, 1, 2, *((-1, 1 << 60, LAST) if is_wide else (geometry.max_workers + 1, WHOLE - 1))):
            yield Change("index claims", b, partial(_field, "claims", field, value, one))
    for value in (0, 1, 2, geometry.max_claims, geometry.max_claims + 1, geometry.max_claims + 2, WHOLE - 1):
        yield Change("total or mark", b, partial(_field, "state", "claims_used", value, False))


def _of_snapshots(b: int, geometry: Geometry) -> Iterator[Change]:
    """The listed damages to the snapshot index."""
    for word in OWNERS:
        yield Change("owner word", b, partial(_owner, 1, word, 0))
    for how in SNAPSHOTS:
        yield Change("snapshots", b, partial(_snapshots, how))
    most = {"slot": geometry.snapshot_slots, "parent": 1 + geometry.max_snapshots,
            "snapshot": 1 + geometry.max_snapshots, "worker": geometry.max_workers + 1, "flags": 64}  # fmt: skip
    for section, fields in SNAPSHOT_INDEXES.items():
        if section != "slots" or geometry.snapshot_slots:
            for field, one, value in itertools.product(fields, (True, False), (-1, 0, 1, WHOLE - 1)):
                bad = value if value == WHOLE - 1 else max(most.get(field, 1) + value, 0)
                yield Change(f"index {section}", b, partial(_field, section, field, bad, one))
    for field, value in itertools.product(SNAPSHOT_MARKS, (0, 1, 2, 7, 10, 11, 1 << 31, WHOLE - 1)):
        yield Change("total or mark", b, partial(_field, "snapshot_state", field, value, False))


def _fill(value: int, image: Any) -> None:
    image.data.fill(value)


class Plan:
    """All images of a seed: the listed damages in an order of the seed's, then random ones without end."""

    def __init__(self, seed: int, name: str) -> None:
        self.seed, self.bases = seed, bases(name)
        self.changes = list(systematic(self.bases))
        self.order = np.random.default_rng(seed).permutation(len(self.changes)).tolist()

    def image(self, number: int) -> Image:
        """Image `number`, from 0."""
        chance = np.random.default_rng([self.seed, number])
        if number < len(self.order):
            change = self.changes[self.order[number]]
            image = Image(number, self.bases[change.base], chance, change.kind)
            change.do(image)
            image.are_alive = bool(chance.integers(2))
            return image
        image = Image(number, self.bases[int(chance.integers(len(self.bases)))], chance)
        draw: list[Callable[[Image], None]] = [
            self._noise,
            self._noise,
            self._several,
            self._rebuild,
            self._rebuild_any,
        ]
        draw[int(chance.integers(len(draw)))](image)
        return image

    def _noise(self, image: Image) -> None:
        names = [s.name for s in image.base.geometry.sections() if s.nbytes and s.name != "header"]
        chosen = [image.any_of(names) for _ in range(int(image.chance.choice([1, 1, 1, 2, 4])))]
        how = image.any_of(["bits", "bytes"])
        for name in chosen:
            _noise(name, how, image)
        image.kind, image.are_alive = f"noise, {how}", bool(image.chance.integers(2))

    def _changes(self, image: Image, derived: bool) -> list[Change]:
        here = [c for c in self.changes if self.bases[c.base] is image.base and (c.derived or not derived)]
        return [image.any_of([c for c in here if c.kind not in ("size", "other geometry", "whole")])
                for _ in range(int(image.chance.integers(1, 5)))]  # fmt: skip

    def _several(self, image: Image) -> None:
        for change in self._changes(image, False):
            change.do(image)
        image.kind, image.are_alive = "several", bool(image.chance.integers(2))

    def _rebuild(self, image: Image) -> None:
        """A dead owner that left derived data in any state whatever."""
        for change in self._changes(image, True):
            change.do(image)
        for name in ("heap", "buckets"):
            if image.chance.integers(4) == 0:
                _noise(name, "bytes", image)
        image.die()
        image.kind, image.is_rebuilt = "rebuild", True

    def _rebuild_any(self, image: Image) -> None:
        """The same where truth is damaged, too."""
        self._noise(image) if image.chance.integers(2) else self._several(image)
        image.die(dirty=bool(image.chance.integers(4)))
        image.kind, image.are_alive = "rebuild of damaged truth", bool(image.chance.integers(2))
