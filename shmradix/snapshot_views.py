"""From a handle's address to the arrays of the snapshot index, inside compiled code; `views.py` for the tree's."""

from typing import Any, NamedTuple

import numpy as np
from numba import carray

from shmradix import layout
from shmradix.atomics import as_pointer
from shmradix.compile import kernel, opener
from shmradix.views import GUARD_WORDS, HANDLE_SIZE

SNAPSHOT_WORDS, PIN_WORDS = layout.words_of(layout.SNAPSHOT), layout.words_of(layout.PIN)
SLOT_WORDS, STATE_WORDS = layout.words_of(layout.SLOT), layout.words_of(layout.SNAPSHOT_STATE)


class Index(NamedTuple):
    """What the kernels of the snapshot index work on."""

    tree: Any  # the tree's state: its epoch is read, without its guard
    workers: Any
    state: Any
    snapshots: Any
    slots: Any
    pins: Any
    sessions: Any
    guard_words: Any  # the guards, and what follows once more, as int64 words for the atomics
    state_words: Any
    snapshot_words: Any
    slot_words: Any
    pin_words: Any
    private: Any  # FAULT and SLOT, see views.py
    incarnation: Any
    tail_lease: Any
    retention: Any
    alpha: Any


@opener
def open_index(handle):
    """The arrays of the snapshot index behind a handle's address."""
    h = carray(as_pointer(handle), (HANDLE_SIZE,), np.int64)
    workers, snapshots, slots, pins, sessions = h[15], h[23], h[24], h[25], h[26]
    header = carray(as_pointer(h[17]), (1,), layout.HEADER)
    return Index(
        carray(as_pointer(h[3]), (1,), layout.STATE),
        carray(as_pointer(h[4]), (workers,), layout.WORKER),
        carray(as_pointer(h[18]), (1,), layout.SNAPSHOT_STATE),
        carray(as_pointer(h[19]), (snapshots,), layout.SNAPSHOT),
        carray(as_pointer(h[20]), (slots,), layout.SLOT),
        carray(as_pointer(h[21]), (pins,), layout.PIN),
        carray(as_pointer(h[22]), (sessions,), layout.SESSION),
        carray(as_pointer(h[2]), (GUARD_WORDS,), np.int64),
        carray(as_pointer(h[18]), (STATE_WORDS,), np.int64),
        carray(as_pointer(h[19]), (snapshots * SNAPSHOT_WORDS,), np.int64),
        carray(as_pointer(h[20]), (slots * SLOT_WORDS,), np.int64),
        carray(as_pointer(h[21]), (pins * PIN_WORDS,), np.int64),
        carray(as_pointer(handle), (2,), np.int64),
        header["incarnation"][0],
        np.int64(header["tail_lease"][0]),
        np.int64(header["retention"][0]),
        header["snapshot_alpha"][0],
    )


@opener
def copy_index(handle, out):
    """Copy the sections of the snapshot index, which are the segment's last, to uint8 `out`."""
    h = carray(as_pointer(handle), (HANDLE_SIZE,), np.int64)
    out[:] = carray(as_pointer(h[18]), (len(out),), np.uint8)


@kernel
def used(count, limit):
    """One more than the highest record that was ever used, from a mark in the segment, within the table."""
    return min(max(np.int64(count), np.int64(1)), np.int64(limit))
