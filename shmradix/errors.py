"""Every error that shmradix raises on its own account; bad arguments raise ValueError or TypeError."""


class ShmradixError(Exception):
    """Base of all errors below."""


class SegmentExists(ShmradixError, FileExistsError):
    """A segment of that name exists already."""


class SegmentNotFound(ShmradixError, FileNotFoundError):
    """No segment has that name."""


class SegmentForeign(ShmradixError):
    """What lies under that name is not a shmradix segment, or was cut short."""


class LayoutMismatch(ShmradixError):
    """A shmradix segment, but of another version, layout, byte order, boot or geometry."""


class AccessDenied(ShmradixError, PermissionError):
    """The segment belongs to somebody else, or its mode does not let this process in."""


class NoSharedMemory(ShmradixError, OSError):
    """There is no /dev/shm, or it can't be written."""


class SharedMemoryFull(ShmradixError, OSError):
    """/dev/shm has too little room for the segment."""


class WorkersFull(ShmradixError):
    """Every worker slot is held by a live process."""


class LeasesFull(ShmradixError):
    """Every lease is in use."""


class NamespacesFull(ShmradixError):
    """Every namespace (adapter and salt) is in use."""


class NoFreeBlocks(ShmradixError):
    """Fewer blocks are free or evictable than were asked for; the numbers of blocks are the error's attributes."""

    free: int = 0
    evictable: int = 0
    leased: int = 0
    private: int = 0


class BlockError(ShmradixError):
    """A managed block is not this worker's, so it can't free or insert it."""


class ClaimsFull(ShmradixError):
    """Every claim is in use."""


class ClaimError(ShmradixError):
    """The claim is not this worker's, so it can't insert by it or release it."""


class CorruptBlock(ShmradixError):
    """A block's bytes are not those that its checksum is of."""


class SnapshotsFull(ShmradixError):
    """Every record of the snapshot index is in use."""


class SlotsFull(ShmradixError):
    """No snapshot slot can be had: all are in use and none may be evicted."""


class SlotError(ShmradixError):
    """The snapshot slot is in the index already, or not this worker's."""


class TierError(ShmradixError, OSError):
    """A tier could not read or write: whether it has a state is not known."""


class LeaseError(ShmradixError):
    """The lease is not held by this worker."""


class LockTimeout(ShmradixError, TimeoutError):
    """A live worker held the guard for longer than `lock_timeout`."""


class CacheClosed(ShmradixError):
    """The cache handle was closed."""


class CorruptSegment(ShmradixError):
    """The segment holds an index that points nowhere."""
