"""Snapshots between processes: who is handed which slot, and what a worker that dies leaves."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shmradix import RadixCache, errors
from shmradix.results import Spill
from tests import snapshot_actors as snap
from tests.actors import Actor, attach
from tests.children import in_child
from tests.snapshot_actors import Slots, prompt_of, state_of, store_prompt

CacheFactory = Callable[..., RadixCache]

crews = pytest.mark.parametrize(("workers", "retention"), [(2, "session"), (4, "chain")])
policies = pytest.mark.parametrize("retention", ["session", "chain"])


@contextmanager
def crew(cache: RadixCache, workers: int) -> Iterator[list[Actor]]:
    """Processes that are attached, and have done their imports."""
    with ExitStack() as stack:
        actors = [stack.enter_context(Actor()) for _ in range(workers)]
        for actor in actors:
            actor.begin(attach, cache.name)
        for actor in actors:
            actor.answer()
        yield actors


def soon() -> float:
    """A monotonic time at which all processes that hear of it now can begin."""
    return time.monotonic() + 0.02


def at_once(actors: list[Actor], *calls: tuple[Any, ...]) -> list[Any]:
    """Have each actor make its call, whose last argument is the time to begin, or all the same; their answers."""
    start = soon()
    for actor, (function, *arguments) in zip(actors, itertools.cycle(calls)):
        actor.begin(function, *arguments, start)
    return [actor.answer() for actor in actors]


def flat(answers: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(answers))


def save_all(cache: RadixCache, count: int) -> list[int]:
    """Save the states of so many prompts, in slots of the cache's or in those with the prompts' numbers."""
    slots = []
    for number in range(count):
        managed = cache._segment.geometry.snapshot_slots
        slot = cache.allocate_snapshot_slot(evict=False) if managed else number
        store_prompt(cache, number)
        assert cache.insert_intermediate_snapshot(prompt_of(number), slot) == []
        slots.append(slot)
    return slots


def all_slots(cache: RadixCache) -> list[int]:
    """All slots that can be had, snapshots evicted for them; they are given back."""
    taken = []
    try:
        while True:
            taken.append(cache.allocate_snapshot_slot())
    except errors.SlotsFull:
        pass
    for slot in taken:
        cache.free_snapshot_slot(slot)
    return sorted(taken)


# --- victims


@crews
@pytest.mark.parametrize("spills", [False, True])
def test_no_two_are_handed_the_same_victim(
    cache_factory: CacheFactory, workers: int, retention: str, spills: bool
) -> None:
    cache = cache_factory(block_size=4, max_blocks=1000, max_snapshots=400, retention=retention)
    with crew(cache, workers) as actors:
        for _ in range(10):  # a worker that the machine favours, or whose kernels are loaded, may take them all
            save_all(cache, 400)
            handed = at_once(actors, (evict_some_way, spills))
            assert sorted(flat(handed)) == list(range(400))
            if sum(map(bool, handed)) > 1:
                break
        else:
            pytest.fail("one took them all, ten times: nothing was tried")


def evict_some_way(state: SimpleNamespace, spills: bool, start: float) -> list[int]:
    return snap.evict_all(state, start, spills)


@crews
def test_no_two_are_handed_the_same_slot(cache_factory: CacheFactory, workers: int, retention: str) -> None:
    cache = cache_factory(
        block_size=4, max_blocks=1000, max_snapshots=400, snapshot_slots=300, retention=retention
    )  # fmt: skip
    save_all(cache, 200)
    with crew(cache, workers) as actors:
        handed = at_once(actors, (snap.allocate_all,), (evict_some_way, True))
        assert sorted(flat(handed)) == list(range(300)), handed
        assert all_slots(cache) == []
        actors[0].kill()
        assert all_slots(cache) == sorted(handed[0])
    assert all_slots(cache) == list(range(300))
    assert cache.verify() == []


# --- what a match has


@crews
@pytest.mark.parametrize("managed", [True, False])
@pytest.mark.parametrize("superseded", [False, True])
def test_the_slot_of_a_match_is_nobody_elses_until_the_release_and_then_one_others(
    cache_factory: CacheFactory, workers: int, retention: str, managed: bool, superseded: bool
) -> None:
    cache = cache_factory(
        block_size=4, max_blocks=1000, max_snapshots=64, snapshot_slots=32 if managed else 0, retention=retention
    )  # fmt: skip
    save_all(cache, 20)
    with crew(cache, workers) as actors, Actor() as reader:
        reader.do(attach, cache.name)
        slot = reader.do(snap.pin, 7)
        assert slot == 7
        if superseded:
            new = actors[0].do(snap.allocate) if managed else 31
            assert actors[0].do(snap.save_in, 7, new) == []
        handed = flat(at_once(actors, (evict_some_way, True)))
        assert len(handed) == len(set(handed)) == 19 + superseded
        assert slot not in handed
        with pytest.raises(errors.SlotError):
            actors[1].do(snap.save_in, 9, slot)
        if managed:
            handed += flat(at_once(actors, (snap.allocate_all,)))
            assert sorted([*handed, slot]) == list(range(32))
        assert reader.do(found_in_slot) == slot
        reader.do(snap.let_go)
        assert flat(at_once(actors, (evict_some_way, False))) == [slot]


def found_in_slot(state: SimpleNamespace) -> int:
    return int(state.match.snapshot_slot)


def overwrite_for_a_while(state: SimpleNamespace, path: str, number: int, start: float) -> int:
    """Save the prompt's state and evict it again and again, and write something else into every slot it is handed."""
    slots, rounds = Slots(path, 8), 0
    snap.begin_at(start)
    while time.monotonic() < start + 1.5:
        slot = state.cache.allocate_snapshot_slot()
        slots.write(slot, state_of(prompt_of(number)))
        for free in state.cache.insert_intermediate_snapshot(prompt_of(number), slot):
            slots.write(free, state_of([rounds]))
            state.cache.free_snapshot_slot(free)
        if rounds % 3:
            gone = state.cache.evict_snapshot_lru()
            if gone is not None:
                slots.write(gone, state_of([rounds]))
                state.cache.free_snapshot_slot(gone)
        rounds += 1
    return rounds


