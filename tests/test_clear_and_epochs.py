"""Which lease an insert extends and a release drops, and that nothing older than a clear() comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shmradix import InsertAcquired, RadixCache, errors

CacheFactory = Callable[..., RadixCache]
PROMPT = list(range(16))  # four blocks of 4
TABLE = [0, 1, 2, 3]


@pytest.fixture
def cache(cache_factory: CacheFactory) -> RadixCache:
    return cache_factory(max_blocks=64, block_size=4)


@pytest.fixture
def other(cache: RadixCache) -> Iterator[RadixCache]:
    with RadixCache.attach(cache.name) as other:
        yield other


def store(cache: RadixCache, tokens: list[int], table: list[int]) -> None:
    cache.insert(tokens, table)
    cache.release(tokens)


def live_blocks(cache: RadixCache) -> list[int]:
    """The blocks of all live nodes, those of namespaces that a clear() hid, too."""
    nodes: Any = cache._segment.views.nodes[1 + cache._segment.geometry.max_namespaces :]
    return sorted(nodes["block"][nodes["born"] != 0].tolist())


def is_sound(cache: RadixCache) -> bool:
    return cache.verify() == [] and len(set(live_blocks(cache))) == len(live_blocks(cache))


def nothing(stored: InsertAcquired) -> bool:
    arrays = stored.blocks, stored.disk_block_ids, stored.duplicates, stored.duplicate_disk_block_ids
    return stored.inserted_tokens == 0 and not any(len(array) for array in arrays)


# --- insert(matched_tokens=)


@pytest.mark.parametrize("held", [1, 2, 3, 4])
@pytest.mark.parametrize("claimed", [1, 2, 3, 4])
def test_an_insert_extends_a_lease_of_just_as_many_blocks(cache: RadixCache, held: int, claimed: int) -> None:
    store(cache, PROMPT, TABLE)
    match = cache.lookup(PROMPT[: 4 * held])
    before = cache._segment.views.leases.copy()
    if held == claimed:
        assert cache.insert([*PROMPT, *PROMPT], [*TABLE, 4, 5, 6, 7], matched_tokens=4 * claimed).inserted_tokens == 32
        assert cache.stats().leases == 1
    else:
        with pytest.raises(errors.LeaseError, match=f"matched_tokens={4 * claimed}"):
            cache.insert([*PROMPT, *PROMPT], [*TABLE, 4, 5, 6, 7], matched_tokens=4 * claimed)
        assert cache.stats().blocks_live == 4
        assert np.array_equal(cache._segment.views.leases, before)
    match.release()
    assert cache.stats().leases == 0
    assert is_sound(cache)


def test_an_insert_leaves_the_leases_of_other_depths_alone(cache: RadixCache) -> None:
    store(cache, PROMPT, TABLE)
    matches = [cache.lookup(PROMPT[:length]) for length in (4, 8, 12)]
    assert cache.insert([*PROMPT, 9, 9, 9, 9], [*TABLE, 4], matched_tokens=8).inserted_tokens == 20
    matches[0].release()
    matches[2].release()
    assert cache.stats().leases == 1
    assert len(cache.evict(64)) == 0  # what is left covers all five
    matches[1].release()
    assert len(cache.evict(64)) == 5


def test_matched_tokens_beside_a_match_are_refused(cache: RadixCache) -> None:
    store(cache, PROMPT, TABLE)
    with cache.lookup(PROMPT[:8]) as match:
        for matched in (4, 8, 16):
            with pytest.raises(ValueError, match="matched_tokens="):
                cache.insert([*PROMPT, 9, 9, 9, 9], [*TABLE, 4], match=match, matched_tokens=matched)
        assert cache.stats().blocks_live == 4
        assert cache.insert(PROMPT, TABLE, match=match, matched_tokens=0).inserted_tokens == 16


# --- after clear()


@pytest.mark.parametrize("others_held", [0, 4, 8, 16])
@pytest.mark.parametrize("recomputed", [0, 1, 2, 4])
def test_matched_tokens_from_before_a_clear_never_bring_old_blocks_back(
    cache: RadixCache, other: RadixCache, recomputed: int, others_held: int
) -> None:
    store(cache, PROMPT, TABLE)
    old = cache.lookup(PROMPT)
    other.clear()
    if recomputed:
        store(cache, PROMPT[: 4 * recomputed], list(range(50, 50 + recomputed)))
    new = cache.lookup(PROMPT[:others_held]) if others_held else None
    stored = cache.insert(PROMPT, old.matched_blocks, matched_tokens=old.matched_tokens)
    assert stored.stale
    assert nothing(stored)
    assert other.lookup(PROMPT).matched_blocks.tolist() == list(range(50, 50 + recomputed))
    assert is_sound(cache)
    old.release()
    if new is not None:
        new.release()
    assert sorted(cache.evict(64).blocks.tolist()) == TABLE


@pytest.mark.parametrize("length", [16, 8, 4])
def test_a_match_from_before_a_clear_stores_nothing_and_says_so(
    cache: RadixCache, other: RadixCache, length: int
) -> None:
    store(cache, PROMPT[:length], TABLE[: length // 4])
    match = cache.lookup(PROMPT)
    fresh = cache.insert(PROMPT, TABLE, match=match)
    assert not fresh.stale
    other.clear()
    for _ in range(2):
        stored = cache.insert([*PROMPT, 9, 9, 9, 9], [*TABLE, 4], match=match)
        assert stored.stale
        assert nothing(stored)
    assert cache.peek_matched_tokens(PROMPT) == 0
    assert live_blocks(cache) == TABLE
    match.release()
    assert sorted(cache.evict(64).blocks.tolist()) == TABLE


def test_an_empty_match_from_before_a_clear_is_stale_and_a_later_one_is_not(
    cache: RadixCache, other: RadixCache
) -> None:
    before = cache.lookup(PROMPT)
    other.clear()
    after = cache.lookup(PROMPT)
    assert cache.insert(PROMPT, TABLE, match=before).stale
    assert cache.stats().blocks_live == cache.stats().leases == 0
    stored = cache.insert(PROMPT, TABLE, match=after)
    assert (stored.stale, stored.inserted_tokens) == (False, 16)
    after.release()
    before.release()
    assert cache.stats().leases == 0


def test_an_insert_that_finds_no_room_is_not_stale(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=2, block_size=4)
    cache.insert(PROMPT[:8], TABLE[:2])
    stored = cache.insert([9] * 4, [7])
    assert nothing(stored)
    assert not stored.stale


def test_a_release_after_a_clear_drops_the_new_lease_first(cache: RadixCache, other: RadixCache) -> None:
    store(cache, PROMPT, TABLE)
    old = cache.lookup(PROMPT)
    other.clear()
    cache.insert(PROMPT[:4], [50])
    cache.release(PROMPT)
    assert cache.evict(64).blocks.tolist() == [50]
    old.release()
    assert sorted(cache.evict(64).blocks.tolist()) == TABLE


# --- partial leases

FIRST, SECOND = [1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 9, 9, 9]


@pytest.fixture
def siblings(cache: RadixCache) -> RadixCache:
    """Two prompts that part inside their second block."""
    store(cache, FIRST, [0, 1])
    store(cache, SECOND, [0, 2])
    return cache


RELEASES: dict[str, Callable[[RadixCache, list[int]], None]] = {
    "release": lambda cache, tokens: cache.release(tokens),
    "release_matched": lambda cache, tokens: cache.release_matched(tokens, 4),
}


@pytest.mark.parametrize("how", RELEASES)
@pytest.mark.parametrize("length", [6, 7])
@pytest.mark.parametrize("first_is_younger", [False, True])
def test_a_release_does_not_unpin_another_requests_partial_block(
    siblings: RadixCache, how: str, length: int, first_is_younger: bool
) -> None:
    if first_is_younger:
        theirs = siblings.lookup(SECOND[:length])
        ours = siblings.lookup(FIRST[:length])
    else:
        ours = siblings.lookup(FIRST[:length])
        theirs = siblings.lookup(SECOND[:length])
    assert (ours.partial_block, theirs.partial_block) == (1, 2)
    RELEASES[how](siblings, FIRST[:length])
    assert siblings.evict(64).blocks.tolist() == [1]
    theirs.release()
    assert sorted(siblings.evict(64).blocks.tolist()) == [0, 2]
    with pytest.raises(errors.LeaseError):
        ours.release()


@pytest.mark.parametrize("how", RELEASES)
@pytest.mark.parametrize("tokens", [SECOND[:6], [1, 2, 3, 4, 5, 7], [1, 2, 3, 4, 7], [1, 2, 3, 4]])
def test_a_release_finds_no_lease_whose_partial_block_its_prompt_does_not_share(
    siblings: RadixCache, how: str, tokens: list[int]
) -> None:
    match = siblings.lookup(FIRST[:6])
    with pytest.raises(errors.LeaseError):
        RELEASES[how](siblings, tokens)
    assert siblings.evict(64).blocks.tolist() == [2]
    match.release()


def test_a_release_prefers_the_lease_that_shares_the_partial_block(siblings: RadixCache) -> None:
    partial = siblings.lookup(FIRST[:7])
    whole = siblings.lookup(FIRST[:4])  # younger, as deep, pins the same block above
    assert (partial.partial_block, whole.partial_block) == (1, None)
    siblings.release(FIRST[:7])
    whole.release()
    with pytest.raises(errors.LeaseError):
        partial.release()


@pytest.mark.parametrize("match_is_younger", [False, True])
@pytest.mark.parametrize("length", [4, 7], ids=["no partial block", "a partial block"])
def test_a_release_by_tokens_spares_an_open_match(siblings: RadixCache, length: int, match_is_younger: bool) -> None:
    """An insert without a match takes a lease just as deep; whichever came first, the release drops that one."""
    if match_is_younger:
        siblings.insert(FIRST[:4], [0])
        match = siblings.lookup(FIRST[:length])
    else:
        match = siblings.lookup(FIRST[:length])
        siblings.insert(FIRST[:4], [0])
    siblings.release(FIRST[:length])
    pinned = [0] if match.partial_block is None else [0, match.partial_block]
    assert sorted(siblings.evict(64).blocks.tolist()) == sorted({0, 1, 2} - set(pinned))
    match.release()
    assert siblings.stats().leases == 0


@pytest.mark.parametrize("lookup_is_younger", [False, True])
def test_undoing_a_lookup_spares_what_an_insert_by_tokens_holds(siblings: RadixCache, lookup_is_younger: bool) -> None:
    steps: list[Callable[[], object]] = [lambda: siblings.insert(FIRST[:4], [0]), lambda: siblings.lookup(FIRST[:4])]
    for step in steps if lookup_is_younger else steps[::-1]:
        step()
    open_match = siblings.lookup(FIRST[:7])
    siblings.release_matched(FIRST[:4], 4)
    siblings.release(FIRST[:7])
    open_match.release()
    assert siblings.stats().leases == 0


def test_an_insert_of_one_request_leaves_anothers_partial_block_pinned(siblings: RadixCache) -> None:
    theirs = siblings.lookup(SECOND[:7])
    ours = siblings.lookup([*FIRST[:7], 0])
    siblings.insert([*FIRST[:7], 0], [0, 3], matched_tokens=4)
    ours.release()
    assert sorted(siblings.evict(64).blocks.tolist()) == [1, 3]
    theirs.release()
