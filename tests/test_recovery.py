"""A worker that dies in the middle of a critical section: whoever comes next puts right what it left."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shmradix import RadixCache
from shmradix.owner_word import tag_of

DERIVED = ("hash", "leases", "first_child", "next_sibling", "prev_sibling", "hash_next", "in_heap")
TOTALS = ("free_node", "free_namespace", "free_lease", "live_blocks", "live_namespaces", "live_leases", "heap_size")


def die_in_section(cache: RadixCache, dirty: bool) -> None:
    """Leave the tree guard as a worker that was killed inside its section does: held by a generation that is gone."""
    guards: Any = cache._segment.views.guards
    guards["owner"][0] = tag_of(0, 1 << 40)
    guards["dirty"][0] = dirty


def grow(cache: RadixCache, seed: int) -> list[list[int]]:
    """A few dozen overlapping prompts in two namespaces; every third stays leased."""
    chance, prompts, block = random.Random(seed), [], 0
    for i in range(40):
        prompt = [chance.randrange(2) for _ in range(chance.randrange(4, 40))]
        blocks = list(range(block, block + len(prompt) // 4))
        block += len(blocks)
        match = cache.lookup(prompt, adapter_id=i % 2)
        cache.insert(prompt, blocks, match=match)
        if i % 3:
            match.release()
        prompts.append(prompt)
    return prompts


def answers(cache: RadixCache, prompts: list[list[int]]) -> list[Any]:
    """All that a user can see: matches, partial blocks, totals."""
    seen: list[Any] = []
    for prompt in prompts:
        for adapter in (0, 1):
            seen.append(cache.peek_matched_tokens(prompt, adapter_id=adapter))
    stats = cache.stats()
    seen += [stats.blocks_live, stats.blocks_leased, stats.blocks_free, stats.leases, stats.namespaces]
    return seen


def image(cache: RadixCache) -> dict[str, np.ndarray]:
    views = cache._segment.views
    return {name: getattr(views, name).copy() for name in ("nodes", "leases", "namespaces", "tokens")}


@pytest.mark.parametrize("seed", range(5))
def test_derived_data_is_rebuilt_whatever_the_dead_owner_left_in_it(
    cache_factory: Callable[..., RadixCache], seed: int
) -> None:
    cache = cache_factory(block_size=4, max_blocks=400, max_namespaces=3)
    twin = cache_factory(block_size=4, max_blocks=400, max_namespaces=3)
    prompts = grow(cache, seed)
    grow(twin, seed)
    before = answers(cache, prompts)
    assert before[: 2 * len(prompts)] == answers(twin, prompts)[: 2 * len(prompts)]

    views: Any = cache._segment.views
    noise = np.random.default_rng(seed)
    for field in DERIVED:
        views.nodes[field] = noise.integers(0, 1 << 32, len(views.nodes), np.uint32)
    for field in TOTALS:
        views.state[field] = noise.integers(0, 1 << 32, dtype=np.uint32)
    views.buckets[:] = noise.integers(0, 1 << 32, len(views.buckets), np.uint32)
    views.heap["node"] = noise.integers(0, 1 << 32, len(views.heap), np.uint32)
    die_in_section(cache, dirty=True)

    assert answers(cache, prompts) == before
    assert cache.stats().recoveries == 1
    for prompt in prompts:  # the oldest child still wins a tie
        with cache.lookup([*prompt, 1]) as ours, twin.lookup([*prompt, 1]) as theirs:
            assert (ours.partial_block, ours.partial_tokens) == (theirs.partial_block, theirs.partial_tokens)
    assert cache.evict(1000).blocks.tolist() == twin.evict(1000).blocks.tolist()


def test_a_node_without_its_birth_never_was_and_its_record_is_free_again(
    cache_factory: Callable[..., RadixCache],
) -> None:
    cache = cache_factory(block_size=4, max_blocks=8)
    cache.insert(range(12), [1, 2, 3])
    cache.release(range(12))
    nodes: Any = cache._segment.views.nodes
    nodes["born"][nodes["block"] == 2] = 0
    die_in_section(cache, dirty=True)
    assert cache.peek_matched_tokens(range(12)) == 4
    stats = cache.stats()
    assert (stats.blocks_live, stats.blocks_free) == (1, 7)
    assert cache.insert(range(100, 132), list(range(10, 18))).inserted_tokens == 28


def test_a_namespace_whose_first_node_never_was_is_free_again(cache_factory: Callable[..., RadixCache]) -> None:
    cache = cache_factory(block_size=4, max_namespaces=1)
    cache.insert(range(4), [1])
    cache.release(range(4))
    nodes: Any = cache._segment.views.nodes
    nodes["born"][nodes["block"] == 1] = 0
    die_in_section(cache, dirty=True)
    assert cache.stats().namespaces == 0
    assert cache.insert(range(4), [2], adapter_id=9).inserted_tokens == 4


def test_a_clean_section_is_taken_over_without_a_rebuild(cache_factory: Callable[..., RadixCache]) -> None:
    cache = cache_factory(block_size=4)
    cache.insert(range(12), [1, 2, 3])
    before = image(cache)
    die_in_section(cache, dirty=False)
    assert cache.peek_matched_tokens(range(12)) == 12
    after = image(cache)
    assert all(np.array_equal(before[part], after[part]) for part in before)
    assert cache.stats().recoveries == 1
