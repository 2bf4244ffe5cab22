"""A worker that dies at any store of an operation, or of a recovery, leaves nothing that the next can't put right."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from shmradix import compile
from shmradix.guard import TREE
from shmradix.owner_word import tag_of
from tests.conftest import fresh_name, remove_all
from tests.crash_operations import NOW, operations
from tests.crash_shapes import SHAPES, TAKER, VICTIM
from tests.crash_states import Limits, Report, Trial, World, run
from tests.plain import Change, Counted, Kernels, Tape, handle_on, make

pytestmark = pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="numpy 1 makes a float of a uint64 and an int"
)


@contextlib.contextmanager
def a_world() -> Iterator[World]:
    name = fresh_name()
    try:
        with contextlib.closing(World(name)) as world:
            yield world
    finally:
        remove_all(name)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with a_world() as made:
        yield made


def test_no_death_in_an_operation_or_in_the_recovery_from_one_loses_or_leaks_anything(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = [fresh_name(), fresh_name()]
    try:
        report = run(names, Limits(second=40, reordered=100, second_reordered=4))
    finally:
        for name in names:
            remove_all(name)
    with capsys.disabled():
        print(f"\n{report}")
    assert not report.counts["failures"], "\n".join(report.failures)
    assert report.counts["crash states"] >= 200_000


@pytest.mark.parametrize("shape", SHAPES)
def test_plain_and_compiled_kernels_make_the_same_of_every_byte(world: World, shape: str) -> None:
    kernels, compiled, geometry = Kernels(), compile.load(), world.geometry
    start = next(one for one in world.shapes if one.name == shape)
    for operation in operations(start):
        tape, answers = kernels.record(start.image, geometry, VICTIM, operation.call)
        image = start.image.copy()
        handle = handle_on(image, geometry, VICTIM)
        theirs = operation.call(compiled, handle.ctypes.data)
        assert np.array_equal(tape.image, image), operation.name
        assert np.array_equal(make(start.image.copy(), tape.stores), image), operation.name
        assert _flat(answers) == _flat(theirs), operation.name

        crashed = make(start.image.copy(), tape.stores[: len(tape.stores) * 2 // 3])
        word = int(geometry.views(crashed).guards["owner"][TREE])
        take_over = partial(_take_over, word)
        tape, answers = kernels.record(crashed, geometry, TAKER, take_over)
        handle = handle_on(crashed, geometry, TAKER)
        assert _flat(answers) == _flat(take_over(compiled, handle.ctypes.data)), operation.name
        assert np.array_equal(tape.image, crashed), operation.name


def _take_over(word: int, entries: Any, handle: int) -> Any:
    return entries.take_over(handle, tag_of(TAKER, 1), NOW, TREE, word)


def _flat(answers: Any) -> list[Any]:
    if isinstance(answers, (tuple, np.ndarray)):
        return [flat for answer in answers for flat in _flat(answer)]
    return [int(answers)]


# What must be noticed, by its name: the change, the operations that have it, and in which crash states it shows.
BROKEN: dict[str, tuple[Change, str, str]] = {
    "a node is born before it is filled": (
        (
            "index",
            "    for i in range(seg.block_size):\n        seg.tokens[node, i]",
            "    store_release(seg.node_words, node * WORDS, clock)\n"
            "    for i in range(seg.block_size):\n        seg.tokens[node, i]",
        ),
        "insert",
        "store ",
    ),
    "a node may be born before it is filled": (
        (
            "index",
            "    store_release(seg.node_words, node * WORDS, clock)\n    app",
            '    nodes["born"][node] = clock\n    app',
        ),
        "insert",
        "stores [",
    ),
    "a node is dead after its record is free": (
        (
            "index",
            "    store_release(seg.node_words, node * WORDS, 0)\n    _leave(seg, node)\n"
            "    _remove_child(seg, parent, node)\n    free_node(seg, node)\n",
            "    _leave(seg, node)\n    _remove_child(seg, parent, node)\n    free_node(seg, node)\n"
            "    store_release(seg.node_words, node * WORDS, 0)\n",
        ),
        "evict",
        "store ",
    ),
    "a lease is born before it is filled": (
        (
            "leases",
            '    leases["taken_ns"][lease] = now\n',
            '    leases["taken_ns"][lease] = now\n    store_release(seg.lease_words, lease * WORDS, 1)\n',
        ),
        "lookup",
        "store ",
    ),
    "a dead worker's slot is free before its leases": (
        (
            "entries",
            "    leases.drop_all_of(seg, slot, generation)\n",
            '    seg.workers["pid"][slot] = 0\n    leases.drop_all_of(seg, slot, generation)\n',
        ),
        "bury",
        "store ",
    ),
    "a section is not marked": (
        ("guard", "guard * WORDS + _DIRTY, 1)", "guard * WORDS + _DIRTY, 0)"),
        "release",
        "store ",
    ),
    "a recovery's end is noted before": (
        (
            "entries",
            "        recovery.rebuild(seg)\n",
            "        seg.guard_words[which * guard.WORDS + 8] = 0\n        recovery.rebuild(seg)\n",
        ),
        "release",
        "of the recovery",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_wrong_order_of_stores_is_noticed(what: str) -> None:
    change, name, where = BROKEN[what]
    report, kernels = Report(), Kernels(change)
    with a_world() as world:
        for shape in world.shapes:
            if shape.name in ("fragmented", "leased"):
                for operation in operations(shape):
                    if operation.name.startswith(name):
                        Trial(world, shape, operation, kernels, report).run(Limits(8, 40, 0))
    assert any(where in failure for failure in report.failures), report


def test_a_trial_is_the_same_each_time(world: World) -> None:
    shape = world.shapes[-1]
    counts = []
    for _ in range(2):
        report = Report()
        for operation in list(operations(shape))[::6]:
            Trial(world, shape, operation, Kernels(), report).run(Limits(5, 10, 1))
        counts.append(report.counts)
    assert counts[0] == counts[1]
    assert not counts[0]["failures"]


def test_every_store_is_noted_through_views_and_in_pieces() -> None:
    records = np.zeros(4, np.dtype([("a", "<i8"), ("b", "<u4", (2,))]))
    counted: Any = records.view(Counted)
    Counted.tape = tape = Tape(records.view(np.uint8))
    try:
        counted["a"][1] = 5
        counted["a"][1] += 2
        counted["a"][1] = 7  # no change
        counted["b"][2][1] = 1
        counted["a"][:] = 9
        with pytest.raises(AssertionError, match="take it apart"):
            counted[3] = (1, (2, 3))
    finally:
        Counted.tape = None
    assert tape.count == 9
    assert [store.word for store in tape.stores] == [2, 2, 5, 0, 2, 4, 6]
