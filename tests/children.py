"""What tests of interruptions share: forked children with a time limit, blows at chosen instants, who is alive."""

from __future__ import annotations

import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import shmradix
from shmradix import RadixCache, locks

PACKAGE = str(Path(shmradix.__file__).parent)


class Interruption(Exception):
    """What a signal handler raises."""


def in_child(work: Callable[[], object], seconds: int = 20) -> str:
    """Run `work` in a forked child that leaves without ceremony: its answer as text, or error, or how it was killed."""
    answer, answer_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        os.close(answer)
        try:
            said = str(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(answer_end, said.encode()[:60_000])
        os._exit(0)
    os.close(answer_end)
    with open(answer, encoding="utf-8") as file:
        said = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return said if code == 0 else f"hung for {seconds} s" if code == -signal.SIGALRM else f"killed by {-code}"


def kill_self(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def slots_alive(cache: RadixCache) -> list[int]:
    """The slots whose byte somebody has locked."""
    fd = os.open(f"/proc/self/fd/{cache._segment._file.fileno()}", os.O_RDWR)
    slots = range(cache._segment.geometry.max_workers)
    try:
        return [slot for slot in slots if locks.is_locked_by_others(fd, locks.FIRST_WORKER_BYTE + slot)]
    finally:
        os.close(fd)


def resources(name: str) -> tuple[int, int]:
    """How many descriptors this process has open, and how many mappings of the segment `name`."""
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count(f"shmradix.{name}")


@contextmanager
def struck(cache: RadixCache, entry: str, blow: Callable[[], object], after: bool = False) -> Iterator[None]:
    """Strike just before, or after, each call of a compiled entry point."""
    entries = cache._worker.entries
    kernel = getattr(entries, entry)

    def struck_kernel(*args: Any) -> Any:
        if not after:
            blow()
        answer = kernel(*args)
        if after:
            blow()
        return answer

    names = {key: getattr(entries, key) for key in dir(entries) if not key.startswith("__")}
    cache._worker.entries = SimpleNamespace(**{**names, entry: struck_kernel})
    try:
        yield
    finally:
        cache._worker.entries = entries


def raise_interruption() -> None:
    raise Interruption


STATEFUL = tuple(f"{PACKAGE}/{module}.py" for module in ("cache", "workers", "segment", "locks", "parking"))


def interrupted_at(work: Callable[[], object], instant: int) -> str | None:
    """Run `work`, and raise at the `instant`-th instant, in what has a state, at which CPython looks for signals.

    That is where a function begins, and where C code has returned to one. Says where; None if there are not so many.
    """
    left, where = instant, None

    def watch(frame: FrameType, event: str, _: object) -> None:
        nonlocal left, where
        if event in ("call", "c_return") and frame.f_code.co_filename in STATEFUL:
            left -= 1
            if left == 0:
                where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({event})"
                raise Interruption(where)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        work()
    except Interruption:
        pass
    finally:
        sys.setprofile(before)
    return where


@contextmanager
def collected() -> Iterator[Callable[[], object]]:
    """A quick garbage collection: of what is made inside the block only. Handles may be collected unclosed."""
    gc.collect()
    gc.freeze()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            yield gc.collect
    finally:
        gc.unfreeze()
