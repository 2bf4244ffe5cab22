"""One match in two threads, forks beside an attach, handles that nobody closed, dead workers when room runs short."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from shmradix import RadixCache, errors, workers
from tests.actors import BLOCKS, PROMPT, run_script
from tests.children import in_child, kill_self, slots_alive
from tests.plain import Kernels

CacheFactory = Callable[..., RadixCache]


@pytest.fixture(autouse=True, scope="module")
def _warm() -> None:
    """Have the kernels before anything forks."""
    workers.compile.load()


@pytest.fixture
def _switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def at_once(*calls: Callable[[], object]) -> list[BaseException]:
    """Make the calls, each in a thread of its own; what they raised."""
    raised: list[BaseException] = []
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], object]) -> None:
        barrier.wait()
        try:
            call()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return raised


@pytest.mark.usefixtures("_switching")
def test_one_match_in_two_threads_is_released_once_and_has_one_lease(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=1000, block_size=4)
    cache.insert(range(4), [1])
    cache.release(range(4))
    for i in range(150):
        match = cache.lookup(range(4))
        assert at_once(match.release, match.release) == []
        prompt = [1000 + i] * 4
        empty = cache.lookup(prompt)
        insert = partial(cache.insert, prompt, [10 + 2 * i], match=empty)
        assert at_once(insert, insert) == []
        assert cache.stats().leases == 1
        empty.release()
        prompt = [5000 + i] * 4
        late = cache.lookup(prompt)
        raised = at_once(lambda p=prompt, m=late, b=500 + i: cache.insert(p, [b], match=m), late.release)
        assert all(type(error) is errors.LeaseError for error in raised)
        assert cache.stats().leases == 0


def test_a_fork_beside_an_attach_keeps_no_slot_alive_and_nobody_waiting(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_workers=60)
    stop, children = threading.Event(), []

    def attach_again_and_again() -> None:
        while not stop.is_set():
            RadixCache.attach(cache.name).close()

    thread = threading.Thread(target=attach_again_and_again, daemon=True)
    thread.start()
    try:
        for _ in range(50):
            time.sleep(0.001)
            pid = os.fork()
            if pid == 0:
                signal.alarm(60)
                signal.pause()
            children.append(pid)
        stop.set()
        thread.join(10)
        assert not thread.is_alive()
        deadline = time.monotonic() + 10  # a child closes what it inherited first thing, but once it runs
        while slots_alive(cache) != [cache._worker.slot] and time.monotonic() < deadline:
            time.sleep(0.001)
        assert slots_alive(cache) == [cache._worker.slot]
        assert in_child(lambda: RadixCache.attach(cache.name).stats().workers) == "2"
    finally:
        stop.set()
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_no_call_imports_anything(cache_factory: CacheFactory) -> None:
    # A child forked meanwhile would wait for the import's lock for ever.
    run_script(
        "import sys, numpy as np\n"
        "from shmradix import RadixCache\n"
        "cache = RadixCache.attach(sys.argv[1])\n"
        "before = set(sys.modules)\n"
        "ids = np.arange(64, dtype=np.uint32)\n"
        "with cache.lookup(ids) as match:\n"
        "    cache.insert(ids, [1, 2, 3, 4], match=match)\n"
        "cache.lookup(list(range(64))).release(), cache.peek_matched_tokens(ids), cache.reap(), cache.stats()\n"
        "cache.evict(1), cache.clear()\n"
        "assert set(sys.modules) == before, set(sys.modules) - before\n",
        cache_factory().name,
    )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_handle_that_is_collected_is_closed_also_where_warnings_are_errors(cache_factory: CacheFactory) -> None:
    cache = cache_factory()
    second = RadixCache.attach(cache.name)
    second.insert(PROMPT, BLOCKS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del second
    assert slots_alive(cache) == [cache._worker.slot]
    assert (cache.stats().workers, cache.stats().leases) == (1, 0)


def leave_dead(cache: RadixCache, leases: int) -> None:
    """A worker that takes so many leases and is killed."""

    def hold() -> None:
        with RadixCache.attach(cache.name) as dying:
            kept = [dying.lookup(PROMPT) for _ in range(leases)]
            kill_self(kept)

    assert in_child(hold) == "killed by 9"
    assert cache.stats().leases == leases


@pytest.mark.parametrize("call", ["lookup", "insert", "evict", "namespace"])
def test_what_the_dead_hold_is_freed_when_room_runs_short(cache_factory: CacheFactory, call: str) -> None:
    cache = cache_factory(max_leases=4, max_namespaces=1)
    cache.insert(PROMPT, BLOCKS)
    cache.release(PROMPT)
    leave_dead(cache, 4)
    if call == "lookup":
        assert cache.lookup(PROMPT).matched_tokens == 64
    elif call == "insert":
        assert cache.insert([*PROMPT, *range(16)], [*BLOCKS, 14]).inserted_tokens == 80
    elif call == "evict":
        assert len(cache.evict(4)) == 4
    else:
        with pytest.raises(errors.NamespacesFull):
            cache.insert([7] * 16, [40], adapter_id=1)
    assert cache.stats().leases == (1 if call in ("lookup", "insert") else 0)


@pytest.mark.parametrize("call", ["lookup", "insert", "evict", "release", "peek", "copy", "totals"])
def test_only_sections_that_change_something_are_dirty(cache_factory: CacheFactory, call: str) -> None:
    cache = cache_factory(max_blocks=8, max_leases=4, max_workers=2, max_namespaces=2, block_size=4)
    cache.insert(range(8), [1, 2])
    geometry = cache._segment.geometry
    image = np.ndarray(geometry.size, np.uint8, cache._segment._map).copy()
    tokens, none, rows = np.arange(8, dtype=np.uint32), np.empty(0, np.uint64), np.empty((5, 2), np.uint32)
    empty, space, counts = np.empty(0, np.uint32), np.zeros(5, np.uint64), np.zeros(5, np.int64)
    arguments: dict[str, tuple[Any, ...]] = {
        "lookup": (space, tokens, none, rows),
        "insert": (space, tokens, none, tokens[:2], empty, 0, 0, 0, -1, rows, counts),
        "evict": (1, 1 << 60, rows, counts),
        "release": (1, 0),
        "peek": (space, tokens, none, rows),
        "copy": (np.empty(geometry.size, np.uint8),),
        "totals": (np.zeros(geometry.node_count, np.uint8),),
    }
    tag, slot = cache._worker.tag, cache._worker.slot
    tape, answer = Kernels().record(
        image, geometry, slot, lambda entries, handle: getattr(entries, call)(handle, tag, 1, *arguments[call])
    )
    assert answer[0] in (0, 5)
    dirty = next(section.offset for section in geometry.sections() if section.name == "guards") // 8 + 8
    values = [store.value for store in tape.stores if store.word == dirty]
    assert values == ([] if call in ("peek", "copy", "totals") else [1, 0])
