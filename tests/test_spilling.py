"""Spilling and faulting in: in which order it is done, what is kept when a step fails, and that no byte is mistaken."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shmradix import RadixCache, errors, tier
from shmradix.tier import FileTier
from tests.actors import Actor, attach
from tests.snapshot_actors import STATE, Slots, begin_at, prompt_of, state_of, store_prompt

CacheFactory = Callable[..., RadixCache]
FILE = STATE + 32


class Engine:
    """A worker, its slots and its tier; notes what is done, and that no guard is held where bytes are moved."""

    def __init__(self, cache: RadixCache, slots: Slots, path: Path, room: int) -> None:
        self.cache, self.slots, self.room = cache, slots, room
        self.log: list[str] = []
        self.files = NotingTier(self, path, room * FILE)
        self.on_read: Callable[[int], object] = lambda slot: None
        self.on_write: Callable[[int], object] = lambda slot: None

    def note(self, what: str) -> None:
        assert not self.cache._segment.views.guards["owner"].any(), f"a guard is held at {what}"
        self.log.append(what)

    def read(self, slot: int) -> bytes:
        self.note("read")
        self.on_read(slot)
        return self.slots.read(slot)

    def write(self, slot: int, state: bytes) -> None:
        self.note("write")
        self.on_write(slot)
        self.slots.write(slot, state)

    def save(self, number: int) -> int:
        """Store a prompt and its state; the slot."""
        store_prompt(self.cache, number)
        slot = tier.allocate(self.cache, self.files, self.read, 1)
        self.slots.write(slot, state_of(prompt_of(number)))
        for free in self.cache.insert_intermediate_snapshot(prompt_of(number), slot):
            self.cache.free_snapshot_slot(free)
        return slot

    def spill(self) -> int | None:
        return tier.spill(self.cache, self.files, self.read, 1)

    def fault_in(self, match: Any) -> bool:
        return tier.fault_in(
            self.cache, self.files, match, self.read, self.write, min_tokens=1, spill_tokens=1
        )  # fmt: skip

    def where(self, number: int) -> str:
        """Where the prompt's state is; a resident one must be the right one."""
        with self.cache.lookup(prompt_of(number)) as match:
            if match.snapshot_slot is not None:
                assert self.slots.read(match.snapshot_slot) == state_of(prompt_of(number))
                return "slot"
            return "tier" if match.snapshot_tier_key is not None else match.no_snapshot

    def free_slots(self) -> int:
        """How many slots are nobody's: all can be had, and are given back."""
        slots = []
        try:
            while True:
                slots.append(self.cache.allocate_snapshot_slot(evict=False))
        except errors.SlotsFull:
            for slot in slots:
                self.cache.free_snapshot_slot(slot)
            return len(slots)


class NotingTier(FileTier):
    def __init__(self, engine: Engine, path: Path, max_bytes: int) -> None:
        super().__init__(path, max_bytes)
        self.engine = engine
        self.fails: tuple[str, ...] = ()

    def _note(self, what: str) -> None:
        self.engine.note(what)
        if what in self.fails:
            raise errors.TierError(f"{what} fails")

    def put(self, key: int, state: Any) -> bool:
        self._note("put")
        return super().put(key, state)

    def get(self, key: int) -> bytes | None:
        self._note("get")
        return super().get(key)

    def remove(self, key: int) -> bool:
        self._note("remove")
        return super().remove(key)


@pytest.fixture(params=["session", "chain"])
def make(
    request: pytest.FixtureRequest, cache_factory: CacheFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Engine]:
    """An engine whose calls of the cache are in its log, too."""

    def make_engine(slots: int = 2, room: int = 8, max_snapshots: int = 8, **sizes: Any) -> Engine:
        cache = cache_factory(
            block_size=4, max_snapshots=max_snapshots, snapshot_slots=slots, retention=request.param, **sizes
        )
        engine = Engine(cache, Slots(tmp_path / "slots", 16), tmp_path / "tier", room)
        for method, name in (
            ("evict_snapshot_to_tier", "evict"),
            ("commit_snapshot_spill", "commit"),
            ("promote_snapshot", "promote"),
            ("forget_snapshot_tier_key", "forget"),
        ):
            monkeypatch.setattr(RadixCache, method, noting(engine, getattr(RadixCache, method), name))
        return engine

    return make_engine


def noting(engine: Engine, method: Callable[..., Any], name: str) -> Callable[..., Any]:
    def noting_method(*arguments: Any, **keywords: Any) -> Any:
        engine.log.append(name)
        return method(*arguments, **keywords)

    return noting_method


def raising(error: BaseException) -> Callable[[int], object]:
    def fail(_: int) -> None:
        raise error

    return fail


