"""Snapshots that are being written or spilled, slots that the cache manages, clear()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shmradix import RadixCache, errors
from shmradix.layout import RETENTIONS
from shmradix.results import Drop, Spill
from tests.snapshot_steps import CacheFactory, anchor, cache_with


def in_index(cache: RadixCache) -> dict[int, int]:
    """Slot and depth of everything resident, taken out."""
    found = {}
    while (got := cache.evict_snapshot_to_tier(1 << 30)) is not None:
        assert isinstance(got, Drop)
        found[got.slot] = got.tokens
    return found


def spilled_from(cache: RadixCache, **how: Any) -> Spill:
    spilled = cache.evict_snapshot_to_tier(**how)
    assert isinstance(spilled, Spill)
    return spilled


# --- snapshots that are being written -------------------------------------------------------------------------------


def test_a_pending_snapshot_is_found_once_it_is_committed(cache_factory: CacheFactory) -> None:
    cache = cache_with(cache_factory)
    pending = cache.reserve_snapshot(range(32), 5)
    assert (anchor(cache, range(64)), cache.snapshot_count(), pending.done) == ((None, 0), 0, False)
    assert cache.evict_snapshot_lru() is None
    assert pending.commit() == []
    assert (anchor(cache, range(64)), cache.snapshot_count(), pending.done) == ((5, 32), 1, True)
    with pytest.raises(errors.LeaseError, match="tokens=32, slot=5, done"):
        pending.commit()
    pending.abort()
    assert anchor(cache, range(64)) == (5, 32)


def test_an_aborted_snapshot_never_was(cache_factory: CacheFactory) -> None:
    cache = cache_with(cache_factory)
    with pytest.raises(ZeroDivisionError), cache.reserve_snapshot(range(32), 5) as pending:
        _ = 1 / 0
    assert pending.done
    pending.abort()
    with pytest.raises(errors.LeaseError):
        pending.commit()
    assert (cache.snapshot_count(), cache.stats().snapshot_saves) == (0, 0)
    assert cache.insert_intermediate_snapshot(range(32), 5) == []  # the slot may be used again


def test_a_pending_snapshot_counts_as_used_when_it_is_committed(cache_factory: CacheFactory) -> None:
    cache = cache_with(cache_factory)
    pending = cache.reserve_snapshot(range(16), 1)
    cache.insert_intermediate_snapshot(range(32), 2)
    pending.commit()
    assert [cache.evict_snapshot_lru() for _ in range(3)] == [2, 1, None]


def test_a_save_of_the_same_prompt_meanwhile(cache_factory: CacheFactory) -> None:
    """Whoever commits last stays; a pending one displaces nothing."""
    cache = cache_with(cache_factory)
    cache.insert_intermediate_snapshot(range(32), 1)
    first = cache.reserve_snapshot(range(32), 2, kind="tail", session=7)
    second = cache.reserve_snapshot(range(32), 3)
    assert anchor(cache, range(64), session=7) == (1, 32)
    assert second.commit() == [1]
    assert cache.insert_intermediate_snapshot(range(32), 4) == [3]
    assert first.commit() == [4]
    assert anchor(cache, range(64), session=7) == (2, 32)
    assert (cache.snapshot_count(), cache.stats().snapshot_saves) == (1, 4)


def test_a_tail_that_is_pending_is_not_swept(cache_factory: CacheFactory) -> None:
    cache = cache_with(cache_factory)
    older = cache.reserve_snapshot(range(16), 1, kind="tail", session=7)
    assert cache.insert_tail_snapshot(range(32), 2, session=7) == []
    assert older.commit() == [2]
    assert anchor(cache, range(64), session=7) == (1, 16)


def test_a_clear_before_the_commit(cache_factory: CacheFactory) -> None:
    cache = cache_with(cache_factory)
    pending = cache.reserve_snapshot(range(32), 5)
    assert cache.clear().snapshot_slots.tolist() == []  # still the caller's
    assert cache.evict_snapshot_lru() is None
    assert pending.commit() == [5]
    assert (pending.done, cache.snapshot_count(), cache.stats().snapshot_saves) == (True, 0, 0)
    assert cache.insert_intermediate_snapshot(range(32), 5) == []


def test_a_clear_between_the_lookup_and_the_save(cache_factory: CacheFactory) -> None:
    """The state is of the old weights: nothing is stored, the caller's own slot comes back."""
    cache = cache_with(cache_factory)
    match = cache.lookup(range(64))
    cache.clear()
    assert cache.insert_intermediate_snapshot(range(64), 5, match=match) == [5]
    assert cache.insert_tail_snapshot(range(64), 5, 7, match=match) == [5]
    assert cache.insert_intermediate_snapshot(range(16), 6) == []
    with pytest.raises(errors.SlotError, match="slot 6 "):  # not the caller's to free
        cache.insert_intermediate_snapshot(range(64), 6, match=match)
    assert cache.evict_snapshot_lru() == 6
    freed, acquired = cache.insert_with_snapshot(range(64), range(4), 5, match=match)
    assert (freed, acquired.stale, len(acquired.blocks)) == ([5], True, 0)
    with pytest.raises(errors.LeaseError, match="clear"):
        cache.reserve_snapshot(range(64), 5, match=match)
    assert (cache.snapshot_count(), cache.stats().snapshot_saves) == (0, 1)
    match.release()
    with cache.lookup(range(64)) as match:
        assert cache.insert_intermediate_snapshot(range(64), 5, match=match) == []


