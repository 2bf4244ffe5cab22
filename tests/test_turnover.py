"""Workers come and are killed, hundreds, one after another: the survivor and the host have what they had before.

SHMRADIX_ROUNDS=1000 says how many.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shmradix import RadixCache
from shmradix import compile as kernels
from tests.actors import files_of
from tests.children import resources, slots_alive

ROUNDS = int(os.environ.get("SHMRADIX_ROUNDS", "250"))
STARTING, ATTACHING, USING = 0, 1, 2
SHARED = list(range(64))
PRIVATE = 1 << 20  # the first token that no prompt of the survivor has


@pytest.fixture(autouse=True, scope="module")
def _warm() -> None:
    """Have the kernels before anything forks."""
    kernels.load()


def work(name: str, stage: mmap.mmap, seed: int) -> None:
    """A worker's life: attach, then lease, store, evict, without ever giving anything back in the end."""
    stage[0] = ATTACHING
    cache = RadixCache.attach(name)
    stage[0] = USING
    chance, held = random.Random(seed), []
    while True:
        prompt = range(PRIVATE, PRIVATE + 16 * chance.randint(1, 12))
        held += [cache.lookup(SHARED), cache.lookup(prompt)]
        cache.evict(12)
        cache.insert(prompt, [chance.randrange(10_000, 1 << 31) for _ in range(len(prompt) // 16)], match=held[-1])
        while len(held) > 20:
            held.pop(chance.randrange(20)).release()
        if chance.random() < 0.05:
            cache.clear()
        if chance.random() < 0.05:
            cache.close()
            cache, held = RadixCache.attach(name), []


class Host:
    """Starts one worker after another and kills each."""

    def __init__(self, cache: RadixCache, stage: mmap.mmap) -> None:
        self.cache, self.stage = cache, stage
        self.chance = random.Random(4)
        self.died: Counter[int] = Counter()

    def round(self) -> None:
        """Start a worker, wait until it does what this round is about, and then a moment, and kill it."""
        self.stage[0] = STARTING
        aim = self.chance.choices((STARTING, ATTACHING, USING), (1, 5, 6))[0]
        moment = self.chance.uniform(0, 0.002) if aim != USING else min(0.001 * self.chance.paretovariate(1.2), 0.05)
        pid = os.fork()
        if pid == 0:
            try:
                signal.alarm(60)
                work(self.cache.name, self.stage, self.chance.randrange(1 << 30))
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        deadline = time.monotonic() + 60
        while self.stage[0] < aim and time.monotonic() < deadline:
            pass
        moment += time.monotonic()
        while time.monotonic() < moment:
            pass
        os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code == -signal.SIGKILL, f"the worker ended by itself: {code}"
        self.died[self.stage[0]] += 1

    def state(self) -> tuple[Any, ...]:
        """What must be as it was: descriptors and mappings, files, whose slots are locked, whose taken, leases."""
        cache = self.cache
        cache.reap()
        stats, taken = cache.stats(), np.flatnonzero(cache._segment.views.workers["pid"]).tolist()
        return resources(cache.name), files_of(cache.name), slots_alive(cache), taken, stats.workers, stats.leases


def test_workers_that_are_killed_one_after_another_take_nothing_with_them(
    cache_factory: Callable[..., RadixCache],
) -> None:
    cache = cache_factory(max_blocks=64, max_workers=4, max_leases=64)
    with mmap.mmap(-1, mmap.PAGESIZE) as stage:
        host = Host(cache, stage)
        cache.insert(SHARED, range(2000, 2004))
        before = host.state()
        for number in range(ROUNDS):
            host.round()
            cache.peek_matched_tokens(SHARED)  # takes over what the dead one held, if it did
            assert slots_alive(cache) == before[2], f"round {number}"
            if number % 50 == 49:
                assert host.state() == before, f"round {number}"
                assert cache.verify() == [], f"round {number}"
        assert host.state() == before
        print(dict(host.died), cache.stats().recoveries, "takeovers")
        assert all(host.died[stage] for stage in (ATTACHING, USING)), host.died
    cache.release(SHARED)
    assert cache.verify() == []
    cache.evict(64)
    assert cache.stats().blocks_live == 0