# --- all goes well


def test_the_oldest_state_is_spilled_and_comes_back_the_very_same(make: Callable[..., Engine]) -> None:
    engine = make()
    first = [engine.save(number) for number in range(2)]
    assert engine.log == ["evict"] * 0
    assert engine.save(2) == first[0]
    assert engine.log == ["evict", "read", "put", "commit"]
    assert [engine.where(number) for number in range(3)] == ["tier", "slot", "slot"]

    engine.log.clear()
    with engine.cache.lookup(prompt_of(0)) as match:
        assert (match.snapshot_slot, match.snapshot_tier_tokens) == (None, 8)
        assert engine.fault_in(match)
        assert engine.log == ["get", "evict", "read", "put", "commit", "write", "promote", "remove"]
        assert (match.snapshot_tokens, match.snapshot_tier_key) == (8, None)
        slot = match.snapshot_slot
        assert slot is not None
        assert engine.slots.read(slot) == state_of(prompt_of(0))
        assert engine.spill() != slot  # pinned
        assert engine.spill() is None
        assert not engine.fault_in(match)  # nothing is left to do
    assert engine.spill() == slot
    stats = engine.cache.stats()
    assert (stats.snapshots, stats.snapshots_tiered, stats.tier_fault_ins) == (3, 3, 1)


def test_a_state_of_few_tokens_is_dropped_and_not_faulted_in(make: Callable[..., Engine]) -> None:
    engine = make()
    engine.save(0)
    engine.save(1)
    assert tier.spill(engine.cache, engine.files, engine.read, 9) is not None
    assert engine.log == ["evict"]
    engine.spill()
    engine.log.clear()
    with engine.cache.lookup(prompt_of(1)) as match:
        assert match.snapshot_tier_tokens == 8
        assert not tier.fault_in(engine.cache, engine.files, match, engine.read, engine.write, min_tokens=9)
    assert engine.log == []


def test_slots_of_the_callers_own_go_the_same_way(make: Callable[..., Engine]) -> None:
    engine = make(slots=0)
    for number in (0, 1):
        store_prompt(engine.cache, number)
        engine.slots.write(number, state_of(prompt_of(number)))
        engine.cache.insert_intermediate_snapshot(prompt_of(number), number)
    assert engine.spill() == 0
    with engine.cache.lookup(prompt_of(0)) as match:
        assert tier.fault_in(engine.cache, engine.files, match, engine.read, engine.write, slot=5, min_tokens=1)
        assert match.snapshot_slot == 5
    assert [engine.where(number) for number in (0, 1)] == ["slot", "slot"]


def test_a_state_is_not_pushed_out_of_a_full_tier_by_what_is_spilled_for_it(make: Callable[..., Engine]) -> None:
    engine = make(room=1)
    for number in range(3):
        engine.save(number)
    assert engine.where(0) == "tier"
    for number, spilled in ((0, 1), (1, 2), (2, 0)):
        with engine.cache.lookup(prompt_of(number)) as match:
            assert engine.fault_in(match)
        assert engine.where(number) == "slot"
        assert engine.where(spilled) in ("tier", "none")


# --- a step of a spill fails


@pytest.mark.parametrize("how", ["refused", "failed", "failed to remove, too"])
def test_a_tier_that_does_not_take_the_state_yields_the_slot_and_the_key_is_forgotten(
    make: Callable[..., Engine], how: str
) -> None:
    engine = make(room=0 if how == "refused" else 8)
    slots = {engine.save(0), engine.save(1)}
    engine.files.fails = {"refused": (), "failed": ("put",), "failed to remove, too": ("put", "remove")}[how]
    assert engine.spill() in slots
    assert engine.log[:4] == ["evict", "read", "put", "forget"]
    assert [engine.where(number) for number in (0, 1)] == ["none", "slot"]
    assert engine.files.used_bytes() == 0
    assert (engine.cache.stats().snapshots, engine.free_slots()) == (1, 0)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), RuntimeError("no device")], ids=repr)
@pytest.mark.parametrize("slots", [2, 0])
def test_a_read_that_raises_leaves_the_state_where_it_is(
    make: Callable[..., Engine], error: BaseException, slots: int
) -> None:
    engine = make(slots=slots)
    for number in (0, 1):
        store_prompt(engine.cache, number)
        slot = engine.cache.allocate_snapshot_slot() if slots else number
        engine.slots.write(slot, state_of(prompt_of(number)))
        engine.cache.insert_intermediate_snapshot(prompt_of(number), slot)
    engine.on_read = raising(error)
    with pytest.raises(type(error)):
        engine.spill()
    assert [engine.where(number) for number in (0, 1)] == ["slot", "slot"]
    assert engine.files.used_bytes() == 0
    engine.on_read = lambda slot: None
    assert sorted([engine.spill(), engine.spill()]) == [0, 1]  # type: ignore[type-var]


