"""Kernel file locks on single bytes of a segment: how the kernel says who is alive.

Open-file-description locks (F_OFD_SETLK, Linux 3.15) belong to one `open`: the kernel drops them when the last
descriptor of that open is gone, however its process died, and a `close` of another descriptor of the same file
does not. The bytes lie far beyond the end of the file, where nobody reads or writes.
"""

import errno
import fcntl
import struct

_GETLK, _SETLK = 36, 37  # F_OFD_GETLK and F_OFD_SETLK of linux/fcntl.h; the fcntl module lacks them
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid

CREATOR_BYTE = 1 << 60
REMOVER_BYTE = CREATOR_BYTE + 1
FIRST_WORKER_BYTE = CREATOR_BYTE + (1 << 32)


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