def test_a_save_uses_its_match_s_namespace(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=64, block_size=16, max_snapshots=8)
    cache.insert(range(32), [0, 1], adapter_id=3, salt=b"x")
    with cache.lookup(range(32), adapter_id=3, salt=b"x") as match:
        cache.insert_intermediate_snapshot(range(32), 5, match=match)
        with pytest.raises(ValueError, match="adapter_id and salt differ"):
            cache.insert_intermediate_snapshot(range(16), 6, match=match, adapter_id=4)
    assert anchor(cache, range(32), adapter_id=3, salt=b"x") == (5, 32)


def test_a_failed_insert_leaves_no_snapshot(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=64, block_size=16, max_snapshots=8)
    with pytest.raises(ValueError, match="more than once"):
        cache.insert_with_snapshot(range(32), [1, 1], 5)
    with pytest.raises(errors.LeaseError):
        cache.insert_with_snapshot(range(32), [1, 2], 5, matched_tokens=16)
    assert (cache.snapshot_count(), cache.stats().snapshot_saves, cache.stats().blocks_live) == (0, 0, 0)
    assert cache.insert_with_snapshot(range(32), [1, 2], 5)[0] == []


def test_pending_snapshots_end_with_their_handle(cache_factory: CacheFactory) -> None:
    cache = cache_with(cache_factory)
    with RadixCache.attach(cache.name) as other, other.reserve_snapshot(range(16), 1) as pending:
        with pytest.raises(errors.SlotError):
            cache.insert_intermediate_snapshot(range(32), 1)
        other.close()
        assert cache.insert_intermediate_snapshot(range(32), 1) == []
        with pytest.raises(errors.CacheClosed):
            pending.commit()
    assert pending.done
    assert in_index(cache) == {1: 32}


def test_pins_end_with_their_handle(cache_factory: CacheFactory) -> None:
    cache = cache_with(cache_factory)
    cache.insert_intermediate_snapshot(range(32), 1)
    with RadixCache.attach(cache.name) as other:
        match = other.lookup(range(64))
        assert match.snapshot_slot == 1
        assert cache.evict_snapshot_lru() is None
    assert cache.evict_snapshot_lru() == 1
    match.release()


# --- slots that the cache manages -----------------------------------------------------------------------------------


def managed(cache_factory: CacheFactory, slots: int = 3, **sizes: Any) -> RadixCache:
    return cache_with(cache_factory, snapshot_slots=slots, **sizes)


