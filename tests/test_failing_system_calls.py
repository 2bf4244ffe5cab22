"""Each system call of create, open and attach fails once: an error that says so, or success, and nothing is left."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shmradix import RadixCache, errors
from shmradix import compile as kernels
from tests.actors import BLOCKS, PROMPT, SHM, files_of
from tests.children import resources
from tests.namespaces import private_shm
from tests.system_calls import NoSuchFilter, count, fail, supervised

ERRORS = (errno.ENOSPC, errno.EMFILE, errno.EINTR, errno.EACCES, errno.ENOMEM)
NEVER = 60_000  # more calls than any use makes

USES: dict[str, Callable[[str], RadixCache]] = {
    "create": lambda name: RadixCache.create(name, max_blocks=64),
    "open": lambda name: RadixCache.open(name, max_blocks=64),
    "attach": lambda name: RadixCache.attach(name),
}
FEWEST = {"create": 60, "open": 60, "attach": 25}  # that they do; fewer would mean that not all were asked about


@pytest.fixture(autouse=True, scope="module")
def _warm() -> None:
    """Have the kernels before anything forks."""
    kernels.load()


class Trials:
    """One use of a name, again and again, each time with the next call failing."""

    def __init__(self, name: str, use: str, error: int) -> None:
        self.name, self.use, self.error = name, use, error
        self.outcomes: dict[str, int] = {}
        self.wrong: list[str] = []
        self.strays: set[Path] = set()
        self.is_private = False

    def run(self) -> str:
        with contextlib.suppress(OSError):  # else other processes' files are beside ours
            private_shm()
            self.is_private = True
        self.keeper = RadixCache.create(self.name, max_blocks=64) if self.use == "attach" else None
        for _ in range(2):
            self.trial(NEVER)  # what is done only once in a process is none of ours
        self.outcomes.clear()
        for kth in itertools.count(1):
            if self.trial(kth) < kth or len(self.wrong) > 4:
                break
        if self.keeper:
            self.keeper.close()
            RadixCache.unlink(self.name)
        self.sweep()
        return json.dumps({"calls": kth - 1, "outcomes": self.outcomes, "wrong": self.wrong})

    def trial(self, kth: int) -> int:
        """Let the `kth` call fail; how many there were."""
        before, others = self.state(), set(SHM.glob("sem.??????"))
        cache, said, expected = None, "success", True
        fail(kth, self.error)
        try:
            cache = USES[self.use](self.name)
        except BaseException as error:
            said = type(error).__name__
            expected = isinstance(error, (errors.ShmradixError, OSError, MemoryError))
        calls, number = count()
        self.outcomes[said] = self.outcomes.get(said, 0) + 1
        where = f"call {kth} (number {number}) failed: {said}"
        if not expected:
            self.wrong.append(f"{where}: no error of ours nor the system's")
        if cache is None and self.state() != before:
            self.wrong.append(f"{where}: left {self.state()}, there were {before}")
        try:
            if cache is not None:
                with cache:
                    self.check(cache)
            with USES["open"](self.name) as cache:
                self.check(cache)
                if not self.keeper:
                    cache.unlink()
        except BaseException as error:
            self.wrong.append(f"{where}: then {error!r}")
        cache = None
        if self.state() != before:
            self.wrong.append(f"{where}: in the end there are {self.state()}, there were {before}")
        self.strays |= set(SHM.glob("sem.??????")) - others
        return calls

    def state(self) -> tuple[tuple[int, int], list[str]]:
        """Descriptors, mappings, files."""
        return resources(self.name), files_of(self.name)

    def check(self, cache: RadixCache) -> None:
        cache.insert(PROMPT, BLOCKS)
        cache.release(PROMPT)
        assert cache.peek_matched_tokens(PROMPT) == 64
        assert cache.verify() == []
        assert cache.stats().workers == 1 + (self.keeper is not None)
        assert cache.stats().leases == 0

    def sweep(self) -> None:
        """Remove what the C library's `sem_open` leaves where its own `unlink` fails; others' files soon go away."""
        if self.is_private or not self.strays:
            return
        time.sleep(0.5)
        for path in self.strays:
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_uid == os.geteuid() and time.time() - path.stat().st_mtime > 0.4:
                    path.unlink()


@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("use", USES)
def test_whichever_system_call_fails_nothing_is_left_half_made(name: str, use: str, error: int) -> None:
    try:
        said = supervised(lambda: Trials(name, use, error).run())
    except NoSuchFilter as why:
        pytest.skip(str(why))
    assert said.startswith("{"), said
    report = json.loads(said)
    print(report["calls"], report["outcomes"])
    assert not report["wrong"], "\n".join(report["wrong"])
    assert report["calls"] >= FEWEST[use]
