"""Fixtures: caches under fresh names, all of whose files are gone at the end, whatever happened in between."""

import contextlib
import os
import secrets
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shmradix import RadixCache

SHM = Path("/dev/shm")
RUN = f"test-{os.getpid()}-{secrets.token_hex(4)}"


def fresh_name() -> str:
    """A cache name that nobody else uses; `remove_all` finds what was made under it."""
    return f"{RUN}-{secrets.token_hex(4)}"


def remove_all(name: str) -> None:
    """Remove every file of the cache `name`: segment, temporary file, semaphores."""
    for path in SHM.glob(f"*shmradix.{name}*"):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


@pytest.fixture(scope="session", autouse=True)
def _leave_nothing_behind() -> Iterator[None]:
    # A process of its own, which outlives this one: it removes what is left even where this one is killed.
    sweep = f"cat; sleep 1; rm -f {SHM}/*shmradix.{RUN}*"
    with subprocess.Popen(["sh", "-c", sweep], stdin=subprocess.PIPE, start_new_session=True) as sweeper:
        yield
        left = sorted(path.name for path in SHM.glob(f"*shmradix.{RUN}*"))
        assert sweeper.stdin is not None
        sweeper.stdin.close()
    assert not left, f"tests left {left} in {SHM}"


@pytest.fixture
def name() -> Iterator[str]:
    fresh = fresh_name()
    yield fresh
    remove_all(fresh)


@pytest.fixture
def cache_factory() -> Iterator[Callable[..., RadixCache]]:
    made: list[RadixCache] = []

    def make(**sizes: Any) -> RadixCache:
        cache = RadixCache.create(fresh_name(), **{"max_blocks": 64, **sizes})
        made.append(cache)
        return cache

    yield make
    for cache in made:
        with contextlib.suppress(Exception):
            cache.close()
        remove_all(cache.name)
