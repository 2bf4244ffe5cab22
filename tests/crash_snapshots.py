"""Every operation of the snapshot index stopped after every store; crash_states.py does the same for the tree.

There is nothing to rebuild in this half: it must be sound at each store as it is. So no model is needed: once the dead
are buried, each snapshot is as it was before the operation or as it is after it, nothing of the dead is left, and the
index gives out each of its slots once.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np
import xxhash

from shmradix import PrefixMatch, RadixCache, errors, layout, verify
from shmradix.guard import SNAPSHOTS
from shmradix.inputs import NO_KEYS, as_namespace
from shmradix.layout import BRANCH, LEAF, PENDING, SIBLING, TAIL
from shmradix.owner_word import tag_of
from shmradix.prefix_hash import prefix_hashes
from shmradix.snapshot_methods import PendingSnapshot
from tests.crash_operations import NOW
from tests.crash_shapes import DEAD, HOLDER, SURVIVOR, TAKER, VICTIM
from tests.crash_states import GONE, SEED, Report, another_order
from tests.plain import Kernels, make

TAG = tag_of(VICTIM, 1)
SIZES: dict[str, Any] = {
    "block_size": 3, "max_blocks": 24, "max_namespaces": 4, "max_leases": 6, "max_workers": 5, "max_snapshots": 7,
    "tail_lease": 2, "snapshot_alpha": 0.5,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    f"{policy}, {'own' if slots else 'callers'} slots": {"retention": policy, "snapshot_slots": slots}
    for policy in ("session", "chain")
    for slots in (5, 0)
}
PROMPT = [*range(10, 22)]
OTHER = [*PROMPT[:6], *range(70, 76)]
TENANT = b"tenant"
FRESH = [*range(90, 96)]  # of which nothing was saved


_STATE = next(section.offset for section in layout.Geometry(1, 1, 1, 1, 1).sections() if section.name == "state")
_EPOCH = _STATE // 8 + layout.word_of(layout.STATE, "epoch")  # of the tree, in words of a segment


class Shape(NamedTuple):
    """A segment's bytes, and what the victim has in it."""

    name: str
    image: np.ndarray
    slots: list[int]  # the victim's own, in no snapshot
    pending: list[PendingSnapshot]
    pins: list[tuple[int, int]]  # and their births
    keys: list[int]  # of all that is in a tier
    depths: list[tuple[int, int]]  # of each live snapshot, and where it is


class Operation(NamedTuple):
    """An entry point's call by the victim."""

    name: str
    call: Callable[[Any, int], Any]  # of the entry points, compiled or plain, and a handle's address: all answers


# --- shapes -------------------------------------------------------------------------------------------------------


