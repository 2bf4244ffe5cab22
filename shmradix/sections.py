"""How a critical section of the tree guard begins and ends."""

import numpy as np

from shmradix import guard
from shmradix.compile import kernel
from shmradix.guard import TREE
from shmradix.status import CORRUPT
from shmradix.views import FAULT


@kernel
def checked(seg, status):
    """The status, or CORRUPT where a fault was noted, which outranks any other."""
    if seg.private[FAULT] != 0:
        seg.private[FAULT] = 0
        return np.int64(CORRUPT)
    return np.int64(status)


@kernel
def begin(seg, tag, now):
    """Take the tree guard for a section that changes something. False if it is taken."""
    if not guard.acquire(seg, TREE, tag, now):
        return False
    guard.begin(seg, TREE)
    return True


@kernel
def end(seg, status):
    """Release the tree guard. Returns the status and which guard's waiters to wake: 1 + TREE, or 0."""
    status = checked(seg, status)
    return status, np.int64(guard.release(seg, TREE))
