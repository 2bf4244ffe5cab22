"""Opens a segment, or a copy of one in a file, read-only, and copies its index while nobody changes it.

No guard is taken. Workers write when they took a guard into it, and its word is 0 while nobody has it: where neither
differs after the copy, nobody changed anything meanwhile. Else the copy is thrown away and made again.
"""

from __future__ import annotations

import builtins
import io
import mmap
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from shmradix import locks, verify
from shmradix.errors import AccessDenied, CorruptSegment, SegmentForeign, SegmentNotFound, ShmradixError
from shmradix.inspect.snapshots import Snapshot, snapshots
from shmradix.layout import COUNTERS, GUARDS, HEADER, LIMITS, Geometry, Views
from shmradix.owner_word import PARKED, owner_of
from shmradix.segment import boot_id, geometry_of, header_of, names, path_of
from shmradix.verify import Violation

PATIENCE = 10.0  # seconds that a copy is tried for
_PAUSE = 0.0005


class WorkersBusy(ShmradixError, TimeoutError):
    """No moment without a change was long enough for a copy."""


@dataclass(frozen=True)
class Worker:
    """Who has, or had, a slot: alive is None where nobody can tell, for the cache is a file, or from another boot."""

    slot: int
    pid: int
    alive: bool | None
    attached: float
    """Unix time, seconds."""
    leases: int
    private_blocks: int
    counters: dict[str, int]


@dataclass(frozen=True)
class Lease:
    """What keeps the first `depth` blocks of a prompt: whose it is, and for how many seconds it had been held."""

    slot: int
    pid: int
    alive: bool | None
    depth: int
    partial_tokens: int
    """Of the next block, which it keeps, too, where this is not 0."""
    seconds: float | None
    """None of a copy in a file, which does not say when it was made."""


@dataclass(frozen=True)
class Guard:
    """A guard at one moment: who has it, whether others sleep until he gives it back, since when, how often it was
    taken from the dead."""

    name: str
    slot: int | None
    pid: int | None
    alive: bool | None
    is_waited_for: bool
    seconds: float | None
    """None where nobody has it, or the cache is a file."""
    recoveries: int


class Reading:
    """A consistent copy of a cache's index, with the arrays of `layout.Views`, and who was alive at that time."""

    def __init__(self, name: str, image: np.ndarray, geometry: Geometry, alive: list[bool] | None) -> None:
        self.name, self.image, self.geometry = name, image, geometry
        self.views: Views = geometry.views(image)
        self.taken_ns = time.monotonic_ns()
        self.alive = alive
        """Of each slot whether a process has it; None where nobody can tell."""

    @property
    def created(self) -> float:
        """Unix time, seconds."""
        return int(self.views.header["created_ns"][0]) / 1e9

    @property
    def workers(self) -> list[Worker]:
        """Those that have a slot, and dead ones that nobody has reaped yet, by slot."""
        views, blocks, found = self.views, self.views.blocks, []
        leases = views.leases[views.leases["born"] != 0]
        for slot, record in enumerate(views.workers):
            alive = None if self.alive is None else self.alive[slot]
            if not record["pid"] and not alive:
                continue
            holds, has = (
                (its["worker"] == slot + 1) & (its["generation"] == record["generation"]) for its in (leases, blocks)
            )
            counters = dict(zip(COUNTERS, record["counters"].tolist()))
            found.append(
                Worker(
                    slot, int(record["pid"]), alive, int(record["claimed_ns"]) / 1e9, int(holds.sum()), int(has.sum()),
                    counters,
                )
            )  # fmt: skip
        return found

    @property
    def leases(self) -> list[Lease]:
        """All leases, the oldest first."""
        views = self.views
        records = views.leases[1:][views.leases["born"][1:] != 0]
        found = []
        for record in records[np.argsort(records["taken_ns"], kind="stable")]:
            slot = int(record["worker"]) - 1
            worker = views.workers[slot] if 0 <= slot < len(views.workers) else None
            is_its = worker is not None and worker["generation"] == record["generation"]
            alive = None if self.alive is None else is_its and self.alive[slot]
            pid = int(worker["pid"]) if worker is not None and is_its else 0
            age = None if self.alive is None else (self.taken_ns - int(record["taken_ns"])) / 1e9
            found.append(Lease(slot, pid, alive, int(record["depth"]), int(record["partial_tokens"]), age))
        return found

    @property
    def snapshots(self) -> list[Snapshot]:
        """All snapshots, the oldest first."""
        return snapshots(self.views)

    @property
    def counters(self) -> dict[str, int]:
        """Sums over all slots, also of workers that are gone; a slot keeps counting for its next worker."""
        return dict(zip(COUNTERS, self.views.workers["counters"].sum(axis=0).tolist()))

    @property
    def held_by(self) -> list[int | None]:
        """The slot that holds each guard, in the order of `layout.GUARDS`: None, or that of a dead worker."""
        return [owner_of(word)[0] if word else None for word in self.views.guards["owner"].tolist()]

    def verify(self) -> list[Violation]:
        """Every invariant (docs/invariants.md) that does not hold; some need not while a dead worker has a guard."""
        return verify.check(self.views, self.geometry)


