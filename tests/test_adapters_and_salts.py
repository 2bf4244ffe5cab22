"""What belongs to a block's identity besides its tokens: adapter, tenant salt, block key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shmradix import RadixCache
from tests.model import segment_image

CacheFactory = Callable[..., RadixCache]
Identity = dict[str, Any]

PROMPT = list(range(8))  # two blocks of 4

SPACES: dict[str, Identity] = {
    "base": {},
    "adapter_1": {"adapter_id": 1},
    "adapter_2": {"adapter_id": 2},
    "largest_adapter": {"adapter_id": 2**64 - 1},
    "salt_a": {"salt": b"a"},
    "salt_b": {"salt": b"b"},
    "salt_with_zero": {"salt": b"a\0"},
    "one_zero_byte": {"salt": b"\0"},
    "long_salt": {"salt": b"a" * 5000},
    "adapter_and_salt": {"adapter_id": 1, "salt": b"a"},
    "other_adapter_same_salt": {"adapter_id": 2, "salt": b"a"},
}


@pytest.fixture
def cache(cache_factory: CacheFactory) -> RadixCache:
    return cache_factory(max_blocks=64, block_size=4, max_namespaces=16)


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_only_the_same_adapter_and_salt_hit(space: Identity, cache: RadixCache) -> None:
    cache.insert(PROMPT, [10, 20], **space)
    for other in SPACES.values():
        expected = [10, 20] if other == space else []
        match = cache.lookup(PROMPT, **other)
        assert match.matched_blocks.tolist() == expected
        assert match.partial_block is None
        assert cache.peek_matched_tokens(PROMPT, **other) == 4 * len(expected)


def test_every_adapter_and_salt_keeps_its_own_blocks(cache: RadixCache) -> None:
    for number, space in enumerate(SPACES.values()):
        got = cache.insert(PROMPT, [10 * number, 10 * number + 1], **space)
        assert (len(got.blocks), len(got.duplicates)) == (2, 0)
    for number, space in enumerate(SPACES.values()):
        with cache.lookup(PROMPT, **space) as match:
            assert match.matched_blocks.tolist() == [10 * number, 10 * number + 1]
    assert cache.stats().namespaces == len(SPACES)


def test_an_adapter_id_is_not_a_token(cache: RadixCache) -> None:
    cache.insert([1, 2, 3, 4], [10], adapter_id=5)
    assert cache.peek_matched_tokens([5, 1, 2, 3, 4]) == 0
    cache.insert([5, 1, 2, 3, 4], [20])
    assert cache.lookup([1, 2, 3, 4], adapter_id=5).matched_blocks.tolist() == [10]
    assert cache.lookup([5, 1, 2, 3, 4]).matched_blocks.tolist() == [20]


def test_partial_blocks_are_not_reported_across_salts(cache: RadixCache) -> None:
    cache.insert(PROMPT, [10, 20], salt=b"a")
    assert cache.lookup(PROMPT[:6], salt=b"a").partial_block == 20
    assert cache.lookup(PROMPT[:6], salt=b"b").partial_block is None
    assert cache.lookup(PROMPT[:3]).partial_block is None


def test_a_lease_of_one_salt_is_not_released_by_another(cache: RadixCache) -> None:
    cache.insert(PROMPT, [10, 20], salt=b"a")
    cache.insert(PROMPT, [11, 21], salt=b"b")
    cache.release(PROMPT, salt=b"b")
    assert cache.evict(9).blocks.tolist() == [21, 11]
    cache.release(PROMPT, salt=b"a")
    assert cache.evict(9).blocks.tolist() == [20, 10]


def test_eviction_is_one_order_over_all_salts(cache: RadixCache) -> None:
    for number, space in enumerate(SPACES.values()):
        cache.insert(PROMPT[:4], [number], **space)
        cache.release(PROMPT[:4], **space)
    cache.lookup(PROMPT[:4], **SPACES["base"]).release()
    assert cache.evict(99).blocks.tolist() == [*range(1, len(SPACES)), 0]


def test_a_namespace_is_freed_with_its_last_block(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=8, block_size=4, max_namespaces=1)
    for round_number in range(5):
        salt = bytes([1 + round_number])
        cache.insert(PROMPT, [10, 20], salt=salt)
        cache.release(PROMPT, salt=salt)
        assert cache.evict(1).blocks.tolist() == [20]
        assert cache.stats().namespaces == 1
        assert cache.peek_matched_tokens(PROMPT, salt=salt) == 4
        assert cache.evict(1).blocks.tolist() == [10]
        assert cache.stats().namespaces == 0
        assert cache.peek_matched_tokens(PROMPT, salt=salt) == 0


def test_reading_makes_no_namespace(cache: RadixCache) -> None:
    for adapter in range(100):
        cache.lookup(PROMPT, adapter_id=adapter)
        cache.peek_matched_tokens(PROMPT, adapter_id=adapter)
    assert cache.stats().namespaces == 0


def test_an_insert_of_less_than_a_block_makes_no_namespace(cache: RadixCache) -> None:
    cache.insert([1, 2, 3], [], salt=b"a")
    assert cache.stats().namespaces == 0


def test_a_match_brings_its_own_salt_and_keys_its_blocks_there(cache: RadixCache) -> None:
    cache.insert(PROMPT[:4], [10], adapter_id=3, salt=b"a")
    with cache.lookup(PROMPT, adapter_id=3, salt=b"a") as match:
        cache.insert(PROMPT, [10, 20], match=match)
    assert cache.peek_matched_tokens(PROMPT, adapter_id=3, salt=b"a") == 8
    assert cache.peek_matched_tokens(PROMPT) == 0


KEYS = {
    "no_keys": None,
    "zeros": [0, 0],
    "first": [7, 0],
    "second": [0, 7],
    "both": [7, 7],
    "large": [2**64 - 1, 7],
}


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
def test_block_keys_are_part_of_a_blocks_identity(keys: list[int] | None, cache: RadixCache) -> None:
    cache.insert(PROMPT, [10, 20], block_keys=keys)
    stored = keys or [0, 0]
    for asked_or_none in KEYS.values():
        asked = asked_or_none or [0, 0]
        same = 2 if asked == stored else 1 if asked[0] == stored[0] else 0
        assert cache.peek_matched_tokens(PROMPT, block_keys=asked_or_none) == 4 * same
        with cache.lookup(PROMPT, block_keys=asked_or_none) as match:
            assert match.matched_blocks.tolist() == [10, 20][:same]


def test_two_pictures_behind_the_same_placeholders_keep_apart(cache: RadixCache) -> None:
    placeholders = [1, 2, 3, 4, 99, 99, 99, 99]
    cache.insert(placeholders, [10, 20], block_keys=[0, 0xCA7])
    got = cache.insert(placeholders, [10, 30], block_keys=[0, 0xD06])
    assert (got.blocks.tolist(), got.duplicates.tolist()) == ([30], [])
    assert cache.lookup(placeholders, block_keys=[0, 0xCA7]).matched_blocks.tolist() == [10, 20]
    assert cache.lookup(placeholders, block_keys=[0, 0xD06]).matched_blocks.tolist() == [10, 30]


def test_only_a_child_with_the_same_key_is_reported_as_partial(cache: RadixCache) -> None:
    cache.insert(PROMPT, [10, 20], block_keys=[0, 5])
    cache.insert([0, 1, 2, 3, 4, 8, 8, 8], [10, 30], block_keys=[0, 6])
    assert cache.lookup(PROMPT[:7], block_keys=[0, 5]).partial_block == 20
    other = cache.lookup(PROMPT[:7], block_keys=[0, 6])
    assert (other.partial_block, other.partial_tokens) == (30, 1)
    assert cache.lookup(PROMPT[:7], block_keys=[0, 9]).partial_block is None
    assert cache.lookup(PROMPT[:7], block_keys=[0]).partial_block is None
    assert cache.lookup(PROMPT, block_keys=[0, 9]).partial_block is None


def test_a_release_needs_the_keys_of_its_lease(cache: RadixCache) -> None:
    cache.insert(PROMPT, [10, 20], block_keys=[1, 2])
    cache.insert(PROMPT, [30, 40], block_keys=[3, 4])
    cache.release(PROMPT, block_keys=[3, 4])
    assert cache.evict(9).blocks.tolist() == [40, 30]
    cache.release_matched(PROMPT, 8, block_keys=[1, 2])
    assert cache.evict(9).blocks.tolist() == [20, 10]


def test_clear_hides_every_adapter_and_salt(cache: RadixCache) -> None:
    for number, space in enumerate(SPACES.values()):
        cache.insert(PROMPT[:4], [number], **space)
        cache.release(PROMPT[:4], **space)
    assert sorted(cache.clear().blocks.tolist()) == list(range(len(SPACES)))
    assert all(cache.peek_matched_tokens(PROMPT[:4], **space) == 0 for space in SPACES.values())
    assert cache.stats().namespaces == 0
    assert segment_image(cache) == []


def forge_hashes(cache: RadixCache, hashes: dict[int, int]) -> None:
    """Give nodes other hashes and index them anew, as if theirs had collided with another block's."""
    nodes, buckets = cache._segment.views.nodes, cache._segment.views.buckets
    buckets[:] = 0
    for node, number in hashes.items():
        bucket = number & (len(buckets) - 1)
        nodes["hash"][node], nodes["hash_next"][node] = number, buckets[bucket]
        buckets[bucket] = node


