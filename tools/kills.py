"""Workers are killed at random, again and again, while they use one cache; what survives is checked.

Half of the kills are aimed at whoever has a guard. After each hundred all workers are killed, and then every block
whose insert had returned must be in the tree, unless an eviction cut short may have taken it; every node must hold
what was noted for its block before the insert, every snapshot's slot or file the state of its prefix; every slot must
be free or in one snapshot, `verify()` empty, and no lease, pin or pending snapshot left. `--job` sets the killer on
others: `kv` are workers that compute KV into blocks of the cache, each word checked by whoever reads it, where each
block must be free or in one node in the end; `guard`, `semaphore` and `owner` count under a lock, the cache's, and two
broken ones, which must hang or corrupt. Exit status 1 means that something was wrong; lines with WRONG say what.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, Protocol

import kv
import numpy as np
import psutil
import victims
from ledger import BLOCK_SIZE
from locked import LockJob
from saves import SIZES
from victims import BLOCKS, DOING, SEAT, SHM, STOPPED_UNTIL, CacheJob, line, shared_array

from shmradix import RadixCache
from shmradix.layout import RETENTIONS

ROUND = 100  # kills between two checks
PATIENCE = {
    "index": 30.0,
    "kv": 30.0,
    "guard": 30.0,
    "semaphore": 4.0,
    "owner": 4.0,
}  # seconds without progress: it hangs
_PR_SET_CHILD_SUBREAPER, _CLONE_NEWPID = 36, 0x2000_0000
_libc = ctypes.CDLL(None, use_errno=True)


class Job(Protocol):
    """What the victims do, and how to tell that they do it right."""

    def work(self, number: int) -> None:
        """A worker's life, in its process."""

    words: list[memoryview]
    """Each of one int64: its low 16 bits say who is in a section, 0 if nobody is."""

    def owners(self) -> dict[int, int]:
        """From what a word's low 16 bits say to a seat."""

    def died(self, number: int) -> None:
        """The process at this seat is dead."""

    def check(self, quiet: bool) -> list[str]:
        """What is wrong now; `quiet` if nobody is alive."""

    def report(self, kills: int) -> list[str]:
        """What is wrong in the end; prints its own figures."""


