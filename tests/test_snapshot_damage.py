"""A damaged snapshot index: a call says so or gives an answer that can be, and no slot is given out twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shmradix import RadixCache, errors, workers
from shmradix.layout import PENDING
from tests.children import in_child

CacheFactory = Callable[..., RadixCache]
SIZES: dict[str, Any] = {
    "block_size": 4, "max_blocks": 16, "max_leases": 4, "max_workers": 3, "max_snapshots": 6, "snapshot_slots": 5,
}  # fmt: skip
PROMPT, SLOTS, WHOLE, SESSION = list(range(16)), 5, 1 << 32, 9
EXPECTED = (errors.CorruptSegment, errors.SlotsFull, errors.SlotError, errors.SnapshotsFull, errors.LeasesFull)


@pytest.fixture(autouse=True, scope="module")
def _warm() -> None:
    """Have the kernels before anything forks."""
    for module in ("entries", "snapshot_entries"):
        workers.compile.load(module)


class Patient:
    """A cache with a snapshot in each state: slot 0 spilled, 1 plain, 2 a tail, 3 pending, 4 this worker's."""

    def __init__(self, cache: RadixCache) -> None:
        self.cache, self.views = cache, cache._segment.views
        cache.insert(PROMPT, [1, 2, 3, 4])
        cache.release(PROMPT)
        slots = [cache.allocate_snapshot_slot() for _ in range(SLOTS)]
        assert slots == [*range(SLOTS)]
        cache.insert_intermediate_snapshot(PROMPT[:3], 0)
        spilled: Any = cache.evict_snapshot_to_tier()
        self.key = spilled.key
        cache.free_snapshot_slot(0)
        cache.insert_intermediate_snapshot(PROMPT[:8], 1)
        cache.insert_tail_snapshot(PROMPT[:12], 2, SESSION)
        self.pending = cache.reserve_snapshot(PROMPT[:14], 3, kind="tail", session=SESSION)
        self.mine = {4}
        self._raw = np.ndarray(cache._segment.geometry.size, np.uint8, cache._segment._map)
        self._image = self._raw.copy()
        assert cache.verify() == []

    def restore(self) -> None:
        self._raw[:] = self._image
        self.mine, self.pending.done = {4}, False

    def got(self, *slots: int) -> bool:
        """Whether slots that a call returned are nobody else's."""
        record = self.views.snapshots[1 : max(1, int(self.views.snapshot_state["snapshots_used"][0]))]
        resident = record["slot"][(record["born"] != 0) & (record["tier_key"] == 0)].tolist()
        good = all(slot not in self.mine and slot not in resident and slot < SLOTS for slot in slots)
        self.mine |= {*slots}
        return good and len({*slots}) == len(slots)

    def is_well(self) -> bool:
        with self.cache.lookup(PROMPT, session=SESSION) as match:
            found = match.snapshot_slot, match.restorable
        return found == (2, [3, 8, 12]) and self.cache.verify() == [] and self.cache.snapshot_count() == 3


def lookup(p: Patient) -> bool:
    with p.cache.lookup(PROMPT, session=SESSION) as match:
        return match.snapshot_tokens in (0, 3, 8, 12, 14) and (match.snapshot_slot or 0) < SLOTS


def allocate(p: Patient) -> bool:
    return all(p.got(p.cache.allocate_snapshot_slot()) for _ in range(SLOTS + 1))


def evict(p: Patient) -> bool:
    slots = [p.cache.evict_snapshot_lru() for _ in range(SLOTS + 1)]
    return p.got(*(slot for slot in slots if slot is not None))


def spill(p: Patient) -> bool:
    done = p.cache.evict_snapshot_to_tier()
    return done is None or p.got(done.slot)


def save(p: Patient) -> bool:
    p.mine.discard(4)
    return p.got(*p.cache.insert_tail_snapshot(PROMPT[:8], 4, SESSION))


def commit(p: Patient) -> bool:
    try:
        return p.got(*p.pending.commit())
    except errors.LeaseError:
        return True


def promote(p: Patient) -> bool:
    p.mine.discard(4)
    return p.cache.promote_snapshot(p.key, 4) in (True, False)


CALLS: dict[str, Callable[[Patient], bool]] = {
    "lookup": lookup, "allocate": allocate, "evict": evict, "spill": spill, "save": save, "commit": commit,
    "promote": promote,
    "restorable": lambda p: {*p.cache.lookup(PROMPT, session=SESSION).restorable} <= {3, 8, 12, 14},
    "free": lambda p: p.cache.free_snapshot_slot(4) is None,
    "clear": lambda p: len(p.cache.clear().snapshot_slots) == 0,
    "count": lambda p: 0 <= p.cache.snapshot_count() <= 6,
    "verify": lambda p: isinstance(p.cache.verify(), list),
    "reap": lambda p: p.cache.reap() >= 0,
}  # fmt: skip


def judge(name: str, section: str, field: str) -> str:
    """Do every call after every damage of a field; what was not as it must be, a line each."""
    patient, bad = Patient(RadixCache.attach(name, lock_timeout=5)), []
    records: Any = getattr(patient.views, section)
    is_wide = records.dtype[field].itemsize == 8
    values = [0, 1, 2, 3, 4, 5, 6, 7, 64, *([1 << 40, (1 << 63) - 1] if is_wide else [1 << 31, WHOLE - 1])]
    first = 1 if section in ("snapshots", "pins") else 0
    for value in values:
        for call in CALLS:
            patient.restore()
            records[field][first:] = value
            if (section, field) == ("slots", "worker"):
                patient.mine.clear()  # nobody can know whose they were
            try:
                said = "sane" if CALLS[call](patient) else "INSANE"
            except EXPECTED as error:
                said = "sane" if str(error) else repr(error)
            except Exception as error:
                said = repr(error)
            patient.restore()
            if said != "sane":
                bad.append(f"{value}: {call}: {said}")
            if not patient.is_well():
                bad.append(f"{value}: {call}: the next call gives a wrong answer")
    patient.restore()
    return "\n".join(bad)