class Builder:
    """Lets real handles work on a blank segment."""

    def __init__(self, caches: list[RadixCache]) -> None:
        self.caches, self.is_managed = caches, bool(caches[0]._segment.geometry.snapshot_slots)
        self.slots: list[int] = []
        self.pending: list[PendingSnapshot] = []
        self.matches: list[tuple[int, PrefixMatch]] = []
        self.keys: list[int] = []
        self._ids = itertools.count(40)
        self.store()

    def store(self) -> None:
        """Put the prompts into the tree."""
        for tokens, blocks, salt in (
            (PROMPT, [1, 2, 3, 4], None),
            (OTHER, [1, 2, 5, 6], None),
            (PROMPT, [7, 8, 9, 10], TENANT),
        ):
            self.caches[SURVIVOR].insert(tokens, blocks, salt=salt)
            self.caches[SURVIVOR].release(tokens, salt=salt)

    def slot(self, client: int) -> int:
        return self.caches[client].allocate_snapshot_slot() if self.is_managed else next(self._ids)

    def free(self, client: int, *slots: int) -> None:
        for slot in slots if self.is_managed else ():
            self.caches[client].free_snapshot_slot(slot)

    def own(self) -> None:
        """Give the victim a slot."""
        self.slots.append(self.slot(VICTIM))

    def reserve(
        self, client: int, tokens: list[int], kind: str = "plain", session: int = 0, salt: bytes | None = None
    ) -> PendingSnapshot:
        """Announce a snapshot."""
        cache = self.caches[client]
        pending = cache.reserve_snapshot(tokens, self.slot(client), kind=kind, session=session, salt=salt)
        if client == VICTIM:
            self.pending.append(pending)
        return pending

    def save(self, tokens: list[int], kind: str = "plain", session: int = 0, salt: bytes | None = None) -> None:
        """Save a snapshot, the survivor's."""
        self.free(SURVIVOR, *self.reserve(SURVIVOR, tokens, kind, session, salt).commit())

    def hold(self, client: int, tokens: list[int], session: int = 0, salt: bytes | None = None) -> None:
        """Pin the deepest snapshot of a prompt."""
        match = self.caches[client].lookup(tokens, session=session, salt=salt)
        assert match.snapshot_slot is not None
        self.matches.append((client, match))

    def use(self, tokens: list[int], session: int = 0) -> None:
        self.caches[SURVIVOR].lookup(tokens, session=session).release()

    def spill(self, client: int, pending: bool = False) -> None:
        """Spill what goes first."""
        spilled: Any = self.caches[client].evict_snapshot_to_tier(pending=pending)
        self.keys.append(spilled.key)
        if client == VICTIM and self.is_managed:
            self.slots.append(spilled.slot)
        elif client == SURVIVOR:
            self.free(SURVIVOR, spilled.slot)

    def hide(self) -> None:
        """A clear() whose worker died right after it had begun a new epoch."""
        worker: Any = self.caches[SURVIVOR]._worker
        worker.run(worker.entries.hide_all)

    def shape(self, name: str) -> Shape:
        cache = self.caches[SURVIVOR]
        assert not cache.verify()
        image = np.ndarray(cache._segment.geometry.size, np.uint8, buffer=cache._segment._map).copy()
        pins = [(match._anchor.pin, match._anchor.born) for client, match in self.matches if client == VICTIM]
        slots = self.slots if self.is_managed else [next(self._ids), next(self._ids)]
        for match in (match for _, match in self.matches):
            match.released = True  # the next shape starts from a blank segment
        for pending in self.pending:
            pending.done = True
        record = cache._segment.views.snapshots
        depths = [(int(record["token_count"][at]), at) for at in np.flatnonzero(record["born"]).tolist()]
        return Shape(name, image, slots, self.pending, pins, self.keys, depths)


def _empty(to: Builder) -> None:
    to.own()


def _sessions(to: Builder) -> None:
    to.save(PROMPT[:3])
    to.save(PROMPT[:9], "tail", 1)
    to.save(PROMPT[:6], "sibling", 1)
    to.save(PROMPT[:8], "finish", salt=TENANT)
    to.use(PROMPT, 1)
    to.own()


def _pending(to: Builder) -> None:
    to.save(PROMPT[:3])
    to.save(PROMPT[:9], "tail", 1)
    to.reserve(VICTIM, PROMPT, "tail", 1)
    to.reserve(DEAD, PROMPT[:5])
    to.reserve(HOLDER, OTHER[:9], "finish")


def _again(to: Builder) -> None:
    to.save(PROMPT[:6])
    to.save(PROMPT[:9], "tail", 1)
    to.save(OTHER[:9])
    to.reserve(VICTIM, PROMPT[:6], "sibling", 1)  # takes the place of the first
    to.own()


def _pinned(to: Builder) -> None:
    to.save(PROMPT[:3])
    to.save(PROMPT[:9], "tail", 1)
    to.hold(VICTIM, PROMPT, 1)
    to.save(PROMPT[:6])
    to.hold(HOLDER, PROMPT)
    to.hold(DEAD, PROMPT[:6])
    to.save(PROMPT[:6])  # hides the one that is pinned
    to.own()


def _tiered(to: Builder) -> None:
    for depth in (3, 6, 9):
        to.save(PROMPT[:depth])
    to.spill(SURVIVOR)
    to.spill(VICTIM, pending=True)
    to.spill(DEAD, pending=True)
    to.save(PROMPT, "tail", 1)
    to.hold(HOLDER, PROMPT, 1)


def _crowded(to: Builder) -> None:
    for depth in (3, 6, 9, 12):
        to.save(OTHER[:depth])
        to.spill(SURVIVOR)
    to.save(PROMPT[:3])
    to.save(PROMPT[:9], "tail", 1)
    to.save(PROMPT[:6], "sibling", 1)
    to.hold(DEAD, PROMPT[:6])
    to.use(PROMPT, 2)
    to.own()


