"""What the policies make of fast and slow conversations behind one system prompt, and of their finish leaves."""

from __future__ import annotations

from typing import Any

import pytest

from shmradix import RadixCache, errors
from tests.snapshot_steps import CacheFactory
from tests.test_scenarios import prompt_tokens

SYSTEM = prompt_tokens(2048)


class Engine:
    """Serves turns of conversations behind one system prompt, and saves states as engines do."""

    def __init__(self, cache: RadixCache, kind: str = "plain", leaves: bool = True) -> None:
        self.cache, self.kind, self.leaves = cache, kind, leaves
        self.said: dict[str, list[int]] = {}
        self.block = 0

    def table(self, tokens: list[int]) -> range:
        self.block += len(tokens) // self.cache.block_size
        return range(self.block - len(tokens) // self.cache.block_size, self.block)

    def turn(self, name: str, session: int) -> bool:
        """One turn; whether it resumed from what the conversation's last turn had saved."""
        before = self.said.get(name, [])
        question, answer = ([hash_of(name, len(before), part, n) for n in range(64)] for part in (1, 2))
        prompt = [*(before or SYSTEM), *question]
        cache = self.cache
        with cache.lookup(prompt, session=session, max_snapshot_tokens=len(prompt) - 1) as match:
            kept = match.snapshot_tokens >= len(before) - 64 > 0
            slot = cache.allocate_snapshot_slot()
            if self.kind == "tail":
                cache.insert(prompt, self.table(prompt), match=match)
                freed = cache.insert_tail_snapshot(prompt, slot, session)
            else:
                freed, _ = cache.insert_with_snapshot(prompt, self.table(prompt), slot, session=session, match=match)
            if self.leaves:
                freed += self.save_answer([*prompt, *answer], session)
            for slot in freed:
                cache.free_snapshot_slot(slot)
        self.said[name] = [*prompt, *answer]
        return kept

    def save_answer(self, tokens: list[int], session: int) -> list[int]:
        try:
            slot = self.cache.allocate_snapshot_slot(finish=True)
        except errors.SlotsFull:
            return []
        freed, _ = self.cache.insert_with_snapshot(tokens, self.table(tokens), slot, session=session, finish=True)
        self.cache.release(tokens)
        return freed

    def found(self, name: str, session: int) -> list[int]:
        with self.cache.lookup([*self.said[name], 1], session=session) as match:
            return match.restorable


def hash_of(*parts: Any) -> int:
    """A token that means nothing, the same in each run."""
    value = 1
    for part in "-".join(map(str, parts)).encode():
        value = (value * 31 + part) % 1_000_003
    return 10_000 + value


# Sessions are one where they are hashes of the first 1,024 tokens.
CONVERSATIONS = [  # policy, sessions, what is saved, turns (of 6) in which slow conversations resumed from their own
    ("chain", "one", "plain", 6),
    ("chain", "own", "plain", 6),
    ("session", "one", "plain", 0),
    ("session", "own", "plain", 0),
    ("session", "own", "tail", 5),  # leased, but for the very first: its first lookup matched nothing
    ("session", "one", "tail", 0),  # each tail takes the place of all others
    ("chain", "own", "tail", 6),
    ("chain", "one", "tail", 6),  # the answers' snapshots are kept
]


@pytest.mark.parametrize(("retention", "sessions", "kind", "expected"), CONVERSATIONS)
def test_a_fast_conversation_beside_three_slow_ones(
    retention: str, sessions: str, kind: str, expected: int, cache_factory: CacheFactory
) -> None:
    """16 slots, a shared system prompt, 20 turns a round of one conversation and one of each of three others."""
    cache = cache_factory(
        max_blocks=40_000, block_size=16, max_snapshots=32, snapshot_slots=16, retention=retention, max_leases=64
    )
    engine, kept = Engine(cache, kind), 0
    for _ in range(3):
        for number, slow in enumerate(("a", "b", "c")):
            kept += engine.turn(slow, 1 if sessions == "one" else 2 + number)
        for _ in range(20):
            engine.turn("fast", 1)
    assert kept == expected
    assert cache.stats().snapshot_evictions > 50


@pytest.mark.parametrize("count", [3, 8, 9, 12, 15])
def test_finish_leaves_live_on_what_is_left(count: int, cache_factory: CacheFactory) -> None:
    """Four turns of some conversations on 16 slots: no conversation's last prompt is lost to a finish leaf."""
    cache = cache_factory(
        max_blocks=40_000, block_size=16, max_snapshots=32, snapshot_slots=16, retention="chain", max_leases=64
    )
    engine, names = Engine(cache), [f"conversation {n}" for n in range(count)]
    for turn in range(4):
        assert [engine.turn(name, 0) for name in names] == [turn > 0] * count
    depths = [engine.found(name, 0) for name in names]
    lengths = [len(engine.said[name]) for name in names]
    assert all(length - 64 in found for length, found in zip(lengths, depths))
    leaves = sum(length in found for length, found in zip(lengths, depths))
    assert leaves == min(count, 15 - count)  # one slot has what the last turn resumed from