class Crew:
    """Keeps workers at their seats, and kills them."""

    def __init__(self, job: Job, seats: Any, options: argparse.Namespace) -> None:
        self.job, self.seats, self.workers = job, seats, options.workers
        self.random = random.Random(options.seed)
        self.namespaces, self.kind = options.namespaces, options.job
        self.spare = {child.pid for child in psutil.Process().children()}  # the sweeper
        self.pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self.kills = self.stops = self.productive = 0  # the last is the kills until somebody did something
        self.operations = self.gap = self.late = self.longest_stop = 0
        self.wrong: list[str] = []

    def run(self, kills: int) -> None:
        """Kill that many, or until something is wrong."""
        for number in range(self.workers):
            self.start(number)
        checks = [ROUND // 2, ROUND]
        while self.kills < kills and not self.wrong:
            self.pause()
            self.strike()
            self.watch()
            if self.kills >= checks[0] and not self.wrong:
                self.wrong += self.job.check(quiet=False)
                checks[0] += ROUND
            if self.kills >= checks[1] and not self.wrong:
                self.check_quiet()
                checks[1] += ROUND
                for number in range(self.workers):
                    self.start(number)
        if self.wrong:
            self.kill_all()
        else:
            self.check_quiet()

    def check_quiet(self) -> None:
        self.kill_all()
        self.wrong += self.job.check(quiet=True)

    def start(self, number: int) -> None:
        """Fork a worker; where wished, every other one as pid 1 of a pid namespace of its own."""
        seat = self.seats[number]
        victims.take_seat(seat, 0)
        apart = self.namespaces and number % 2
        if apart and _libc.unshare(_CLONE_NEWPID):
            raise OSError(ctypes.get_errno(), "unshare: " + os.strerror(ctypes.get_errno()))
        pid = os.fork()
        if pid == 0:
            victims.die_with_parent()
            victims.live(seat, lambda: self.job.work(number))
        seat["pid"] = pid
        if apart and _libc.setns(self.pid_namespace, _CLONE_NEWPID):
            raise OSError(ctypes.get_errno(), "setns")

    def pause(self) -> None:
        """Most often a moment, seldom long."""
        seconds = min(0.001 * self.random.paretovariate(1.1), 0.5)
        started = time.monotonic()
        time.sleep(seconds)
        self.late = max(self.late, int((time.monotonic() - started - seconds) * 1e9))

    def strike(self) -> None:
        """Kill the owner of the guard, anybody, several within a millisecond, parents only, or all."""
        alive = np.flatnonzero(self.seats["pid"] > 0).tolist()
        children = [number for number in alive if number >= self.workers]
        way = self.random.random()
        stop = min(0.001 * self.random.paretovariate(0.8), 0.2) if self.random.random() < 0.1 else 0
        if way < 0.55:
            chosen = [self.aim(signal.SIGSTOP if stop else signal.SIGKILL)]
        elif way < 0.62 and children:
            chosen = [self.random.choice(children) - self.workers]
        elif way < 0.68:
            chosen = self.random.sample(alive, self.random.randint(2, len(alive)))
        elif way < 0.685:
            chosen = alive
        else:
            chosen = [self.random.choice(alive)]
        self.kill(chosen, stop)

    def aim(self, which: signal.Signals) -> int:
        """Send the signal to the next one that is in a section; to anybody if nobody is for some milliseconds."""
        pids = {at: (seat, int(self.seats["pid"][seat])) for at, seat in self.job.owners().items()}
        word, wait = self.random.choice(self.job.words), self.random.choice((0, 0, 0, 0, 20, 200))
        deadline, chosen = time.monotonic() + 0.005, None
        while chosen is None and time.monotonic() < deadline:
            for _ in range(20):
                chosen = pids.get(word[0] & 0xFFFF)
                if chosen is not None:
                    break
        seat, pid = chosen or (number := self.random.randrange(self.workers), int(self.seats["pid"][number]))
        for _ in range(wait):
            pass
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, which)
        return seat

    def kill(self, numbers: list[int], stop: float = 0, again: bool = True) -> None:
        """Kill whoever sits there, stopped for some seconds before, and start workers in their place."""
        chosen = [(number, int(self.seats["pid"][number])) for number in numbers if self.seats["pid"][number] > 0]
        if stop:
            STOPPED_UNTIL[0] = 1 << 62
            self.signal(chosen, signal.SIGSTOP)
            time.sleep(stop)
            self.stops += len(chosen)
            self.longest_stop = max(self.longest_stop, int(stop * 1e9))
        else:
            self.note_gaps()
        self.signal(chosen, signal.SIGKILL)
        if stop:
            STOPPED_UNTIL[0] = time.monotonic_ns()
        for number, pid in chosen:
            await_end(pid)
            self.bury(number)
        self.kills += len(chosen)
        for number, _ in chosen if again else ():
            if number < self.workers:
                self.start(number)

    @staticmethod
    def signal(chosen: list[tuple[int, int]], which: signal.Signals) -> None:
        for _, pid in chosen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, which)

    def bury(self, number: int) -> None:
        self.job.died(number)
        for field, value in (("pid", 0), ("slot", -1), ("evicting", 0), ("clearing", 0)):
            self.seats[field][number] = value

    def kill_all(self) -> None:
        """Kill everybody, also children that nobody has heard of yet."""
        while True:
            self.kill(np.flatnonzero(self.seats["pid"] > 0).tolist(), again=False)
            strays = [child.pid for child in psutil.Process().children(recursive=True) if child.pid not in self.spare]
            if not strays and not (self.seats["pid"] > 0).any():
                break
            for pid in strays:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                await_end(pid)
                for number in np.flatnonzero(self.seats["pid"] == pid).tolist():
                    self.bury(number)
        self.seats["pid"][:] = 0

    def note_gaps(self) -> int:
        """Look for how long some survivor has done nothing, in nanoseconds."""
        beats = self.seats["beat"][self.seats["pid"] > 0]
        longest = time.monotonic_ns() - int(beats.min()) if len(beats) else 0
        if len(beats) and beats.min() > STOPPED_UNTIL[0]:
            self.gap = max(self.gap, longest)
        return longest

    def watch(self) -> None:
        """Note workers that ended by themselves, and hangs: of any worker under a good lock, of all under a broken."""
        operations = int(self.seats["operations"].sum())
        if operations != self.operations:
            self.operations, self.productive, self.since = operations, self.kills, time.monotonic_ns()
        broken = self.kind in ("semaphore", "owner")
        longest = time.monotonic_ns() - self.since if broken else self.note_gaps()
        if longest > PATIENCE[self.kind] * 1e9:
            doing = Counter(DOING[seat["doing"]] for seat in self.seats if seat["pid"] > 0)
            self.wrong.append(f"hang: no progress for {longest / 1e9:.1f} s, workers are in {dict(doing)}")
        for number in range(self.workers):
            pid, code = os.waitpid(int(self.seats["pid"][number]), os.WNOHANG)
            if pid:
                self.wrong.append(f"worker {number} ended by itself: {os.waitstatus_to_exitcode(code)}")
                self.bury(number)
        if self.seats["wrong"].any():
            self.wrong.append("a worker saw a wrong answer: see above")
        if broken:
            self.wrong += self.job.check(quiet=False)

    since = time.monotonic_ns()

    def report(self) -> None:
        line("kills", f"{self.kills}, {self.stops} of them stopped before")
        line("operations", f"{self.operations:,}")
        self.gap = max(self.gap, int(self.seats["gap"].max()))
        while_stopped = int(self.seats["gap_stopped"].max())
        line("longest gap", f"{self.gap / 1e6:.0f} ms of a survivor without progress")
        line("beside a stop", f"{while_stopped / 1e6:.0f} ms")
        line(
            "longest stop", f"{self.longest_stop / 1e6:.0f} ms; the killer itself woke up {self.late / 1e6:.0f} ms late"
        )


