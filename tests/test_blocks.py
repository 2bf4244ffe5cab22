"""Managed blocks: allocating, evicting for it, freeing, inserting, and what becomes of a dead worker's."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shmradix import NO_DISK, RadixCache, errors
from shmradix.block_methods import count_owners
from shmradix.layout import IN_TREE
from tests.actors import Actor, attach
from tests.children import Interruption, in_child

CacheFactory = Callable[..., RadixCache]

SIZE = 4


@pytest.fixture
def cache(cache_factory: CacheFactory) -> RadixCache:
    """Eight blocks of four tokens, all of them free."""
    return cache_factory(max_blocks=None, num_blocks=8, block_size=SIZE, max_leases=8, max_workers=4)


def prompt(number: int, blocks: int) -> list[int]:
    return [number] * SIZE * blocks


def fill(cache: RadixCache, *numbers: int, blocks: int = 2) -> dict[int, list[int]]:
    """Store prompts of two blocks each, the first one used the longest ago; their blocks."""
    stored = {}
    for number in numbers:
        table = cache.allocate(blocks)
        stored[number] = cache.insert(prompt(number, blocks), table).blocks.tolist()
        cache.release(prompt(number, blocks))
    return stored


def counts(cache: RadixCache) -> tuple[int, int, int]:
    """Free, private and stored blocks, which are all there are."""
    stats = cache.stats()
    found = stats.blocks_free, stats.blocks_private, stats.blocks_live
    assert sum(found) == cache._segment.geometry.num_blocks
    assert cache.verify() == []
    return found


def test_all_blocks_can_be_had_each_once(cache: RadixCache) -> None:
    given = [cache.allocate(count) for count in (3, 0, 4, 1)]
    assert [(blocks.dtype, blocks.size) for blocks in given] == [
        ("uint32", 3),
        ("uint32", 0),
        ("uint32", 4),
        ("uint32", 1),
    ]
    assert sorted(np.concatenate(given).tolist()) == list(range(8))
    assert counts(cache) == (0, 8, 0)


def test_blocks_are_kept_as_many_as_there_are_unless_said(cache: RadixCache, cache_factory: CacheFactory) -> None:
    assert cache._segment.geometry.max_blocks == 8
    small = cache_factory(max_blocks=1, num_blocks=8, block_size=SIZE)
    table = small.allocate(3)
    assert small.insert(prompt(1, 3), table).inserted_tokens == SIZE
    assert counts(small) == (5, 2, 1)


def test_an_insert_takes_what_it_stores_and_the_rest_stays_the_workers(cache: RadixCache) -> None:
    fill(cache, 1)
    table = cache.allocate(3)
    acquired = cache.insert([*prompt(1, 2), *prompt(2, 1)], table)
    assert acquired.duplicates.tolist() == table[:2].tolist()
    assert acquired.blocks.tolist() == table[2:].tolist()
    assert counts(cache) == (3, 2, 3)
    cache.free(acquired.duplicates)
    assert counts(cache) == (5, 0, 3)


def test_the_longest_unused_blocks_go_for_an_allocation(cache: RadixCache) -> None:
    stored = fill(cache, 1, 2, 3)
    cache.lookup(prompt(1, 2)).release()
    assert set(cache.allocate(4).tolist()) >= {*stored[2]}
    assert [cache.peek_matched_tokens(prompt(number, 2)) for number in (1, 2, 3)] == [2 * SIZE, 0, 2 * SIZE]
    cache.allocate(3)
    assert [cache.peek_matched_tokens(prompt(number, 2)) for number in (1, 3)] == [SIZE, 0]
    assert counts(cache) == (0, 7, 1)


def test_an_allocation_that_is_too_large_says_who_has_the_blocks_and_evicts_nothing(cache: RadixCache) -> None:
    fill(cache, 1, 2)
    match = cache.lookup(prompt(1, 2))
    with RadixCache.attach(cache.name) as other:
        other.allocate(3)
        cache.allocate(1)
        with pytest.raises(errors.NoFreeBlocks) as raised:
            cache.allocate(3)
        error = raised.value
        assert (error.free, error.evictable, error.leased, error.private) == (0, 2, 2, 4)
        for part in (
            "3 blocks asked for", "num_blocks=8", "0 are free", "2 evictable", "2 leased", "4 private", "3 by", "1 by",
            f"pid {os.getpid()}",
        ):  # fmt: skip
            assert part in str(error)
        assert counts(cache) == (0, 4, 4)
        match.release()
        assert cache.allocate(4).size == 4


@pytest.mark.parametrize("leased", [1, 2, 3])
def test_what_a_lease_needs_stays(cache: RadixCache, leased: int) -> None:
    cache.insert(prompt(1, 3), cache.allocate(3))
    cache.release(prompt(1, 3))
    cache.lookup(prompt(1, leased))
    with pytest.raises(errors.NoFreeBlocks):
        cache.allocate(8 - leased + 1)
    assert cache.peek_matched_tokens(prompt(1, 3)) == 3 * SIZE
    cache.allocate(8 - leased)
    assert cache.peek_matched_tokens(prompt(1, 3)) == leased * SIZE


def test_leases_that_share_blocks_are_not_counted_twice(cache: RadixCache) -> None:
    fill(cache, 1, blocks=4)
    for _ in range(7):
        cache.lookup(prompt(1, 2))
    assert cache.allocate(6).size == 6
    assert counts(cache) == (0, 6, 2)


def test_an_eviction_ahead_of_need_frees_blocks(cache: RadixCache) -> None:
    stored = fill(cache, 1, 2, 3, 4)
    evicted = cache.evict(3).blocks.tolist()
    assert evicted == [*reversed(stored[1]), stored[2][1]]
    assert counts(cache) == (3, 0, 5)
    assert sorted(cache.allocate(3).tolist()) == sorted(evicted)


def test_clear_frees_all_but_what_is_leased_or_private(cache: RadixCache) -> None:
    fill(cache, 1, 2)
    match = cache.lookup(prompt(1, 1))
    cache.allocate(1)
    cache.clear()
    assert counts(cache) == (6, 1, 1)
    match.release()
    assert cache.allocate(7).size == 7


def test_disk_blocks_of_what_an_allocation_evicted_are_handed_over_once(cache: RadixCache) -> None:
    for number in (1, 2, 3, 4):
        disk = [100 + number, NO_DISK]
        cache.insert(prompt(number, 2), cache.allocate(2), disk_block_ids=disk)
        cache.release(prompt(number, 2))
    assert cache.evicted_disk_blocks().size == 0
    cache.allocate(2)
    cache.allocate(3)
    assert cache.evicted_disk_blocks().tolist() == [101, 102]
    assert cache.evicted_disk_blocks().size == 0


@pytest.mark.parametrize(
    "wrong",
    [lambda own, tree, other: [*own, *tree], lambda own, tree, other: [*other, *own], lambda own, *_: [*own, 8],
     lambda own, *_: [*own, 2**32 - 2]],
    ids=["in the tree", "another worker's", "beyond the pool", "far beyond"],
)  # fmt: skip
def test_blocks_that_are_not_the_workers_are_refused(cache: RadixCache, wrong: Callable[..., list[int]]) -> None:
    tree, own = fill(cache, 1)[1], cache.allocate(2).tolist()
    with RadixCache.attach(cache.name) as other:
        table = wrong(own, tree, other.allocate(1).tolist())
        before = counts(cache)
        with pytest.raises(errors.BlockError, match="expected blocks from allocate"):
            cache.free(table)
        with pytest.raises(errors.BlockError, match="expected blocks from allocate"):
            cache.insert(prompt(3, len(table)), table)
        assert counts(cache) == before
        assert cache.peek_matched_tokens(prompt(3, 1)) == 0
    cache.free(own)


def test_a_free_block_is_not_the_workers(cache: RadixCache) -> None:
    own = cache.allocate(1)
    cache.free(own)
    for call in (lambda: cache.free(own), lambda: cache.insert(prompt(1, 1), own)):
        with pytest.raises(errors.BlockError):
            call()


def test_a_block_twice_is_refused(cache: RadixCache) -> None:
    own = cache.allocate(1).tolist()
    with pytest.raises(ValueError, match="more than once"):
        cache.free(own * 2)
    with pytest.raises(ValueError, match="more than once"):
        cache.insert(prompt(1, 2), own * 2)
    assert counts(cache) == (7, 1, 0)


@pytest.mark.parametrize(
    ("count", "error"), [(-1, ValueError), (9, ValueError), (2**70, ValueError), (1.5, TypeError), (None, TypeError)]
)
def test_senseless_numbers_of_blocks_are_refused(cache: RadixCache, count: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="num_blocks"):
        cache.allocate(count)
    assert counts(cache) == (8, 0, 0)


def test_a_cache_whose_callers_manage_the_blocks_says_so(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=4)
    for call in (lambda: cache.allocate(1), lambda: cache.free([1]), lambda: cache.evicted_disk_blocks()):
        with pytest.raises(ValueError, match="create it with num_blocks"):
            call()
    stats = cache.stats()
    assert (stats.blocks_free, stats.blocks_private) == (4, 0)


# --- workers that end


def allocate(state: SimpleNamespace, count: int) -> list[int]:
    return list(map(int, state.cache.allocate(count)))


def insert(state: SimpleNamespace, tokens: list[int], blocks: list[int]) -> None:
    state.cache.insert(tokens, blocks)


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_a_gone_workers_private_blocks_come_back_and_what_it_inserted_stays(cache: RadixCache, how: str) -> None:
    with Actor() as actor:
        actor.do(attach, cache.name)
        blocks = actor.do(allocate, 5)
        actor.do(insert, prompt(1, 2), blocks[:2])
        assert counts(cache) == (3, 3, 2)
        actor.kill() if how == "killed" else actor.leave()
    assert cache.reap() == (how == "killed")
    assert counts(cache) == (6, 0, 2)
    assert cache.allocate(8).size == 8


def test_an_allocation_finds_what_dead_workers_had(cache: RadixCache) -> None:
    with Actor() as actor:
        actor.do(attach, cache.name)
        actor.do(allocate, 7)
        actor.kill()
    assert cache.allocate(8).size == 8
    assert counts(cache) == (0, 8, 0)


def test_a_forked_child_has_none_of_its_parents_blocks(cache: RadixCache) -> None:
    own = cache.allocate(2)

    def use() -> tuple[str, int]:
        with pytest.raises(errors.BlockError):
            cache.free(own)
        return str(cache.allocate(6).size), cache.stats().blocks_private

    assert in_child(use) == "('6', 8)"
    cache.reap()
    assert counts(cache) == (6, 2, 0)
    cache.free(own)


@pytest.mark.parametrize("after", [False, True])
def test_an_allocation_that_a_signal_handler_cuts_short_keeps_nothing(cache: RadixCache, after: bool) -> None:
    entries = cache._worker.blocks

    def cut_short(*args: Any) -> Any:
        cache._worker.blocks = entries
        if after:
            entries.allocate(*args)
        raise Interruption

    cache._worker.blocks = SimpleNamespace(allocate=cut_short, free=entries.free)
    with pytest.raises(Interruption):
        cache.allocate(5)
    assert cache.stats().blocks_private == (5 if after else 0)
    assert cache.allocate(8).size == 8
    assert counts(cache) == (0, 8, 0)


class Racing(np.ndarray):
    """An array that another process writes to as soon as it was looked at."""

    def __le__(self, other: object) -> Any:
        small = np.asarray(self) <= other
        self[...] = IN_TREE
        return small


def test_an_error_counts_the_owners_of_blocks_that_change_hands_meanwhile() -> None:
    named = np.array([2, 0, 1, 2, IN_TREE, 9], np.uint32).view(Racing)
    assert count_owners(named, 4).tolist() == [1, 2]
