"""A segment's named semaphores, one a guard and one for claims: made and removed here, slept on in `parking.py`."""

import contextlib
import errno
import os
from pathlib import Path

import posix_ipc

from shmradix import layout
from shmradix.errors import AccessDenied

SHM = Path("/dev/shm")
PREFIX = "shmradix."


def name_of(name: str, incarnation: int, which: str) -> str:
    """The name of the semaphore on which waiters for `which` (see layout.SEMAPHORES) of this very segment sleep."""
    return f"/{PREFIX}{name}.{incarnation:016x}.{which}"


def make(semaphore: str, mode: int) -> None:
    """Make the semaphore if it is not there, at 0 tokens, with the mode of its segment whatever the umask."""
    try:
        try:
            posix_ipc.Semaphore(semaphore).close()  # without O_CREAT: fs.protected_regular refuses it for another's
        except posix_ipc.ExistentialError:
            posix_ipc.Semaphore(semaphore, posix_ipc.O_CREAT, mode, 0).close()
            with contextlib.suppress(OSError):
                os.chmod(_path_of(semaphore), mode)
    except posix_ipc.PermissionsError:
        raise AccessDenied(f"semaphore {_path_of(semaphore)} can't be opened by user {os.geteuid()}") from None
    except posix_ipc.Error as error:  # its own errors are no OSError; not FileExistsError, which is the segment's
        raise OSError(errno.EIO, str(error), str(_path_of(semaphore))) from None


def _path_of(semaphore: str) -> Path:
    return SHM / f"sem.{semaphore[1:]}"  # where glibc and musl keep it


def remove(name: str, incarnation: int) -> None:
    """Remove the semaphores of one segment; whoever has them open goes on with them."""
    for which in layout.SEMAPHORES:
        with contextlib.suppress(posix_ipc.ExistentialError, posix_ipc.PermissionsError):
            posix_ipc.unlink_semaphore(name_of(name, incarnation, which))


def remove_all(name: str) -> None:
    """Remove the semaphores of every segment that ever had the name."""
    for which in layout.SEMAPHORES:
        for path in SHM.glob(f"sem.{PREFIX}{name}.{'[0-9a-f]' * 16}.{which}"):
            with contextlib.suppress(OSError):
                path.unlink()
