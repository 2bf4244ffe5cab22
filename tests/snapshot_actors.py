"""Slots with contents that processes share, and what workers with snapshots do in tests of several processes."""

from __future__ import annotations

import mmap
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from shmradix import RadixCache, errors
from shmradix.results import Spill

STATE = 256  # bytes of a state in these tests


def state_of(prompt: list[int]) -> bytes:
    """The state after a prompt, recognisable at every byte."""
    return np.random.default_rng(prompt).bytes(STATE)


class Slots:
    """The engine's memory: a mapped file of slots, the same in all processes."""

    def __init__(self, path: Path | str, count: int) -> None:
        with open(path, "a+b") as file:
            file.truncate(count * STATE)
            self._map = mmap.mmap(file.fileno(), count * STATE)

    def read(self, slot: int) -> bytes:
        return self._map[slot * STATE : (slot + 1) * STATE]

    def write(self, slot: int, state: bytes) -> None:
        self._map[slot * STATE : (slot + 1) * STATE] = state


def prompt_of(number: int) -> list[int]:
    """Prompts of two blocks of four tokens that share none."""
    return [number * 8 + i for i in range(8)]


def store_prompt(cache: RadixCache, number: int) -> None:
    cache.insert(prompt_of(number), [2 * number, 2 * number + 1])
    cache.release(prompt_of(number))


def begin_at(start: float) -> None:
    """Wait until the monotonic time `start`, the same in all processes, without going to sleep."""
    while time.monotonic() < start:
        pass


# --- for actors: all take the state first


def allocate_all(state: SimpleNamespace, start: float) -> list[int]:
    """Allocate until there is no slot left."""
    state.slots = []
    begin_at(start)
    try:
        while True:
            state.slots.append(state.cache.allocate_snapshot_slot())
            if len(state.slots) % 8 == 0:
                time.sleep(0.001)
    except errors.SlotsFull:
        return list(state.slots)


def evict_all(state: SimpleNamespace, start: float, spills: bool) -> list[int]:
    """Evict, or spill and evict by turns, until there is no snapshot left that may go."""
    slots: list[int] = []
    begin_at(start)
    while True:
        if spills and len(slots) % 2:
            gone = state.cache.evict_snapshot_to_tier(pending=len(slots) % 4 == 1)
            slot = None if gone is None else gone.slot
        else:
            slot = state.cache.evict_snapshot_lru()
        if slot is None:
            return slots
        slots.append(slot)
        if len(slots) % 8 == 0:
            time.sleep(0.001)  # let the others have some, on a busy machine too


def pin(state: SimpleNamespace, number: int) -> int | None:
    """Look the prompt up and keep the match; the slot."""
    state.match = state.cache.lookup(prompt_of(number))
    slot: int | None = state.match.snapshot_slot
    return slot


def let_go(state: SimpleNamespace) -> None:
    state.match.release()


def allocate(state: SimpleNamespace) -> int:
    state.slot = state.cache.allocate_snapshot_slot()
    return int(state.slot)


def reserve(state: SimpleNamespace, number: int) -> int:
    state.pending = state.cache.reserve_snapshot(prompt_of(number), allocate(state))
    return int(state.slot)


def begin_spill(state: SimpleNamespace) -> int:
    """Spill and do not commit; the slot."""
    gone = state.cache.evict_snapshot_to_tier(pending=True)
    assert isinstance(gone, Spill)
    return gone.slot


def save(state: SimpleNamespace, number: int, start: float = 0) -> list[int]:
    """Save a prompt's state in a slot of the worker's own; the slots that are the worker's then."""
    slot = allocate(state)
    begin_at(start)
    return list(state.cache.insert_intermediate_snapshot(prompt_of(number), slot))


def save_in(state: SimpleNamespace, number: int, slot: int, start: float = 0) -> list[int]:
    begin_at(start)
    return list(state.cache.insert_intermediate_snapshot(prompt_of(number), slot))


def free_slot(state: SimpleNamespace, slot: int) -> None:
    state.cache.free_snapshot_slot(slot)


def promote(state: SimpleNamespace, key: int, start: float) -> bool:
    """Promote into the slot that `allocate` gave."""
    begin_at(start)
    return bool(state.cache.promote_snapshot(key, state.slot))


def forget(state: SimpleNamespace, key: int, start: float) -> bool:
    begin_at(start)
    return bool(state.cache.forget_snapshot_tier_key(key))


def seize_snapshots_guard(state: SimpleNamespace) -> None:
    """Take the snapshots guard as this worker and keep it."""
    state.cache._segment.views.guards["owner"][1] = state.cache._worker.tag
