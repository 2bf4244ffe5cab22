"""`verify` names the damage among claims, and no damage has a call hang, crash or answer what is not there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shmradix import RadixCache, errors
from tests.conftest import fresh_name, remove_all

CLAIMS = 4
MINE, OTHERS, NEW = [1] * 8, [2] * 8, [3] * 8


class Patient:
    """Four claims: 1 is this worker's, 2 another's, 3 was given back, 4 was never used."""

    def __init__(self) -> None:
        sizes = {"block_size": 4, "max_blocks": 12, "max_workers": 3, "max_claims": CLAIMS}
        self.cache = RadixCache.create(fresh_name(), **sizes)  # type: ignore[arg-type]
        self.other = RadixCache.attach(self.cache.name)
        self.mine, self.others = self.cache.claim(MINE), self.other.claim(OTHERS)
        self.cache.claim(NEW).release()
        self.views: Any = self.cache._segment.views
        self.bytes = np.ndarray(self.cache._segment.geometry.size, np.uint8, self.cache._segment._map)
        self.whole = self.bytes.copy()


@pytest.fixture
def patient() -> Iterator[Patient]:
    made = Patient()
    yield made
    made.bytes[:] = made.whole
    made.other.close()
    made.cache.close()
    remove_all(made.cache.name)


def claim(number: int, field: str, value: int) -> Callable[[Patient], None]:
    def do(patient: Patient) -> None:
        patient.views.claims[field][number] = value

    return do


def used(value: int) -> Callable[[Patient], None]:
    def do(patient: Patient) -> None:
        patient.views.state["claims_used"][0] = value

    return do


DAMAGES: list[tuple[str, int, Callable[[Patient], None]]] = [
    ("a claim of a worker that there is not", 31, claim(2, "worker", 4)),
    ("a claim of nobody", 31, claim(2, "worker", 0)),
    ("a claim of a worker far away", 31, claim(1, "worker", 2**32 - 1)),
    ("a claim of a generation to come", 31, claim(2, "generation", 1 << 60)),
    ("a claim of an epoch to come", 31, claim(2, "epoch", 1 << 60)),
    ("a claim from the future", 31, claim(2, "born", 1 << 60)),
    ("a claim born before time", 31, claim(2, "born", -1)),
    ("two claims born at once", 31, lambda patient: claim(2, "born", int(patient.views.claims["born"][1]))(patient)),
    ("the null claim is live", 31, claim(0, "born", 1)),
    ("a claim where none was ever", 31, claim(4, "born", 1)),
    ("fewer used than live", 31, used(2)),
    ("none was ever used", 31, used(0)),
    ("more used than there are", 31, used(CLAIMS + 2)),
    ("far more used than there are", 31, used(2**32 - 1)),
]


def test_there_is_nothing_to_name_before(patient: Patient) -> None:
    assert patient.cache.verify() == []
    assert np.flatnonzero(patient.views.claims["born"]).tolist() == [1, 2]


@pytest.mark.parametrize(("number", "damage"), [pytest.param(n, do, id=what) for what, n, do in DAMAGES])
def test_the_damage_is_named(patient: Patient, number: int, damage: Callable[[Patient], None]) -> None:
    damage(patient)
    found = patient.cache.verify()
    assert number in {violation.number for violation in found}, found
    assert all(violation.detail for violation in found)


@pytest.mark.parametrize("damage", [pytest.param(do, id=what) for what, _, do in DAMAGES])
def test_whatever_is_damaged_calls_answer_or_say_that_it_is(
    patient: Patient, damage: Callable[[Patient], None]
) -> None:
    cache = patient.cache
    for call in (
        lambda: cache.claim(OTHERS).wait(0), lambda: cache.claim(NEW).insert([1, 2]), lambda: cache.claim(MINE),
        lambda: patient.mine.insert([1], num_tokens=4), lambda: patient.mine.release(), cache.reap, cache.clear,
    ):  # fmt: skip
        patient.bytes[:] = patient.whole
        damage(patient)
        for _ in range(3):
            try:
                call()
            except errors.ShmradixError:
                continue