def _cleared(to: Builder) -> None:
    for depth in (3, 6, 9):
        to.save(PROMPT[:depth])
        if depth < 9:
            to.hold(HOLDER if depth == 3 else DEAD, PROMPT)
    to.spill(VICTIM, pending=True)
    to.reserve(VICTIM, PROMPT, "tail", 1)
    to.hide()
    to.store()
    to.save(PROMPT[:3])


SHAPES: dict[str, Callable[[Builder], None]] = {
    "empty": _empty, "sessions": _sessions, "pending": _pending, "again": _again, "pinned": _pinned,
    "tiered": _tiered, "crowded": _crowded, "cleared": _cleared,
}  # fmt: skip


# --- operations ---------------------------------------------------------------------------------------------------


def _candidates(shape: Shape, tokens: list[int], limit: int) -> np.ndarray:
    """All snapshots of so many tokens at most, of these or of others, deepest first, with the tokens' hashes there."""
    found = sorted((depth, at) for depth, at in shape.depths if depth <= limit)
    hashes = prefix_hashes(
        SEED, np.array(tokens, np.uint32), NO_KEYS, SIZES["block_size"], [depth for depth, _ in found]
    )
    return np.hstack([np.array(found, np.uint64).reshape(-1, 2), hashes])[::-1].copy()


def _scratch() -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(1 + SIZES["max_snapshots"], np.int64), np.zeros((16, 2), np.int64)


def _out(size: int = 16) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(size, np.uint32), np.zeros(1, np.int64)


def _call(name: str, entry: str, *arguments: Any, outputs: Callable[[], tuple[np.ndarray, ...]] = tuple) -> Operation:
    """An entry point's call; `outputs` makes the arrays that it is handed last, anew for each call."""

    def call(entries: Any, handle: int) -> Any:
        given = outputs()
        return getattr(entries, entry)(handle, TAG, NOW, *arguments, *given), given

    return Operation(name, call)


def _marked(name: str, entry: str, *arguments: Any, size: int | None = 1) -> Operation:
    """An entry point's call that is handed scratch first and, if they have a size, outputs last."""

    def call(entries: Any, handle: int) -> Any:
        given = () if size is None else _out(size)
        return getattr(entries, entry)(handle, TAG, NOW, *_scratch(), *arguments, *given), given

    return Operation(name, call)


def _reads(shape: Shape) -> Iterator[Operation]:
    tokens, namespace = np.array(PROMPT, np.uint32), as_namespace(0, None)

    def deepest(entries: Any, handle: int) -> Any:
        return entries.deepest(handle, namespace, tokens, 9, np.uint64(1), 0)

    def all_within(entries: Any, handle: int) -> Any:
        out = np.zeros((8, 4), np.uint64)
        return entries.all_within(handle, namespace, tokens, 12, np.uint64(1), 0, out), out

    def totals(entries: Any, handle: int) -> Any:
        return entries.totals(handle, TAG, NOW, _scratch()[0])

    yield Operation("deepest", deepest)
    yield Operation("all within", all_within)
    yield Operation("totals", totals)


def _takes(shape: Shape, name: str, tokens: list[int], session: int, hermetic: int) -> Iterator[Operation]:
    gate = 12, np.uint64(session), hermetic, int(shape.image.view(np.int64)[_EPOCH])
    for depth, at, low, high in _candidates(shape, tokens, len(tokens)):
        where = as_namespace(0, None), int(depth), int(at), low, high
        yield _call(f"take {at} {name}", "take", *where, *gate)


def _save(
    shape: Shape,
    name: str,
    tokens: list[int],
    slot: int,
    kind: int = 0,
    session: int = 0,
    epoch: int = -1,
    pending: int = 0,
    salt: bytes | None = None,
) -> Operation:
    where = (
        as_namespace(0, salt),
        np.array(tokens, np.uint32),
        *prefix_hashes(SEED, np.array(tokens, np.uint32), NO_KEYS, SIZES["block_size"], [len(tokens)])[0],
    )
    what = np.uint32(slot), np.uint64(session), kind, epoch, pending
    parents = _candidates(shape, tokens, len(tokens) - 1)
    return _call(f"save {name}", "save", *where, *what, parents, outputs=_out)


