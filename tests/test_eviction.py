"""What is evicted and in which order, what leases hold, and what happens when a capacity runs out."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest

from shmradix import NO_DISK, RadixCache, errors
from tests.model import all_stats, segment_image

CacheFactory = Callable[..., RadixCache]


@pytest.fixture
def cache(cache_factory: CacheFactory) -> RadixCache:
    return cache_factory(max_blocks=64, block_size=2, max_leases=64, max_namespaces=8)


def store(cache: RadixCache, *prompts: str) -> None:
    """Store and release prompts: each letter is one block of two tokens, its block id is the letter's code."""
    for prompt in prompts:
        cache.insert(tokens(prompt), [ord(letter) for letter in prompt])
        cache.release(tokens(prompt))


def tokens(prompt: str) -> list[int]:
    return [ord(letter) for letter in prompt for _ in range(2)]


def touch(cache: RadixCache, prompt: str) -> None:
    cache.lookup(tokens(prompt)).release()


def evicted(cache: RadixCache, count: int = 99) -> str:
    return "".join(map(chr, cache.evict(count).blocks.tolist()))


# "+ab" stores and releases the prompt of blocks a and b, "?ab" looks it up, "=ab" only peeks.
ORDERS = {
    "each_lookup_makes_its_prompt_the_most_recent": ("+a +b +c ?b ?a", "cba"),
    "a_miss_and_a_peek_refresh_nothing": ("+a +b =a ?xa", "ab"),
    "a_repeated_insert_refreshes": ("+a +b +a", "ba"),
    "a_prefix_used_alone_outlives_younger_prompts": ("+abc +x +y ?ab", "cxyba"),
    "a_parent_takes_the_later_use_of_its_evicted_child": ("+ab +x ?ab +y", "xbay"),
    "a_parent_keeps_its_own_later_use": ("+ab +x ?a", "bxa"),
    "a_parent_of_several_takes_the_latest_use": ("+ab +ac +x +ad +y ?ab", "cxdyba"),
    "a_prompt_goes_leaf_first_before_younger_ones": ("+abcd +ef", "dcbafe"),
}


@pytest.mark.parametrize(("calls", "expected"), ORDERS.values(), ids=ORDERS)
def test_order_of_eviction(calls: str, expected: str, cache: RadixCache) -> None:
    for call in calls.split():
        if call[0] == "+":
            store(cache, call[1:])
        elif call[0] == "?":
            touch(cache, call[1:])
        else:
            cache.peek_matched_tokens(tokens(call[1:]))
    assert evicted(cache) == expected


@pytest.mark.parametrize("order", list(itertools.permutations("abcd")), ids="".join)
def test_eviction_follows_the_order_of_use(order: tuple[str, ...], cache: RadixCache) -> None:
    store(cache, *"dbca")
    for prompt in order:
        touch(cache, prompt)
    assert evicted(cache) == "".join(order)


def test_a_parent_that_took_its_childs_use_outlives_what_was_used_between(cache: RadixCache) -> None:
    store(cache, "ab", "y")
    touch(cache, "ab")
    with cache.lookup(tokens("y")):
        touch(cache, "ab")
        assert evicted(cache, 1) == "b"
    assert evicted(cache) == "ya"


def test_a_child_stored_after_the_youngest_went_is_still_found(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=8, block_size=4)
    for child in (3, 1, 2):
        cache.insert([7, child, child, child], [child])
        cache.release([7, child, child, child])
    for child in (3, 1):
        cache.lookup([7, child, child, child]).release()
    assert cache.evict(1).blocks.tolist() == [2]
    cache.insert([7, 4, 4, 4], [4])
    assert cache.lookup([7, 4, 4]).partial_block == 4


def test_a_release_refreshes_nothing(cache: RadixCache) -> None:
    cache.insert(tokens("a"), [ord("a")])
    cache.insert(tokens("b"), [ord("b")])
    cache.release(tokens("b"))
    cache.release(tokens("a"))
    assert evicted(cache) == "ab"


@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_evicting_in_steps_gives_the_same_order(step: int, cache: RadixCache) -> None:
    store(cache, "abc", "abd", "xyz", "xq", "m")
    touch(cache, "ab")
    touch(cache, "xy")
    parts = [evicted(cache, step) for _ in range(9)]
    assert all(len(part) <= step for part in parts)
    assert "".join(parts) == "cdzqmbayx"


def test_evicting_nothing_gives_nothing(cache: RadixCache) -> None:
    assert evicted(cache) == ""
    store(cache, "ab")
    got = cache.evict(0)
    assert (len(got), got.blocks.tolist(), got.disk_block_ids.tolist()) == (0, [], [])
    assert cache.stats().blocks_live == 2


