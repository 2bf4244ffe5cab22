"""A counter under a lock, for the kill test: the cache's guard, and two broken locks that the test must find out."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import posix_ipc
from victims import IDLE, SECTION, beat, line, shared_array

from shmradix import RadixCache


class Lock(Protocol):
    """What a section is done under."""

    def acquire(self) -> None: ...

    def release(self) -> None: ...


class SemaphoreLock:
    """Broken: a semaphore that nobody posts when its holder is killed."""

    def __init__(self, name: str) -> None:
        self._semaphore = posix_ipc.Semaphore(f"/shmradix.{name}.lock")

    def acquire(self) -> None:
        self._semaphore.acquire()

    def release(self) -> None:
        self._semaphore.release()


class OwnedSemaphoreLock:
    """Broken: a semaphore and a word that says who has it, in two steps; a dead owner's lock is taken over."""

    def __init__(self, name: str, owner: Any) -> None:
        self._semaphore = posix_ipc.Semaphore(f"/shmradix.{name}.lock")
        self._owner = owner

    def acquire(self) -> None:
        while True:
            try:
                self._semaphore.acquire(0.02)
                break
            except posix_ipc.BusyError:
                owner = int(self._owner[0])
                if owner and not os.path.exists(f"/proc/{owner}"):
                    break
        self._owner[0] = os.getpid()

    def release(self) -> None:
        self._owner[0] = 0
        self._semaphore.release()


class GuardLock:
    """The cache's own guard, held while Python runs."""

    kernels: tuple[Any, Any] | None = None

    @classmethod
    def compile(cls) -> None:
        """Compile two entry points that only take the guard and give it back; once, before workers are forked."""
        import numba

        from shmradix import guard
        from shmradix.views import open_views

        def take(handle: Any, tag: Any, now: Any) -> Any:
            return (0 if guard.acquire(open_views(handle), 0, tag, now) else 1), 0

        def give(handle: Any, tag: Any, now: Any) -> Any:
            return 0, 1 if guard.release(open_views(handle), 0) else 0

        signature = numba.types.UniTuple(numba.int64, 2)(numba.int64, numba.int64, numba.int64)
        cls.kernels = numba.njit(signature, nogil=True)(take), numba.njit(signature, nogil=True)(give)

    def __init__(self, name: str) -> None:
        self._cache = RadixCache.attach(name)
        self._worker = self._cache._worker

    def acquire(self) -> None:
        assert self.kernels is not None
        self._worker.run(self.kernels[0])

    def release(self) -> None:
        assert self.kernels is not None
        self._worker.run(self.kernels[1])


COUNTER = np.dtype([("first", "<i8"), ("second", "<i8"), ("inside", "<i8"), ("owner", "<i8"), ("met", "<i8")])


def count_for_ever(lock: Lock, counter: Any, counted: Any, seat: Any, number: int) -> None:
    """Add one to a counter of two words under the lock; note whoever else is inside. What a dead one left is mended."""
    killer = os.getppid()
    while os.getppid() == killer:
        seat["doing"] = SECTION
        lock.acquire()
        counter["inside"] = number + 1
        total = int(max(counter["first"], counter["second"])) + 1
        counter["first"] = total
        for _ in range(random.randrange(200)):
            pass
        counter["second"] = total
        if counter["inside"] != number + 1:
            counter["met"] += 1
        counter["inside"] = 0
        lock.release()
        counted[number] += 1
        seat["doing"] = IDLE
        beat(seat)
    os._exit(0)


class LockJob:
    """A counter under a lock."""

    def __init__(self, cache: RadixCache, kind: str, seats: Any) -> None:
        self.cache, name = cache, cache.name
        self.seats, counter = seats, shared_array(COUNTER, 1)
        self.counter, self.words = counter[0], [memoryview(counter["inside"])]
        self.counted, self.dead = shared_array("<i8", len(seats)), 0
        if kind == "guard":
            GuardLock.compile()
        else:
            posix_ipc.Semaphore(f"/shmradix.{name}.lock", posix_ipc.O_CREX, 0o600, 1).close()
        locks: dict[str, Callable[[], Lock]] = {
            "guard": lambda: GuardLock(name),
            "semaphore": lambda: SemaphoreLock(name),
            "owner": lambda: OwnedSemaphoreLock(name, counter["owner"]),
        }
        self.lock = locks[kind]

    def work(self, number: int) -> None:
        count_for_ever(self.lock(), self.counter, self.counted, self.seats[number], number)

    def owners(self) -> dict[int, int]:
        return {seat + 1: seat for seat in np.flatnonzero(self.seats["pid"] > 0).tolist()}

    def died(self, number: int) -> None:
        self.dead += 1

    def check(self, quiet: bool) -> list[str]:
        counted, total = int(self.counted.sum()), int(max(self.counter["first"], self.counter["second"]))
        wrong = [f"two were in the section at once, {self.counter['met']} times"] if self.counter["met"] else []
        if quiet and not counted <= total <= counted + self.dead:
            wrong.append(f"counted {counted} times with {self.dead} dead, the counter says {total}")
        return wrong

    def report(self, kills: int) -> list[str]:
        line("counted", f"{int(self.counted.sum()):,}")
        line("takeovers", f"{self.cache.stats().recoveries}, of the guard")
        return []