def test_a_slot_is_free_or_a_workers_or_in_the_index(cache_factory: CacheFactory) -> None:
    cache = managed(cache_factory)
    one, two, three = (cache.allocate_snapshot_slot() for _ in range(3))
    assert (one, two, three) == (0, 1, 2)
    with pytest.raises(errors.SlotsFull, match="snapshot_slots=3"):
        cache.allocate_snapshot_slot()
    cache.free_snapshot_slot(two)
    assert cache.allocate_snapshot_slot() == two
    assert cache.insert_intermediate_snapshot(range(32), one) == []
    with pytest.raises(errors.SlotError, match="slot 0 is in the index"):
        cache.free_snapshot_slot(one)
    assert cache.insert_intermediate_snapshot(range(32), two) == [one]  # the worker's again
    assert cache.insert_intermediate_snapshot(range(16), one) == []
    assert cache.evict_snapshot_lru() == two
    cache.free_snapshot_slot(two)
    with pytest.raises(errors.SlotError, match="slot 1"):
        cache.free_snapshot_slot(two)


@pytest.mark.parametrize("retention", ["session", "chain"])
def test_allocating_evicts_what_the_policy_gives_up_first(retention: str, cache_factory: CacheFactory) -> None:
    cache = managed(cache_factory, 2, retention=retention)
    for token in (7, 8):
        cache.insert_with_snapshot([token] * 16, [token], cache.allocate_snapshot_slot())
    assert anchor(cache, [7] * 16) == (0, 16)
    assert cache.allocate_snapshot_slot() == 1
    assert cache.stats().snapshot_evictions == 1
    with cache.lookup([7] * 16), pytest.raises(errors.SlotsFull):  # one is pinned, one the worker's
        cache.allocate_snapshot_slot()
    assert cache.allocate_snapshot_slot() == 0


def test_for_a_finish_snapshot_the_session_policy_gives_up_any_other(cache_factory: CacheFactory) -> None:
    cache = managed(cache_factory, 1)
    cache.insert_intermediate_snapshot(range(32), cache.allocate_snapshot_slot())
    assert cache.allocate_snapshot_slot(finish=True) == 0


def test_a_hidden_slot_is_allocated_before_any_other(cache_factory: CacheFactory) -> None:
    cache = managed(cache_factory, 3)
    cache.insert_intermediate_snapshot([1] * 16, cache.allocate_snapshot_slot())
    cache.insert_intermediate_snapshot(range(32), cache.allocate_snapshot_slot())
    with cache.lookup(range(64)) as match:
        assert match.snapshot_slot == 1
        assert cache.insert_intermediate_snapshot(range(32), cache.allocate_snapshot_slot()) == []
    assert cache.allocate_snapshot_slot() == 1
    assert (cache.snapshot_count(), cache.stats().snapshot_evictions) == (2, 0)


USES: list[Callable[[RadixCache, int, int], Any]] = [
    lambda cache, slot, key: cache.insert_intermediate_snapshot(range(32), slot),
    lambda cache, slot, key: cache.insert_with_snapshot(range(32), [0, 1], slot),
    lambda cache, slot, key: cache.reserve_snapshot(range(32), slot),
    lambda cache, slot, key: cache.promote_snapshot(key, slot),
    lambda cache, slot, key: cache.free_snapshot_slot(slot),
]


def test_slots_that_are_not_the_workers_are_refused(cache_factory: CacheFactory) -> None:
    cache = managed(cache_factory)
    cache.insert_intermediate_snapshot(range(16), cache.allocate_snapshot_slot())
    spilled = spilled_from(cache)
    cache.free_snapshot_slot(spilled.slot)
    with RadixCache.attach(cache.name) as other:
        theirs = other.allocate_snapshot_slot()
        for slot in (theirs, 1, 2, 3, 2**32 - 1):  # another worker's, free, free, not there, not there
            for use in USES:
                with pytest.raises(errors.SlotError, match=f"slot {slot} "):
                    use(cache, slot, spilled.key)
        assert (cache.snapshot_count(), cache.stats().leases) == (1, 0)
        other.insert_intermediate_snapshot(range(32), theirs)
    assert cache.evict_snapshot_lru() == theirs  # in the index it was no worker's


