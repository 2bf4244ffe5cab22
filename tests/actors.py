"""Worker processes for tests: driven over a pipe, with the calls that the tests have in common."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shmradix import RadixCache, layout

PROMPT = list(range(64))
BLOCKS = [10, 11, 12, 13]
SHM = Path("/dev/shm")
FILES = 1 + len(layout.SEMAPHORES)
"""How many a cache has there."""


def serve(connection: Connection) -> None:
    """Run what the parent sends, one function at a time, until it hangs up."""
    state = SimpleNamespace()
    with contextlib.suppress(EOFError):
        while True:
            function, arguments = connection.recv()
            try:
                answer = True, function(state, *arguments)
            except Exception as error:
                answer = False, error
            connection.send(answer)


class Actor:
    """A spawned process that runs module-level functions on request and keeps their state in between."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,))
        self.process.start()
        theirs.close()

    def begin(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Start `function(state, *arguments)` in the process."""
        self._connection.send((function, arguments))

    def answer(self, seconds: float = 300) -> Any:
        """What the function that was begun returned; raises what it raised, TimeoutError if it takes too long."""
        if not self._connection.poll(seconds):
            raise TimeoutError(f"no answer within {seconds} s")
        good, answer = self._connection.recv()
        if good:
            return answer
        raise answer

    def do(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.begin(function, *arguments)
        return self.answer()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self.process.kill()
        self.process.join()

    def leave(self) -> None:
        """Let the process come to its normal end."""
        self._connection.close()
        self.process.join()

    def __enter__(self) -> Actor:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._connection.close()


def attach(state: SimpleNamespace, name: str) -> int:
    """Attach to the cache `name`; its incarnation."""
    state.cache = RadixCache.attach(name)
    return int(state.cache.incarnation)


def store(state: SimpleNamespace, tokens: list[int], blocks: list[int]) -> list[int]:
    """Insert and release; the blocks that were stored."""
    acquired = state.cache.insert(tokens, blocks)
    state.cache.release(tokens)
    return list(map(int, acquired.blocks))


def hold(state: SimpleNamespace, tokens: list[int]) -> list[int]:
    """Look up and keep the lease; the blocks that matched."""
    state.match = state.cache.lookup(tokens)
    return list(map(int, state.match.matched_blocks))


def exit_without_ceremony(state: SimpleNamespace) -> None:
    os._exit(0)


def files_of(name: str) -> list[str]:
    """Everything in shared memory that has to do with the cache `name`."""
    return sorted(entry.name for entry in SHM.iterdir() if name in entry.name)


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, which must end well."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
