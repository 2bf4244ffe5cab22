"""The tier in memory of the stress and the kill tool: whoever writes a record meanwhile, no other key's state."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from ledger import SLOT_STATE, TIERED
from saves import MemoryTier

FIELDS = 4  # that a put writes, one by one


class Interrupted:
    """A record before whose `at`-th write `do` is done."""

    def __init__(self, record: Any, at: int, do: Callable[[], Any]) -> None:
        self._record, self._left, self._do = record, at, do

    def __setitem__(self, field: str, value: Any) -> None:
        if self._left == 0:
            self._do()
        self._left -= 1
        self._record[field] = value

    def __getitem__(self, field: str) -> Any:
        return self._record[field]

    def copy(self) -> Any:
        return self._record.copy()


def state_of(key: int) -> bytes:
    state = np.zeros(1, SLOT_STATE)
    state["digest"] = key
    return state.tobytes()


@pytest.mark.parametrize("at", range(FIELDS + 1))
@pytest.mark.parametrize("meanwhile", ["put", "remove", "put and remove"])
def test_two_that_write_one_record_leave_a_state_under_its_own_key_or_none(at: int, meanwhile: str) -> None:
    records = np.zeros(1, TIERED)
    other = MemoryTier(records)

    def interrupt() -> None:
        if "put" in meanwhile:
            other.put(2, state_of(2))
        if "remove" in meanwhile:
            other.remove(2)

    tier: Any = MemoryTier(records)
    tier._records = [Interrupted(records[0], at, interrupt)]
    tier.put(1, state_of(1))
    for key in (1, 2):
        assert other.get(key) in (None, state_of(key))
    assert at != FIELDS or other.get(1) == state_of(1)
