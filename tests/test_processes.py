"""Several processes on one segment: opening at once, sharing, dying, exiting."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import posix_ipc
import pytest

from shmradix import RadixCache, Stats, compile, errors
from tests.actors import BLOCKS, FILES, PROMPT, Actor, attach, exit_without_ceremony, files_of, hold, run_script, store

CacheFactory = Callable[..., RadixCache]


def open_in_many_forks(state: SimpleNamespace, name: str, count: int) -> list[str]:
    """Fork `count` processes that all open `name` when a gate falls; what each says about its cache."""
    compile.load()  # what takes long happens here, once: the children shall all be in open() at the same time
    gate, gate_end = os.pipe()
    answers, answers_end = os.pipe()
    for _ in range(count):
        if os.fork() == 0:
            try:
                os.close(gate_end)
                os.read(gate, 1)
                cache = RadixCache.open(name, max_blocks=64, max_workers=count)
                os.write(answers_end, f"{cache.created} {cache.incarnation}\n".encode())
            except BaseException as error:
                os.write(answers_end, f"{error!r}\n".encode())
            finally:
                os._exit(0)
    os.close(gate_end)
    os.close(answers_end)
    with open(answers) as file:
        said = file.read().splitlines()
    for _ in range(count):
        os.wait()
    os.close(gate)
    return said


def test_of_fifty_processes_that_open_at_once_exactly_one_creates_and_all_share_it(name: str) -> None:
    with Actor() as actor:
        said = actor.do(open_in_many_forks, name, 50)
    created, incarnations = zip(*(line.split(" ", 1) for line in said), strict=True)
    assert sorted(created) == ["False"] * 49 + ["True"], said
    assert len(set(incarnations)) == 1
    assert len(files_of(name)) == FILES, files_of(name)


def test_spawned_processes_that_open_one_name_share_one_incarnation(name: str) -> None:
    actors = [Actor() for _ in range(3)]
    try:
        for actor in actors:
            actor.begin(open_quietly, name)
        answers = [actor.answer() for actor in actors]
    finally:
        for actor in actors:
            actor.kill()
    assert sorted(created for created, _ in answers) == [False, False, True]
    assert len({incarnation for _, incarnation in answers}) == 1


def open_quietly(state: SimpleNamespace, name: str) -> tuple[bool, int]:
    state.cache = RadixCache.open(name, max_blocks=64)
    return state.cache.created, state.cache.incarnation


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def create_and_die(state: SimpleNamespace, name: str, module: Any, step: str, after: bool) -> None:
    """Create a cache in a process that is killed just before or after the creation's call of `step`."""
    holder: Any = {"os": os, "posix_ipc": posix_ipc}[module]
    original = getattr(holder, step)

    def step_and_die(*arguments: object, **keywords: object) -> None:
        original(*arguments, **keywords)
        die()

    setattr(holder, step, step_and_die if after else die)
    RadixCache.create(name, max_blocks=64)


@pytest.mark.parametrize(
    ("module", "step", "after"),
    [
        ("os", "fchmod", False),
        ("os", "posix_fallocate", False),
        ("os", "pwrite", True),
        ("posix_ipc", "Semaphore", True),
        ("os", "link", False),
    ],
)
def test_a_creator_killed_half_way_does_not_block_the_next_and_its_leftovers_are_swept(
    name: str, module: str, step: str, after: bool
) -> None:
    with Actor() as actor:
        actor.begin(create_and_die, name, module, step, after)
        actor.process.join(60)
        assert actor.process.exitcode == -signal.SIGKILL
    assert files_of(name), "the creator died before it left anything"
    with pytest.raises(errors.SegmentNotFound):
        RadixCache.attach(name)
    with RadixCache.open(name, max_blocks=64) as cache:
        assert cache.created
        assert len(files_of(name)) == FILES, files_of(name)
        cache.unlink()
    assert files_of(name) == []


def test_a_creator_killed_just_after_it_named_the_segment_leaves_a_good_one(name: str) -> None:
    with Actor() as actor:
        actor.begin(create_and_die, name, "os", "link", True)
        actor.process.join(60)
        assert actor.process.exitcode == -signal.SIGKILL
    with RadixCache.open(name, max_blocks=64) as cache:
        assert not cache.created
        assert cache.insert(PROMPT, BLOCKS).inserted_tokens == 64
        cache.unlink()
    assert files_of(name) == []


def test_two_workers_share_a_prefix(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=64)
    with Actor() as actor:
        assert actor.do(attach, cache.name) == cache.incarnation
        assert actor.do(store, PROMPT, BLOCKS) == BLOCKS
        with cache.lookup([*PROMPT[:48], 7, 7]) as match:
            assert match.matched_blocks.tolist() == BLOCKS[:3]
        assert cache.insert([*PROMPT[:48], *range(1000, 1016)], [20, 21, 22, 23]).blocks.tolist() == [23]
        assert actor.do(hold, [*PROMPT[:48], *range(1000, 1016)]) == [10, 11, 12, 23]


def test_the_segment_outlives_its_processes_and_serves_a_later_one(name: str) -> None:
    RadixCache.create(name, max_blocks=64).close()
    with Actor() as actor:
        actor.do(attach, name)
        actor.do(store, PROMPT, BLOCKS)
        actor.leave()
    with RadixCache.attach(name) as cache:
        assert not cache.created
        assert cache.peek_matched_tokens(PROMPT) == 64
        assert cache.stats().inserted_blocks == 4


