"""Kernel file locks on single bytes of a segment: how the kernel says who is alive.

Open-file-description locks (F_OFD_SETLK, Linux 3.15) belong to one `open`: the kernel drops them when the last
descriptor of that open is gone, however its process died, and a `close` of another descriptor of the same file
does not. A forked child would keep them, and its dead parent would look alive: so files for locks are opened here
only, and a child closes all that it inherited. The bytes lie far beyond the end of the file, where
nobody reads or writes.
"""

import contextlib
import errno
import fcntl
import io
import os
import struct
import threading
import weakref
from pathlib import Path

_GETLK, _SETLK = 36, 37  # F_OFD_GETLK and F_OFD_SETLK of linux/fcntl.h; the fcntl module lacks them
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid

CREATOR_BYTE = 1 << 60
REMOVER_BYTE = CREATOR_BYTE + 1
FIRST_WORKER_BYTE = CREATOR_BYTE + (1 << 32)


_files: "weakref.WeakSet[io.FileIO]" = weakref.WeakSet()
_registering = threading.RLock()  # held by a fork, too: no child inherits a file that is not registered yet


def open_for_locks(path: Path | str, flags: int, mode: int = 0o600) -> io.FileIO:
    """An open of its own of the file; its `close` drops its locks, and may be repeated where it was interrupted."""
    with _registering:
        file = io.FileIO(os.open(path, flags | os.O_CLOEXEC, mode), "r+")
        _files.add(file)
    return file


def _close_all_in_child() -> None:
    for file in list(_files):
        with contextlib.suppress(OSError):
            file.close()
    _registering.release()


os.register_at_fork(
    before=_registering.acquire, after_in_parent=_registering.release, after_in_child=_close_all_in_child
)


def _flock(kind: int, byte: int) -> bytes:
    return _FLOCK.pack(kind, 0, byte, 1, 0)


def try_lock(file: io.FileIO, byte: int) -> bool:
    """Lock `byte` for this open of the file; False if another open holds it."""
    try:
        fcntl.fcntl(file, _SETLK, _flock(fcntl.F_WRLCK, byte))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock(file: io.FileIO, byte: int) -> None:
    """Give `byte` back."""
    fcntl.fcntl(file, _SETLK, _flock(fcntl.F_UNLCK, byte))


def is_locked_by_others(file: io.FileIO, byte: int) -> bool:
    """Whether another open of the file holds `byte`."""
    answer = fcntl.fcntl(file, _GETLK, _flock(fcntl.F_WRLCK, byte))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
