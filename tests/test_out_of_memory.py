"""The kernel's OOM killer takes workers while they use a cache: the others go on, as after any other death."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import random
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from shmradix import RadixCache
from shmradix import compile as kernels
from shmradix.errors import LeaseError
from tests.actors import BLOCKS, PROMPT, files_of
from tests.children import resources, slots_alive

VICTIMS = int(os.environ.get("SHMRADIX_OOM_KILLS", "20"))
LIMIT, ENOUGH, BITE = 24 << 20, 512 << 20, 256 << 10
OPERATIONS, INSIDE = 0, 1  # what a victim notes in shared memory: calls that returned, whether it is in one
_PR_SET_PDEATHSIG = 1


class MemoryGroup:
    """A control group of little memory, below our own (version 1) or beside it (version 2)."""

    def __init__(self, parent: Path, is_v2: bool) -> None:
        self.path = parent / f"shmradix-test-{os.getpid()}"
        self.limits = ("memory.max", "memory.swap.max") if is_v2 else ("memory.limit_in_bytes", "memory.swappiness")
        self.events = self.path / ("memory.events" if is_v2 else "memory.oom_control")

    def limit(self) -> None:
        (self.path / self.limits[0]).write_text(str(LIMIT))
        with contextlib.suppress(OSError):  # no swap, or not accounted for
            (self.path / self.limits[1]).write_text("0")

    def event(self, which: str) -> int:
        """How often that happened, or whether it is so."""
        return int(dict(line.split() for line in self.events.read_text().splitlines()).get(which, 0))

    def kills(self) -> int:
        return self.event("oom_kill")

    def join(self) -> None:
        (self.path / "cgroup.procs").write_text("0")


def candidates() -> Iterator[MemoryGroup]:
    """Where the control group might be made: only where this process's own limits go on to hold."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        root, mount = fields.split()[3:5]
        kind, _, options = rest.split(" ", 2)
        if kind == "cgroup" and "memory" in options.split(","):
            path = next((path for names, path in own.items() if "memory" in names.split(",")), None)
        elif kind == "cgroup2":
            path = own.get("")
        else:
            continue
        if path is None:
            continue
        where = Path(mount) / os.path.relpath(path, root) if path.startswith(root) else Path(mount)
        if kind == "cgroup":
            yield MemoryGroup(where, is_v2=False)
            continue
        for parent in (where, *where.parents):  # a group with processes in it has no controlled children
            if parent.is_relative_to(mount) and "memory" in _words(parent / "cgroup.subtree_control"):
                yield MemoryGroup(parent, is_v2=True)
                break


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    reasons = ["no control group of version 1 or 2 hands memory on to groups below it"]
    for group in candidates():
        try:
            group.path.mkdir()
        except OSError as error:
            reasons.append(f"no control group can be made: {error}")
            continue
        # A process of its own, which outlives this one: the group goes even where this one is killed.
        sweep = f"cat; for _ in 1 2 3 4 5; do rmdir {group.path} 2>&- && break; sleep 1; done"
        with subprocess.Popen(["sh", "-c", sweep], stdin=subprocess.PIPE, start_new_session=True) as sweeper:
            assert sweeper.stdin is not None
            try:
                try:
                    group.limit()
                    if group.event("oom_kill_disable"):
                        raise OSError("its OOM killer is switched off")
                except OSError as error:
                    reasons.append(f"the control group takes no limit: {error}")
                    continue
                yield group
                return
            finally:
                sweeper.stdin.close()
    pytest.skip(reasons[-1])


def grow() -> None:
    """Take memory, without the interpreter's lock, until the kernel has had enough."""
    with mmap.mmap(-1, ENOUGH) as memory:
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for bite in range(0, ENOUGH, BITE):
            ctypes.memset(start + bite, 1, BITE)
    os._exit(3)


def work(name: str, noted: np.ndarray, seed: int) -> None:
    """Use the cache in long sections, so that death often comes within one; after a few calls begin to grow."""
    chance, hunger = random.Random(seed), threading.Thread(target=grow, daemon=True)
    cache = RadixCache.attach(name)

    def call(function: Callable[..., object], *arguments: object) -> None:
        noted[INSIDE] = 1
        function(*arguments)
        noted[INSIDE] = 0
        noted[OPERATIONS] += 1

    while True:
        start = 1_000_000 * chance.randint(1, 50)
        prompt = np.arange(start, start + 16 * chance.randint(500, 1500), dtype=np.uint32)
        ids = np.array(chance.sample(range(100, 1 << 31), len(prompt) // 16), np.uint32)
        call(cache.evict, 1500)
        call(cache.insert, prompt, ids)
        call(cache.lookup, PROMPT)
        for tokens in (prompt, PROMPT):
            if chance.random() < 0.9:  # the others it still has when it dies
                with contextlib.suppress(LeaseError):  # where nothing was stored for want of room
                    cache.release(tokens)
        if hunger.ident is None:
            hunger.start()


def starve(group: MemoryGroup, name: str, noted: np.ndarray, seed: int) -> int:
    """Let a worker be killed by the kernel; its exit code."""
    noted[:] = 0
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(120)
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent:
                group.join()
                work(name, noted, seed)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture(autouse=True, scope="module")
def _warm() -> None:
    """Have the kernels before anything forks."""
    kernels.load()


def test_the_others_go_on_when_the_kernel_kills_a_worker_that_takes_too_much_memory(
    group: MemoryGroup, cache_factory: Callable[..., RadixCache]
) -> None:
    cache = cache_factory(max_blocks=4096, max_workers=4, max_leases=4096)
    cache.insert(PROMPT, BLOCKS)
    noted = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.int64)[:2]

    def state() -> tuple[object, ...]:
        stats = cache.stats()
        return resources(cache.name), files_of(cache.name), slots_alive(cache), stats.workers, stats.leases

    gc.collect()  # what tests before this one left open closes now, not half-way
    before, inside, operations, started = state(), 0, 0, time.monotonic()
    for number in range(VICTIMS):
        kills = group.kills()
        assert starve(group, cache.name, noted, number) == -signal.SIGKILL
        assert group.kills() == kills + 1  # it was the kernel
        assert noted[OPERATIONS] >= 3
        inside += int(noted[INSIDE])
        operations += int(noted[OPERATIONS])
        assert cache.peek_matched_tokens(PROMPT) == 64
        own = range(500_000, 500_064)
        cache.evict(8)
        assert cache.insert(own, range(50, 54)).inserted_tokens == 64
        cache.release(own)
        assert cache.evict(4096).blocks.size >= 4  # also what the dead one had leased
        assert cache.reap() <= 1
        assert state() == before
        assert cache.verify() == []
    print(
        f"{VICTIMS} killed, {inside} of them within a call, after {operations} calls; "
        f"{cache.stats().recoveries} takeovers, {cache.stats().rebuilds} rebuilds, {time.monotonic() - started:.1f} s"
    )
    assert inside > 0
