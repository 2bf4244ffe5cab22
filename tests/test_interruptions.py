"""Signal handlers, kills and exceptions at any instant: no slot, lease, lock or block is lost, and nothing hangs."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shmradix import RadixCache, errors, locks, segment, workers
from shmradix import cache as caches
from tests.actors import BLOCKS, PROMPT, SHM, files_of
from tests.children import (
    Interruption,
    collected,
    in_child,
    interrupted_at,
    kill_self,
    raise_interruption,
    resources,
    slots_alive,
    struck,
)

CacheFactory = Callable[..., RadixCache]


@pytest.fixture(autouse=True, scope="module")
def _warm() -> None:
    """Have the kernels before anything forks."""
    workers.compile.load()


@pytest.fixture
def cache(cache_factory: CacheFactory) -> RadixCache:
    """With a prompt in it, and nobody else but the test."""
    cache = cache_factory(max_blocks=64, max_workers=4)
    cache.insert(PROMPT, BLOCKS)
    cache.release(PROMPT)
    return cache


@pytest.fixture
def second(cache: RadixCache) -> Iterator[RadixCache]:
    with RadixCache.attach(cache.name) as second:
        yield second


def is_whole(cache: RadixCache) -> bool:
    """Nothing but `cache` is here, the guard is free, and all invariants hold."""
    stats = cache.stats()
    alone = (stats.workers, stats.leases) == (1, 0) and slots_alive(cache) == [cache._worker.slot]
    return alone and cache._segment.views.guards["owner"][0] == 0 and cache.verify() == []


# --- a handler that uses or closes the handle it interrupts

CALLS: dict[str, tuple[str, Callable[[RadixCache], object]]] = {
    "lookup": ("lookup", lambda cache: cache.lookup(PROMPT).matched_tokens),
    "insert": ("insert", lambda cache: cache.insert([*PROMPT, *range(16)], [*BLOCKS, 14]).inserted_tokens),
    "peek": ("peek", lambda cache: cache.peek_matched_tokens(PROMPT)),
    "evict": ("evict", lambda cache: len(cache.evict(2))),
    "clear": ("hide_all", lambda cache: len(cache.clear())),
    "stats": ("totals", lambda cache: cache.stats().blocks_live),
    "verify": ("copy", lambda cache: cache.verify()),
    "close": ("bury", lambda cache: cache.close()),
}
HANDLERS: dict[str, Callable[[RadixCache], object]] = {
    "peek": lambda cache: cache.peek_matched_tokens(PROMPT),
    "lookup": lambda cache: cache.lookup(PROMPT).release(),
    "insert": lambda cache: cache.insert([9] * 16, [40]),
    "reap": lambda cache: cache.reap(),
    "close": lambda cache: cache.close(),
}


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("call", CALLS)
def test_a_handler_may_use_or_close_the_handle_that_it_interrupts(
    cache: RadixCache, call: str, handler: str, after: bool
) -> None:
    def strike() -> str:
        with RadixCache.attach(cache.name) as second:
            said: list[str] = []

            def handle(*_: object) -> None:
                signal.signal(signal.SIGUSR1, signal.SIG_IGN)
                try:
                    HANDLERS[handler](second)
                    said.append("done")
                except errors.CacheClosed:
                    said.append("closed")

            signal.signal(signal.SIGUSR1, handle)
            entry, use = CALLS[call]
            with struck(second, entry, lambda: signal.raise_signal(signal.SIGUSR1), after):
                try:
                    use(second)
                except errors.CacheClosed:
                    assert handler == "close"  # in the middle of a call of several sections
            if call == "close" or handler == "close":
                assert second.closed
                with pytest.raises(errors.CacheClosed):
                    second.peek_matched_tokens(PROMPT)
            else:
                assert second.peek_matched_tokens(PROMPT[:16]) in (0, 16)
            return said[0]

    said = in_child(strike)
    assert said == ("closed" if call == "close" and handler != "close" else "done"), said
    assert is_whole(cache)


def use_for_ever(cache: RadixCache) -> None:
    while True:
        cache.lookup(PROMPT).release()


def test_a_handler_closes_a_handle_under_load(cache: RadixCache) -> None:
    def strike() -> str:
        with RadixCache.attach(cache.name) as second:
            signal.signal(signal.SIGALRM, lambda *_: second.close())
            for _ in range(20):
                signal.setitimer(signal.ITIMER_REAL, 0.0005)
                with pytest.raises(errors.CacheClosed):
                    use_for_ever(second)
                second = RadixCache.attach(cache.name)
            second.close()
        return "done"

    assert in_child(strike) == "done"
    assert is_whole(cache)


@pytest.mark.parametrize("after", [False, True])
def test_what_a_handler_leases_while_the_worker_claims_its_slot_is_reaped(cache: RadixCache, after: bool) -> None:
    def strike() -> None:
        def use_and_die() -> None:
            with contextlib.suppress(RuntimeError):  # refused: just as good
                cache.lookup(PROMPT)
            kill_self()

        with struck(cache, "bury", use_and_die, after):
            cache.peek_matched_tokens(PROMPT)  # the child's first use

    assert in_child(strike) == "killed by 9"
    cache.reap()
    assert is_whole(cache)


# --- an exception out of a handler, at any instant


def at_every_instant(work: Callable[[], object], check: Callable[[str], str], step: int = 1) -> None:
    """Interrupt `work` at its first instant, at its second and so on, until it comes through; `check` after each."""
    bad, instant, where = [], 1, ""
    with collected() as collect:
        while True:
            found = interrupted_at(work, instant)
            if found is None:
                break
            where, instant = found, instant + step
            collect()
            if said := check(where):
                bad.append(f"{where}: {said}")
    assert instant > 5
    assert not bad, "\n".join(bad)


def lost_slots(cache: RadixCache) -> str:
    lost = set(slots_alive(cache)) - {cache._worker.slot}
    return f"slots {lost} stay locked" if lost else ""


def test_an_attach_interrupted_at_any_instant_keeps_no_slot(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=64, max_workers=200)
    kept: list[RadixCache] = []
    at_every_instant(lambda: kept.append(RadixCache.attach(cache.name)), lambda _: newly_lost(cache))
    kept.pop().close()


LOST: dict[str, set[int]] = {}  # slots, by the cache


def newly_lost(cache: RadixCache) -> str:
    """The slots that are lost since the last call."""
    lost = set(slots_alive(cache)) - {cache._worker.slot}
    new = lost - LOST.get(cache.name, set())
    LOST[cache.name] = lost
    return f"slots {new} stay locked" if new else ""


def test_a_close_interrupted_at_any_instant_is_done_by_the_next(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=64, max_workers=200)
    second = RadixCache.attach(cache.name)

    def check(_: str) -> str:
        nonlocal second
        said = ""
        try:
            second.close()
        except OSError as error:
            said = f"{error!r} "
        said += newly_lost(cache)
        second = RadixCache.attach(cache.name)
        return said

    at_every_instant(lambda: second.close(), check)
    second.close()


def test_a_create_interrupted_at_any_instant_can_be_repeated(name: str) -> None:
    def check(_: str) -> str:
        try:
            with RadixCache.open(name, max_blocks=4, max_workers=40, lock_timeout=0.3) as cache:
                said = lost_slots(cache)
        except errors.LockTimeout as error:
            (SHM / f".shmradix.{name}.new").unlink()
            return str(error)
        RadixCache.unlink(name)
        return said or " ".join(files_of(name))

    kept: list[RadixCache] = []
    at_every_instant(lambda: kept.append(RadixCache.create(name, max_blocks=4, max_workers=40)), check)
    kept.pop().close()


def test_what_a_claim_interrupted_at_any_instant_holds_is_reaped(cache: RadixCache, second: RadixCache) -> None:
    def check(_: str) -> str:
        second.lookup(PROMPT)
        second._worker.forget()  # as if it were killed
        cache.reap()
        return "" if is_whole(cache) else "not whole"

    second._worker.forget()  # as in a forked child
    at_every_instant(lambda: second.peek_matched_tokens(PROMPT), check)


def test_calls_interrupted_at_any_instant_leave_the_handle_usable(cache: RadixCache, second: RadixCache) -> None:
    def work() -> None:
        with second.lookup(PROMPT) as match:
            second.insert([*PROMPT, *[1] * 16], [*BLOCKS, 50], match=match)
        second.evict(1)
        second.reap()
        second.stats()

    def check(_: str) -> str:
        second.evict(0)
        return "" if second.peek_matched_tokens(PROMPT[:16]) == 16 else "lost"

    at_every_instant(work, check)
    second.close()
    assert is_whole(cache)


def test_an_interrupted_reap_makes_no_dead_worker_look_alive(cache: RadixCache, second: RadixCache) -> None:
    views: Any = cache._segment.views
    dead = 3

    def check(_: str) -> str:
        views.workers["pid"][dead] = 1
        return "looks alive" if dead in slots_alive(cache) else ""

    check("")
    at_every_instant(second.reap, check)


def test_a_reaper_that_waits_locks_no_dead_slot(cache: RadixCache, second: RadixCache) -> None:
    views: Any = cache._segment.views
    views.workers["pid"][3] = 1
    seen: list[list[int]] = []
    with struck(second, "bury", lambda: seen.append(slots_alive(cache))):
        assert second.reap() == 1
    assert seen == [[cache._worker.slot, second._worker.slot]]


# --- an attach that fails late


@pytest.mark.parametrize("error", [errors.LockTimeout("held"), Interruption(), OSError(5, "what"), KeyboardInterrupt()])
@pytest.mark.parametrize(
    "step", [(workers.Worker, "_reap"), (workers, "_start_time"), (segment.Segment, "has_its_name")], ids=lambda s: s[1]
)
def test_an_attach_that_fails_late_leaves_no_worker(
    cache: RadixCache, monkeypatch: pytest.MonkeyPatch, step: tuple[Any, str], error: BaseException
) -> None:
    def fail(*_: object) -> None:
        raise error

    before = resources(cache.name)
    with monkeypatch.context() as patch:
        patch.setattr(*step, fail)
        for _ in range(5):
            with pytest.raises(type(error)):
                RadixCache.attach(cache.name)
    error.__traceback__ = None
    assert resources(cache.name) == before
    assert is_whole(cache)


# --- evictions that are cut short


@pytest.fixture
def full(cache_factory: CacheFactory, monkeypatch: pytest.MonkeyPatch) -> RadixCache:
    """Twelve blocks, evicted two at a time."""
    monkeypatch.setattr(caches, "_EVICT_STEP", 2)
    full = cache_factory(max_blocks=12, block_size=1, lock_timeout=0.05)
    for block in range(12):
        full.insert([block], [block])
        full.release([block])
    return full


def cut_short(cache: RadixCache, call: Callable[[], object], after_calls: int, how: str) -> None:
    """Let `call` fail in its kernel call number `after_calls`, before it, after it, or for want of the guard."""
    left = after_calls

    def blow() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            if how != "timeout":
                raise_interruption()
            views: Any = cache._segment.views
            views.guards["owner"][0] = cache._worker.tag  # held by somebody who lives

    with struck(cache, "evict", blow, how == "after"), pytest.raises((Interruption, errors.LockTimeout)):
        call()
    cache._segment.views.guards["owner"][0] = 0


@pytest.mark.parametrize("how", ["before", "after", "timeout"])
@pytest.mark.parametrize("calls", [1, 2, 5])
@pytest.mark.parametrize("clear", [False, True])
def test_blocks_of_an_eviction_cut_short_come_with_the_next(
    full: RadixCache, calls: int, how: str, clear: bool
) -> None:
    cut_short(full, full.clear if clear else lambda: full.evict(12), calls, how)
    taken = 12 - full.stats().blocks_live
    assert taken == 2 * (calls if how == "after" else calls - 1)
    assert in_child(lambda: sorted(full.evict(12).blocks.tolist())) == str(list(range(taken, 12)))  # not those taken
    assert full.stats().blocks_live == 0
    assert [len(full.evict(1)) for _ in range(taken)] == [1] * taken
    assert len(full.evict(12)) == 0


@pytest.mark.parametrize("wanted", [1, 3, 4, 7, 12])
def test_blocks_of_an_eviction_cut_short_keep_their_order(full: RadixCache, wanted: int) -> None:
    cut_short(full, lambda: full.evict(12), 3, "before")
    first = full.evict(wanted)
    assert len(first) == len(first.disk_block_ids) == wanted
    rest = full.evict(12)
    assert [*first.blocks.tolist(), *rest.blocks.tolist()] == list(range(12))
    assert full.verify() == []


@pytest.mark.parametrize("clear", [False, True])
def test_a_reap_that_fails_in_an_eviction_loses_no_block(
    full: RadixCache, clear: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(workers.Worker, "_reap", lambda _: raise_interruption())
        with pytest.raises(Interruption):
            full.evict(20)
    assert (full.clear() if clear else full.evict(20)).blocks.tolist() == list(range(12))
    assert len(full.evict(20)) == 0


def test_blocks_of_an_eviction_that_met_damage_come_with_the_next(full: RadixCache) -> None:
    image = np.ndarray(full._segment.geometry.size, np.uint8, full._segment._map)
    left = 3

    def damage() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            full._segment.views.state["heap_size"][0] = 1 << 31

    with struck(full, "evict", damage), pytest.raises(errors.CorruptSegment):
        full.evict(12)
    assert image.size
    full._segment.views.state["heap_size"][0] = 8
    assert full.evict(12).blocks.tolist() == list(range(12))


def test_a_descriptor_for_locks_is_known_before_anybody_can_fork(cache: RadixCache) -> None:
    with locks._registering:
        inherited = set(locks._files)
    assert cache._worker._file in inherited
    assert in_child(lambda: [file for file in locks._files if not file.closed]) == "[]"