def await_end(pid: int) -> None:
    """Wait until a process is gone, be it our child or our child's."""
    while True:
        try:
            if os.waitpid(pid, os.WNOHANG)[0]:
                return
        except ChildProcessError:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return
        time.sleep(0.0002)


def entries() -> tuple[int, list[str]]:
    """What must not grow: descriptors, and what is in shared memory that a killed `sem_open` leaves."""
    return len(os.listdir("/proc/self/fd")), sorted(path.name for path in SHM.glob("sem.??????"))


@contextlib.contextmanager
def swept(name: str, path: str) -> Iterator[None]:
    """Remove everything of `name` in the end, by a process that outlives this one, however it ends."""
    since = f"-user $(id -u) -newermt @{time.time():.0f} ! -newermt '1 second ago'"
    sweep = f"read _; sleep 1.5; rm -rf {SHM}/*shmradix.{name}* {SHM}/.shmradix.{name}* {path} {path}.tier"
    sweep += f"; find {SHM} -maxdepth 1 -name 'sem.??????' {since} -delete"
    with subprocess.Popen(["sh", "-c", sweep], stdin=subprocess.PIPE, start_new_session=True) as sweeper:
        assert sweeper.stdin is not None
        os.register_at_fork(after_in_child=sweeper.stdin.close)
        try:
            yield
        finally:
            sweeper.stdin.close()


def sizes_of(options: argparse.Namespace) -> dict[str, Any]:
    """Those of the cache that the job needs."""
    if options.job == "kv":
        return {**kv.SIZES, "checksums": bool(options.seed % 2)}
    blocks = {"max_blocks": BLOCKS * 3 // 4, "block_size": BLOCK_SIZE, "max_namespaces": 64}
    return {**blocks, **SIZES, "retention": RETENTIONS[options.seed % 2]}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Kill workers at random and check what survives.")
    parser.add_argument("--kills", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="even: session retention, odd: chain, and checksums")
    parser.add_argument("--job", choices=PATIENCE, default="index", help="what is killed (default %(default)s)")
    parser.add_argument("--namespaces", action="store_true", help="every other worker is pid 1 of its own namespace")
    options = parser.parse_args(arguments)
    name = f"kills-{os.getpid()}-{os.urandom(4).hex()}"
    handle, path = tempfile.mkstemp(prefix=f"{name}-")
    os.close(handle)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    seats = shared_array(SEAT, options.workers * (2 if options.job == "index" else 1))
    with (
        swept(name, path),
        RadixCache.create(name, max_workers=2 * options.workers + 2, **sizes_of(options)) as cache,
    ):
        job: Any
        if options.job == "index":
            job = CacheJob(cache, path, seats, options.seed)
        elif options.job == "kv":
            job = kv.KvJob(cache, seats, options.seed)
        else:
            job = LockJob(cache, options.job, seats)
        crew = Crew(job, seats, options)
        gc.freeze()
        before, started = entries(), time.monotonic()
        crew.since = time.monotonic_ns()
        crew.run(options.kills)
        wrong, after = crew.wrong, entries()
        crew.report()
        wrong += job.report(crew.kills)
        line("until", f"{crew.productive} kills, {time.monotonic() - started:.0f} s")
        if after[0] != before[0]:
            wrong.append(f"{after[0]} descriptors are open, {before[0]} were before")
        line("left by sem_open", f"{len(set(after[1]) - set(before[1]))}")
        cache.unlink()
    for text in wrong:
        print(f"WRONG: {text}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