def test_the_answer_is_two_parallel_arrays(cache: RadixCache) -> None:
    cache.insert(tokens("abc"), [1, 2, 3], disk_block_ids=[11, NO_DISK, 13])
    cache.release(tokens("abc"))
    got = cache.evict(2)
    assert len(got) == 2
    assert got.blocks.dtype == got.disk_block_ids.dtype == np.uint32
    assert (got.blocks.tolist(), got.disk_block_ids.tolist()) == ([3, 2], [13, NO_DISK])


def test_any_worker_may_evict_what_another_stored(cache: RadixCache) -> None:
    store(cache, "ab")
    with RadixCache.attach(cache.name) as other:
        assert evicted(other) == "ba"
    assert cache.peek_matched_tokens(tokens("ab")) == 0


def test_the_64_oldest_children_are_candidates_for_the_partial_block(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=80, block_size=4)
    for child in range(65):
        cache.insert([7, child, child, child], [child])
    with cache.lookup([7, 64, 64]) as match:
        assert (match.partial_block, match.partial_tokens) == (0, 1)
    with cache.lookup([7, 63, 63]) as match:
        assert (match.partial_block, match.partial_tokens) == (63, 3)
    cache.release([7, 20, 20, 20])
    assert cache.evict(1).blocks.tolist() == [20]
    with cache.lookup([7, 64, 64]) as match:
        assert (match.partial_block, match.partial_tokens) == (64, 3)


def test_hidden_blocks_go_before_all_others_once_released(cache: RadixCache) -> None:
    store(cache, "ab", "c")
    held = cache.lookup(tokens("ab"))
    assert [chr(block) for block in cache.clear().blocks.tolist()] == ["c"]
    store(cache, "x", "ab", "y")
    held.release()
    assert evicted(cache) == "baxbay"


def test_an_insert_stores_what_fits_and_evicts_nothing(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=4, block_size=2)
    store(cache, "ab")
    got = cache.insert(tokens("xyz"), [1, 2, 3])
    assert (got.blocks.tolist(), got.inserted_tokens) == ([1, 2], 4)
    got = cache.insert(tokens("xq"), [1, 4])
    assert (got.blocks.tolist(), got.inserted_tokens) == ([], 2)
    got = cache.insert(tokens("n"), [5])
    assert (got.blocks.tolist(), got.inserted_tokens) == ([], 0)
    assert cache.stats().blocks_free == 0
    assert evicted(cache) == "ba"
    got = cache.insert(tokens("xyz"), [1, 2, 3])
    assert (got.blocks.tolist(), got.duplicates.tolist(), got.inserted_tokens) == ([3], [], 6)


def test_every_block_of_the_capacity_can_be_used_again_and_again(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=7, block_size=2)
    pick = random.Random(1)
    for _ in range(50):
        letters = pick.sample("abcdefghijklm", 7)
        store(cache, "".join(letters[:3]), "".join(letters[3:]))
        assert cache.stats().blocks_free == 0
        assert len(evicted(cache)) == 7
        assert cache.stats().blocks_free == 7


def test_a_full_lease_table_changes_nothing(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=8, block_size=2, max_leases=2)
    store(cache, "ab")
    matches = [cache.lookup(tokens("ab")), cache.lookup(tokens("a"))]
    before = all_stats(cache), segment_image(cache)
    for call in (lambda: cache.lookup(tokens("ab")), lambda: cache.insert(tokens("abc"), [1, 2, 3])):
        with pytest.raises(errors.LeasesFull, match=r"max_leases.*2|2.*max_leases"):
            call()
        assert (all_stats(cache), segment_image(cache)) == before
    assert cache.lookup(tokens("x")).matched_tokens == 0
    assert cache.peek_matched_tokens(tokens("ab")) == 4
    assert cache.insert(tokens("abc"), [97, 98, 99], match=matches[0]).blocks.tolist() == [99]
    matches[1].release()
    assert cache.lookup(tokens("abc")).matched_tokens == 6


def test_a_full_namespace_table_changes_nothing(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=8, block_size=2, max_namespaces=2)
    cache.insert(tokens("a"), [1], adapter_id=1)
    cache.insert(tokens("a"), [2], salt=b"tenant")
    before = all_stats(cache), segment_image(cache)
    with pytest.raises(errors.NamespacesFull, match=r"max_namespaces.*2|2.*max_namespaces"):
        cache.insert(tokens("a"), [3])
    assert (all_stats(cache), segment_image(cache)) == before
    assert cache.lookup(tokens("a")).matched_tokens == 0
    assert cache.insert(tokens("ab"), [1, 4], adapter_id=1, matched_tokens=2).blocks.tolist() == [4]
    cache.release(tokens("a"), salt=b"tenant")
    assert cache.evict(1).blocks.tolist() == [2]
    assert cache.insert(tokens("a"), [3]).blocks.tolist() == [3]
