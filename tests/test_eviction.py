"""What is evicted and in which order, what leases hold, and what happens when a capacity runs out."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest

from shmradix import NO_DISK, RadixCache, errors
from tests.model import all_stats, segment_image
from tests.test_scenarios import FAILS, Step, cleared, drop, ev, ins, look, play, rel, rel_matched, stat

CacheFactory = Callable[..., RadixCache]

LEASES: dict[str, list[Step]] = {
    "another_block_for_a_stored_chunk_is_reported": [
        ins(32, [10, 20]),
        ins(48, [11, 20, 31], blocks=[31], duplicates=[11], inserted=48),
        look(48, 48, [10, 20, 31]),
        stat(duplicate_blocks=1),
    ],
    "another_block_than_the_matched_one_is_reported": [
        ins(32, [10, 20]),
        rel(32),
        look(48, 32, [10, 20], keep="request"),
        ins(48, [11, 20, 30], match="request", blocks=[30], duplicates=[11], inserted=48),
    ],
    "a_disk_id_for_a_matched_block_is_taken": [
        ins(32, [10, 20]),
        rel(32),
        look(48, 32, [10, 20], keep="request"),
        ins(48, [10, 20, 30], disk=[NO_DISK, 101, 102], match="request", blocks=[30], disk_ids=[101, 102]),
    ],
    "each_insert_needs_its_own_release": [
        ins(32, [10, 20]),
        ins(32, [11, 21], blocks=[], duplicates=[11, 21]),
        rel(32),
        ev(2),
        rel(32),
        ev(2, 20, 10),
    ],
    "releasing_what_is_not_held_fails": [
        ins(16, [42]),
        rel(16),
        rel(16, **FAILS),
        rel((100, 116), **FAILS),
        look(16, 16, [42]),
    ],
    "releasing_below_what_is_held_drops_the_deepest_held": [
        ins(48, [10, 20, 30]),
        rel(48),
        look(16, 16, [10]),
        rel(48),
        look(48, 48, [10, 20, 30]),
    ],
    "releasing_one_path_keeps_the_other": [
        ins(32, [10, 20]),
        ins((0, 16, 100, 116), [10, 30]),
        rel(32),
        ev(9, 20),
        rel(32, **FAILS),
        rel((0, 16, 100, 116)),
        ev(9, 30, 10),
    ],
    "a_match_released_twice_counts_once": [
        ins(16, [42]),
        look(16, 16, [42], keep="first"),
        look(16, 16, [42], keep="second"),
        stat(leases=3),
        drop("first"),
        drop("first"),
        stat(leases=2),
        drop("second"),
        stat(leases=1),
    ],
    "release_matched_undoes_a_lookup_of_that_depth": [
        ins(64, [10, 11, 12, 13]),
        rel(64),
        look(48, 48, [10, 11, 12]),
        rel_matched(48, 32, **FAILS),
        rel_matched(48, 48),
        look(32, 32, [10, 11]),
        ev(8, 13, 12),
        rel(32),
        ev(8, 11, 10),
    ],
    "extending_a_lease_that_is_not_held_fails": [
        ins(32, [10, 20]),
        rel(32),
        ins(48, [10, 20, 30], matched=32, **FAILS),
        stat(blocks_live=2, leases=0),
    ],
    "extending_moves_the_lease_and_takes_no_second": [
        ins(32, [10, 20]),
        ins(48, [10, 20, 30], matched=32, blocks=[30], duplicates=[]),
        stat(leases=1, blocks_leased=3),
        rel(48),
        rel(48, **FAILS),
        ev(9, 30, 20, 10),
    ],
    "a_miss_takes_its_lease_when_it_inserts": [
        look(40, 0, [], keep="request"),
        stat(leases=0),
        ins(40, [10, 20, 30], match="request", blocks=[10, 20], inserted=32),
        stat(leases=1, blocks_leased=2),
        drop("request"),
        ev(9, 20, 10),
    ],
    "a_lease_on_a_partial_block_is_not_released_by_another_prompt": [
        ins(16, [10]),
        rel(16),
        look(10, 0, [], keep="copying", partial=(10, 10)),
        rel((100, 116), **FAILS),
        ev(9),
        rel(12),
        ev(9, 10),
    ],
    "a_release_keeps_the_partial_block_of_another_prompt_with_the_same_start": [
        ins(32, [10, 20]),
        rel(32),
        look((0, 16, 300, 304), 16, [10]),
        look(20, 16, [10], keep="copying", partial=(20, 4)),
        rel_matched((0, 16, 300, 304), 16),
        ev(9),
        drop("copying"),
        ev(9, 20, 10),
    ],
    "clear_hides_everything_and_keeps_leased_blocks_until_released": [
        ins(32, [10, 20]),
        rel(32),
        ins((100, 116), [30]),
        rel((100, 116)),
        look(32, 32, [10, 20], keep="old"),
        cleared(30),
        look(32, 0, []),
        stat(blocks_live=2, blocks_leased=2),
        ins(16, [50], blocks=[50], duplicates=[]),
        look(32, 16, [50]),
        ev(9),
        drop("old"),
        ev(9, 20, 10),
    ],
    "a_release_drops_a_lease_of_now_before_a_deeper_one_of_before_clear": [
        ins(48, [10, 20, 30]),
        cleared(),
        ins(16, [50]),
        rel(48),
        ev(9, 50),
        rel(48),
        ev(9, 30, 20, 10),
    ],
    "a_match_older_than_clear_stores_nothing": [
        ins(16, [10]),
        rel(16),
        look(32, 16, [10], keep="old"),
        cleared(),
        ins(32, [10, 20], match="old", blocks=[], inserted=0),
        look(32, 0, []),
        drop("old"),
        ev(9, 10),
    ],
}


@pytest.mark.parametrize("steps", LEASES.values(), ids=LEASES.keys())
def test_lease_scenario(steps: list[Step], cache_factory: CacheFactory) -> None:
    play(cache_factory(max_blocks=64, block_size=16), steps)


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


@pytest.mark.parametrize("depth", range(1, 6))
def test_a_lease_pins_its_whole_path_and_nothing_else(depth: int, cache: RadixCache) -> None:
    store(cache, "abcde", "abx", "y")
    path = "abcde"[:depth]
    with cache.lookup(tokens(path)):
        references = {chr(image.block): image.references for image in segment_image(cache)}
        assert references == {letter: int(letter in path) for letter in "abcdexy"}
        assert cache.stats().blocks_leased == depth
        assert cache.stats().blocks_evictable == 7 - depth
        assert sorted(evicted(cache)) == sorted(set("abcdexy") - set(path))
    assert evicted(cache) == path[::-1]


def test_a_reference_count_is_the_number_of_leases_below(cache: RadixCache) -> None:
    store(cache, "abc", "abd", "e")
    matches = [cache.lookup(tokens(prompt)) for prompt in ("a", "ab", "ab", "abc", "abd", "abd")]
    counts = {chr(image.block): image.references for image in segment_image(cache)}
    assert counts == {"a": 6, "b": 5, "c": 1, "d": 2, "e": 0}
    for match in matches:
        match.release()
    assert {image.references for image in segment_image(cache)} == {0}


def test_a_block_leased_by_two_workers_waits_for_both(cache: RadixCache) -> None:
    store(cache, "ab")
    with RadixCache.attach(cache.name) as other:
        mine, theirs = cache.lookup(tokens("ab")), other.lookup(tokens("ab"))
        mine.release()
        assert evicted(cache) == ""
        theirs.release()
        assert evicted(cache) == "ba"


def test_closing_a_worker_drops_its_leases(cache: RadixCache) -> None:
    store(cache, "ab", "c")
    with RadixCache.attach(cache.name) as other:
        other.lookup(tokens("ab"))
        other.insert(tokens("c"), [ord("c")])
        assert cache.stats().leases == 2
        assert evicted(cache) == ""
    assert cache.stats().leases == 0
    assert evicted(cache) == "bac"


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
