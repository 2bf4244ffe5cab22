"""A tier for spilled snapshots: their bytes as files, and the order in which spilling and faulting in are done.

No byte is read or written while a guard of the cache is held. docs/snapshots.md shows where an engine calls these.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash

from shmradix.cache import RadixCache
from shmradix.errors import SlotsFull, TierError
from shmradix.inputs import as_count
from shmradix.results import Drop, PrefixMatch, Spill

SPILL_TOKENS = 1024  # a shorter prefix is computed again sooner than its state is written and read
FAULT_TOKENS = 256

_HEADER = struct.Struct("<8sQ16s")  # magic, bytes of the state, their xxh3-128
_MAGIC = b"shmrtier"
_LOCK = ".lock"

ReadSlot = Callable[[int], Any]
"""Gives the bytes of a slot: anything with the buffer protocol."""
WriteSlot = Callable[[int, bytes], None]
"""Puts bytes into a slot."""


class FileTier:
    """States as files in a directory, of at most `max_bytes` together; whichever was not used for longest goes first.

    Any number of processes, and of caches, may share a directory. A file counts from the moment that it is whole; what
    a process that died left half-written is removed by whoever opens the directory next, or needs room.
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int) -> None:
        self.path = Path(path)
        self.max_bytes = as_count("max_bytes", max_bytes)
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._one_at_a_time():
            self._make_room(0)

    def put(self, key: int, state: Any) -> bool:
        """Keep the bytes of `state` under `key`. False where `max_bytes` is too little for them, and for those that
        others are writing now. Raises TierError."""
        data = memoryview(state).cast("B")
        size = _HEADER.size + len(data)
        if size > self.max_bytes:
            return False
        final, part = self._file(key), self.path / f".{key:016x}.{secrets.token_hex(8)}"
        try:
            with contextlib.ExitStack() as stack:
                with self._one_at_a_time():
                    if not self._make_room(size):
                        return False
                    file = stack.enter_context(open(part, "xb", opener=_private))
                    fcntl.flock(file, fcntl.LOCK_EX)  # its writer lives
                    os.posix_fallocate(file.fileno(), 0, size)  # whoever makes room next counts it
                file.write(_HEADER.pack(_MAGIC, len(data), xxhash.xxh3_128_digest(data)))
                file.write(data)
                file.flush()
                with self._one_at_a_time():  # else who makes room may see neither name
                    os.rename(part, final)
        except BaseException as error:
            with contextlib.suppress(OSError):
                part.unlink()
            if isinstance(error, OSError):
                raise TierError(f"{final}: {error}") from error
            raise
        return True

    def get(self, key: int) -> bytes | None:
        """The bytes under `key`; None where there are none, or not whole. Raises TierError where nobody can tell."""
        path = self._file(key)
        try:
            with open(path, "rb", opener=_private) as file:
                header, state = file.read(_HEADER.size), file.read()
            with contextlib.suppress(FileNotFoundError):
                os.utime(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise TierError(f"{path}: {error}") from error
            header = state = b""  # a symbolic link, which no put makes
        if header == _HEADER.pack(_MAGIC, len(state), xxhash.xxh3_128_digest(state)):
            return state
        self.remove(key)
        return None

    def remove(self, key: int) -> bool:
        """Forget the bytes under `key`. False where there were none. Raises TierError."""
        try:
            self._file(key).unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise TierError(f"{self._file(key)}: {error}") from error
        return True

    def used_bytes(self) -> int:
        """Bytes of all files, half-written ones too."""
        return sum(status.st_size for _, status in self._files())

    def _file(self, key: int) -> Path:
        return self.path / f"{as_count('key', key, (1 << 64) - 1):016x}"

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for entry in os.scandir(self.path):
            with contextlib.suppress(FileNotFoundError):
                if entry.name != _LOCK and entry.is_file(follow_symlinks=False):
                    yield Path(entry.path), entry.stat(follow_symlinks=False)

    def _make_room(self, size: int) -> bool:
        """Remove what the dead left half-written, then the coldest files until `size` bytes more fit.

        False, and no whole file is removed, where they can't beside those that others are writing.
        """
        whole, used = [], size
        for path, status in self._files():
            if path.name.startswith(".") and _is_abandoned(path):
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
                continue
            used += status.st_size
            if not path.name.startswith("."):
                whole.append((status.st_mtime_ns, status.st_size, path))
        if used - sum(file_size for _, file_size, _ in whole) > self.max_bytes:
            return False
        for _, file_size, path in sorted(whole):
            if used <= self.max_bytes:
                break
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            used -= file_size
        return True

    @contextlib.contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        with open(self.path / _LOCK, "ab", opener=_private) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)  # closing would not do where another thread forked meanwhile


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _is_abandoned(path: Path) -> bool:
    """Whether nobody writes the file any more: its writer's lock fell with it."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError):
        return False
    return True


def spill(cache: RadixCache, tier: FileTier, read: ReadSlot, min_tokens: int = SPILL_TOKENS) -> int | None:
    """Make room: move the state that the policy gives up first to the tier. Returns its slot, now the caller's.

    A state of fewer than `min_tokens` tokens is dropped; so is one that the tier refuses, or fails to write: its slot
    is what matters. Lookups find the spilled state once it is whole. None where no snapshot may go. Whatever `read`
    raises passes through, and the state is back in the index, in its slot.
    """
    victim = cache.evict_snapshot_to_tier(min_tokens, pending=True)
    if victim is None or isinstance(victim, Drop):
        return victim and victim.slot
    kept = False
    try:
        with contextlib.suppress(TierError):
            kept = tier.put(victim.key, read(victim.slot)) and cache.commit_snapshot_spill(victim.key)
    except BaseException:
        _put_back(cache, victim)
        raise
    finally:
        if not kept:
            cache.forget_snapshot_tier_key(victim.key)
            with contextlib.suppress(TierError):
                tier.remove(victim.key)
    return victim.slot


def _put_back(cache: RadixCache, victim: Spill) -> None:
    """Undo a spill: nobody is there to take the slot. Where the state was superseded meanwhile, the slot is free."""
    if not (cache.commit_snapshot_spill(victim.key) and cache.promote_snapshot(victim.key, victim.slot)):
        with contextlib.suppress(ValueError):  # the cache does not manage slots: it is lost to the caller's pool
            cache.free_snapshot_slot(victim.slot)


def allocate(
    cache: RadixCache, tier: FileTier, read: ReadSlot, min_tokens: int = SPILL_TOKENS, *, finish: bool = False
) -> int:
    """A slot that the cache manages, as `allocate_snapshot_slot`, but what has to go for it goes to the tier.

    For a `finish` snapshot it is dropped. Raises SlotsFull.
    """
    try:
        return cache.allocate_snapshot_slot(evict=False)
    except SlotsFull:
        slot = None if finish else spill(cache, tier, read, min_tokens)
    return cache.allocate_snapshot_slot(finish=finish) if slot is None else slot


def fault_in(
    cache: RadixCache,
    tier: FileTier,
    match: PrefixMatch,
    read: ReadSlot,
    write: WriteSlot,
    *,
    slot: int | None = None,
    min_tokens: int = FAULT_TOKENS,
    spill_tokens: int = SPILL_TOKENS,
) -> bool:
    """Bring the state that the match found in the tier back into a slot, pinned by the match as its `snapshot_slot`.

    The slot is one of the cache's, for which another state may be spilled, or the caller's own `slot`. False, and that
    slot is free, or the caller's, again, where the state has less than `min_tokens` tokens, was lost or promoted by
    another worker meanwhile, or can't be read now. Whatever `write` raises passes through, likewise.
    """
    key = match.snapshot_tier_key
    if key is None or match.snapshot_tier_tokens < min_tokens:
        return False
    given, done = slot is not None, False
    try:
        state = tier.get(key)  # before a spill makes room in the tier, where this state may be the coldest
        if state is not None:
            if slot is None:
                slot = allocate(cache, tier, read, spill_tokens)
            write(slot, state)
            done = cache.promote_snapshot(key, slot, match=match)
        if done or (state is None and cache.forget_snapshot_tier_key(key)):  # first, so that nobody looks for it
            tier.remove(key)
    except (SlotsFull, TierError):
        return done  # an error is no evidence of absence: the key stays
    finally:
        if slot is not None and not given and not done:
            cache.free_snapshot_slot(slot)
    return done