def read_for_a_while(state: SimpleNamespace, path: str, number: int, start: float) -> int:
    """Look the prompt up; a state that is found must be the right one as long as the match has it. How many were."""
    slots, found, right = Slots(path, 8), 0, state_of(prompt_of(number))
    snap.begin_at(start)
    while time.monotonic() < start + 1.5:
        with state.cache.lookup(prompt_of(number)) as match:
            slot = match.snapshot_slot
            if slot is not None:
                assert slots.read(slot) == right
                time.sleep(0.0003)
                assert slots.read(slot) == right
                found += 1
    return found


@crews
def test_lookups_beside_evictions_find_the_right_state_or_none(
    cache_factory: CacheFactory, workers: int, retention: str, tmp_path: Path
) -> None:
    cache = cache_factory(block_size=4, max_snapshots=8, snapshot_slots=6, retention=retention)
    store_prompt(cache, 3)
    path = str(tmp_path / "slots")
    with crew(cache, workers) as actors:
        rounds, found, *_ = at_once(actors, (overwrite_for_a_while, path, 3), (read_for_a_while, path, 3))
    assert rounds > 100
    assert found > 20
    assert all_slots(cache) == list(range(6))
    assert cache.verify() == []


# --- one of several wins


def test_of_promotions_and_a_forget_at_once_one_wins_and_the_losers_keep_their_slots(
    cache_factory: CacheFactory,
) -> None:
    cache = cache_factory(block_size=4, max_snapshots=8, snapshot_slots=4)
    store_prompt(cache, 0)
    winners = set()
    with crew(cache, 3) as actors:
        for round_ in range(60):
            slot = cache.allocate_snapshot_slot()
            cache.insert_intermediate_snapshot(prompt_of(0), slot)
            gone = cache.evict_snapshot_to_tier()
            assert isinstance(gone, Spill)
            cache.free_snapshot_slot(gone.slot)
            slots = [actor.do(snap.allocate) for actor in (actors[0], actors[2])]
            promote, forget = (snap.promote, gone.key), (snap.forget, gone.key)
            won = at_once(actors, promote, forget, promote)
            assert sum(won) == 1, round_
            winners.add(won.index(True))
            with cache.lookup(prompt_of(0)) as match:
                promoted = slots[0] if won[0] else slots[1] if won[2] else None
                assert (match.snapshot_slot, match.snapshot_tier_key) == (promoted, None)
            for actor, slot in ((actors[0], slots[0]), (actors[2], slots[1])):
                if slot != promoted:
                    actor.do(snap.free_slot, slot)
                else:
                    with pytest.raises(errors.SlotError):
                        actor.do(snap.free_slot, slot)
            late = actors[0].do(snap.forget, gone.key, 0), cache.promote_snapshot(gone.key, 0)
            assert late == (False, False)
            assert all_slots(cache) == [0, 1, 2, 3]
    assert len(winners) > 1


