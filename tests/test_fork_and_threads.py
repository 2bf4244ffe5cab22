"""Forked children and threads: who owns which slot and which lease."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from shmradix import PrefixMatch, RadixCache, errors
from tests.actors import BLOCKS, PROMPT, Actor, attach, hold, store

CacheFactory = Callable[..., RadixCache]


@contextmanager
def forked(function: Callable[[], str]) -> Iterator[tuple[int, str]]:
    """Fork a child that runs `function` and stays until the block ends; its pid and what it answered."""
    answer, answer_end = os.pipe()
    gate, gate_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(gate_end)
        try:
            said = function()
        except BaseException as error:
            said = f"raised {type(error).__name__}: {error}"
        os.write(answer_end, said.encode() or b"nothing")
        os.read(gate, 1)
        os._exit(0)
    try:
        yield pid, os.read(answer, 65_536).decode()
    finally:
        for end in (gate_end, gate, answer, answer_end):
            os.close(end)
        os.waitpid(pid, 0)


def test_a_forked_child_gets_a_slot_of_its_own_at_first_use(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=64)
    cache.insert(PROMPT, BLOCKS)
    with forked(lambda: "idle"):
        assert cache.stats().workers == 1

    def use() -> str:
        kept.append(cache.lookup(PROMPT))
        return f"{kept[0].matched_tokens} {cache.stats().workers} {cache.stats().leases}"

    kept: list[PrefixMatch] = []
    with forked(use) as (_, said):
        assert said == "64 2 2"
        assert cache.stats().workers == 2
        assert cache.stats().leases == 2
    assert cache.reap() == 1
    assert (cache.stats().workers, cache.stats().leases) == (1, 1)


def test_a_forked_child_gets_a_slot_also_when_the_cache_was_unlinked(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=64)
    cache.insert(PROMPT, BLOCKS)
    cache.unlink()
    with forked(lambda: f"{cache.lookup(PROMPT).matched_tokens} {cache.stats().workers}") as (_, said):
        assert said == "64 2"


def test_a_child_that_used_the_cache_does_not_disturb_its_parent(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=64)
    cache.insert(PROMPT, BLOCKS)
    match = cache.lookup(PROMPT)

    def use() -> str:
        child_match = cache.lookup(PROMPT)
        cache.insert([7] * 16, [40])
        cache.release([7] * 16)
        child_match.release()
        cache.close()
        return str(cache.closed)

    with forked(use) as (_, said):
        assert said == "True"
    assert (cache.stats().workers, cache.stats().leases) == (1, 2)
    match.release()
    cache.release(PROMPT)
    assert cache.stats().leases == 0


def test_the_exit_of_a_child_does_not_release_its_parents_leases(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=64)
    cache.insert(PROMPT, BLOCKS)
    with Actor() as actor:
        actor.do(attach, cache.name)
        actor.do(hold, PROMPT)
        for used in (False, True):
            assert actor.do(fork_and_exit, used) == 0
            assert (cache.stats().leases, cache.stats().workers) == (2, 2)
        assert cache.reap() == 0
        assert cache.stats().leases == 2


def fork_and_exit(state: SimpleNamespace, used: bool) -> int:
    """Fork a child that comes to its normal end, exit handlers and all; its exit status."""
    pid = os.fork()
    if pid == 0:
        if used:
            state.cache.lookup(PROMPT)
        leave_normally()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def leave_normally() -> None:
    """End a forked process as the interpreter would, running its exit handlers."""
    import atexit

    atexit._run_exitfuncs()
    os._exit(0)


def test_a_match_inherited_from_the_parent_cannot_be_released_by_the_child(
    cache_factory: CacheFactory,
) -> None:
    cache = cache_factory(max_blocks=64)
    cache.insert(PROMPT, BLOCKS)
    match = cache.lookup(PROMPT)

    def misuse(use: Callable[[], object]) -> Callable[[], str]:
        return lambda: str(use())

    for use in (
        match.release,
        lambda: cache.release(PROMPT),
        lambda: cache.release_matched(PROMPT, 64),
        lambda: cache.insert([*PROMPT, *range(16)], [*BLOCKS, 14], match=match),
    ):
        with forked(misuse(use)) as (_, said):
            assert "LeaseError" in said
    assert cache.stats().leases == 2
    match.release()
    assert cache.stats().leases == 1


def test_a_child_does_not_keep_the_slot_of_its_killed_parent_alive(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=64)
    with Actor() as actor:
        actor.do(attach, cache.name)
        actor.do(store, PROMPT, BLOCKS)
        actor.do(hold, PROMPT)
        child = actor.do(fork_idler)
        try:
            actor.kill()
            assert cache.reap() == 1
            assert (cache.stats().leases, cache.stats().workers) == (0, 1)
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)


def fork_idler(state: SimpleNamespace) -> int:
    """Fork a child that does nothing, for long; its pid."""
    pid = os.fork()
    if pid == 0:
        time.sleep(60)
        os._exit(0)
    return pid


def test_threads_share_the_slot_of_their_handle_and_leave_no_lease(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=512, block_size=4)
    blocks = iter(range(1_000_000))
    guard = threading.Lock()
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        pick = random.Random(seed)
        try:
            for _ in range(1_500):
                tokens = [pick.randrange(2) for _ in range(pick.randrange(1, 40))]
                with cache.lookup(tokens) as match:
                    with guard:
                        table = match.matched_blocks.tolist() + [next(blocks) for _ in range(10)]
                    stored = cache.insert(tokens, table, match=match)
                    assert stored.inserted_tokens >= match.matched_tokens
                if pick.random() < 0.1:
                    cache.evict(20)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    stats = cache.stats()
    assert (stats.leases, stats.blocks_leased, stats.workers) == (0, 0, 1)
    assert stats.lookups == 8 * 1_500


def test_a_process_may_have_several_handles_each_a_worker_of_its_own(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=64)
    cache.insert(PROMPT, BLOCKS)
    with RadixCache.attach(cache.name) as second:
        assert cache.stats().workers == 2
        with pytest.raises(errors.LeaseError):
            second.release(PROMPT)
    assert cache.stats().leases == 1


def test_closing_one_handle_leaves_the_others_of_the_process_alive(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=64)
    second = RadixCache.attach(cache.name)
    third = RadixCache.attach(cache.name)
    third.insert(PROMPT, BLOCKS)
    match = third.lookup(PROMPT)
    second.close()
    with Actor() as actor:
        actor.do(attach, cache.name)
        assert actor.do(reap) == 0
    assert match.matched_tokens == 64
    assert cache.stats().leases == 2
    third.close()


def reap(state: SimpleNamespace) -> int:
    return int(state.cache.reap())


def test_closing_while_other_threads_use_the_handle_raises_no_other_error(
    cache_factory: CacheFactory,
) -> None:
    cache = cache_factory(max_blocks=64)
    cache.insert(PROMPT, BLOCKS)
    for _ in range(20):
        handle = RadixCache.attach(cache.name)
        seen: list[BaseException] = []
        threads = [threading.Thread(target=use_until_closed, args=(handle, seen)) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.002)
        handle.close()
        for thread in threads:
            thread.join()
        assert [type(error) for error in seen] == [errors.CacheClosed] * 3
    assert (cache.stats().leases, cache.stats().workers) == (1, 1)


def use_until_closed(handle: RadixCache, seen: list[BaseException]) -> None:
    try:
        while True:
            handle.lookup(PROMPT).release()
    except BaseException as error:
        seen.append(error)