def test_the_slots_of_a_worker_are_free_once_it_is_gone(cache_factory: CacheFactory) -> None:
    cache = managed(cache_factory, 3)
    other = RadixCache.attach(cache.name)
    saved, reserved, held = (other.allocate_snapshot_slot() for _ in range(3))
    other.insert_intermediate_snapshot(range(16), saved)
    other.reserve_snapshot(range(32), reserved)
    assert cache.allocate_snapshot_slot() == saved  # all there is to take
    cache.insert_intermediate_snapshot(range(16), saved)
    with cache.lookup(range(64)), pytest.raises(errors.SlotsFull):
        cache.allocate_snapshot_slot()
    other.close()
    assert {cache.allocate_snapshot_slot(), cache.allocate_snapshot_slot()} == {reserved, held}
    assert cache.snapshot_count() == 1


# --- clear() --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [0, 6], ids=["own slots", "managed slots"])
def test_clear_forgets_snapshots(slots: int, cache_factory: CacheFactory) -> None:
    cache = cache_with(cache_factory, snapshot_slots=slots)
    own = iter(range(6))
    for depth in (16, 32, 48):
        cache.insert_intermediate_snapshot(range(depth), cache.allocate_snapshot_slot() if slots else next(own))
    spilled = spilled_from(cache)
    assert (spilled.slot, spilled.tokens) == (0, 16)
    with cache.lookup(range(64), max_snapshot_tokens=32) as match:
        assert match.snapshot_slot == 1
        cleared = cache.clear()
        assert cleared.snapshot_slots.tolist() == ([] if slots else [2])
        assert cache.snapshot_count() == cache.stats().snapshots_tiered == 0
        assert not cache.promote_snapshot(spilled.key, 0)
        assert not cache.forget_snapshot_tier_key(spilled.key)
        assert match.restorable == []
        assert cache.evict_snapshot_lru() is None  # the match has it still
    cache.insert(range(64), range(4))
    assert anchor(cache, range(64)) == (None, 0)
    if slots:
        assert cache.allocate_snapshot_slot() == 2  # free since the clear; 0 is the worker's
    assert cache.evict_snapshot_lru() == 1
    assert cache.stats().snapshot_evictions == 0
    if slots:
        assert [cache.allocate_snapshot_slot() for _ in range(3)] == [3, 4, 5]


def test_clear_gives_back_what_was_superseded_before(cache_factory: CacheFactory) -> None:
    cache = cache_with(cache_factory)
    cache.insert_intermediate_snapshot(range(16), 1)
    with cache.lookup(range(16)):
        assert cache.insert_intermediate_snapshot(range(16), 2) == []
    assert sorted(cache.clear().snapshot_slots.tolist()) == [1, 2]
    assert cache.evict_snapshot_lru() is None


def test_a_spill_that_a_clear_interrupts_leaves_no_record(cache_factory: CacheFactory) -> None:
    cache = cache_with(cache_factory, max_snapshots=1)
    cache.insert_intermediate_snapshot(range(16), 1)
    spilled = spilled_from(cache, pending=True)
    assert cache.clear().snapshot_slots.tolist() == []  # 1 was handed back by the spill
    assert not cache.commit_snapshot_spill(spilled.key)
    assert cache.insert_intermediate_snapshot(range(16), 1) == []


# --- spills that are being written, and a full table ----------------------------------------------------------------


