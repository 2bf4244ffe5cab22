"""A worker: one attached handle, its slot, and how its calls reach the compiled code.

The slot is claimed by a kernel lock (`locks.py`), which the kernel drops when the process dies. Threads of a process
share a handle and its slot and queue here. A forked child claims a slot of its own at first use.
"""

import atexit
import contextlib
import io
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from shmradix import compile, locks, semaphores
from shmradix.errors import CacheClosed, CorruptSegment, LockTimeout, SegmentNotFound, WorkersFull
from shmradix.guard import SNAPSHOTS, TREE
from shmradix.layout import CLAIMS, GUARDS
from shmradix.owner_word import MAX_GENERATION, PARKED, SLOT_BITS, owner_of, tag_of
from shmradix.parking import Parking
from shmradix.segment import Segment
from shmradix.status import BUSY, BUSY_SNAPSHOTS, CORRUPT
from shmradix.tree import LOCK_WAITS, REBUILD_NS, REBUILDS
from shmradix.views import SLOT, make_handle

_workers: "weakref.WeakSet[Worker]" = weakref.WeakSet()


class Worker:
    """This handle's place in the segment. Raises WorkersFull where every slot is taken."""

    def __init__(self, segment: Segment, lock_timeout: float | None) -> None:
        self.segment = segment
        self.entries = compile.load()
        self.snapshots = compile.load("snapshot_entries") if segment.geometry.max_snapshots else None
        self.blocks = compile.load("block_entries") if segment.geometry.num_blocks else None
        self._lock_timeout = lock_timeout
        self._handle = make_handle(segment.views, segment.geometry)
        self.address: int = self._handle.ctypes.data
        self._parking: list[Parking] = []  # for each guard
        self._queue = threading.RLock()  # re-entrant: a signal handler may use the handle that it interrupts
        self._calls = 0  # of the thread that has the queue: more than one in such a handler
        self._file: io.FileIO | None = None  # whose lock is the slot
        self.slot = -1  # none: before the first claim, and in a forked child
        self.tag = 0
        self.closed = False
        self.unreturned: list[tuple[np.ndarray, np.ndarray]] = []  # (rows, count) of evictions that were cut short
        self.undelivered: list[tuple[np.ndarray, np.ndarray]] = []  # (blocks, counts) of allocations, likewise
        self.evicted: list[tuple[np.ndarray, np.ndarray]] = []  # (rows, counts) of what allocations evicted
        _workers.add(self)
        try:
            for which in GUARDS:
                self._parking.append(_parking(segment, which))
            # Not closed with the handle, but with its last user: other threads may sleep there.
            self.claimers = _parking(segment, CLAIMS)
            self.locked(lambda: None)
        except BaseException:
            self.forget()
            self._close_parking()
            raise

    @cached_property
    def claims(self) -> Any:
        """The entry points of claims, loaded where somebody uses them."""
        return compile.load("claim_entries")

    # --- calls --------------------------------------------------------------------------------------------

    def locked(self, work: Callable[..., Any], *args: Any) -> Any:
        """Call `work` when no other thread of this process is in a call, with a slot to work in. Returns its answer."""
        with self._queue:
            calls = self._calls
            try:
                self._calls = calls + 1
                if self.closed or self.slot < 0:
                    self._claim()
                return work(*args)
            finally:
                self._calls = calls
                if self.closed and calls == 0 and self.slot >= 0:
                    self._end()

    def run(self, kernel: Callable[..., Any], *args: Any) -> Any:
        """`call`, when no other thread of this process is in one."""
        return self.locked(self.call, kernel, *args)

    def read(self, kernel: Callable[..., Any], *args: Any) -> Any:
        """Call an entry point that takes no guard."""
        return self.locked(kernel, self.address, *args)

    def call(self, kernel: Callable[..., Any], *args: Any) -> Any:
        """Call an entry point, waiting for its guard as long as it takes; only within `locked`.

        Raises LockTimeout when a live owner keeps the guard longer than the handle's `lock_timeout`, CorruptSegment
        when the kernel met an index that points nowhere, CacheClosed.
        """
        answer = kernel(self.address, self.tag, time.monotonic_ns(), *args)
        if answer[0] == BUSY:
            answer = self._call_parked(TREE, kernel, *args)
        elif answer[0] == BUSY_SNAPSHOTS:
            answer = self._call_parked(SNAPSHOTS, kernel, *args)
        if answer[1]:
            self._parking[answer[1] - 1].wake()
        if answer[0] == CORRUPT:
            raise CorruptSegment(
                f"segment {self.segment.name!r} holds an index that points nowhere: unlink it and create it anew"
            )
        return answer

    def _call_parked(self, guard: int, kernel: Callable[..., Any], *args: Any) -> Any:
        started = time.monotonic()
        self.segment.views.workers["counters"][owner_of(self.tag)[0]][LOCK_WAITS] += 1
        while True:
            word = self.entries.announce(self.address, guard)
            if word and not self._parking[guard].sleep() and self.is_dead(*owner_of(word)):
                self._take_over(guard, word)
            elif word:
                self._check_deadline(guard, word, started)
            if self.closed and kernel not in self._buriers():
                raise self._closed_error()
            answer = kernel(self.address, self.tag | PARKED, time.monotonic_ns(), *args)
            if answer[0] not in (BUSY, BUSY_SNAPSHOTS):
                return answer

    def _check_deadline(self, guard: int, word: int, started: float) -> None:
        if self._lock_timeout is None or time.monotonic() - started < self._lock_timeout:
            return
        held = (time.monotonic_ns() - int(self.segment.views.guards["acquired_ns"][guard])) / 1e9
        raise LockTimeout(
            f"cache {self.segment.name!r}: {self.describe(owner_of(word)[0])} has held the {GUARDS[guard]} guard for "
            f"{max(held, 0):.2f} s (lock_timeout={self._lock_timeout} s): wait longer, or see whether it is stopped"
        )

    def _take_over(self, guard: int, word: int) -> None:
        started = time.monotonic_ns()
        done, wake = self.entries.take_over(self.address, self.tag, started, guard, word)
        if wake:
            self._parking[guard].wake()
        if done == 2:
            counters = self.segment.views.workers["counters"][owner_of(self.tag)[0]]
            counters[REBUILDS] += 1
            counters[REBUILD_NS] += time.monotonic_ns() - started

    # --- slots --------------------------------------------------------------------------------------------

    def _closed_error(self) -> CacheClosed:
        return CacheClosed(f"cache {self.segment.name!r} was closed: attach again")

    def _claim(self) -> None:
        if self.closed:
            raise self._closed_error()
        if self._file is not None:
            raise RuntimeError(f"cache {self.segment.name!r} was used by a signal handler while it was being attached")
        try:
            self._file = self.segment.open_for_locks()
            slot = self._lock_a_slot(self._file)
            record = self.segment.views.workers[slot : slot + 1]
            generation = self._next_generation(slot, int(record["generation"][0]))
            record["generation"] = generation  # first: an owner word of the slot's last holder is a dead one's from now
            self._handle[SLOT] = slot
            self.tag = tag_of(slot, generation)
            self.bury(slot, generation - 1)
            record["claimed_ns"] = time.time_ns()
            record["start_time"] = _start_time(os.getpid())
            record["pid_namespace"] = os.stat("/proc/self/ns/pid").st_ino
            record["pid"] = os.getpid()
            self.slot = slot  # last: until then no call of a signal handler can take a lease that no reaper would find
        except BaseException:
            self.forget()
            raise

    def _next_generation(self, slot: int, generation: int) -> int:
        owners = [owner_of(word) for word in self.segment.views.guards["owner"].tolist()]
        while True:
            generation = generation % (MAX_GENERATION - 1) + 1
            if (slot, generation) not in owners:
                return generation  # which in a damaged segment might seem to hold a guard already

    def _lock_a_slot(self, file: io.FileIO) -> int:
        slots = self.segment.geometry.max_workers
        for slot in range(slots):
            if locks.try_lock(file, locks.FIRST_WORKER_BYTE + slot):
                return slot
        holders = ", ".join(self.describe(slot) for slot in range(min(slots, 16)))
        raise WorkersFull(
            f"cache {self.segment.name!r}: all max_workers={slots} slots are taken by {holders}: "
            "close one, or create the cache with more"
        )

    def reap(self) -> int:
        """Free what dead workers hold. Returns how many there were."""
        return self.locked(self._reap)

    def _reap(self) -> int:
        # Nothing is locked meanwhile: a generation that is dead stays so, whoever claims its slot.
        workers, reaped = self.segment.views.workers, 0
        for slot in np.flatnonzero(workers["pid"]).tolist():
            generation = int(workers["generation"][slot])
            if slot != self.slot and self.is_dead(slot, generation):
                self.bury(slot, generation)
                reaped += 1
        return reaped

    def _buriers(self) -> list[Callable[..., Any]]:
        return [*([self.snapshots.bury] if self.snapshots else []), self.entries.bury]

    def bury(self, slot: int, generation: int) -> None:
        """Free all that the slot's holders up to this generation hold; the tree's part, with their pid, last."""
        for bury in self._buriers():
            self.call(bury, slot, generation)

    def is_dead(self, slot: int, generation: int) -> bool:
        if not 0 <= slot < self.segment.geometry.max_workers:
            return True  # no worker ever wrote that word
        if int(self.segment.views.workers["generation"][slot]) != generation:
            return True
        return not self._is_locked(slot)

    def _is_locked(self, slot: int) -> bool:
        assert self._file is not None  # only a worker with a slot asks
        return slot == self.slot or locks.is_locked_by_others(self._file, locks.FIRST_WORKER_BYTE + slot)

    def counters(self) -> tuple[list[int], int, int]:
        """The sums of all slots' counters in the order of `layout.COUNTERS`, recoveries, and live workers."""
        return self.locked(self._counters)

    def _counters(self) -> tuple[list[int], int, int]:
        views = self.segment.views
        slots = np.flatnonzero(views.workers["pid"]).tolist()
        live = sum(map(self._is_locked, slots))
        return views.workers["counters"].sum(axis=0).tolist(), int(views.guards["recoveries"].sum()), live

    def describe(self, slot: int) -> str:
        """Who has a slot, for people."""
        if not 0 <= slot < self.segment.geometry.max_workers:
            return "nobody that ever was here"
        record = self.segment.views.workers[slot]
        pid = int(record["pid"])
        if record["pid_namespace"] != os.stat("/proc/self/ns/pid").st_ino:
            return f"pid {pid} of another pid namespace (slot {slot})"
        with contextlib.suppress(psutil.Error, OSError):
            if _start_time(pid) == record["start_time"]:
                return f"pid {pid} ({psutil.Process(pid).name()}, slot {slot})"
        return f"pid {pid} (exiting or gone, slot {slot})"

    # --- the end ------------------------------------------------------------------------------------------

    def close(self, patience: float = -1) -> None:
        """Give the slot and all its leases back and unmap, once no thread is in a call.

        Waits no longer than `patience` seconds, or the handle's `lock_timeout`: the kernel frees the slot anyway, and
        the next worker what it holds.
        """
        if not self._queue.acquire(timeout=patience):
            return
        try:
            if patience >= 0:
                self._lock_timeout = patience
            self.closed = True
            if self._calls == 0:  # else a signal handler closes what it interrupts, which ends it on its way out
                self._end()
        finally:
            self._queue.release()

    def _end(self) -> None:
        self._calls = 1  # for a signal handler that comes in between
        try:
            if self.slot >= 0:
                with contextlib.suppress(LockTimeout):
                    self.bury(self.slot, self.tag >> SLOT_BITS)
        finally:
            self._calls = 0
            self.forget()
            self._close_parking()
            self.segment.close()

    def _close_parking(self) -> None:
        for parking in self._parking:
            parking.close()

    def forget(self) -> None:
        """Give up the slot's lock only."""
        if self._file is not None:
            self._file.close()
        self._file, self.slot, self.tag = None, -1, 0

    def after_fork(self) -> None:
        """In a forked child: the slot stays the parent's, its lock is closed, and no thread of the parent is here."""
        self._queue, self._calls = threading.RLock(), 0
        self._file, self.slot, self.tag = None, -1, 0
        self.unreturned, self.undelivered, self.evicted = [], [], []


def _parking(segment: Segment, which: str) -> Parking:
    semaphore = semaphores.name_of(segment.name, segment.incarnation, which)
    semaphores.make(semaphore, segment.mode)
    parking = None
    try:
        parking = Parking(semaphore)
    except FileNotFoundError:
        raise SegmentNotFound(f"segment {segment.name!r} was unlinked while it was being attached") from None
    finally:
        try:
            if not segment.has_its_name():  # unlinked meanwhile: we may have made anew what was removed with it
                semaphores.remove(segment.name, segment.incarnation)
        except BaseException:
            if parking is not None:
                parking.close()
            raise
    return parking


def _start_time(pid: int) -> int:
    """When the process started, in clock ticks after boot: proc(5), /proc/<pid>/stat, field 22."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _after_fork_in_child() -> None:
    for worker in list(_workers):
        worker.after_fork()


def _at_exit() -> None:
    for worker in list(_workers):
        worker.close(patience=1.0)


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