def test_a_put_that_is_interrupted_leaves_the_state_where_it_is(
    make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    engine.save(0)
    for step in ("posix_fallocate", "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(tier.os, step, lambda *_: raising(KeyboardInterrupt())(0))
            with pytest.raises(KeyboardInterrupt):
                engine.spill()
        assert (engine.where(0), engine.files.used_bytes()) == ("slot", 0)


def supersede(engine: Engine, number: int, slot: int) -> None:
    """Save the prompt's state again from another worker."""
    with RadixCache.attach(engine.cache.name) as other:
        mine = other.allocate_snapshot_slot(evict=False)
        assert mine != slot
        engine.slots.write(mine, state_of(prompt_of(number)))
        assert other.insert_intermediate_snapshot(prompt_of(number), mine) == []


@pytest.mark.parametrize("raises", [False, True])
def test_a_state_that_is_superseded_while_it_is_spilled_yields_its_slot_once(
    make: Callable[..., Engine], raises: bool
) -> None:
    engine = make()
    slot = engine.save(0)

    def read(_: int) -> None:
        supersede(engine, 0, slot)
        if raises:
            raise KeyboardInterrupt

    engine.on_read = read
    if raises:
        with pytest.raises(KeyboardInterrupt):
            engine.spill()
    else:
        assert engine.spill() == slot
        engine.cache.free_snapshot_slot(slot)
    assert (engine.where(0), engine.files.used_bytes(), engine.free_slots()) == ("slot", 0, 1)


@pytest.mark.parametrize("raises", [False, True])
def test_a_clear_while_a_state_is_spilled_leaves_no_record_behind(make: Callable[..., Engine], raises: bool) -> None:
    engine = make(max_snapshots=2)

    def read(_: int) -> None:
        engine.cache.clear()
        if raises:
            raise KeyboardInterrupt

    engine.on_read = read
    for _ in range(5):
        slot = engine.save(0)
        if raises:
            with pytest.raises(KeyboardInterrupt):
                engine.spill()
        else:
            assert engine.spill() == slot
            engine.cache.free_snapshot_slot(slot)
        assert not (engine.cache._segment.views.snapshots["born"] != 0).any()
    assert (engine.files.used_bytes(), engine.free_slots()) == (0, 2)


# --- a step of a fault-in fails


def tiered(make: Callable[..., Engine], **sizes: Any) -> Engine:
    """The state of prompt 0 is in the tier, those of 1 and 2 in the two slots."""
    engine = make(**sizes)
    for number in range(3):
        engine.save(number)
    engine.log.clear()
    return engine


def test_a_lost_state_is_forgotten_before_it_is_removed_and_nothing_goes_for_it(make: Callable[..., Engine]) -> None:
    engine = tiered(make)
    with engine.cache.lookup(prompt_of(0)) as match:
        assert match.snapshot_tier_key is not None
        FileTier.remove(engine.files, match.snapshot_tier_key)
        assert not engine.fault_in(match)
    assert engine.log == ["get", "forget", "remove"]
    assert [engine.where(number) for number in range(3)] == ["none", "slot", "slot"]
    assert engine.cache.stats().tier_reaps == 1


def test_a_state_that_cannot_be_read_now_keeps_its_key(make: Callable[..., Engine]) -> None:
    engine = tiered(make)
    engine.files.fails = ("get",)
    with engine.cache.lookup(prompt_of(0)) as match:
        assert not engine.fault_in(match)
        assert engine.log == ["get"]
        engine.files.fails = ()
        assert engine.fault_in(match)
    assert engine.where(0) == "slot"


def test_a_state_whose_file_cannot_be_removed_is_there_all_the_same(make: Callable[..., Engine]) -> None:
    engine = tiered(make)
    engine.files.fails = ("remove",)
    with engine.cache.lookup(prompt_of(0)) as match:
        assert engine.fault_in(match)
    assert engine.where(0) == "slot"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), RuntimeError("no device")], ids=repr)
def test_a_write_that_raises_keeps_the_key_and_frees_the_slot(
    make: Callable[..., Engine], error: BaseException
) -> None:
    engine = tiered(make)
    engine.on_write = raising(error)
    with engine.cache.lookup(prompt_of(0)) as match:
        with pytest.raises(type(error)):
            engine.fault_in(match)
        assert engine.free_slots() == 1
        engine.on_write = lambda slot: None
        assert engine.fault_in(match)
    assert [engine.where(number) for number in range(3)] == ["slot", "tier", "slot"]


