"""Operations on claims stopped after every store, or some in another order: the dead one's go, the others' stay.

As in `test_block_crashes.py`, an operation runs uncompiled on a copy of a segment, which yields its stores, and a real
handle goes on from where its worker died.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from shmradix import RadixCache, compile, errors
from shmradix.guard import TREE
from shmradix.inputs import NO_KEYS, as_namespace
from shmradix.owner_word import tag_of
from shmradix.prefix_hash import prefix_hash
from tests.conftest import fresh_name, remove_all
from tests.crash_states import another_order
from tests.plain import Kernels, handle_on, make

SURVIVOR, VICTIM, TAKER = range(3)
CLAIMS, NOW = 4, 1_000_000
OWN, THEIRS, NEW = [1] * 8, [2] * 8, [3] * 8
REORDERED = 60

Call = Callable[[Any, int], Any]


class World:
    """Four claims: one of the survivor, one of the victim, one given back, one never used."""

    def __init__(self) -> None:
        self.name = fresh_name()
        RadixCache.create(self.name, max_blocks=12, block_size=2, max_workers=3, max_claims=CLAIMS).close()
        self.caches = [RadixCache.attach(self.name) for _ in range(3)]
        self.survivor, victim, _ = self.caches
        self.geometry = self.survivor._segment.geometry
        self.memory = np.ndarray(self.geometry.size, np.uint8, buffer=self.survivor._segment._map)
        back = self.survivor.claim(NEW)
        self.own, self.theirs = self.survivor.claim(OWN), victim.claim(THEIRS)
        self.theirs.insert([1, 2], num_tokens=4)  # and goes on with the third block
        back.release()
        for cache in self.caches[1:]:
            cache._worker.forget()  # its kernel lock, as when a process dies
        parking: Any = self.survivor._worker._parking[TREE]
        parking.sleep = lambda: False
        self.image = self.memory.copy()

    def key(self, tokens: list[int], depth: int) -> tuple[int, int, int]:
        ids, size = np.array(tokens, np.uint32), self.geometry.block_size
        return *prefix_hash(self.survivor._hash_seed, ids, NO_KEYS, size, (depth + 1) * size), (depth + 1) * size

    def judge(self, crashed: np.ndarray) -> None:
        """Recover, bury the dead, and use every claim there is."""
        self.memory[:] = crashed
        self.survivor.stats()  # takes the guard over
        assert self.survivor.verify() == []
        record, own = self.survivor._segment.views.claims, self.own._at
        kept = [field for field in record.dtype.names or () if field != "waiters"]
        assert record[kept][own] == self.geometry.views(self.image).claims[kept][own]
        self.survivor.reap()
        assert self.survivor.verify() == []
        assert np.flatnonzero(record["born"]).tolist() == [own]
        made = [self.survivor.claim([9 + i] * 4) for i in range(CLAIMS - 1)]
        assert all(claim.is_mine for claim in made)
        with pytest.raises(errors.ClaimsFull):
            self.survivor.claim(THEIRS)
        assert self.survivor.verify() == []


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    made = World()
    yield made
    for cache in made.caches:
        cache.close()
    remove_all(made.name)


class Case(NamedTuple):
    module: str
    by: int
    call: Callable[[World], Call]


def _take(tokens: list[int]) -> Callable[[World], Call]:
    def of(world: World) -> Call:
        prompt = as_namespace(0, None), np.array(tokens, np.uint32), NO_KEYS
        low, high, _ = world.key(tokens, 0)

        def call(entries: Any, handle: int) -> Any:
            rows = np.empty((2, len(tokens) // 2), np.uint32)
            return entries.take(handle, tag_of(VICTIM, 1), NOW, *prompt, 0, low, high, rows)

        return call

    return of


def _advance(world: World) -> Call:
    claim, key = world.theirs, world.key(THEIRS, 3)
    return lambda entries, handle: entries.advance(handle, tag_of(VICTIM, 1), NOW, claim._at, claim._born, *key)


def _drop(world: World) -> Call:
    claim = world.theirs
    return lambda entries, handle: entries.drop(handle, tag_of(VICTIM, 1), NOW, claim._at, claim._born)


def _bury(world: World) -> Call:
    return lambda entries, handle: entries.bury(handle, tag_of(TAKER, 1), NOW, VICTIM, 1)


CASES = {
    "take one that was given back": Case("claim_entries", VICTIM, _take(NEW)),
    "wait for another's": Case("claim_entries", VICTIM, _take(OWN)),
    "advance": Case("claim_entries", VICTIM, _advance),
    "drop": Case("claim_entries", VICTIM, _drop),
    "bury": Case("entries", TAKER, _bury),
}


@pytest.mark.parametrize("case", CASES)
def test_a_worker_that_dies_at_any_store_leaves_the_claims_of_others_alone(world: World, case: str) -> None:
    module, by, call = CASES[case]
    tape, _ = Kernels().record(world.image, world.geometry, by, call(world), module)
    made, chance = tape.stores, random.Random(case)
    assert made
    orders = [list(range(stop)) for stop in range(len(made) + 1)]
    orders += [another_order(made, chance) for _ in range(REORDERED)]
    for chosen in orders:
        world.judge(make(world.image.copy(), (made[i] for i in chosen)))


@pytest.mark.parametrize("case", CASES)
def test_plain_and_compiled_kernels_make_the_same_of_every_byte(world: World, case: str) -> None:
    module, by, call = CASES[case]
    tape, _ = Kernels().record(world.image, world.geometry, by, call(world), module)
    image = world.image.copy()
    call(world)(compile.load(module), handle_on(image, world.geometry, by).ctypes.data)
    assert np.array_equal(tape.image, image)


def test_a_fault_is_found(world: World) -> None:
    """A claim that is born before it has an owner: whoever dies between leaves one that nobody can bury."""
    birth = '    store_release(seg.claim_words, free * WORDS, state["clock"][0])\n'
    owner = '    record["worker"][free] = slot + 1\n'
    change = ("claims", owner, birth.replace('state["clock"][0])', 'state["clock"][0] + 1)') + owner)
    tape, _ = Kernels(change).record(world.image, world.geometry, VICTIM, _take(NEW)(world), "claim_entries")

    def stop_everywhere() -> None:
        for stop in range(len(tape.stores) + 1):
            world.judge(make(world.image.copy(), tape.stores[:stop]))

    with pytest.raises(AssertionError):
        stop_everywhere()
