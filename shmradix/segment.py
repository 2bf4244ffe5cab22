"""Segments: create, attach, check, unlink, list.

A segment is the file `/dev/shm/shmradix.<name>`, which is what `shm_open("/shmradix.<name>")` opens. It is made under
a temporary name, complete with its semaphores, and gets its own by one `link`: nobody ever sees half a segment.
Python's `multiprocessing.shared_memory` is not used: its tracker unlinks what a process merely attached.
"""

import contextlib
import errno
import io
import mmap
import os
import pwd
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from shmradix import layout, locks, semaphores
from shmradix.errors import (
    AccessDenied,
    CorruptSegment,
    LayoutMismatch,
    LockTimeout,
    NoSharedMemory,
    SegmentExists,
    SegmentForeign,
    SegmentNotFound,
    SharedMemoryFull,
)
from shmradix.layout import Geometry
from shmradix.semaphores import PREFIX, SHM
from shmradix.sizes import is_consistent

MAX_NAME = 200  # so that the semaphores' names stay below glibc's 251 characters

CGROUP = Path("/sys/fs/cgroup")  # of this process, in a container with control groups of version 2

_NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)
_RESERVE_STEP = 64 << 20  # one huge posix_fallocate on tmpfs can fail where many small ones succeed
_NAME = re.compile(r"[A-Za-z0-9_-]+")


def check_name(name: str) -> str:
    """Return `name`, or raise TypeError or ValueError where it can't name a segment."""
    if not isinstance(name, str):
        raise TypeError(f"name={name!r}: expected a string")
    if not _NAME.fullmatch(name):
        raise ValueError(f"name={name!r}: expected one or more of the letters, digits, '-' and '_'")
    if len(name) > MAX_NAME:
        raise ValueError(f"name={name!r} has {len(name)} characters: expected at most {MAX_NAME}")
    return name


def path_of(name: str) -> Path:
    """The file of the segment `name`."""
    return SHM / f"{PREFIX}{check_name(name)}"


def _temporary_path_of(name: str) -> Path:
    return SHM / f".{PREFIX}{name}.new"  # one for each name: two creators never reserve memory at once