@crews
@pytest.mark.parametrize("kind", ["plain", "tail"])
def test_of_the_same_prefix_saved_at_once_one_stays_and_each_other_slot_is_handed_back_once(
    cache_factory: CacheFactory, workers: int, retention: str, kind: str
) -> None:
    cache = cache_factory(block_size=4, max_snapshots=16, snapshot_slots=8, retention=retention)
    store_prompt(cache, 0)
    with crew(cache, workers) as actors:
        for _ in range(30):
            slots = [actor.do(snap.allocate) for actor in actors]
            start = soon()
            for actor, slot in zip(actors, slots):
                actor.begin(save_kind, kind, slot, start)
            back = [actor.answer() for actor in actors]
            handed = flat(back)
            with cache.lookup(prompt_of(0), session=5) as match:
                stayed = match.snapshot_slot
                assert stayed is not None
            assert sorted([*handed, stayed]) == sorted(slots)
            assert cache.snapshot_count() == 1
            for actor, its in zip(actors, back):
                for slot in its:
                    actor.do(snap.free_slot, slot)
            assert all_slots(cache) == list(range(8))


def save_kind(state: SimpleNamespace, kind: str, slot: int, start: float) -> list[int]:
    snap.begin_at(start)
    if kind == "tail":
        return list(state.cache.insert_tail_snapshot(prompt_of(0), slot, 5))
    return list(state.cache.insert_intermediate_snapshot(prompt_of(0), slot))


# --- workers that die


def pin_and_be_superseded(state: SimpleNamespace, number: int) -> int:
    """Have a match of a snapshot that another has superseded: its slot is nobody's until the match goes."""
    slot = snap.pin(state, number)
    assert slot is not None
    with RadixCache.attach(state.cache.name) as other:
        mine = other.allocate_snapshot_slot()
        assert other.insert_intermediate_snapshot(prompt_of(number), mine) == []
    return slot


def allocate_some(state: SimpleNamespace, count: int) -> list[int]:
    return [state.cache.allocate_snapshot_slot() for _ in range(count)]


HOLDING: dict[str, tuple[Any, ...]] = {
    "a pin": (snap.pin, 0),
    "a pin of what was superseded": (pin_and_be_superseded, 0),
    "a pending snapshot": (snap.reserve, 3),
    "private slots": (allocate_some, 2),
    "a pending spill": (snap.begin_spill,),
}


def use(cache: RadixCache) -> tuple[int, int, int]:
    """Live pins, pending snapshots, and slots that are some worker's."""
    views = cache._segment.views
    snapshots: Any = views.snapshots
    pending = (snapshots["born"] != 0) & ((snapshots["flags"] & 8) != 0)
    return int((views.pins["born"] != 0).sum()), int(pending.sum()), int((views.slots["worker"] != 0).sum())


