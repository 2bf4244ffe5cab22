"""The robust lock, Python half: how a worker that found a guard taken sleeps, and what it does about a dead owner."""

import signal

import posix_ipc

from shmradix.guard import PARKED

PARK = 0.02  # seconds: a wake-up that got lost costs at most this
_TOKENS = 64  # more posts than that serve nobody

_SLOT_BITS = 16
MAX_GENERATION = PARKED >> _SLOT_BITS


def tag_of(slot: int, generation: int) -> int:
    """What a worker writes into an owner word."""
    return generation << _SLOT_BITS | slot + 1


def owner_of(word: int) -> tuple[int, int]:
    """(slot, generation) of an owner word."""
    word &= ~PARKED
    return (word & (1 << _SLOT_BITS) - 1) - 1, word >> _SLOT_BITS


class Parking:
    """Where one worker waits for one guard."""

    def __init__(self, semaphore: posix_ipc.Semaphore) -> None:
        self._semaphore = semaphore

    def sleep(self) -> bool:
        """Sleep until somebody wakes us, at most `PARK` seconds. False if nobody did.

        Signals wait meanwhile: `acquire` would lose the exception of their handler. They strike right after.
        """
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        try:
            signal.pthread_sigmask(
                signal.SIG_BLOCK, signal.valid_signals()
            )  # runs handlers already due, which may raise
            self._semaphore.acquire(PARK)
            return True
        except (posix_ipc.BusyError, posix_ipc.SignalError):
            return False
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def wake(self) -> None:
        """Wake one sleeper."""
        if self._semaphore.value < _TOKENS:
            self._semaphore.release()