class Segment:
    """An open segment: its mapping, and numpy views of all of it."""

    def __init__(self, name: str, fd: int, geometry: Geometry) -> None:
        self.name = name
        self.geometry = geometry
        # An open of its own: on `fd` a creator has a lock.
        self._file = io.FileIO(os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC), "r+")
        try:
            self.inode = _inode(os.fstat(fd))
            self.mode = stat.S_IMODE(os.fstat(fd).st_mode)
            self._map = mmap.mmap(self._file.fileno(), geometry.size)
        except BaseException:
            self._file.close()
            raise
        # From an array that holds the mapping, not from the mapping itself: numpy would let that be closed under it.
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.views = geometry.views(self._bytes)
        self.incarnation = int(self.views.header["incarnation"][0])
        self.mapped: dict[str, np.ndarray] = {}
        """What `map_bytes` gave, by what it holds, for as long as the segment is open."""

    def map_bytes(self, offset: int, nbytes: int) -> np.ndarray:
        """Map uint8[nbytes] of the file beyond the index, in huge pages where they were asked for and can be had.

        `offset` is a multiple of MAP_STEP. Raises CorruptSegment where the file ends before.
        """
        try:
            pages = mmap.mmap(self._file.fileno(), nbytes, offset=offset)
        except ValueError:
            raise CorruptSegment(
                f"segment {self.name!r} was cut short below {offset + nbytes:,} bytes: unlink it and create it anew"
            ) from None
        if self.geometry.huge_pages:
            with contextlib.suppress(OSError):
                pages.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(pages, np.uint8)

    def open_for_locks(self) -> io.FileIO:
        """A new open of this very segment, whatever became of its name."""
        try:
            return locks.open_for_locks(f"/proc/self/fd/{self._file.fileno()}", os.O_RDWR)
        except PermissionError:
            raise AccessDenied(f"segment {self.name!r} can't be opened again by user {os.geteuid()}") from None

    def has_its_name(self) -> bool:
        """Whether the segment still is what its name stands for."""
        return _is_still(path_of(self.name), self._file.fileno())

    def close(self) -> None:
        """Unmap; memory that arrays still refer to stays mapped until they are gone. The second time does nothing."""
        self._file.close()
        self.__dict__.pop("views", None)
        self.__dict__.pop("_bytes", None)
        self.mapped.clear()
        with contextlib.suppress(BufferError):
            self._map.close()


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _open(name: str, path: Path) -> io.FileIO:
    try:
        return locks.open_for_locks(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise SegmentNotFound(f"no segment {name!r}: create it first, or use RadixCache.open") from None
    except PermissionError:
        raise AccessDenied(
            f"segment {name!r} {_ownership(path)}: run as that user, or create it with a wider mode"
        ) from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise SegmentForeign(f"{path} is not a regular file: remove it, or use another name") from None
        raise


def _ownership(path: Path) -> str:
    status = path.stat()
    try:
        owner = pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        owner = str(status.st_uid)
    return f"belongs to user {owner}, mode {stat.S_IMODE(status.st_mode):#o}"


def boot_id() -> np.ndarray:
    """The kernel's id of this boot, as uint64[2]."""
    text = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    return np.frombuffer(bytes.fromhex(text), "<u8")


# --- attach ---------------------------------------------------------------------------------------------------


def attach(name: str) -> Segment:
    """Open the segment `name` and check all of it that must agree with this build before anything is trusted.

    Raises SegmentNotFound, SegmentForeign, LayoutMismatch, CorruptSegment or AccessDenied; the segment stays as it is.
    """
    path = path_of(name)
    with _open(name, path) as file:
        fd = file.fileno()
        if os.fstat(fd).st_nlink > 1:
            sweep(name)
        return Segment(name, fd, _checked_geometry(name, path, fd))


def _check_owner(name: str, path: Path, status: os.stat_result) -> None:
    """Refuse another user's segment, unless it was created for a group that this process belongs to."""
    is_shared = status.st_mode & 0o060 == 0o060 and status.st_gid in {os.getegid(), *os.getgroups()}
    if status.st_uid != os.geteuid() and not is_shared:
        raise AccessDenied(
            f"segment {name!r} {_ownership(path)}, this process runs as user {os.geteuid()}: run as that user, "
            "or create it with mode=0o660 and a common group"
        )


def _checked_geometry(name: str, path: Path, fd: int) -> Geometry:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise SegmentForeign(f"{path} is not a regular file: remove it, or use another name")
    _check_owner(name, path, status)
    if status.st_nlink > 1 and not _is_still(_temporary_path_of(name), fd) and os.fstat(fd).st_nlink > 1:
        # Not the temporary name of a creator that is just about to be done.
        raise SegmentForeign(f"{path} has {status.st_nlink} hard links: remove the others, or use another name")
    header = header_of(path, os.pread(fd, layout.HEADER.itemsize, 0))
    if header["boot_id"].tobytes() != boot_id().tobytes():
        raise LayoutMismatch(f"segment {name!r} is from before the last boot: unlink it")
    geometry = geometry_of(name, header)
    if geometry.file_size != header["size"] or geometry.file_size != status.st_size:
        raise SegmentForeign(
            f"segment {name!r} has {status.st_size:,} bytes, its header says {int(header['size']):,}, "
            f"its geometry needs {geometry.file_size:,}: it was cut short or damaged; unlink it"
        )
    return geometry


def header_of(path: Path, image: bytes) -> Any:
    """The header record at the start of a file. Raises SegmentForeign where it is none of shmradix's."""
    if len(image) < layout.HEADER.itemsize:
        raise SegmentForeign(f"{path} has {len(image)} bytes, less than a header: remove it, or use another name")
    header = np.frombuffer(image, layout.HEADER)[0]
    if header["magic"] != layout.MAGIC:
        raise SegmentForeign(f"{path} does not start with shmradix's magic: remove it, or use another name")
    return header


def geometry_of(name: str, header: Any) -> Geometry:
    """The sizes that a header says. Raises LayoutMismatch where the layout is another one, CorruptSegment."""
    expected = {
        "byte_order": layout.BYTE_ORDER,
        "version": layout.VERSION,
        "fingerprint": layout.FINGERPRINT,
    }
    for field, value in expected.items():
        if header[field] != value:
            raise LayoutMismatch(
                f"segment {name!r} has {field} {int(header[field]):#x}, this shmradix has {value:#x}: "
                "use one shmradix version for all workers, or unlink the segment"
            )
    try:
        sizes = {field: int(header[field]) for field in layout.LIMITS}
        shape = header["block_shape"].tolist()
        geometry = Geometry(
            **sizes,
            snapshot_alpha=float(header["snapshot_alpha"]),
            block_shape=tuple(shape[: shape.index(0)] if 0 in shape else shape),
            block_dtype=header["block_dtype"].decode(),
        )
    except ValueError as error:
        raise LayoutMismatch(f"segment {name!r}: {error}: unlink it") from None
    if header["bucket_count"] != geometry.bucket_count:
        raise LayoutMismatch(
            f"segment {name!r} has bucket_count {int(header['bucket_count'])}, its geometry asks for "
            f"{geometry.bucket_count}: it was damaged; unlink it"
        )
    if not is_consistent(geometry):
        raise CorruptSegment(
            f"segment {name!r} has blocks of {geometry.block_nbytes:,} bytes, shape {geometry.block_shape} and dtype "
            f"{geometry.block_dtype!r}, which do not go together: it was damaged; unlink it"
        )
    return geometry


# --- create ---------------------------------------------------------------------------------------------------


def create(name: str, geometry: Geometry, mode: int, timeout: float | None) -> Segment:
    """Make a segment and map it.

    Raises SegmentExists, SharedMemoryFull, NoSharedMemory, AccessDenied, and LockTimeout where another process has
    been creating it for `timeout` seconds.
    """
    path, temporary = path_of(name), _temporary_path_of(name)
    with _creator(name, path, temporary, mode, timeout) as fd:
        try:
            _reserve(name, fd, geometry)
            segment = _format(name, fd, geometry, mode)
            try:
                os.link(temporary, path)
            except BaseException:
                segment.close()
                raise
        except BaseException as error:
            _remove_semaphores(name, fd)
            if isinstance(error, FileExistsError):
                raise _exists(name) from None
            if isinstance(error, OSError) and error.errno in _NO_ROOM:
                raise _full(name, geometry) from None
            raise
    return segment


def _exists(name: str) -> SegmentExists:
    return SegmentExists(f"segment {name!r} exists: attach to it, use RadixCache.open, or unlink it first")


@contextlib.contextmanager
def _creator(name: str, path: Path, temporary: Path, mode: int, timeout: float | None) -> Iterator[int]:
    """Hold the one temporary file of `name`; waits while another live process holds it, sweeps a dead one's."""
    started, file = time.monotonic(), None
    try:
        while file is None:
            sweep(name)
            if os.path.lexists(path):
                raise _exists(name)
            try:
                file = locks.open_for_locks(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
            except FileExistsError:
                _check_temporary(temporary)
                if timeout is not None and time.monotonic() - started > timeout:
                    raise LockTimeout(f"another process has been creating segment {name!r} for {timeout} s") from None
                time.sleep(0.005)
                continue
            except PermissionError:
                raise AccessDenied(f"no permission to create files in {SHM}") from None
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EROFS):
                    raise
                message = f"{SHM} is missing or read-only: mount a writable tmpfs there"
                raise NoSharedMemory(error.errno, message) from None
            if not (locks.try_lock(file, locks.CREATOR_BYTE) and _is_still(temporary, file.fileno())):
                file.close()  # a sweeper was quicker than our lock: start again
                file = None
        if os.path.lexists(path):  # again: until we had the lock, another creator may have come and gone
            raise _exists(name)
        os.fchmod(file.fileno(), mode)  # not left to the umask
        semaphores.remove_all(name)  # of a segment of that name whose remover died: there is none now
        yield file.fileno()
    finally:
        if file is not None:
            with contextlib.suppress(OSError):  # else the next to look for the name sweeps it
                if _is_still(temporary, file.fileno()):
                    os.unlink(temporary)
            file.close()


def _check_temporary(temporary: Path) -> None:
    """Refuse to wait for what no creator of ours made."""
    with contextlib.suppress(FileNotFoundError):
        status = temporary.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise SegmentForeign(f"{temporary} is in the way and no regular file: remove it, or use another name")
        if status.st_uid != os.geteuid():
            raise AccessDenied(f"{temporary} {_ownership(temporary)} and is in the way: use another name")


def _is_still(path: Path, fd: int) -> bool:
    try:
        return _inode(os.lstat(path)) == _inode(os.fstat(fd))
    except FileNotFoundError:
        return False


def sweep(name: str) -> None:
    """Remove what a creator of `name` that died half-way left behind; a live creator's is left alone."""
    temporary = _temporary_path_of(name)
    try:
        file = locks.open_for_locks(temporary, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return  # nothing there, or another user's, whose creator sweeps it
    with file:
        fd = file.fileno()
        is_ours = stat.S_ISREG(os.fstat(fd).st_mode)
        if is_ours and locks.try_lock(file, locks.CREATOR_BYTE) and _is_still(temporary, fd):
            if os.fstat(fd).st_nlink == 1:  # else it died just after it gave the segment its name
                _remove_semaphores(name, fd)
            with contextlib.suppress(PermissionError):  # another user's, in a sticky directory
                os.unlink(temporary)


def _reserve(name: str, fd: int, geometry: Geometry) -> None:
    """Have the kernel set memory aside now: a full /dev/shm must be an error here, not SIGBUS at a later store."""
    if geometry.file_size > _room():
        raise _full(name, geometry)
    try:
        for start in range(0, geometry.file_size, _RESERVE_STEP):
            os.posix_fallocate(fd, start, min(_RESERVE_STEP, geometry.file_size - start))
    except OSError:
        os.ftruncate(fd, 0)
        raise


def _room() -> int:
    """Bytes that can still be reserved: what the file system, the machine and the control group allow."""
    room = psutil.virtual_memory().available
    status = os.statvfs(SHM)
    if status.f_blocks:  # 0: a tmpfs without a limit of its own
        room = min(room, status.f_bavail * status.f_frsize)
    with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no limit
        limit, used = (int((CGROUP / f"memory.{what}").read_text()) for what in ("max", "current"))
        room = min(room, limit - used)
    return max(room - 2 * mmap.PAGESIZE, 0)  # the semaphores take a page each


def _full(name: str, geometry: Geometry) -> SharedMemoryFull:
    tokens = layout.TOKEN.itemsize * geometry.block_size
    of_blocks = f"max_blocks={geometry.max_blocks:,} (each takes {tokens + 84} bytes, {tokens} of them its tokens)"
    if geometry.block_stride:
        of_blocks = f"num_blocks={geometry.num_blocks:,} (each takes {geometry.block_stride + tokens + 100:,} bytes)"
    return SharedMemoryFull(
        errno.ENOSPC,
        f"segment {name!r} needs {geometry.file_size:,} bytes, {SHM} and memory have {_room():,}: lower {of_blocks}, "
        f"max_leases or max_snapshots, or enlarge {SHM} (in a container: --shm-size)",
    )


def _format(name: str, fd: int, geometry: Geometry, mode: int) -> Segment:
    image = np.zeros(1, layout.HEADER)
    header: Any = image[0]
    header["version"] = layout.VERSION
    header["byte_order"] = layout.BYTE_ORDER
    header["fingerprint"] = layout.FINGERPRINT
    header["size"] = geometry.file_size
    header["incarnation"] = secrets.randbits(64)
    header["hash_seed"] = secrets.randbits(64)
    header["created_ns"] = time.time_ns()
    header["creator_pid"] = os.getpid()
    header["boot_id"] = boot_id()
    header["bucket_count"] = geometry.bucket_count
    for field in layout.LIMITS:
        header[field] = getattr(geometry, field)
    header["snapshot_alpha"] = geometry.snapshot_alpha
    header["block_shape"][: len(geometry.block_shape)] = geometry.block_shape
    header["block_dtype"] = geometry.block_dtype.encode()
    os.pwrite(fd, image.tobytes(), 0)
    segment = Segment(name, fd, geometry)
    try:
        segment.views.state["clock"] = 1
        segment.views.state["nodes_used"] = 1 + geometry.max_namespaces
        segment.views.state["namespaces_used"] = 1
        segment.views.state["leases_used"] = 1
        segment.views.state["claims_used"] = 1
        segment.views.state["free_blocks"] = geometry.num_blocks
        segment.views.state["free_block"] = min(geometry.num_blocks, 1)
        segment.views.blocks["next_free"][:-1] = np.arange(2, geometry.num_blocks + 1)
        for which in layout.SEMAPHORES:
            semaphores.make(semaphores.name_of(name, segment.incarnation, which), mode)
    except BaseException:
        segment.close()
        raise
    segment.views.header["magic"] = layout.MAGIC  # last: from here on the segment is one
    return segment


def _remove_semaphores(name: str, fd: int) -> None:
    image = os.pread(fd, layout.HEADER.itemsize, 0)
    if len(image) == layout.HEADER.itemsize:
        semaphores.remove(name, int(np.frombuffer(image, layout.HEADER)["incarnation"][0]))


# --- unlink, list ---------------------------------------------------------------------------------------------


def unlink(name: str, inode: tuple[int, int] | None = None) -> bool:
    """Remove the segment `name`, or only that with this `inode`; False where another has the name by now.

    Processes that have it mapped go on with it. Raises SegmentNotFound where nothing has the name (and no `inode` is
    given), AccessDenied.
    """
    path = path_of(name)
    sweep(name)
    try:
        file = _open(name, path)
    except SegmentNotFound:
        if inode is not None:
            return False
        raise
    with file:
        fd = file.fileno()
        if inode not in (None, _inode(os.fstat(fd))):
            return False
        # Whoever removes this segment holds this lock, so between the look at its name and the unlink nobody else
        # can have freed the name for a newer one.
        while not locks.try_lock(file, locks.REMOVER_BYTE):
            time.sleep(0.001)
        if not _is_still(path, fd):
            return False
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise SegmentForeign(f"{path} is not a regular file: remove it yourself")
        _remove_semaphores(name, fd)  # first: if we die here, the name still leads to the rest
        try:
            os.unlink(path)
        except PermissionError:
            raise AccessDenied(f"segment {name!r} {_ownership(path)}: only that user can unlink it") from None
        _remove_semaphores(name, fd)  # again: an attach may have made them anew meanwhile
        return True


def names() -> list[str]:
    """The names of all segments on this host that start with shmradix's magic, or that this user can't read."""
    found = []
    for path in sorted(SHM.glob(f"{PREFIX}*")):
        name = path.name[len(PREFIX) :]
        if _NAME.fullmatch(name) and _may_be_segment(path):
            found.append(name)
    return found


def _may_be_segment(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except PermissionError:
        return True
    except OSError:
        return False
    try:
        return os.pread(fd, 8, 0) == layout.MAGIC.to_bytes(8, "little")
    except OSError:
        return False
    finally:
        os.close(fd)