def test_a_block_leased_by_another_process_is_not_evicted(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=64)
    with Actor() as actor:
        actor.do(attach, cache.name)
        actor.do(store, PROMPT, BLOCKS)
        assert actor.do(hold, PROMPT[:32]) == BLOCKS[:2]
        assert cache.evict(4).blocks.tolist() == [13, 12]
        assert len(cache.evict(4)) == 0


def killed_holder(cache: RadixCache) -> Stats:
    """Have a worker take a lease and be killed; the statistics from just before."""
    with Actor() as actor:
        actor.do(attach, cache.name)
        actor.do(store, PROMPT, BLOCKS)
        actor.do(hold, PROMPT)
        before = cache.stats()
        assert (before.leases, before.workers) == (1, 2)
        actor.kill()
    return before


def test_reap_gives_back_what_a_killed_worker_held_and_keeps_its_statistics(
    cache_factory: CacheFactory,
) -> None:
    cache = cache_factory(max_blocks=64)
    before = killed_holder(cache)
    assert cache.reap() == 1
    after = cache.stats()
    assert (after.leases, after.workers, after.blocks_leased) == (0, 1, 0)
    assert (after.lookups, after.hits, after.inserted_blocks) == (before.lookups, before.hits, 4)
    assert len(cache.evict(4)) == 4
    assert cache.reap() == 0


def test_attaching_gives_back_what_a_killed_worker_held_and_keeps_its_statistics(
    cache_factory: CacheFactory,
) -> None:
    cache = cache_factory(max_blocks=64, max_workers=2)
    before = killed_holder(cache)
    with RadixCache.attach(cache.name) as newcomer:
        after = newcomer.stats()
        assert (after.leases, after.workers) == (0, 2)
        assert (after.lookups, after.hits, after.inserted_blocks) == (before.lookups, before.hits, 4)


def test_a_worker_that_ends_with_os_exit_is_reaped(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=64)
    with Actor() as actor:
        actor.do(attach, cache.name)
        actor.do(store, PROMPT, BLOCKS)
        actor.do(hold, PROMPT)
        actor.begin(exit_without_ceremony)
        actor.process.join(60)
    assert cache.reap() == 1
    assert cache.stats().leases == 0


def test_an_interpreter_that_exits_without_close_gives_everything_back_at_once(
    cache_factory: CacheFactory,
) -> None:
    cache = cache_factory(max_blocks=64)
    run_script(
        "import sys, shmradix\n"
        "cache = shmradix.RadixCache.attach(sys.argv[1])\n"
        "cache.insert(list(range(64)), [10, 11, 12, 13])\n"
        "match = cache.lookup(list(range(64)))\n"
        "assert cache.stats().leases == 2, cache.stats()\n",
        cache.name,
    )
    stats = cache.stats()
    assert (stats.leases, stats.workers, stats.blocks_live) == (0, 1, 4)
    assert cache.reap() == 0


def test_close_gives_everything_back(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=64)
    second = RadixCache.attach(cache.name)
    second.insert(PROMPT, BLOCKS)
    match = second.lookup(PROMPT)
    assert (cache.stats().leases, cache.stats().workers) == (2, 2)
    second.close()
    second.close()
    assert (cache.stats().leases, cache.stats().workers) == (0, 1)
    match.release()
    with pytest.raises(errors.CacheClosed):
        second.lookup(PROMPT)


def test_a_process_that_attached_and_exited_does_not_take_the_segment_with_it(
    cache_factory: CacheFactory,
) -> None:
    cache = cache_factory(max_blocks=64)
    before = files_of(cache.name)
    run_script(
        "import sys\n"
        "from multiprocessing import resource_tracker, shared_memory\n"
        "from shmradix import RadixCache\n"
        "resource_tracker.ensure_running()\n"
        "own = shared_memory.SharedMemory(create=True, size=64)\n"
        "cache = RadixCache.attach(sys.argv[1])\n"
        "cache.insert(list(range(64)), [1, 2, 3, 4])\n"
        "own.close()\n"
        "own.unlink()\n",
        cache.name,
    )
    time.sleep(0.3)  # a tracker that had it in its books would remove it after its process is gone
    assert files_of(cache.name) == before
    with RadixCache.attach(cache.name) as again:
        assert again.peek_matched_tokens(PROMPT) == 64


def open_and_unlink_for_a_while(state: SimpleNamespace, name: str, seconds: float) -> int:
    """Open, use and unlink `name` again and again; how often. Only documented errors are expected."""
    RadixCache.open(name, max_blocks=64).close()  # the first use in a process takes long: before the clock starts
    rounds, deadline = 0, time.monotonic() + seconds
    while time.monotonic() < deadline:
        with RadixCache.open(name, max_blocks=64) as cache:
            cache.insert(PROMPT, BLOCKS)
            if rounds % 3 == 0:
                cache.unlink()
            assert cache.peek_matched_tokens(PROMPT) == 64
        rounds += 1
    return rounds


def test_opening_and_unlinking_in_several_processes_at_once_leaves_nothing(name: str) -> None:
    actors = [Actor() for _ in range(3)]
    try:
        for actor in actors:
            actor.begin(open_and_unlink_for_a_while, name, 1.5)
        assert all(actor.answer() > 10 for actor in actors)
    finally:
        for actor in actors:
            actor.kill()
    with RadixCache.open(name, max_blocks=64) as cache:
        cache.unlink()
    assert files_of(name) == []
