"""`verify` names the damage among managed blocks, and the rebuild mends what is derived."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shmradix import RadixCache, errors
from shmradix.guard import TREE
from shmradix.layout import IN_TREE
from shmradix.owner_word import tag_of
from tests.conftest import fresh_name, remove_all

BLOCKS = 8
STORED = [1, 1, 2, 2, 3, 3]


class Patient:
    """Eight blocks: 0 to 2 are in the tree, 3 and 4 private, the others free."""

    def __init__(self) -> None:
        self.cache = cache = RadixCache.create(fresh_name(), block_size=2, num_blocks=BLOCKS, max_workers=2)
        cache.insert(STORED, cache.allocate(3))
        assert cache.allocate(2).tolist() == [3, 4]
        self.views: Any = cache._segment.views
        self.bytes = np.ndarray(cache._segment.geometry.size, np.uint8, cache._segment._map)
        self.whole = self.bytes.copy()

    def node(self, block: int) -> int:
        nodes = self.views.nodes
        (node,) = np.flatnonzero((nodes["block"] == block) & (nodes["born"] != 0))
        return int(node)


@pytest.fixture
def patient() -> Iterator[Patient]:
    made = Patient()
    yield made
    made.bytes[:] = made.whole
    made.cache.close()
    remove_all(made.cache.name)


def block(number: int, field: str, value: int) -> Callable[[Patient], None]:
    def do(patient: Patient) -> None:
        patient.views.blocks[field][number] = value

    return do


def state(field: str, value: int) -> Callable[[Patient], None]:
    def do(patient: Patient) -> None:
        patient.views.state[field][0] = value

    return do


def stored(number: int, value: int) -> Callable[[Patient], None]:
    def do(patient: Patient) -> None:
        patient.views.nodes["block"][patient.node(number)] = value

    return do


DERIVED = 30
DAMAGES: list[tuple[str, int, Callable[[Patient], None]]] = [
    ("a node's block beyond the pool", 28, stored(2, BLOCKS)),
    ("a block in two nodes", 28, stored(2, 0)),
    ("a node's block is a worker's", 28, stored(2, 3)),
    ("a node's block is another worker's", 28, block(1, "worker", 2)),
    ("an owner that there is not", 29, block(3, "worker", 3)),
    ("an owner far away", 29, block(3, "worker", 2**32 - 2)),
    ("an owner of a generation to come", 29, block(4, "generation", 1 << 60)),
    ("a free block's owner", DERIVED, block(6, "worker", 1)),
    ("a stored block not known as such", DERIVED, block(1, "worker", 0)),
    ("a free block known as stored", DERIVED, block(6, "worker", IN_TREE)),
    ("a private block known as stored", DERIVED, block(3, "worker", IN_TREE)),
    ("a private block nobody's", DERIVED, block(3, "worker", 0)),
    ("a stored block listed", DERIVED, state("free_block", 1)),
    ("the head beyond the pool", DERIVED, state("free_block", BLOCKS + 1)),
    ("an empty list", DERIVED, state("free_block", 0)),
    ("a list that ends too soon", DERIVED, block(5, "next_free", 0)),
    ("a list that bites its tail", DERIVED, block(7, "next_free", 6)),
    ("a list that leaves the pool", DERIVED, block(6, "next_free", 2**32 - 1)),
    ("too many free blocks counted", DERIVED, state("free_blocks", 4)),
    ("too few private blocks counted", DERIVED, state("private_blocks", 1)),
]


def test_there_is_nothing_to_name_before(patient: Patient) -> None:
    assert patient.cache.verify() == []
    state = patient.views.state[0]
    assert (state["free_blocks"], state["private_blocks"], state["free_block"]) == (3, 2, 6)


@pytest.mark.parametrize(("number", "damage"), [pytest.param(n, do, id=what) for what, n, do in DAMAGES])
def test_the_damage_is_named(patient: Patient, number: int, damage: Callable[[Patient], None]) -> None:
    damage(patient)
    found = patient.cache.verify()
    assert number in {violation.number for violation in found}, found
    assert all(violation.detail for violation in found)


@pytest.mark.parametrize("damage", [pytest.param(do, id=what) for what, n, do in DAMAGES if n == DERIVED])
def test_a_rebuild_mends_what_is_derived(patient: Patient, damage: Callable[[Patient], None]) -> None:
    damage(patient)
    guards = patient.views.guards
    guards["owner"][TREE], guards["dirty"][TREE] = tag_of(1, 7), 1  # as a worker that died in a section leaves it
    patient.cache.stats()
    assert patient.cache.verify() == []


@pytest.mark.parametrize("damage", [pytest.param(do, id=what) for what, _, do in DAMAGES])
def test_whatever_is_damaged_calls_answer_or_say_that_it_is(
    patient: Patient, damage: Callable[[Patient], None]
) -> None:
    cache = patient.cache
    for call in (
        lambda: cache.allocate(1), lambda: cache.allocate(BLOCKS), lambda: cache.free([3]), lambda: cache.free([3, 4]),
        lambda: cache.insert([9] * 4, [3, 4]), lambda: cache.insert([8] * 4, [3, 200]), lambda: cache.evict(3),
        cache.reap, cache.stats,
    ):  # fmt: skip
        patient.bytes[:] = patient.whole
        damage(patient)
        for _ in range(3):
            try:
                call()
            except errors.ShmradixError:
                continue