def test_a_pending_spill_is_found_once_it_is_committed(cache_factory: CacheFactory) -> None:
    cache = cache_with(cache_factory)
    cache.insert_intermediate_snapshot(range(16), 1)
    spilled = spilled_from(cache, pending=True)
    with cache.lookup(range(64)) as match:
        assert (match.snapshot_tier_key, match.no_snapshot) == (None, "pending")
    assert not cache.promote_snapshot(spilled.key, 2)
    with RadixCache.attach(cache.name) as other:  # whose it is not
        assert not other.commit_snapshot_spill(spilled.key)
        assert not other.forget_snapshot_tier_key(spilled.key)
    assert cache.commit_snapshot_spill(spilled.key)
    with cache.lookup(range(64)) as match:
        assert (match.snapshot_tier_key, match.no_snapshot) == (spilled.key, "")
    assert cache.promote_snapshot(spilled.key, 2)
    assert not cache.commit_snapshot_spill(spilled.key)


@pytest.mark.parametrize("ending", ["forgotten", "superseded", "swept", "closed"])
def test_how_else_a_pending_spill_may_end(ending: str, cache_factory: CacheFactory) -> None:
    cache = cache_with(cache_factory)
    other = RadixCache.attach(cache.name)
    cache.insert_tail_snapshot(range(16), 1, session=7)
    spilled = spilled_from(other, pending=True)
    if ending == "forgotten":  # the store was full
        assert other.forget_snapshot_tier_key(spilled.key)
    elif ending == "superseded":
        assert cache.insert_intermediate_snapshot(range(16), 2) == []
    elif ending == "swept":
        assert cache.insert_tail_snapshot(range(32), 2, session=7) == []
    if ending != "closed":
        assert not other.commit_snapshot_spill(spilled.key)
    other.close()
    assert cache.snapshot_count() == (0 if ending in ("forgotten", "closed") else 1)
    assert not cache.forget_snapshot_tier_key(spilled.key)


@pytest.mark.parametrize("retention", RETENTIONS)
def test_managed_slots_are_superseded_where_all_but_the_new_one_are_in_the_index(
    retention: str, cache_factory: CacheFactory
) -> None:
    cache = cache_with(cache_factory, max_snapshots=3, snapshot_slots=3, retention=retention)
    for session in (1, 2):
        cache.insert_tail_snapshot(range(session, session + 32), cache.allocate_snapshot_slot(), session)
    for depth in (48, 64, 48):
        for session in (1, 2):
            new = cache.allocate_snapshot_slot(evict=False)
            (old,) = cache.insert_tail_snapshot(range(session, session + depth), new, session)
            cache.free_snapshot_slot(old)
    assert cache.snapshot_count() == 2


def test_superseding_with_slots_of_ones_own_needs_a_record_more(cache_factory: CacheFactory) -> None:
    cache = cache_with(cache_factory, max_snapshots=2)
    for slot, session in enumerate((7, 8)):
        cache.insert_tail_snapshot(range(32 + slot), slot, session)
    with pytest.raises(errors.SnapshotsFull, match="takes the place of one needs its own"):
        cache.insert_tail_snapshot(range(48), 2, 7)
    assert cache.snapshot_count() == 2
    assert cache.evict_snapshot_lru() == 0
    assert cache.insert_tail_snapshot(range(48), 2, 7) == []
    assert in_index(cache) == {1: 33, 2: 48}


def test_a_full_table_gives_up_the_coldest_spilled_snapshot(cache_factory: CacheFactory) -> None:
    cache = cache_with(cache_factory, max_snapshots=3)
    for slot, depth in enumerate((16, 32, 48)):
        cache.insert_intermediate_snapshot(range(depth), slot)
    assert [spilled_from(cache).slot for _ in range(2)] == [0, 1]
    anchor(cache, range(16))  # so that the coldest is that of 32
    assert cache.insert_intermediate_snapshot(range(64), 3) == []
    with cache.lookup(range(64)) as match:
        assert match.restorable == [16, 48, 64]
    assert cache.insert_intermediate_snapshot(range(8), 4) == []
    with pytest.raises(errors.SnapshotsFull, match="max_snapshots=3"):
        cache.insert_intermediate_snapshot(range(9), 5)
    assert in_index(cache) == {2: 48, 3: 64, 4: 8}