class _Source:
    """The file, mapped read-only."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self._file = _open_file(name, path)
        try:
            status = os.fstat(self._file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise SegmentForeign(f"{path} is not a regular file: expected a cache, or a copy of one")
            header = header_of(path, os.pread(self._file.fileno(), HEADER.itemsize, 0))
            self.geometry = geometry_of(name, header)
            if status.st_size < self.geometry.size:
                raise CorruptSegment(f"{path} has {status.st_size:,} bytes: its index alone {self.geometry.size:,}")
            is_live = path.parent == path_of("x").parent and header["boot_id"].tobytes() == boot_id().tobytes()
            self._is_live = is_live
            self._map = mmap.mmap(self._file.fileno(), self.geometry.size, access=mmap.ACCESS_READ)
        except BaseException:
            self._file.close()
            raise
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._views = self.geometry.views(self._bytes)

    def __enter__(self) -> _Source:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        del self._bytes, self._views
        self._file.close()

    def read(self, patience: float) -> Reading:
        """Copy, until no worker changed anything while it was made. Raises WorkersBusy after so many seconds."""
        image, deadline = np.empty(self.geometry.size, np.uint8), time.monotonic() + patience
        image.fill(0)  # have the memory before: the copy is to be short
        guards = self._views.guards
        while True:
            acquired = guards["acquired_ns"].tolist()  # before the owners, so that who comes later changes it
            before = self._owners()
            alive = self._alive() if self._is_live else None
            if not self._is_held(before, alive):
                image[:] = self._bytes
                if self._owners() == before and guards["acquired_ns"].tolist() == acquired:
                    return Reading(self.name, image, self.geometry, alive)
            if time.monotonic() > deadline:
                raise WorkersBusy(
                    f"cache {self.name!r}: its workers left no moment to copy {self.geometry.size:,} bytes in "
                    f"{patience:.0f} s: try again when it is less busy, or give it more time"
                )
            time.sleep(_PAUSE)

    def guards(self) -> list[Guard]:
        """As they are now: whoever has one is at work, or dead."""
        found = []
        for name, record in zip(GUARDS, self._views.guards.copy()):
            word = int(record["owner"])
            slot, generation = owner_of(word) if word else (None, 0)
            is_known = slot is not None and slot < self.geometry.max_workers
            worker = self._views.workers[slot] if is_known else None
            is_its = worker is not None and int(worker["generation"]) == generation
            since = (time.monotonic_ns() - int(record["acquired_ns"])) / 1e9
            found.append(
                Guard(
                    name=name,
                    slot=slot,
                    pid=int(worker["pid"]) if worker is not None and is_its else None,
                    alive=is_its and slot in self._living() if slot is not None and self._is_live else None,
                    is_waited_for=bool(word & PARKED),
                    seconds=since if slot is not None and self._is_live else None,
                    recoveries=int(record["recoveries"]),
                )
            )
        return found

    def _living(self) -> set[int]:
        return _living_slots(self._file, self.geometry.max_workers)

    def _owners(self) -> list[int]:
        return [word & ~PARKED for word in self._views.guards["owner"].tolist()]

    def _alive(self) -> list[bool]:
        """Of each slot whether a process has it."""
        living = self._living()
        return [slot in living for slot in range(self.geometry.max_workers)]

    def _is_held(self, owners: list[int], alive: list[bool] | None) -> bool:
        """Whether somebody who can still change something has a guard."""
        generations = self._views.workers["generation"].tolist()
        holders = [owner_of(word) for word in owners if word]
        return alive is not None and any(
            slot < len(alive) and alive[slot] and generations[slot] == generation for slot, generation in holders
        )


def _living_slots(file: io.FileIO, count: int) -> set[int]:
    """Those of the first `count` slots whose byte a process has locked."""
    return {slot for slot in range(count) if locks.is_locked_by_others(file, locks.FIRST_WORKER_BYTE + slot)}


def living_slots(name: str) -> set[int]:
    """The slots of a cache that a process has, whatever its layout. Raises SegmentNotFound, AccessDenied."""
    with _open_file(name, path_of(name)) as file:
        return _living_slots(file, LIMITS["max_workers"][1])


def _open_file(name: str, path: Path) -> io.FileIO:
    """Read-only, and without waiting for the writer of a pipe."""
    try:
        return io.FileIO(path, opener=lambda at, flags: os.open(at, flags | os.O_NONBLOCK))
    except FileNotFoundError:
        raise SegmentNotFound(f"no cache {name!r}, and no such file") from None
    except IsADirectoryError:
        raise SegmentForeign(f"{path} is a directory: expected a cache, or a copy of one") from None
    except PermissionError:
        raise AccessDenied(f"{path} is of user {path.stat().st_uid}: run as that user") from None


def open(cache: str | Path, patience: float = PATIENCE) -> Reading:
    """Read the cache of this name, or, where it is a path or there is no such cache, a copy of one in that file.

    Raises SegmentNotFound, SegmentForeign, LayoutMismatch, CorruptSegment, AccessDenied, or WorkersBusy where the
    workers left no moment for a copy in `patience` seconds.
    """
    with _source(cache) as source:
        return source.read(patience)


def guards(cache: str | Path) -> list[Guard]:
    """Who has the guards of a cache at this moment. Raises as `open`, but for WorkersBusy."""
    with _source(cache) as source:
        return source.guards()


def _source(cache: str | Path) -> _Source:
    name = str(cache)
    is_name = isinstance(cache, str) and name in names()
    return _Source(name, path_of(name) if is_name else Path(cache))


def dump(reading: Reading, path: str | Path) -> None:
    """Write the index, prompts and all, to a new file that `open` reads. Raises FileExistsError, OSError."""
    with builtins.open(path, "xb") as file:
        file.write(reading.image.data)