def operations(shape: Shape) -> Iterator[Operation]:
    """All operations on the shape, with the arguments that make a difference."""
    yield from _reads(shape)
    for session, hermetic in ((0, 0), (1, 0), (2, 1)):
        yield from _takes(shape, f"of session {session}", PROMPT, session, hermetic)
    yield from _takes(shape, "of nothing", FRESH, 3, 0)
    for session, reason in ((0, 0), (3, 2)):
        yield _call(f"miss of session {session}", "miss", 12, np.uint64(session), reason)
    candidates = _candidates(shape, PROMPT, 12)
    yield _call(
        "which", "which", as_namespace(0, None), candidates, np.uint64(1), 0, outputs=lambda: (np.zeros(12, np.int64),)
    )
    for pin in shape.pins:
        yield _call("unpin", "unpin", *pin)
    yield _call("unpin nothing", "unpin", 1, 1 << 40)
    for slot in shape.slots[:1]:
        yield _save(shape, "new", FRESH, slot)
        yield _save(shape, "of a tenant", PROMPT[:8], slot, salt=TENANT)
        yield _save(shape, "again", PROMPT[:6], slot)
        yield _save(shape, "deepest", PROMPT, slot, LEAF)
        yield _save(shape, "a tail", PROMPT, slot, TAIL, 1)
        yield _save(shape, "the tail again", PROMPT[:9], slot, TAIL, 1)
        yield _save(shape, "a sibling", PROMPT[:7], slot, SIBLING, 1)
        yield _save(shape, "pending", OTHER, slot, TAIL, 1, pending=1)
        yield _save(shape, "of a stale match", FRESH, slot, epoch=7)
        yield _call("free", "free", np.uint32(slot))
        for number, key in enumerate(shape.keys):
            yield _call(f"promote {number}", "promote", np.uint64(key), np.uint32(slot), number % 2)
    yield _save(shape, "in a slot that is none", FRESH, 6 if shape.keys else 1 << 20)
    for pending in shape.pending:
        tokens = pending._prefix.ids.tolist()
        parents = _candidates(shape, tokens, len(tokens) - 1)
        held = pending._at, pending._born
        yield _call("commit", "commit", pending._prefix.namespace, *held, parents, outputs=_out)
        yield _call("abort", "abort", *held)
    yield _marked("evict", "evict")
    for least, pending in ((0, 0), (0, 1), (100, 0)):
        yield _marked(f"spill {least} {pending}", "spill", least, pending)
    for number, key in enumerate(shape.keys):
        yield _call(f"commit spill {number}", "commit_spill", np.uint64(key))
        yield _call(f"forget {number}", "forget", np.uint64(key))
    yield _marked("allocate", "allocate", 1, 0, size=None)
    yield _marked("allocate, evict nothing", "allocate", 0, 0, size=None)
    yield _marked("allocate to finish", "allocate", 1, 1, size=None)
    yield _call("free another's", "free", np.uint32(0))
    yield _call("drop hidden", "drop_hidden", outputs=lambda: (_scratch()[0], *_out(SIZES["max_snapshots"])))
    yield _call("bury the dead", "bury", DEAD, 1)
    yield _call("bury", "bury", VICTIM, 1)


# --- dying in them ------------------------------------------------------------------------------------------------

Snapshots = dict[int, tuple[Any, ...]]  # by their births


class Limits(NamedTuple):
    """How many states are tried, besides all those of a single stop."""

    burials: int  # that are cut short, too, for each stop
    reordered: int  # other orders of an operation's stores


