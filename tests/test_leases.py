"""Leases: what they pin, how they are extended and released, who may do it."""

from __future__ import annotations

from collections.abc import Callable

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
    return cache_factory(max_blocks=64, block_size=2)


def tokens(prompt: str) -> list[int]:
    """Each letter is one block of two tokens; its block id is the letter's code."""
    return [ord(letter) for letter in prompt for _ in range(2)]


def store(cache: RadixCache, *prompts: str) -> None:
    for prompt in prompts:
        cache.insert(tokens(prompt), [ord(letter) for letter in prompt])
        cache.release(tokens(prompt))


def evicted(cache: RadixCache) -> str:
    return "".join(map(chr, cache.evict(99).blocks.tolist()))


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


@pytest.mark.parametrize(
    "call",
    [
        lambda worker: worker.release(tokens("ab")),
        lambda worker: worker.release_matched(tokens("ab"), 4),
        lambda worker: worker.insert(tokens("abc"), [97, 98, 99], matched_tokens=4),
    ],
    ids=["release", "release_matched", "extend"],
)
def test_a_lease_is_its_own_workers_only(call: Callable[[RadixCache], object], cache: RadixCache) -> None:
    cache.insert(tokens("ab"), [97, 98])
    with RadixCache.attach(cache.name) as other:
        before = all_stats(cache), segment_image(cache)
        with pytest.raises(errors.LeaseError):
            call(other)
        assert (all_stats(cache), segment_image(cache)) == before
    assert evicted(cache) == ""
    call(cache)


def test_a_release_drops_the_youngest_of_several_at_one_depth(cache: RadixCache) -> None:
    store(cache, "ab")
    first, second = cache.lookup(tokens("ab")), cache.lookup(tokens("ab"))
    cache.release(tokens("ab"))
    with pytest.raises(errors.LeaseError):
        second.release()
    first.release()
    assert cache.stats().leases == 0


def test_a_match_whose_lease_was_released_can_not_be_extended(cache: RadixCache) -> None:
    store(cache, "ab")
    match = cache.lookup(tokens("ab"))
    cache.release(tokens("ab"))
    with pytest.raises(errors.LeaseError):
        cache.insert(tokens("abc"), [97, 98, 99], match=match)
    assert cache.stats().blocks_live == 2


def test_leaving_a_match_releases_it_also_after_an_error(cache: RadixCache) -> None:
    store(cache, "ab")
    match = cache.lookup(tokens("ab"))
    with pytest.raises(RuntimeError, match="prefill failed"), match:
        raise RuntimeError("prefill failed")
    assert match.released
    assert cache.stats().leases == 0


def test_an_insert_through_a_match_moves_its_one_lease(cache: RadixCache) -> None:
    store(cache, "a")
    with cache.lookup(tokens("abcd")) as match:
        for length in range(2, 5):
            prompt = "abcd"[:length]
            cache.insert(tokens(prompt), [ord(letter) for letter in prompt], match=match)
            assert (cache.stats().leases, cache.stats().blocks_leased) == (1, length)
        assert evicted(cache) == ""
    assert evicted(cache) == "dcba"
