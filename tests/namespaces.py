"""A /dev/shm of its own for a child: small, and nobody else's."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

from tests.actors import SHM
from tests.children import in_child

_CLONE_NEWNS, _CLONE_NEWUSER = 0x2_0000, 0x1000_0000
_MS_RDONLY, _MS_REC, _MS_PRIVATE = 1, 1 << 14, 1 << 18

_libc = ctypes.CDLL(None, use_errno=True)


def private_shm(options: str = "", target: Path = SHM, read_only: bool = False) -> None:
    """In a forked child: mount an empty file system in the place of /dev/shm that only this process sees.

    Raises OSError where neither this user nor a user namespace of its own may do that.
    """
    user, group = os.geteuid(), os.getegid()
    if _libc.unshare(_CLONE_NEWNS):
        _check(_libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS), "unshare")
        with contextlib.suppress(FileNotFoundError):
            Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    _mount(b"none", Path("/"), None, _MS_REC | _MS_PRIVATE, None)  # or the mount would show outside, too
    _mount(b"tmpfs", target, b"tmpfs", _MS_RDONLY if read_only else 0, f"mode=1777,{options}".rstrip(",").encode())


def _mount(source: bytes, target: Path, kind: bytes | None, flags: int, options: bytes | None) -> None:
    _check(_libc.mount(source, str(target).encode(), kind, ctypes.c_ulong(flags), options), "mount")


def _check(answer: int, call: str) -> None:
    if answer:
        error = ctypes.get_errno()
        raise OSError(error, f"{call}: {os.strerror(error)}")


def why_not_private() -> str:
    """Why there can be no such /dev/shm here; empty where there can."""
    said = in_child(private_shm)
    return "" if said == "None" else f"no mount namespace of its own: {said}"