class World:
    """A segment whose worker 0 goes on, worker 2 lives and holds things, and workers 1, 3 and 4 are dead."""

    def __init__(self, name: str, kind: str) -> None:
        creator = RadixCache.create(name, **SIZES, **KINDS[kind])
        creator._segment.views.header["hash_seed"] = SEED
        creator.close()
        self.kind, self.geometry = kind, creator._segment.geometry
        self.caches = [RadixCache.attach(name) for _ in range(SIZES["max_workers"])]
        self.survivor = self.caches[SURVIVOR]
        self.memory = np.ndarray(self.geometry.size, np.uint8, buffer=self.survivor._segment._map)
        self.shapes = self._shapes()
        for client in GONE:
            self.caches[client]._worker.forget()  # its kernel lock, as when a process dies
        for parking in self.survivor._worker._parking:
            any_parking: Any = parking
            any_parking.sleep = lambda: False  # the owner is dead whenever a guard is held: nothing to wait for

    def close(self) -> None:
        """Remove the segment."""
        del self.memory
        self.survivor.unlink()
        for cache in self.caches:
            cache.close()

    def _shapes(self) -> list[Shape]:
        blank, shapes = self.memory.copy(), []
        for name, build in SHAPES.items():
            self.memory[:] = blank
            builder = Builder(self.caches)
            build(builder)
            shapes.append(builder.shape(name))
        return shapes

    @property
    def views(self) -> Any:
        return self.survivor._segment.views

    def recover(self, crashed: np.ndarray) -> Snapshots:
        """Let the survivor take the guard over and bury the dead: the snapshots that are left, pending ones aside."""
        self.memory[:] = crashed
        self.survivor.snapshot_count()
        assert not (broken := verify.check(self.views, self.geometry)), f"recovered: {broken}"
        assert not self.views.guards["owner"].any(), "a guard is held"
        assert self.survivor.reap() == len(GONE), "not all dead workers were reaped"
        views, dead = self.views, [client + 1 for client in GONE]
        record = views.snapshots
        pending = (record["born"] != 0) & (record["flags"] & PENDING != 0)
        assert not np.isin(views.pins["worker"][views.pins["born"] != 0], dead).any(), "pins of the dead"
        assert not np.isin(record["worker"][pending], dead).any(), "pending snapshots of the dead"
        assert not np.isin(views.slots["worker"], dead).any(), "slots of the dead"
        return snapshots_of(views)

    def use_up(self) -> None:
        """Save and find one more, then take every slot there is, once."""
        cache, worker, geometry = self.survivor, self.survivor._worker, self.geometry
        for tokens in (PROMPT, OTHER):
            with cache.lookup(tokens, session=1) as match:
                if match.snapshot_slot is not None:
                    assert self._has(match.snapshot_slot, match.snapshot_tokens), f"found {match._anchor}"
        taken: list[int] = []
        cache.insert(FRESH, [20, 21])
        slot = self._slot()
        if slot is not None:
            try:
                taken += cache.insert_intermediate_snapshot(FRESH, slot)
                with cache.lookup(FRESH) as match:
                    assert match.snapshot_slot == slot, "a snapshot saved since is not found"
            except errors.SnapshotsFull:
                taken.append(slot)
        for is_last in (False, True):
            if is_last:
                worker.run(worker.snapshots.bury, HOLDER, 1)
            if not geometry.snapshot_slots:
                expected = [r["slot"] for r in self._live() if r["tier_key"] == 0 and not r["flags"] & PENDING] + taken
            for _ in range(40):
                slot = cache.evict_snapshot_lru() if not geometry.snapshot_slots else self._slot()
                if slot is None:
                    break
                taken.append(slot)
            assert len(taken) == len({*taken}), f"slots {taken} were given out"
            assert not (broken := cache.verify()), f"used up: {broken}"
        if geometry.snapshot_slots:
            expected = list(range(geometry.snapshot_slots))
        assert sorted(taken) == sorted(expected), f"slots {taken} were given out, not {expected}"
        assert cache.snapshot_count() == cache.stats().snapshots_tiered, "a resident one is left"

    def _slot(self) -> int | None:
        if not self.geometry.snapshot_slots:
            return 1000
        try:
            return self.survivor.allocate_snapshot_slot()
        except errors.SlotsFull:
            return None

    def _live(self) -> Any:
        return self.views.snapshots[self.views.snapshots["born"] != 0]

    def _has(self, slot: int, tokens: int) -> bool:
        return any((r["slot"], r["token_count"], r["tier_key"]) == (slot, tokens, 0) for r in self._live())


def snapshots_of(views: Any) -> Snapshots:
    """All live snapshots, but for what only the order of eviction depends on."""
    found = {}
    for record in views.snapshots[views.snapshots["born"] != 0]:
        what = [record[field].tolist() for field in ("epoch", "adapter_id", "session", "token_count", "check", "salt")]
        where = ("tier", int(record["tier_key"])) if record["tier_key"] else ("slot", int(record["slot"]))
        flags, hash_ = int(record["flags"]) & ~BRANCH, record["prefix_hash"].tolist()
        found[int(record["born"])] = (*map(str, what), str(hash_), flags, where)
    return found