@pytest.mark.parametrize("end", ["killed", "reaped when room runs short", "closed"])
@pytest.mark.parametrize("holding", HOLDING.values(), ids=HOLDING)
def test_what_a_worker_had_comes_back_once(cache_factory: CacheFactory, end: str, holding: tuple[Any, ...]) -> None:
    cache = cache_factory(block_size=4, max_snapshots=8, snapshot_slots=6)
    save_all(cache, 3)
    with crew(cache, 2) as (actor, other):
        private = other.do(snap.allocate)
        actor.do(*holding)
        assert any(use(cache)), holding
        if end == "closed":
            actor.leave()
        else:
            actor.kill()
        if end == "killed":
            assert cache.reap() == 1
            assert use(cache) == (0, 0, 1)
        expected = sorted({0, 1, 2, 3, 4, 5} - {private})
        assert all_slots(cache) == expected
        assert use(cache) == (0, 0, 1)
        assert cache.snapshot_count() == 0
        assert all_slots(cache) == expected
        other.do(snap.free_slot, private)
    assert all_slots(cache) == [0, 1, 2, 3, 4, 5]
    assert cache.verify() == []


def test_a_dead_workers_pending_snapshot_is_never_found_and_its_committed_one_stays(
    cache_factory: CacheFactory,
) -> None:
    cache = cache_factory(block_size=4, max_snapshots=8, snapshot_slots=4)
    with crew(cache, 1) as (actor,):
        for number in (0, 1):
            store_prompt(cache, number)
        actor.do(snap.reserve, 0)
        assert actor.do(snap.save, 1) == []
        with cache.lookup(prompt_of(0)) as match:
            assert match.no_snapshot == "pending"
        actor.kill()
    cache.reap()
    with cache.lookup(prompt_of(0)) as match, cache.lookup(prompt_of(1)) as other:
        assert (match.no_snapshot, other.snapshot_slot) == ("none", 1)
    assert all_slots(cache) == [0, 1, 2, 3]


def hammer(state: SimpleNamespace, number: int) -> None:
    """Allocate, save, look up, spill, evict for ever."""
    cache = state.cache
    for i in itertools.count():
        tokens = prompt_of(number)[: 1 + i % 8]
        with cache.reserve_snapshot(tokens, cache.allocate_snapshot_slot()) as pending:
            back = pending.commit()
        if i % 2 and (gone := cache.evict_snapshot_to_tier(pending=True)):
            back.append(gone.slot)
            if isinstance(gone, Spill):
                cache.commit_snapshot_spill(gone.key)
        for slot in back:
            cache.free_snapshot_slot(slot)
        cache.lookup(prompt_of(number)).release()


@policies
def test_workers_killed_inside_their_sections_stop_nobody_and_keep_nothing(
    cache_factory: CacheFactory, retention: str
) -> None:
    cache = cache_factory(
        block_size=4, max_snapshots=12, snapshot_slots=8, retention=retention, lock_timeout=20.0
    )  # fmt: skip
    store_prompt(cache, 0)
    word = cache._segment.views.guards["owner"][1:].data
    inside = 0
    for _ in range(3):
        with crew(cache, 2) as actors:
            slot_of = {actor.do(worker_slot) + 1: actor for actor in actors}
            for actor in actors:
                actor.begin(hammer, 0)
            deadline, victim = time.monotonic() + 2, None
            while victim is None and time.monotonic() < deadline:
                victim = slot_of.get(word[0] & 0xFFFF)
            victim = victim or actors[0]
            victim.signal(signal.SIGSTOP)
            victim.kill()
            inside += slot_of.get(word[0] & 0xFFFF) is victim
            cache.lookup(prompt_of(0)).release()
        cache.reap()
        assert use(cache) == (0, 0, 0)
        assert all_slots(cache) == list(range(8))
        assert cache.verify() == []
    assert cache.stats().recoveries >= inside


