"""How kernels are compiled: numba, cached on disk by the exact source, so that a machine compiles once.

numba's own cache looks at one file's time stamp; ours lies in a directory named after a hash of all kernels' sources
and numba's version, so a change in any of them is never missed, and a read-only package directory does not matter.
"""

import contextlib
import fcntl
import importlib
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import xxhash

SOURCES = (
    "allocation", "anchors", "atomics", "block_entries", "claim_entries", "claims", "compile", "entries", "guard",
    "hash_keys", "hashing", "heap", "index", "layout", "leases", "owner_word", "pool", "recovery", "retention",
    "sections", "snapshot_entries", "snapshot_views", "snapshots", "status", "tree", "views",
)  # fmt: skip
"""The modules that end up in compiled code."""

NOTICE_AFTER = 1.0  # seconds
PATIENCE = 120.0  # seconds to wait for another process that compiles, before doing the same beside it

_log = logging.getLogger("shmradix")

# Division by zero and overflow as in C: no exception can arise inside a critical section.
_OPTIONS = {"nogil": True, "error_model": "numpy"}
_INNER = {
    **_OPTIONS,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}  # no Python calls them: a third less to compile

# Without numba's reference counting (_nrt): the views own nothing, and counting a dozen arrays at every call made a
# walk three times slower, an eviction six times, a rebuild ten times. Kernels allocate nothing anyway.
kernel: Callable[[Any], Any] = numba.njit(_nrt=False, **_INNER)
"""A function that compiled code calls; compiled with its caller."""

inlined: Callable[[Any], Any] = numba.njit(_nrt=False, forceinline=True, **_INNER)
"""A kernel for the inside of a loop: a call would pass all views of the segment, hundreds of words, on the stack."""

opener: Callable[[Any], Any] = numba.njit(_nrt=True, **_INNER)
"""A kernel that makes arrays of addresses, which numba allows with reference counting only."""


def entry(signature: Any) -> Callable[[Any], Any]:
    """A function that Python calls: compiled for `signature` at import, or loaded from the cache."""
    decorate: Callable[[Any], Any] = numba.njit(
        signature, _nrt=False, cache=_cache is not None, no_cfunc_wrapper=True, **_OPTIONS
    )
    return decorate


def _fingerprint() -> str:
    digest = xxhash.xxh3_64(f"{numba.__version__} {sys.implementation.cache_tag}".encode())
    for module in SOURCES:
        digest.update(Path(__file__).with_name(f"{module}.py").read_bytes())
    return digest.hexdigest()


def _is_ours(directory: Path) -> bool:
    """Whether only this user can have written there: loading compiled code from elsewhere would run it."""
    status = directory.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022 and os.access(directory, os.W_OK)


def _cache_directory() -> Path | None:
    """The first place that is ours to write: the user's cache, or one of its own among the temporary files.

    $SHMRADIX_CACHE_DIR replaces both. None where nothing can be written: then every process compiles.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    places = [Path(base) / "shmradix", Path(tempfile.gettempdir()) / f"shmradix-{os.geteuid()}"]
    if chosen := os.environ.get("SHMRADIX_CACHE_DIR"):
        places = [Path(chosen)]
    for place in places:
        directory = place / _fingerprint()
        with contextlib.suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.mkdir(mode=0o700, exist_ok=True)
            directory.mkdir(mode=0o700, exist_ok=True)
            if _is_ours(place) and _is_ours(directory):
                return directory
    return None


_cache = _cache_directory()


@contextlib.contextmanager
def _one_at_a_time(directory: Path | None) -> Iterator[None]:
    """Let workers that start together on a fresh machine compile once, not each."""
    if directory is None:
        yield
        return
    with open(directory / "lock", "w") as file:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.02)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # closing would not do where another thread forked meanwhile


_loaded: dict[str, Any] = {}
_NOTICE = "shmradix compiles its kernels for this machine: 10 to 30 seconds, once (kept in %s)"


def load(module: str = "entries") -> Any:
    """A module of compiled entry points; says so on the log where compiling them, or waiting for that, takes long."""
    if module in _loaded:
        return _loaded[module]
    done = _cache / f"{module}.done" if _cache else None
    notice = threading.Timer(NOTICE_AFTER, _log.warning, (_NOTICE, _cache or "nowhere: no place is ours to write"))
    notice.daemon = True
    is_done = done is not None and done.exists()
    if not is_done:
        notice.start()
    previous = numba.config.CACHE_DIR
    try:
        with _one_at_a_time(None if is_done else _cache):  # loading needs no turns
            numba.config.CACHE_DIR = str(_cache or previous)
            _loaded[module] = importlib.import_module(f"shmradix.{module}")
            if done is not None:
                done.touch()
    finally:
        numba.config.CACHE_DIR = previous
        notice.cancel()
    return _loaded[module]