@pytest.mark.parametrize(
    ("section", "field"),
    [
        *(("snapshots", field) for field in (
            "born", "epoch", "session", "token_count", "flags", "check", "slot", "last_use", "tier_key", "prefix_hash",
            "generation", "worker", "parent", "parent_born",
        )),
        *(("pins", field) for field in ("born", "worker", "generation", "snapshot", "snapshot_born")),
        ("slots", "worker"), ("slots", "generation"), ("sessions", "session"), ("sessions", "evictions"),
        *(("snapshot_state", field) for field in ("clock", "evictions", "snapshots_used", "pins_used")),
    ],
)  # fmt: skip
def test_no_record_makes_a_call_answer_nonsense_crash_or_hang(
    cache_factory: CacheFactory, section: str, field: str
) -> None:
    cache = cache_factory(**SIZES)
    assert in_child(lambda: judge(cache.name, section, field), 60) == ""


def at(patient: Patient, tokens: int) -> int:
    return int(np.flatnonzero(patient.views.snapshots["token_count"] == tokens)[0])


def test_a_slot_beyond_the_table_is_said(cache_factory: CacheFactory) -> None:
    patient = Patient(cache_factory(**SIZES))
    record: Any = patient.views.snapshots
    record["slot"][at(patient, 8)] = SLOTS
    for call in (lambda: patient.cache.lookup(PROMPT[:8]), patient.cache.evict_snapshot_lru):
        with pytest.raises(errors.CorruptSegment):
            call()
    assert patient.cache.snapshot_count() == 2  # it was taken out
    assert patient.cache.stats().leases == 0
    patient.restore()
    assert patient.is_well()


@pytest.mark.parametrize("slots", [SLOTS, 0])
def test_a_slot_of_two_snapshots_is_given_out_once(cache_factory: CacheFactory, slots: int) -> None:
    cache = cache_factory(**{**SIZES, "snapshot_slots": slots})
    for tokens in (4, 8):
        slot = cache.allocate_snapshot_slot() if slots else tokens
        cache.insert_intermediate_snapshot(PROMPT[:tokens], slot)
    record: Any = cache._segment.views.snapshots
    record["slot"][1:3] = 1
    with pytest.raises(errors.CorruptSegment):
        cache.evict_snapshot_lru()
    assert cache.evict_snapshot_lru() == 1
    assert cache.evict_snapshot_lru() is None
    assert cache.verify() == []


def test_a_workers_slot_in_a_snapshot_stays_the_workers(cache_factory: CacheFactory) -> None:
    patient = Patient(cache_factory(**SIZES))
    record: Any = patient.views.snapshots
    record["slot"][at(patient, 8)] = 4
    assert {patient.cache.allocate_snapshot_slot() for _ in range(2)} == {0, 1}  # which are free
    with pytest.raises(errors.CorruptSegment):
        patient.cache.allocate_snapshot_slot()
    assert patient.cache.allocate_snapshot_slot() == 2
    patient.restore()


def test_pins_of_nothing_pin_nothing(cache_factory: CacheFactory) -> None:
    patient = Patient(cache_factory(**SIZES))
    pins: Any = patient.views.pins
    pins["born"][1:], pins["worker"][1:], pins["snapshot"][1:] = 1, 1, [1, 99, WHOLE - 1, 0]
    patient.views.snapshot_state["pins_used"] = 5
    assert {patient.cache.evict_snapshot_lru() for _ in range(3)} == {1, 2, None}


def test_what_was_spilled_or_is_pending_at_a_clear_leaves_no_record(cache_factory: CacheFactory) -> None:
    cache = cache_factory(**{**SIZES, "max_snapshots": 2, "snapshot_slots": 2})
    for _ in range(3):
        cache.insert_intermediate_snapshot(PROMPT[:4], cache.allocate_snapshot_slot())
        spilled: Any = cache.evict_snapshot_to_tier(pending=True)
        pending = cache.reserve_snapshot(PROMPT[:8], cache.allocate_snapshot_slot())
        cache.clear()
        assert not cache.commit_snapshot_spill(spilled.key)
        assert pending.commit() == [pending.slot]
        for slot in (spilled.slot, pending.slot):
            cache.free_snapshot_slot(slot)
        assert not cache._segment.views.snapshots["born"].any()


def test_a_pending_spill_from_before_a_clear_makes_room(cache_factory: CacheFactory) -> None:
    """Where the worker that cleared died before it had taken out what it hid."""
    cache = cache_factory(**{**SIZES, "max_snapshots": 1, "snapshot_slots": 1})
    cache.insert_intermediate_snapshot(PROMPT[:4], cache.allocate_snapshot_slot())
    spilled: Any = cache.evict_snapshot_to_tier(pending=True)
    worker: Any = cache._worker
    worker.run(worker.entries.hide_all)
    assert cache.insert_intermediate_snapshot(PROMPT[:8], spilled.slot) == []
    assert not cache.commit_snapshot_spill(spilled.key)
    assert cache.snapshot_count() == 1
    assert int(cache._segment.views.snapshots["flags"][1]) & PENDING == 0