def test_a_read_that_raises_while_room_is_made_changes_nothing(make: Callable[..., Engine]) -> None:
    engine = tiered(make)
    engine.on_read = raising(KeyboardInterrupt())
    with engine.cache.lookup(prompt_of(0)) as match, pytest.raises(KeyboardInterrupt):
        engine.fault_in(match)
    assert [engine.where(number) for number in range(3)] == ["tier", "slot", "slot"]
    assert engine.free_slots() == 0


def test_no_slot_to_be_had_keeps_the_key(make: Callable[..., Engine]) -> None:
    engine = tiered(make)
    with engine.cache.lookup(prompt_of(1)), engine.cache.lookup(prompt_of(2)):
        with engine.cache.lookup(prompt_of(0)) as match:
            assert not engine.fault_in(match)
        assert engine.where(0) == "tier"


def test_no_pin_to_be_had_promotes_nothing(make: Callable[..., Engine]) -> None:
    engine = tiered(make, max_leases=1)
    views: Any = engine.cache._segment.views
    with engine.cache.lookup(prompt_of(0)) as match:
        views.snapshot_state["pins_used"], views.pins["born"][1] = 2, 1  # pins go with leases: damage, no less
        with pytest.raises(errors.LeasesFull, match="max_leases=1"):
            engine.fault_in(match)
        assert match.snapshot_slot is None
        views.pins["born"][1] = 0
    assert engine.free_slots() == 1
    assert engine.where(0) == "tier"


def test_a_released_match_gets_no_state_and_the_slot_is_free(make: Callable[..., Engine]) -> None:
    engine = tiered(make)
    match = engine.cache.lookup(prompt_of(0))
    engine.on_write = lambda slot: match.release()
    with pytest.raises(errors.LeaseError):
        engine.fault_in(match)
    assert engine.free_slots() == 1
    assert engine.where(0) == "tier"


def test_a_state_that_another_brought_in_meanwhile_is_brought_in_once(make: Callable[..., Engine]) -> None:
    engine = tiered(make, slots=3)
    engine.spill()

    def bring_in(_: int) -> None:
        engine.on_write = lambda slot: None
        with RadixCache.attach(engine.cache.name) as other, other.lookup(prompt_of(0)) as theirs:
            assert tier.fault_in(other, engine.files, theirs, engine.read, engine.write, min_tokens=1, spill_tokens=1)

    engine.on_write = bring_in
    with engine.cache.lookup(prompt_of(0)) as match:
        assert not engine.fault_in(match)
        assert match.snapshot_slot is None
    assert engine.where(0) == "slot"
    assert engine.free_slots() == 1


# --- two processes


def open_engine(state: SimpleNamespace, name: str, slots: str, path: str) -> None:
    attach(state, name)
    state.slots, state.files = Slots(slots, 16), FileTier(path, 8 * FILE)


def fault_in_at(state: SimpleNamespace, number: int, start: float) -> tuple[bool, bool]:
    """Look up and fault in; whether it was this worker that did, and whether the slot holds the right state then."""
    how: dict[str, Any] = {"min_tokens": 1, "spill_tokens": 1}
    with state.cache.lookup(prompt_of(number)) as match:
        begin_at(start)
        did = tier.fault_in(state.cache, state.files, match, state.slots.read, state.slots.write, **how)
        slot = match.snapshot_slot
        return did, slot is None or state.slots.read(slot) == state_of(prompt_of(number))


def test_of_two_processes_that_fault_in_the_same_state_one_does(cache_factory: CacheFactory, tmp_path: Path) -> None:
    cache = cache_factory(block_size=4, max_snapshots=8, snapshot_slots=4)
    engine = Engine(cache, Slots(tmp_path / "slots", 16), tmp_path / "tier", 8)
    engine.save(0)
    with Actor() as one, Actor() as other:
        actors = (one, other)
        for actor in actors:
            actor.do(open_engine, cache.name, str(tmp_path / "slots"), str(tmp_path / "tier"))
        for round_ in range(40):
            slot = engine.spill()
            assert slot is not None
            cache.free_snapshot_slot(slot)
            start = time.monotonic() + 0.02
            for actor in actors:
                actor.begin(fault_in_at, 0, start)
            did, right = zip(*(actor.answer() for actor in actors), strict=True)
            assert sorted(did) == [False, True], round_
            assert all(right)
            assert engine.where(0) == "slot"
            assert engine.files.used_bytes() == 0
            assert engine.free_slots() == 3
    assert cache.stats().tier_fault_ins == 40
