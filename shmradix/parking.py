"""Where a worker sleeps: when a guard is taken (the robust lock, Python half), or another computes what it wants.

The semaphore is waited for through the C library itself: `posix_ipc`'s `acquire` turns the exception of a signal
handler into its own SignalError, and its deadline follows the wall clock, which may be set back.
"""

import ctypes
import os
import time

PARK = 0.02  # seconds: a wake-up that got lost costs at most this
_TOKENS = 64  # more posts than that serve nobody


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))  # struct timespec of 64-bit Linux


_libc = ctypes.CDLL(None, use_errno=True)
_libc.sem_open.restype = ctypes.c_void_p
_libc.sem_open.argtypes = (ctypes.c_char_p, ctypes.c_int)
for _name in ("sem_post", "sem_close"):
    getattr(_libc, _name).argtypes = (ctypes.c_void_p,)
_libc.sem_getvalue.argtypes = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
_libc.sem_timedwait.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Timespec))
_HAS_CLOCK = hasattr(_libc, "sem_clockwait")  # glibc since 2.30
if _HAS_CLOCK:
    _libc.sem_clockwait.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Timespec))


class Parking:
    """Where one worker waits for one guard, or for claims: the named semaphore, which must exist."""

    def __init__(self, name: str) -> None:
        self._close = _libc.sem_close  # at hand when the interpreter ends, too
        self._semaphore = None  # until opened: a signal may end this before
        self._semaphore = _libc.sem_open(name.encode(), 0)
        if not self._semaphore:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), name)

    def sleep(self, limit: float = PARK) -> bool:
        """Sleep until somebody wakes us, a signal comes, or `limit` seconds are over, at most `PARK`.

        Returns whether somebody woke us.
        """
        clock = time.CLOCK_MONOTONIC if _HAS_CLOCK else time.CLOCK_REALTIME
        deadline = _Timespec(*divmod(time.clock_gettime_ns(clock) + int(min(limit, PARK) * 1e9), 10**9))
        if _HAS_CLOCK:
            return bool(_libc.sem_clockwait(self._semaphore, clock, deadline) == 0)
        return bool(_libc.sem_timedwait(self._semaphore, deadline) == 0)

    def wake(self, sleepers: int = 1) -> None:
        """Wake so many sleepers."""
        value = ctypes.c_int()
        for _ in range(min(sleepers, _TOKENS)):
            if _libc.sem_getvalue(self._semaphore, value) == 0 and value.value < _TOKENS:
                _libc.sem_post(self._semaphore)

    def close(self) -> None:
        """Give the semaphore's mapping back; the second time does nothing."""
        if semaphore := self._semaphore:
            self._semaphore = None
            self._close(semaphore)

    def __del__(self) -> None:
        self.close()
