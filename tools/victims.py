"""What the kill test kills: workers that use a cache, or a lock, for ever, and what they let their killer know.

A seat is a row that one process at a time has: what it is doing, and since when. Seats are in anonymous shared
memory, which survives whoever dies. The second half of the seats is for children that workers fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import posix_ipc
from ledger import HELD, Ledger, Prompt, Prompts
from numpy.typing import NDArray
from stress import Worker, require

from shmradix import InsertAcquired, PrefixMatch, RadixCache, SegmentExists, SegmentNotFound

IDLE, LOOKUP, RELEASE, INSERT, EVICT, CLEAR, PEEK, ATTACH, CREATE, FORK, SECTION = range(11)
DOING = ("between calls", "lookup", "release", "insert", "evict", "clear", "peek", "attach", "create", "fork", "section")

SEAT = np.dtype(
    [
        ("pid", "<i8"),  # 0: nobody; -1: a child that was not heard of yet
        ("slot", "<i8"),  # of the cache; -1: not known
        ("doing", "<i8"),
        ("evicting", "<i8"),  # blocks asked for by an evict that has not returned
        ("clearing", "<i8"),
        ("cleared_at", "<i8"),  # when its last clear had returned
        ("beat", "<i8"),  # when it last finished an operation
        ("gap", "<i8"),  # the longest time between two
        ("operations", "<i8"),
        ("wrong", "<i8"),
    ]
)
SIDES = 2  # caches that are made and unlinked beside
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def shared_array(dtype: Any, count: int) -> Any:
    """An array in anonymous memory that forked processes share."""
    return np.frombuffer(mmap.mmap(-1, max(np.dtype(dtype).itemsize * count, 1)), dtype, count)


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that forked it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Stock(Prompts):
    """Prompts drawn beforehand, some of them long, so that a worker spends its time in the cache."""

    def __init__(self, seed: int, size: int = 400) -> None:
        super().__init__(seed, 0)
        self._random = np.random.default_rng([seed, 1])
        drawn = [super(Stock, self).draw() for _ in range(size)]
        self._prefixes = [np.concatenate([drawn[i].tokens for i in range(k, k + 40)]) for k in range(0, 120, 40)]
        self._stock = drawn + [super(Stock, self).draw() for _ in range(size // 3)]

    def draw(self) -> Prompt:
        return random.choice(self._stock)


class Victim(Worker):
    """A worker under kill: all operations of a cache, each announced at its seat."""

    def __init__(self, cache: RadixCache, ledger: Ledger, stock: Stock, seats: Any, offered_at: Any, seat: int) -> None:
        super().__init__(cache, ledger, seat, 0)
        self.prompts = stock
        self.seats, self.seat, self.offered_at = seats, seats[seat], offered_at
        self.parents = {os.getppid()}
        random.seed(f"{seat} {os.getpid()} {time.monotonic_ns()}")

    def run_for_ever(self, forks: bool) -> None:
        """Do random operations until the killer is gone."""
        operations: list[tuple[Callable[[], None], int, float]] = [
            (self.start_request, LOOKUP, 40),
            (self.finish_request, RELEASE, 38),
            (self.store_without_match, INSERT, 6),
            (self.store_by_tokens, INSERT, 4),
            (self.peek, PEEK, 8),
            (self.evict_some, EVICT, 4),
            (self.clear, CLEAR, 0.01),
            (self.attach_again, ATTACH, 0.15),
            (self.create_beside, CREATE, 0.15),
            (self.fork, FORK, 0.3 if forks else 0),
        ]
        weights = [weight for _, _, weight in operations]
        self.note_slot()
        while os.getppid() in self.parents:
            for operation, what, _ in self.random.choices(operations, weights, k=16):
                self.seat["doing"] = what
                operation()
                self.seat["doing"] = IDLE
                self.note_slot()
                beat(self.seat)
        os._exit(0)

    def note_slot(self) -> None:
        self.seat["slot"] = self.cache._worker.slot

    def evict(self, count: int) -> None:
        before = int(self.seat["doing"])
        self.seat["evicting"] = count
        self.seat["doing"] = EVICT
        super().evict(count)
        self.seat["evicting"] = 0
        self.seat["doing"] = before

    def clear(self) -> None:
        self.seat["clearing"] = 1
        super().clear()
        self.seat["cleared_at"] = time.monotonic_ns()
        self.seat["clearing"] = 0

    def offer(self, prompt: Prompt, match: PrefixMatch | None, own: NDArray[np.uint32]) -> InsertAcquired:
        self.offered_at[own] = time.monotonic_ns()
        self.seat["doing"] = INSERT
        return super().offer(prompt, match, own)

    def store_by_tokens(self) -> None:
        """Look up, store the rest and release, all by the tokens and with no match."""
        prompt = self.prompts.draw()
        how: dict[str, Any] = dict(adapter_id=prompt.adapter_id, salt=prompt.salt, block_keys=prompt.block_keys)
        match = self.look_up(prompt)
        known = len(match.matched_blocks)
        own = self.take(prompt.full_blocks - known) if known else None
        if own is None or self.random.random() < 0.3:
            if own is not None:
                self.free += own.tolist()
            if known:
                self.cache.release_matched(prompt.tokens, match.matched_tokens, **how)
            else:
                match.release()
            return
        self.offered_at[own] = time.monotonic_ns()
        clears = self.clears_begun()
        self.note_offer(prompt, own)
        table = np.concatenate([match.matched_blocks, own])
        acquired = self.cache.insert(prompt.tokens, table, matched_tokens=match.matched_tokens, **how)
        stored = self.settle(prompt, own, known, acquired)
        require(clears == self.clears_begun() or not acquired.stale or not stored, "a stale insert stored something")
        self.check_content(prompt, list(stored.values()), list(stored.keys()))
        self.cache.release(prompt.tokens, **how)

    def attach_again(self) -> None:
        """Close with leases in hand, or without, and attach anew."""
        if self.random.random() < 0.5:
            while self.open:
                self.finish_request()
        self.open.clear()
        self.seat["slot"] = -1
        self.cache.close()
        self.cache = RadixCache.attach(self.cache.name)

    def create_beside(self) -> None:
        """Open or unlink another cache, as its other users do at the same time."""
        name = f"{self.cache.name}-{self.random.randrange(SIDES)}"
        with contextlib.suppress(SegmentExists, SegmentNotFound):
            if self.random.random() < 0.4:
                RadixCache.unlink(name)
                return
            make = RadixCache.open if self.random.random() < 0.8 else RadixCache.create
            with make(name, max_blocks=8, block_size=4, max_leases=64, max_namespaces=2) as other:
                with other.lookup([1, 2, 3, 4, 5]) as match:
                    require(match.matched_blocks.tolist() in ([], [7]), f"found {match.matched_blocks}")
                require(other.insert([1, 2, 3, 4], [7]).inserted_tokens == 4, "a block did not fit")

    def fork(self) -> None:
        """Have a child that goes on with the inherited handle, at a seat of its own."""
        child = self.number + len(self.seats) // 2
        if child >= len(self.seats) or self.seats["pid"][child] != 0:
            return
        self.seats["pid"][child] = -1
        parent = os.getpid()
        if os.fork() != 0:
            return
        self.parents |= {parent}
        self.number, self.seat = child, self.seats[child]
        take_seat(self.seat, os.getpid())
        self.random.seed(f"{os.getpid()} {time.monotonic_ns()}")
        random.seed(self.random.random())
        self.open = []
        self.free = np.flatnonzero(self.ledger.held[child] == HELD).tolist()


def take_seat(seat: Any, pid: int) -> None:
    """Say that a new process has the seat."""
    for field, value in (("slot", -1), ("doing", ATTACH), ("evicting", 0), ("clearing", 0)):
        seat[field] = value
    seat["beat"] = time.monotonic_ns()
    seat["pid"] = pid


def beat(seat: Any) -> None:
    """An operation is done."""
    now = time.monotonic_ns()
    seat["gap"] = max(int(seat["gap"]), now - int(seat["beat"]))
    seat["beat"] = now
    seat["operations"] += 1


def live(seat: Any, work: Callable[[], None]) -> None:
    """All of a forked worker's life; it does not return."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        work()
    except BaseException:
        seat["wrong"] = 1
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(3)


# --- locks around a trivial section, two of them broken


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

        def take(handle, tag, now):  # type: ignore[no-untyped-def]
            return (0 if guard.acquire(open_views(handle), 0, tag, now) else 1), 0

        def give(handle, tag, now):  # type: ignore[no-untyped-def]
            return 0, 1 if guard.release(open_views(handle), 0) else 0

        signature = numba.types.UniTuple(numba.int64, 2)(numba.int64, numba.int64, numba.int64)
        cls.kernels = numba.njit(signature, nogil=True)(take), numba.njit(signature, nogil=True)(give)

    def __init__(self, name: str) -> None:
        self._worker = RadixCache.attach(name)._worker

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
