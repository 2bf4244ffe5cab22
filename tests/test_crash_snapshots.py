"""A worker that dies at any store of a snapshot operation, or of a burial, leaves nothing in the way of the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shmradix import compile
from shmradix.guard import SNAPSHOTS
from tests.conftest import fresh_name, remove_all
from tests.crash_shapes import VICTIM
from tests.crash_snapshots import KINDS, Limits, Trial, World, operations, run
from tests.crash_states import Report
from tests.plain import Change, Kernels, handle_on, make

pytestmark = pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.0.0", reason="numpy 1 makes a float of a uint64 and an int"
)


@contextlib.contextmanager
def a_world(kind: str) -> Iterator[World]:
    name = fresh_name()
    try:
        with contextlib.closing(World(name, kind)) as world:
            yield world
    finally:
        remove_all(name)


def test_no_death_in_a_snapshot_operation_loses_or_leaks_anything(capsys: pytest.CaptureFixture[str]) -> None:
    names = [fresh_name(), fresh_name()]
    try:
        report = run(names, Limits(burials=1, reordered=40))
    finally:
        for name in names:
            remove_all(name)
    with capsys.disabled():
        print(f"\n{report}")
    assert not report.counts["failures"], "\n".join(report.failures)
    assert report.counts["crash states"] >= 20_000


@pytest.mark.parametrize("kind", KINDS)
def test_plain_and_compiled_kernels_make_the_same_of_every_byte(kind: str) -> None:
    kernels, compiled = Kernels(), compile.load("snapshot_entries")
    with a_world(kind) as world:
        for shape in world.shapes:
            for operation in operations(shape):
                tape, answers = kernels.record(shape.image, world.geometry, VICTIM, operation.call, "snapshot_entries")
                image = shape.image.copy()
                handle = handle_on(image, world.geometry, VICTIM)
                theirs = operation.call(compiled, handle.ctypes.data)
                assert np.array_equal(tape.image, image), f"{shape.name}: {operation.name}"
                assert np.array_equal(make(shape.image.copy(), tape.stores), image), f"{shape.name}: {operation.name}"
                assert _flat(answers) == _flat(theirs), f"{shape.name}: {operation.name}"
                assert world.geometry.views(image).guards["owner"][SNAPSHOTS] == 0


def _flat(answers: Any) -> list[Any]:
    if isinstance(answers, (tuple, np.ndarray)):
        return [flat for answer in answers for flat in _flat(answer)]
    return [int(answers)]


# What must be noticed, by its name: the change, the operations that have it, and in which crash states it shows.
BROKEN: dict[str, tuple[Change, str, str]] = {
    "a snapshot is born before it is filled": (
        (
            "snapshots",
            '    record["session"][at] = session\n',
            "    store_release(seg.snapshot_words, at * SNAPSHOT_WORDS, tick(seg))\n"
            '    record["session"][at] = session\n',
        ),
        "save",
        "store ",
    ),
    "a snapshot may be born before it is filled": (
        (
            "snapshots",
            '    born = tick(seg)\n    record["last_use"][at] = born\n'
            "    store_release(seg.snapshot_words, at * SNAPSHOT_WORDS, born)\n",
            '    born = seg.state["clock"][0] + 1\n    seg.state["clock"][0] = record["born"][at] = born\n'
            '    record["last_use"][at] = born\n',
        ),
        "save",
        "stores [",
    ),
    "a pin is taken before it says of what": (
        (
            "snapshots",
            '    pins["snapshot"][free] = at\n',
            '    store_release(seg.pin_words, free * PIN_WORDS, 1)\n    pins["snapshot"][free] = at\n',
        ),
        "take",
        "store ",
    ),
    "a slot is a worker's before it is out of the index": (
        (
            "snapshots",
            "    remove(seg, at)\n    if had_slot and take",
            "    own(seg, slot)\n    remove(seg, at)\n    if had_slot and take",
        ),
        "evict",
        "store ",
    ),
    "a snapshot is found while its slot is a worker's": (
        (
            "snapshots",
            '    disown(seg, record["slot"][at])\n    set_flags(seg, at, record["flags"][at] & _NOT_PENDING)\n',
            '    set_flags(seg, at, record["flags"][at] & _NOT_PENDING)\n    disown(seg, record["slot"][at])\n',
        ),
        "save",
        "store ",
    ),
    "a snapshot may be resident before it is told where": (
        (
            "snapshots",
            "    store_release(seg.snapshot_words, at * SNAPSHOT_WORDS + _TIER_KEY, 0)\n",
            '    seg.snapshots["tier_key"][at] = 0\n',
        ),
        "promote",
        "stores [",
    ),
    "a snapshot may be pending before it is told whose": (
        (
            "snapshots",
            "    store_release(seg.snapshot_words, at * SNAPSHOT_WORDS + _FLAGS, word)\n",
            '    seg.snapshots["flags"][at] = np.uint32(flags)\n',
        ),
        "spill",
        "stores [",
    ),
    "a pinned snapshot is taken out": (
        ("snapshots", "    if is_pinned(seg, at):\n", "    if False:\n"),
        "save",
        "no stop",
    ),
    "a prefix is saved twice": (
        ("snapshots", "    if same != 0 and counts", "    if same < 0 and counts"),
        "save",
        "no stop",
    ),
    "a tail stays beside the next one": (
        ("snapshots", "    _sweep(seg, at, out, counts)\n    same", "    same"),
        "save",
        "no stop",
    ),
    "a slot is given to two": (
        (
            "snapshots",
            'if seg.snapshots["born"][at] != 0 and is_resident(seg, at) and slot <',
            "if slot < 0 and slot <",
        ),
        "allocate",
        "",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_wrong_order_of_stores_is_noticed(what: str) -> None:
    change, name, where = BROKEN[what]
    report, kernels = Report(), Kernels(change)
    with a_world("session, callers slots" if name == "promote" else "session, own slots") as world:
        for shape in world.shapes:
            for operation in operations(shape):
                if operation.name.startswith(name):
                    Trial(world, shape, operation, kernels, report).run(Limits(0, 40))
    assert any(where in failure for failure in report.failures), report


def test_a_trial_is_the_same_each_time() -> None:
    counts = []
    with a_world("chain, own slots") as world:
        for _ in range(2):
            report = Report()
            for operation in list(operations(world.shapes[-1]))[::4]:
                Trial(world, world.shapes[-1], operation, Kernels(), report).run(Limits(1, 10))
            counts.append(report.counts)
    assert counts[0] == counts[1]
    assert not counts[0]["failures"]