class Trial:
    """One operation on one shape, dying in every way."""

    def __init__(self, world: World, shape: Shape, operation: Operation, kernels: Kernels, report: Report) -> None:
        self.world, self.shape, self.operation, self.kernels, self.report = world, shape, operation, kernels, report
        self.chance = random.Random(f"{SEED} {world.kind} {shape.name} {operation.name}")
        self.tried: set[int] = set()
        self.judged: set[bytes] = set()
        self.before: Snapshots = {}
        self.after: Snapshots = {}

    def run(self, limits: Limits) -> None:
        """Try all its crash states."""
        image, geometry = self.shape.image, self.world.geometry
        tape, _ = self.kernels.record(image, geometry, VICTIM, self.operation.call, "snapshot_entries")
        self.report.counts["operations"] += 1
        self.report.counts["stores"] += tape.count
        try:
            self.before, self.after = self.world.recover(image), self.world.recover(tape.image)
        except AssertionError as error:
            self._fail("no stop", str(error))
            return
        image = image.copy()
        for stop in range(len(tape.stores) + 1):
            make(image, tape.stores[stop - 1 : stop] if stop else [])
            where = f"store {stop} of {len(tape.stores)}"
            self._try("stops", image, where)
            self._die_again(image, where, limits.burials)
        for _ in range(limits.reordered):
            if chosen := another_order(tape.stores, self.chance):
                image = make(self.shape.image.copy(), (tape.stores[i] for i in chosen))
                self._try("reordered", image, f"stores {chosen}")
        self.report.counts["crash states"] += len(self.tried)

    def _die_again(self, crashed: np.ndarray, where: str, limit: int) -> None:
        """Stop whoever takes the guard over and buries the dead, too."""
        if not limit:
            return

        def bury(entries: Any, handle: int) -> None:
            tag, tree = tag_of(TAKER, 1), self.kernels.entries
            if word := tree.announce(handle, SNAPSHOTS):
                tree.take_over(handle, tag, NOW, SNAPSHOTS, word)
            entries.bury(handle, tag, NOW, VICTIM, 1)

        tape, _ = self.kernels.record(crashed, self.world.geometry, TAKER, bury, "snapshot_entries")
        for _ in range(limit):
            stop = self.chance.randint(1, len(tape.stores))
            image = make(crashed.copy(), tape.stores[:stop])
            self._try("cut burials", image, f"{where}, then {stop} of {len(tape.stores)} of the burial")

    def _try(self, kind: str, image: np.ndarray, where: str) -> None:
        self.report.counts[kind] += 1
        crash = xxhash.xxh3_64_intdigest(image.data)
        if crash in self.tried:
            return
        self.tried.add(crash)
        try:
            self._judge(self.world.recover(image))
        except Exception as error:
            self._fail(where, f"{type(error).__name__}: {error}")

    def _judge(self, found: Snapshots) -> None:
        for born, what in found.items():
            assert what in (self.before.get(born), self.after.get(born)), f"a snapshot became {what}"
        lost = {*self.before} & {*self.after} - {*found}
        assert not lost, f"snapshots {[self.before[born] for born in lost]} are gone"
        offset = self.world.geometry.index_offset
        digest = xxhash.xxh3_128_digest(self.world.memory[offset:].tobytes())
        if digest not in self.judged:  # else the same was used up before
            self.judged.add(digest)
            self.report.counts["recovered segments used up"] += 1
            self.world.use_up()

    def _fail(self, where: str, what: str) -> None:
        self.report.fail(f"{self.world.kind}: {self.shape.name}: {self.operation.name}: {where}: {what}"[:1500])


def run_part(name: str, part: int, parts: int, limits: Limits) -> Report:
    """One process's share."""
    report, kernels = Report(), Kernels()
    for number, kind in enumerate(KINDS):
        world = World(f"{name}-{number}", kind)
        try:
            everything = [(shape, operation) for shape in world.shapes for operation in operations(shape)]
            for shape, operation in everything[part::parts]:
                Trial(world, shape, operation, kernels, report).run(limits)
        finally:
            world.close()
    return report


def run(names: list[str], limits: Limits) -> Report:
    """All of it, in as many processes as there are names for their segments."""
    report, parts = Report(), len(names)
    with ProcessPoolExecutor(parts, get_context("spawn")) as pool:
        jobs = [pool.submit(run_part, name, part, parts, limits) for part, name in enumerate(names)]
        for job in jobs:
            report.add(job.result())
    return report
