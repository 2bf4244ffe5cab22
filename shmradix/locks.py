"""Kernel file locks on single bytes of a segment: how the kernel says who is alive.

Open-file-description locks (F_OFD_SETLK, Linux 3.15) belong to one `open`: the kernel drops them when the last
descriptor of that open is gone, however its process died, and a `close` of another descriptor of the same file
does not. A forked child would keep them, and its dead parent would look alive: so descriptors for locks are opened
and closed here only, and a child closes all that it inherited. The bytes lie far beyond the end of the file, where
nobody reads or writes.
"""

import contextlib
import errno
import fcntl
import os
import struct
import threading
from pathlib import Path

_GETLK, _SETLK = 36, 37  # F_OFD_GETLK and F_OFD_SETLK of linux/fcntl.h; the fcntl module lacks them
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid

CREATOR_BYTE = 1 << 60
REMOVER_BYTE = CREATOR_BYTE + 1
FIRST_WORKER_BYTE = CREATOR_BYTE + (1 << 32)


_descriptors: set[int] = set()
_registering = threading.RLock()  # held by a fork, too: no child inherits a descriptor that is not registered yet


def open_for_locks(path: Path | str, flags: int, mode: int = 0o600) -> int:
    """A descriptor of its own open of the file; close it with `close`."""
    with _registering:
        fd = os.open(path, flags | os.O_CLOEXEC, mode)
        _descriptors.add(fd)
    return fd


def close(fd: int) -> None:
    """Close the descriptor and drop its locks."""
    with _registering:
        _descriptors.discard(fd)
        os.close(fd)


def _close_all_in_child() -> None:
    for fd in _descriptors:
        with contextlib.suppress(OSError):
            os.close(fd)
    _descriptors.clear()
    _registering.release()


os.register_at_fork(
    before=_registering.acquire, after_in_parent=_registering.release, after_in_child=_close_all_in_child
)


def _flock(kind: int, byte: int) -> bytes:
    return _FLOCK.pack(kind, 0, byte, 1, 0)


def try_lock(fd: int, byte: int) -> bool:
    """Lock `byte` for this open of the file; False if another open holds it."""
    try:
        fcntl.fcntl(fd, _SETLK, _flock(fcntl.F_WRLCK, byte))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock(fd: int, byte: int) -> None:
    """Give `byte` back."""
    fcntl.fcntl(fd, _SETLK, _flock(fcntl.F_UNLCK, byte))


def is_locked_by_others(fd: int, byte: int) -> bool:
    """Whether another open of the file holds `byte`."""
    answer = fcntl.fcntl(fd, _GETLK, _flock(fcntl.F_WRLCK, byte))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
