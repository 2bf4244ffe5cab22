"""Operations on managed blocks stopped after every store, or some in another order: every block is in one place.

As in `crash_states.py`, an operation runs uncompiled on a copy of a segment, which yields its stores, and a real handle
goes on from where its worker died. Which tree that leaves is that module's matter; here it is who has which block.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from shmradix import RadixCache
from shmradix.guard import TREE
from shmradix.inputs import NO_IDS, NO_KEYS, as_namespace
from shmradix.owner_word import tag_of
from tests.conftest import fresh_name, remove_all
from tests.crash_states import another_order
from tests.plain import Kernels, make

SURVIVOR, VICTIM, TAKER = range(3)
BLOCKS, NOW = 12, 1_000_000
STORED, NEW, OTHER = list(range(8)), [*range(4), *range(20, 28)], list(range(40, 48))
REORDERED = 60

Call = Callable[[Any, int], Any]


class World:
    """Twelve blocks of two tokens: six in the tree, of which a lease needs two, four private, two free."""

    def __init__(self) -> None:
        self.name = fresh_name()
        RadixCache.create(self.name, num_blocks=BLOCKS, block_size=2, max_leases=8, max_workers=3).close()
        self.caches = [RadixCache.attach(self.name) for _ in range(3)]
        self.survivor, victim, _ = self.caches
        self.geometry = self.survivor._segment.geometry
        self.memory = np.ndarray(self.geometry.size, np.uint8, buffer=self.survivor._segment._map)
        for tokens in (STORED, OTHER[:4]):
            self.survivor.insert(tokens, self.survivor.allocate(len(tokens) // 2))
            self.survivor.release(tokens)
        self.survivor.lookup(STORED[:4])
        self.own = self.survivor.allocate(1).tolist()
        self.victims = victim.allocate(4)
        victim.free(self.victims[2:3])
        self.victims = np.delete(self.victims, 2)
        for cache in self.caches[1:]:
            cache._worker.forget()  # its kernel lock, as when a process dies
        parking: Any = self.survivor._worker._parking[TREE]
        parking.sleep = lambda: False
        self.image = self.memory.copy()

    def stored(self) -> set[int]:
        nodes = self.survivor._segment.views.nodes[1 + self.geometry.max_namespaces :]
        return set(nodes["block"][nodes["born"] != 0].tolist())

    def owned_by(self, slot: int) -> list[int]:
        return np.flatnonzero(self.survivor._segment.views.blocks["worker"] == slot + 1).tolist()

    def judge(self, crashed: np.ndarray, before: set[int], after: set[int]) -> None:
        """Recover, bury the dead, and use every block there is."""
        self.memory[:] = crashed
        self.survivor.stats()  # takes the guard over
        assert self.survivor.verify() == []
        assert self.owned_by(SURVIVOR) == self.own
        self.survivor.reap()
        assert self.survivor.verify() == []
        assert before & after <= self.stored() <= before | after
        assert [self.owned_by(slot) for slot in (SURVIVOR, VICTIM, TAKER)] == [self.own, [], []]
        stats = self.survivor.stats()
        rest = self.survivor.allocate(BLOCKS - 1 - stats.blocks_leased)
        assert len({*rest.tolist(), *self.own, *self.stored()}) == BLOCKS
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


def _insert(tokens: list[int], chosen: Callable[[World], list[int]]) -> Callable[[World], Call]:
    def of(world: World) -> Call:
        table = np.array(chosen(world), np.uint32)
        prompt = as_namespace(0, None), np.array(tokens, np.uint32), NO_KEYS

        def call(entries: Any, handle: int) -> Any:
            rows, counts = np.zeros((5, len(table)), np.uint32), np.zeros(5, np.int64)
            tag = tag_of(VICTIM, 1)
            return entries.insert(handle, tag, NOW, *prompt, table, NO_IDS, 0, 0, 0, -1, rows, counts)

        return call

    return of


def _allocate(count: int) -> Callable[[World], Call]:
    def call(entries: Any, handle: int) -> Any:
        seen, out = np.zeros(1 << 12, np.uint8), np.empty(count, np.uint32)
        evicted, counts = np.empty((2, count), np.uint32), np.zeros(2, np.int64)
        return entries.allocate(handle, tag_of(VICTIM, 1), NOW, seen, out, evicted, counts)

    return lambda world: call


def _free(world: World) -> Call:
    return lambda entries, handle: entries.free(handle, tag_of(VICTIM, 1), NOW, world.victims)


def _evict(world: World) -> Call:
    def call(entries: Any, handle: int) -> Any:
        return entries.evict(
            handle, tag_of(VICTIM, 1), NOW, 3, (1 << 63) - 1, np.empty((2, 3), np.uint32), np.zeros(1, np.int64)
        )

    return call


CASES = {
    "allocate what is free": Case("block_entries", VICTIM, _allocate(2)),
    "allocate and evict": Case("block_entries", VICTIM, _allocate(6)),
    "allocate too many": Case("block_entries", VICTIM, _allocate(BLOCKS)),
    "free": Case("block_entries", VICTIM, _free),
    "insert": Case("entries", VICTIM, _insert(OTHER[4:], lambda world: world.victims[:2].tolist())),
    "insert behind what is there": Case("entries", VICTIM, _insert(NEW[:10], lambda world: [0, 0, *world.victims])),
    "insert another's": Case(
        "entries", VICTIM, _insert(OTHER[4:], lambda world: [world.own[0], int(world.victims[0])])
    ),
    "evict": Case("entries", VICTIM, _evict),
    "bury": Case(
        "entries", TAKER, lambda world: lambda entries, handle: entries.bury(handle, tag_of(TAKER, 1), NOW, VICTIM, 1)
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_worker_that_dies_at_any_store_leaves_every_block_in_one_place(world: World, case: str) -> None:
    module, by, call = CASES[case]
    tape, answer = Kernels().record(world.image, world.geometry, by, call(world), module)
    made, chance = tape.stores, random.Random(case)
    orders = [list(range(stop)) for stop in range(len(made) + 1)]
    orders += [another_order(made, chance) for _ in range(REORDERED)]
    world.memory[:] = world.image
    before = world.stored()
    world.memory[:] = make(world.image.copy(), made)
    after = world.stored()
    is_refused = "too many" in case or "another's" in case
    assert (int(answer[0]) != 0) == is_refused
    if is_refused:
        assert np.array_equal(world.survivor._segment.views.blocks, world.geometry.views(world.image).blocks)
    for chosen in orders:
        world.judge(make(world.image.copy(), (made[i] for i in chosen)), before, after)


@pytest.mark.parametrize("case", CASES)
def test_plain_and_compiled_kernels_make_the_same_of_every_byte(world: World, case: str) -> None:
    from shmradix import compile
    from tests.plain import handle_on

    module, by, call = CASES[case]
    tape, _ = Kernels().record(world.image, world.geometry, by, call(world), module)
    image = world.image.copy()
    call(world)(compile.load(module), handle_on(image, world.geometry, by).ctypes.data)
    assert np.array_equal(tape.image, image)


def test_a_fault_is_found(world: World) -> None:
    """A block that is free before its node is gone: whoever dies between leaves it in two places."""
    change = (
        "tree",
        "        remove_node(seg, node)\n        replace_top(seg, parent)\n        if len(seg.blocks) > 0:\n"
        "            pool.put(seg, block, np.uint32(IN_TREE))\n",
        "        if len(seg.blocks) > 0:\n"
        "            pool.put(seg, block, np.uint32(IN_TREE))\n"
        "        replace_top(seg, parent)\n",
    )
    tape, _ = Kernels(change).record(world.image, world.geometry, VICTIM, _evict(world))
    with pytest.raises(AssertionError):
        world.judge(make(world.image.copy(), tape.stores), set(), set(range(BLOCKS)))