OTHER_BLOCKS: dict[str, tuple[list[int], list[int] | None]] = {
    "first_token": ([9, 1, 2, 3], None),
    "last_token": ([0, 1, 2, 9], None),
    "swapped_tokens": ([1, 0, 2, 3], None),
    "block_key": ([0, 1, 2, 3], [7]),
}


@pytest.mark.parametrize(("tokens", "keys"), OTHER_BLOCKS.values(), ids=OTHER_BLOCKS)
def test_an_equal_hash_is_not_an_equal_block(tokens: list[int], keys: list[int] | None, cache: RadixCache) -> None:
    """Store one block under the hash of another: the other must not be found, until it really is the other."""
    views = cache._segment.views
    cache.insert([0, 1, 2, 3], [10])
    cache.insert(tokens, [20], block_keys=keys)
    cache.release(tokens, block_keys=keys)
    mine, other = (int(index) for number in (10, 20) for index in np.flatnonzero(views.nodes["block"] == number))
    root, hash_of = int(views.nodes["parent"][mine]), views.nodes["hash"].tolist()
    assert cache.evict(1).blocks.tolist() == [20]
    forge_hashes(cache, {root: hash_of[root], mine: hash_of[other]})
    assert cache.peek_matched_tokens(tokens, block_keys=keys) == 0
    views.tokens[mine] = tokens
    views.nodes["block_key"][mine] = keys[0] if keys else 0
    assert cache.peek_matched_tokens(tokens, block_keys=keys) == 4


@pytest.mark.parametrize(
    "space", [{"adapter_id": 2, "salt": b"a"}, {"adapter_id": 1, "salt": b"b"}], ids=["adapter", "salt"]
)
def test_an_equal_hash_is_not_an_equal_namespace(space: Identity, cache: RadixCache) -> None:
    views = cache._segment.views
    cache.insert(PROMPT[:4], [10], adapter_id=1, salt=b"a")
    cache.insert(PROMPT[:4], [20], **space)
    cache.release(PROMPT[:4], **space)
    mine, other = (int(index) for number in (10, 20) for index in np.flatnonzero(views.nodes["block"] == number))
    root, other_root = views.nodes["parent"][[mine, other]].tolist()
    hash_of, identity = views.nodes["hash"].tolist(), views.namespaces[other_root].copy()
    assert cache.evict(1).blocks.tolist() == [20]
    forge_hashes(cache, {root: hash_of[other_root], mine: hash_of[mine]})
    assert cache.lookup(PROMPT[:3], **space).partial_block is None
    views.namespaces[root] = identity
    assert cache.lookup(PROMPT[:3], **space).partial_block == 10