def worker_slot(state: SimpleNamespace) -> int:
    return int(state.cache._worker.slot)


# --- forked children


def in_forked_child(state: SimpleNamespace) -> list[str]:
    """What a child answers that uses what its parent has, and then slots of its own."""
    cache, tokens = state.cache, prompt_of(3)

    def say(call: Callable[[], Any]) -> str:
        try:
            return str(call())
        except errors.ShmradixError as error:
            return type(error).__name__

    def work() -> str:
        said = [
            say(lambda: cache.free_snapshot_slot(state.slot)),
            say(lambda: cache.insert_intermediate_snapshot(tokens, state.slot)),
            say(state.pending.commit),
            say(state.pending.abort),
            say(state.match.release),
            say(lambda: cache.insert_intermediate_snapshot(tokens, cache.allocate_snapshot_slot())),
            say(lambda: str(cache.allocate_snapshot_slot() >= 0)),
            say(lambda: str(cache.lookup(prompt_of(0)).snapshot_slot)),
        ]
        return " ".join(said)

    return in_child(work, 60).split()


def test_a_forked_child_has_nothing_of_its_parents_and_its_own_comes_back(cache_factory: CacheFactory) -> None:
    cache = cache_factory(block_size=4, max_snapshots=8, snapshot_slots=6)
    save_all(cache, 1)
    with crew(cache, 1) as (actor,):
        assert actor.do(snap.pin, 0) == 0
        pending = actor.do(snap.reserve, 2)
        private = actor.do(snap.allocate)
        said = actor.do(in_forked_child)
        assert said == ["SlotError", "SlotError", "LeaseError", "None", "LeaseError", "[]", "True", "0"]
        assert cache.reap() == 1
        assert use(cache) == (1, 1, 2)
        assert actor.do(commit) == []
        actor.do(snap.free_slot, private)
        actor.do(snap.let_go)
        assert use(cache) == (0, 0, 0)
        with cache.lookup([*prompt_of(2)]) as match:
            assert match.matched_tokens == 0  # no block of it was stored
        assert cache.snapshot_count() == 3
        assert pending != private
    assert all_slots(cache) == [0, 1, 2, 3, 4, 5]


def commit(state: SimpleNamespace) -> list[int]:
    return list(state.pending.commit())


# --- the guard


@contextmanager
def snapshots_guard_holder(cache: RadixCache) -> Iterator[Actor]:
    """A worker of another process that holds the snapshots guard until it is killed."""
    with crew(cache, 1) as (actor,):
        actor.do(snap.pin, 0)
        actor.do(snap.allocate)
        actor.do(snap.seize_snapshots_guard)
        yield actor


def test_the_guard_of_a_killed_worker_is_taken_over(cache_factory: CacheFactory) -> None:
    cache = cache_factory(block_size=4, max_snapshots=8, snapshot_slots=4)
    save_all(cache, 2)
    with crew(cache, 1) as (waiter,), snapshots_guard_holder(cache) as holder:
        assert cache.insert(prompt_of(9), [90, 91]).inserted_tokens == 8  # the tree's is another
        waiter.begin(snap.pin, 1)
        time.sleep(0.2)
        killed = time.monotonic()
        holder.kill()
        assert waiter.answer(10) == 1
        assert time.monotonic() - killed < 2
        assert cache.stats().recoveries == 1
        assert cache._segment.views.guards["recoveries"].tolist() == [0, 1]
        cache.reap()
        assert use(cache) == (1, 0, 0)
    with snapshots_guard_holder(cache) as holder:
        holder.kill()
        with RadixCache.attach(cache.name) as newcomer:
            assert newcomer.lookup(prompt_of(0)).snapshot_slot == 0
    assert all_slots(cache) == [0, 1, 2, 3]


