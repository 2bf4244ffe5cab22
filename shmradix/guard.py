"""The robust lock, compiled half: the owner word *is* the lock.

The word is 0, or the owner's tag: generation << 16 | slot + 1, with PARKED set while somebody may sleep on the guard's
semaphore. It is taken by one compare-and-swap from 0 and given back by one exchange, so there is no instant at which
the lock is held and its holder unknown. `parking.py` is the other half: how a loser sleeps, and what it does about
an owner that died.

The dirty word beside it is set before a changing section's first store and cleared after its last.
"""

import numpy as np

from shmradix.atomics import compare_and_swap, exchange, load_acquire, store_release
from shmradix.compile import kernel
from shmradix.layout import GUARD, word_of, words_of
from shmradix.owner_word import PARKED

TREE, SNAPSHOTS = 0, 1
SPINS = 300  # a section takes microseconds: look a few times more before going to sleep

WORDS = words_of(GUARD)
_DIRTY, _ACQUIRED, _RECOVERIES = (word_of(GUARD, field) for field in ("dirty", "acquired_ns", "recoveries"))


@kernel
def acquire(seg, guard, tag, now):
    """Try for a moment to take the guard; `now` (monotonic ns) is for whoever waits for it. False if it is taken."""
    words, owner = seg.guard_words, guard * WORDS
    for _ in range(SPINS):
        if load_acquire(words, owner) == 0 and compare_and_swap(words, owner, 0, tag) == 0:
            words[owner + _ACQUIRED] = now
            return True
    return False


@kernel
def begin(seg, guard):
    """Say that this section, which holds the guard, is about to change something."""
    store_release(seg.guard_words, guard * WORDS + _DIRTY, 1)


@kernel
def release(seg, guard):
    """Give the guard back. True if somebody may sleep on its semaphore."""
    words, owner = seg.guard_words, guard * WORDS
    store_release(words, owner + _DIRTY, 0)
    return (exchange(words, owner, 0) & PARKED) != 0


@kernel
def announce(seg, guard):
    """Ask the owner to wake somebody when it is done. Returns its word, 0 if the guard is free by now."""
    words, owner = seg.guard_words, guard * WORDS
    while True:
        word = load_acquire(words, owner)
        if word == 0 or word & PARKED:
            return word
        if compare_and_swap(words, owner, word, word | PARKED) == word:
            return word | PARKED


@kernel
def take_over(seg, guard, dead, tag, now):
    """Take the guard from the dead owner whose word is `dead`. False if somebody else was quicker."""
    words, owner = seg.guard_words, guard * WORDS
    if compare_and_swap(words, owner, dead, tag | PARKED) != dead:
        return False
    words[owner + _ACQUIRED] = now
    words[owner + _RECOVERIES] += 1
    return True


@kernel
def is_dirty(seg, guard):
    """Whether the section that holds the guard, or held it when its owner died, may have stored something."""
    return np.int64(seg.guard_words[guard * WORDS + _DIRTY])
