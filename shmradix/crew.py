"""Worker processes for a limited job on segments of their own: whatever happens, none of either is left at the end."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

from shmradix import RadixCache
from shmradix.errors import SegmentNotFound

SPAWN = get_context("spawn")
_POLL_SECONDS, EXIT_SECONDS = 0.1, 10.0


class WorkerFailed(RuntimeError):
    """A worker died or failed; the message says which one and why."""


class Failure(NamedTuple):
    """Sent by a worker in place of its result."""

    text: str


@dataclass(frozen=True)
class Member:
    """The parent's view of a worker."""

    worker: int
    process: SpawnProcess
    link: Connection[Any, Any]


@contextmanager
def segments(max_workers: int) -> Iterator[tuple[Callable[..., str], Callable[[], None]]]:
    """Give a function that creates a segment and returns its name, and one that removes all; the end does so, too."""
    prefix = f"replay-{os.getpid()}-{secrets.token_hex(4)}"
    names: list[str] = []

    def create(suffix: str, **sizes: Any) -> str:
        names.append(f"{prefix}-{suffix}")
        RadixCache.create(names[-1], max_workers=max_workers, max_namespaces=1, **sizes).close()
        return names[-1]

    def remove_all() -> None:
        for name in names:
            _unlink(name)

    try:
        yield create, remove_all
    finally:
        with stops_put_off():
            remove_all()


def _unlink(name: str) -> None:
    with suppress(SegmentNotFound):
        RadixCache.unlink(name)


@contextmanager
def crew(work: Callable[..., Any], jobs: Sequence[Any], names: Sequence[str], *shared: Any) -> Iterator[list[Member]]:
    """Start a worker for each job, which sends what `work(job, link, *shared)` returns; none is left at the end.

    Should this process be killed, the workers remove the segments of these names.
    """
    members: list[Member] = []
    try:
        with stops_put_off():
            for worker, job in enumerate(jobs):
                ours, theirs = SPAWN.Pipe()
                process = SPAWN.Process(target=_run, args=(work, job, theirs, names, *shared))
                members.append(Member(worker, process, ours))
                process.start()
                theirs.close()
        yield members
    finally:
        with stops_put_off():
            for member in members:
                member.link.close()
                if member.process.pid is not None:
                    member.process.kill()
                    member.process.join()


def one_message_from_each(members: Sequence[Member], show_progress: Callable[[], None] = lambda: None) -> list[Any]:
    """Wait for every worker's next message; raises WorkerFailed as soon as one has died or failed."""
    messages: dict[int, Any] = {}
    pending: dict[Any, Member] = {member.link: member for member in members}
    while pending:
        for link in wait(list(pending), _POLL_SECONDS):
            member = pending.pop(link)
            try:
                message = member.link.recv()
            except (EOFError, OSError):
                raise _death(member) from None
            if isinstance(message, Failure):
                raise WorkerFailed(f"worker {member.worker} failed: {message.text}")
            messages[member.worker] = message
        show_progress()
    return [messages[member.worker] for member in members]


def _run(work: Callable[..., Any], job: Any, link: Connection[Any, Any], names: Sequence[str], *shared: Any) -> None:
    """Be a worker process: send the result, or what went wrong, to the parent."""
    try:
        message = work(job, link, *shared)
    except Exception as error:
        message = Failure(f"{type(error).__name__}: {error}")
    with suppress(OSError):
        link.send(message)
    parent = parent_process()
    if parent is not None and not parent.is_alive():
        for name in names:
            _unlink(name)


def _death(member: Member) -> WorkerFailed:
    """Return the error that says how a worker ended."""
    member.process.join(EXIT_SECONDS)
    code = member.process.exitcode or 0
    how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
    return WorkerFailed(f"worker {member.worker} (pid {member.process.pid}) {how}; all were stopped")


@contextmanager
def stops_put_off() -> Iterator[None]:
    """Put the signals that ask to stop off until the end, so that nothing is left half-made or half-removed.

    Processes started inside never see those of a terminal, which come to all of its processes.
    """
    caught: list[int] = []
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {signum: signal.signal(signum, lambda signum, _: caught.append(signum)) for signum in stops}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for stop, handler in handlers.items():
            signal.signal(stop, handler)
        for signum in caught[:1]:
            signal.raise_signal(signum)