def test_a_stopped_owner_is_named_with_the_guard_it_holds_and_nothing_is_kept(cache_factory: CacheFactory) -> None:
    cache = cache_factory(block_size=4, max_snapshots=8, snapshot_slots=5)
    save_all(cache, 2)
    spilled = cache.evict_snapshot_to_tier()
    assert isinstance(spilled, Spill)
    impatient = RadixCache.attach(cache.name, lock_timeout=0.2)
    slot = impatient.allocate_snapshot_slot()
    pending = impatient.reserve_snapshot(prompt_of(5), impatient.allocate_snapshot_slot(evict=False))
    match = impatient.lookup(prompt_of(1))
    with snapshots_guard_holder(cache) as holder:
        holder.signal(signal.SIGSTOP)
        leases = impatient._segment.views.state["live_leases"][0]
        calls: list[Callable[[], object]] = [
            lambda: impatient.lookup(prompt_of(1)),
            lambda: impatient.insert_intermediate_snapshot(prompt_of(6), slot),
            lambda: impatient.insert_with_snapshot(prompt_of(6), [60, 61], slot),
            lambda: impatient.reserve_snapshot(prompt_of(6), slot),
            lambda: impatient.free_snapshot_slot(slot),
            lambda: impatient.promote_snapshot(spilled.key, slot),
            lambda: impatient.forget_snapshot_tier_key(spilled.key),
            impatient.allocate_snapshot_slot,
            impatient.evict_snapshot_lru,
            impatient.evict_snapshot_to_tier,
            impatient.snapshot_count,
            impatient.stats,
            pending.commit,
            match.release,
        ]
        for call in calls:
            with pytest.raises(errors.LockTimeout, match=rf"pid {holder.pid} .* has held the snapshots guard"):
                call()
        assert impatient._segment.views.state["live_leases"][0] == leases
        assert impatient.peek_matched_tokens(prompt_of(1)) == 8
        holder.kill()
    assert pending.commit() == []
    assert not match.released
    match.release()
    assert impatient.insert_intermediate_snapshot(prompt_of(6), slot) == []
    impatient.close()
    cache.free_snapshot_slot(spilled.slot)
    assert all_slots(cache) == [0, 1, 2, 3, 4]
    assert use(cache) == (0, 0, 0)


# --- caches with and without an index


def use_both(state: SimpleNamespace, plain: str, other: str, start: float) -> bool:
    """Use a cache without an index and two with one by turns; what is in one must not show in another."""
    caches = [RadixCache.attach(name) for name in (plain, other)]
    snap.begin_at(start)
    for number in range(40):
        key = os.getpid() % 1000 * 50 + number
        for cache in (state.cache, *caches):
            cache.insert(prompt_of(key), [2 * (key % 8000), 2 * (key % 8000) + 1])
            cache.release(prompt_of(key))
        slot = state.cache.allocate_snapshot_slot()
        for free in state.cache.insert_intermediate_snapshot(prompt_of(key), slot):
            state.cache.free_snapshot_slot(free)
        with pytest.raises(ValueError, match="snapshot_slots"):
            caches[0].allocate_snapshot_slot()
        found = []
        for cache in (state.cache, *caches):
            with cache.lookup(prompt_of(key)) as match:
                found.append((match.matched_tokens > 0, match.snapshot_slot))
        assert found in ([(True, at), (True, None), (True, None)] for at in (slot, None))
    for cache in caches:
        cache.close()
    return True


def test_caches_with_and_without_an_index_side_by_side(cache_factory: CacheFactory) -> None:
    cache = cache_factory(block_size=4, max_blocks=4000, max_snapshots=8, snapshot_slots=6)
    plain = cache_factory(block_size=4, max_blocks=4000)
    other = cache_factory(block_size=4, max_blocks=4000, max_snapshots=3, retention="chain")
    with crew(cache, 2) as actors:
        assert at_once(actors, (use_both, plain.name, other.name)) == [True, True]
    assert all_slots(cache) == list(range(6))
    assert (plain.stats().snapshots, other.stats().snapshots) == (0, 0)
    for each in (cache, plain, other):
        assert each.verify() == []
