"""Worker slots, and the guard when its owner is stopped, killed, or the waiter is interrupted."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, SimpleNamespace

import numpy as np
import pytest

from shmradix import RadixCache, errors
from tests.actors import BLOCKS, PROMPT, Actor, attach, hold, store

CacheFactory = Callable[..., RadixCache]


def seize_guard(state: SimpleNamespace) -> None:
    """Take the tree guard as this worker and keep it: the owner word is generation << 16 | slot + 1."""
    views = state.cache._segment.views
    slot = int(np.flatnonzero(views.workers["pid"] == os.getpid())[0])
    views.guards["owner"][0] = int(views.workers["generation"][slot]) << 16 | slot + 1


def peek_timed(state: SimpleNamespace) -> tuple[int, float]:
    """A peek, and the seconds it took."""
    start = time.monotonic()
    return state.cache.peek_matched_tokens(PROMPT), time.monotonic() - start


def give_guard_back(cache: RadixCache) -> None:
    cache._segment.views.guards["owner"][0] = 0


@contextmanager
def attached_actor(cache: RadixCache) -> Iterator[Actor]:
    """A worker of another process, which has done its imports."""
    with Actor() as actor:
        actor.do(attach, cache.name)
        actor.do(peek_timed)
        yield actor


@contextmanager
def guard_holder(cache: RadixCache) -> Iterator[Actor]:
    """A worker of another process that holds the tree guard until it is killed."""
    with Actor() as actor:
        actor.do(attach, cache.name)
        actor.do(store, PROMPT, BLOCKS)
        actor.do(hold, PROMPT)
        actor.do(seize_guard)
        yield actor


# --- slots


def test_one_worker_too_many_is_refused_with_the_pids_of_those_there_are(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=64, max_workers=2)
    with Actor() as actor:
        actor.do(attach, cache.name)
        with pytest.raises(errors.WorkersFull) as raised:
            RadixCache.attach(cache.name)
        message = str(raised.value)
        assert all(word in message for word in (str(os.getpid()), str(actor.pid), "max_workers=2"))
        actor.leave()
        RadixCache.attach(cache.name).close()
    assert cache.stats().workers == 1


def test_a_refused_worker_leaves_nothing_open(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=64, max_workers=1)
    gc.collect()  # of earlier tests' handles
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(errors.WorkersFull):
            RadixCache.attach(cache.name)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_slot_of_a_killed_worker_goes_to_the_next(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=64, max_workers=2)
    for _ in range(2):
        with Actor() as actor:
            actor.do(attach, cache.name)
            actor.do(store, PROMPT, BLOCKS)
            actor.do(hold, PROMPT)
    with RadixCache.attach(cache.name):
        assert cache.stats().leases == 0


def test_a_stopped_worker_keeps_its_slot_and_its_leases(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=64, max_workers=2)
    with Actor() as actor:
        actor.do(attach, cache.name)
        actor.do(store, PROMPT, BLOCKS)
        actor.do(hold, PROMPT)
        actor.signal(signal.SIGSTOP)
        assert cache.reap() == 0
        with pytest.raises(errors.WorkersFull):
            RadixCache.attach(cache.name)
        assert len(cache.evict(4)) == 0
        actor.signal(signal.SIGCONT)
        assert actor.do(hold, PROMPT) == BLOCKS


def test_a_worker_that_opens_and_closes_its_segments_file_stays_alive(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=64)
    with Actor() as actor:
        actor.do(attach, cache.name)
        actor.do(store, PROMPT, BLOCKS)
        actor.do(hold, PROMPT)
        actor.do(open_and_close, f"/dev/shm/shmradix.{cache.name}")
        assert cache.reap() == 0
        assert cache.stats().leases == 1


def open_and_close(state: SimpleNamespace, path: str) -> None:
    open(path, "rb").close()


# --- the guard


def test_a_stopped_owner_of_the_guard_is_waited_for_and_then_named(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=64)
    patient = RadixCache.attach(cache.name)
    impatient = RadixCache.attach(cache.name, lock_timeout=0.3)
    with guard_holder(cache) as holder:
        holder.signal(signal.SIGSTOP)
        for use in (
            lambda: impatient.lookup(PROMPT),
            lambda: impatient.insert(PROMPT, BLOCKS),
            lambda: impatient.evict(1),
            lambda: impatient.peek_matched_tokens(PROMPT),
            impatient.clear,
        ):
            start = time.monotonic()
            with pytest.raises(errors.LockTimeout, match=str(holder.pid)):
                use()
            assert 0.25 < time.monotonic() - start < 1
        threading.Timer(0.2, give_guard_back, [cache]).start()
        assert patient.peek_matched_tokens(PROMPT) == 64
        assert impatient.stats().leases == 1
    impatient.close()
    patient.close()


def test_an_owner_of_the_guard_that_is_killed_holds_nobody_up(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=64)
    with attached_actor(cache) as waiter, guard_holder(cache) as holder:
        waiter.begin(peek_timed)
        time.sleep(0.2)
        killed = time.monotonic()
        holder.kill()
        assert waiter.answer(10)[0] == 64
        assert time.monotonic() - killed < 1
        assert cache.peek_matched_tokens(PROMPT) == 64
        assert cache.stats().recoveries == 1
        cache.reap()
        assert cache.stats().leases == 0


def test_attaching_while_a_dead_worker_owns_the_guard_works(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=64)
    with guard_holder(cache) as holder:
        holder.kill()
        with RadixCache.attach(cache.name) as newcomer:
            assert newcomer.peek_matched_tokens(PROMPT) == 64
            assert newcomer.stats().leases == 0
    assert cache.stats().recoveries == 1


def test_a_worker_that_dies_as_owner_is_not_confused_with_the_next_in_its_slot(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=64, max_workers=2)
    with guard_holder(cache) as holder:
        holder.kill()
    with Actor() as successor:
        successor.do(attach, cache.name)
        assert cache.peek_matched_tokens(PROMPT) == 64
        assert successor.do(peek_timed)[0] == 64


def test_an_attach_that_gives_up_waiting_for_the_guard_keeps_neither_slot_nor_descriptor(
    cache_factory: CacheFactory,
) -> None:
    cache = cache_factory(max_blocks=64, max_workers=3)
    with guard_holder(cache) as holder:
        holder.signal(signal.SIGSTOP)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(errors.LockTimeout, match=str(holder.pid)):
                RadixCache.attach(cache.name, lock_timeout=0.1)
        assert len(os.listdir("/proc/self/fd")) == before
    with RadixCache.attach(cache.name):
        assert cache.stats().workers == 2


class Interruption(Exception):
    """Raised by a signal handler."""


@contextmanager
def alarm(handler: Callable[[int, FrameType | None], None], seconds: float, again: float = 0) -> Iterator[None]:
    """Call `handler` in the main thread after `seconds`, and every `again` seconds from then on."""
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds, again)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("raised", [Interruption, KeyboardInterrupt, SystemExit])
def test_what_a_signal_handler_raises_ends_the_wait_for_the_guard(
    cache_factory: CacheFactory, raised: type[BaseException]
) -> None:
    cache = cache_factory(max_blocks=64)

    def handler(_number: int, _frame: FrameType | None) -> None:
        raise raised

    with guard_holder(cache) as holder:
        holder.signal(signal.SIGSTOP)
        with alarm(handler, 0.1), pytest.raises(raised):
            cache.peek_matched_tokens(PROMPT)
    assert cache.peek_matched_tokens(PROMPT) == 64


def test_a_signal_handler_that_returns_does_not_end_the_wait(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=64)
    calls = []
    with guard_holder(cache) as holder:
        holder.signal(signal.SIGSTOP)
        threading.Timer(0.3, give_guard_back, [cache]).start()
        with alarm(lambda *_: calls.append(1), 0.02, 0.02):
            assert cache.peek_matched_tokens(PROMPT) == 64
        assert len(calls) > 5
        holder.signal(signal.SIGKILL)


def test_sigint_ends_a_worker_that_waits_for_the_guard(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=64)
    with attached_actor(cache) as waiter, guard_holder(cache) as holder:
        holder.signal(signal.SIGSTOP)
        waiter.begin(peek_timed)
        time.sleep(0.2)
        waiter.signal(signal.SIGINT)
        waiter.process.join(30)
        assert waiter.process.exitcode not in (None, 0)


def interrupt_again_and_again(work: Callable[[], object], seconds: float, interval: float) -> int:
    """Do `work` over and over while a signal handler raises every `interval` seconds; how often it cut `work` short."""
    armed, interrupted, deadline = False, 0, time.monotonic() + seconds

    def handler(_number: int, _frame: FrameType | None) -> None:
        nonlocal armed, interrupted
        if armed:
            armed = False
            interrupted += 1
            raise Interruption

    with alarm(handler, interval, interval):
        while time.monotonic() < deadline:
            try:
                armed = True
                work()
                armed = False
            except Interruption:
                pass  # whoever raised it has disarmed it
    return interrupted


def test_exceptions_from_a_storm_of_signals_leave_the_cache_usable(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=64)
    cache.insert(PROMPT, BLOCKS)

    def work() -> None:
        for _ in range(20):
            cache.peek_matched_tokens(PROMPT)
        cache.insert(PROMPT, BLOCKS)
        cache.release(PROMPT)

    assert interrupt_again_and_again(work, 2, 0.0003) > 100
    assert cache._segment.views.guards["owner"][0] == 0
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    answers: list[int] = []
    thread = threading.Thread(target=lambda: answers.append(cache.peek_matched_tokens(PROMPT)), daemon=True)
    thread.start()
    thread.join(5)
    assert answers == [64], "the handle is stuck"
    with RadixCache.attach(cache.name) as other:
        cache.close()  # an exception between an insert and its release leaves a lease, until here
        assert other.stats().leases == 0


def test_signals_that_interrupt_the_wait_for_the_guard_stay_unblocked(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=64)
    with guard_holder(cache) as holder:
        holder.signal(signal.SIGSTOP)
        assert interrupt_again_and_again(lambda: cache.peek_matched_tokens(PROMPT), 1, 0.0011) > 10
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    assert cache.peek_matched_tokens(PROMPT) == 64


def scribble(state: SimpleNamespace) -> None:
    """Leave the segment as a worker that died in the middle of a change might: all that can be derived is wrong."""
    views = state.cache._segment.views
    views.guards["dirty"][0] = 1
    for field in ("leases", "first_child", "next_sibling", "prev_sibling", "hash_next", "in_heap", "hash"):
        views.nodes[field] = 3
    for total in ("free_node", "live_blocks", "live_leases", "live_namespaces", "free_lease", "heap_size"):
        views.state[total] = 5
    views.buckets[:] = 7
    views.heap["node"] = 2


def test_a_worker_killed_in_the_middle_of_a_change_leaves_a_whole_cache(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=64)
    cache.insert([5] * 16, [20])
    with guard_holder(cache) as holder:
        holder.do(scribble)
        holder.kill()
    with cache.lookup([*PROMPT, 1]) as match:
        assert match.matched_blocks.tolist() == BLOCKS
    cache.reap()
    stats = cache.stats()
    assert (stats.recoveries, stats.leases, stats.blocks_live, stats.blocks_leased) == (1, 1, 5, 1)
    assert cache.evict(64).blocks.tolist() == [13, 12, 11, 10]
    cache.release([5] * 16)
    assert cache.evict(64).blocks.tolist() == [20]
    assert cache.insert(PROMPT, BLOCKS).inserted_tokens == 64
