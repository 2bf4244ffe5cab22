"""What a lookup says about saved states, what names a prefix, bad arguments, statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shmradix import RadixCache, errors
from shmradix.results import Drop, Spill
from tests.conftest import fresh_name, remove_all
from tests.snapshot_steps import CacheFactory, anchor, cache_with, save_as

Call = Callable[[RadixCache], Any]


def test_why_there_is_no_snapshot(cache_factory: CacheFactory) -> None:
    """Of several reasons the last one of: none, too deep, another session, pending."""
    cache = cache_with(cache_factory)
    seen = []

    def look(**args: Any) -> None:
        with cache.lookup(range(64), session=1, **args) as match:
            assert (match.snapshot_slot, match.snapshot_tokens, match.snapshot_tier_key) == (None, 0, None)
            seen.append(match.no_snapshot)

    look()
    cache.insert_intermediate_snapshot(range(48), 1)
    look(max_snapshot_tokens=47)
    cache.insert_tail_snapshot(range(16), 2, session=2)
    look(max_snapshot_tokens=47)
    with cache.reserve_snapshot(range(32), 3):
        look(max_snapshot_tokens=47)
    look(max_snapshot_tokens=47)
    assert seen == ["none", "too deep", "another session", "pending", "another session"]
    stats = cache.stats()
    reasons = stats.no_snapshot, stats.snapshot_too_deep, stats.snapshot_of_another_session, stats.snapshot_pending
    assert reasons == (1, 1, 2, 1)
    assert (stats.snapshot_lookups, stats.snapshot_hits) == (5, 0)
    assert stats.recompute_tokens_on_miss == 64 + 4 * 47


def test_a_usable_snapshot_is_named_whatever_else_there_is(cache_factory: CacheFactory) -> None:
    cache = cache_with(cache_factory)
    cache.insert_intermediate_snapshot(range(16), 1)
    cache.insert_tail_snapshot(range(64), 2, session=2)
    with cache.reserve_snapshot(range(48), 3), cache.lookup(range(64), session=1) as match:
        assert (match.snapshot_slot, match.snapshot_tokens, match.no_snapshot) == (1, 16, "")
    assert cache.stats().snapshot_of_another_session == 0


@pytest.mark.parametrize("depth", [1, 15, 16, 17, 31, 32, 63, 64])
def test_required_snapshots_cut_the_match_to_their_blocks(depth: int, cache_factory: CacheFactory) -> None:
    """Rounded up: the block that a state lies in is needed up to there."""
    cache = cache_with(cache_factory)
    cache.insert_intermediate_snapshot(range(depth), 5)
    blocks = -(-depth // 16)
    with cache.lookup(range(64), require_snapshot=True) as match:
        assert (match.snapshot_slot, match.snapshot_tokens) == (5, depth)
        assert (match.matched_tokens, match.matched_blocks.tolist()) == (blocks * 16, list(range(blocks)))
        assert len(cache.evict(64)) == 4 - blocks  # the lease holds no more than that
    stats = cache.stats()
    assert (stats.hits, stats.hit_tokens, stats.snapshot_hit_tokens) == (1, blocks * 16, depth)
    assert len(cache.evict(64)) == blocks


def test_required_and_not_there(cache_factory: CacheFactory) -> None:
    cache = cache_with(cache_factory)
    cache.insert_intermediate_snapshot(range(48), 5)
    for tokens in (range(32), range(100, 164)):
        with cache.lookup(tokens, require_snapshot=True) as match:
            assert (match.matched_tokens, match.matched_blocks.tolist(), match.snapshot_slot) == (0, [], None)
            assert not match
            assert cache.stats().leases == 0
    stats = cache.stats()
    assert (stats.lookups, stats.hits, stats.hit_tokens) == (2, 0, 0)
    with cache.lookup(range(32), require_snapshot=True) as match:  # an empty match can be extended
        assert cache.insert(range(32), [0, 1], match=match).inserted_tokens == 32
        assert len(cache.evict(64)) == 2


def test_required_and_spilled(cache_factory: CacheFactory) -> None:
    cache = cache_with(cache_factory)
    cache.insert_intermediate_snapshot(range(32), 5)
    spilled = cache.evict_snapshot_to_tier()
    assert isinstance(spilled, Spill)
    with cache.lookup(range(64), require_snapshot=True) as match:
        assert (match.matched_tokens, match.snapshot_tier_key, match.snapshot_tier_tokens) == (32, spilled.key, 32)


def test_a_cut_match_has_no_partial_block_and_an_uncut_one_keeps_its_own(cache_factory: CacheFactory) -> None:
    cache = cache_with(cache_factory)
    cache.insert_intermediate_snapshot(range(32), 5)
    with cache.lookup(range(40), require_snapshot=True) as match:
        assert (match.matched_tokens, match.partial_block, match.partial_tokens) == (32, 2, 8)
        assert cache.evict(64).blocks.tolist() == [3]  # the other is pinned, to be copied from
    cache.insert_intermediate_snapshot(range(16), 6)
    with cache.lookup(range(40), require_snapshot=True, max_snapshot_tokens=31) as match:
        assert (match.matched_tokens, match.partial_block, match.partial_tokens) == (16, None, 0)
        assert cache.evict(64).blocks.tolist() == [2, 1]


def test_a_partial_match_alone_is_none_where_a_snapshot_is_required(cache_factory: CacheFactory) -> None:
    cache = cache_with(cache_factory)
    with cache.lookup(range(10)) as match:
        assert (match.matched_tokens, match.partial_block, match.partial_tokens) == (0, 0, 10)
    with cache.lookup(range(10), require_snapshot=True) as match:
        assert (match.matched_tokens, match.partial_block, match.partial_tokens) == (0, None, 0)
        assert len(cache.evict(64)) == 4
    stats = cache.stats()
    assert (stats.lookups, stats.hits, stats.hit_tokens, stats.leases) == (2, 0, 0, 0)


def test_restorable_names_every_depth_that_may_be_resumed_from_now(cache_factory: CacheFactory) -> None:
    cache = cache_with(cache_factory)
    for slot, depth in enumerate((16, 40, 64)):
        cache.insert_intermediate_snapshot(range(depth), slot, session=9)
    cache.insert_intermediate_snapshot([*range(24), *range(900, 908)], 3)
    cache.insert_tail_snapshot(range(48), 4, session=1)
    cache.insert_intermediate_snapshot(range(20), 5, adapter_id=1)
    with cache.lookup(range(64), session=1) as match:
        assert match.restorable == [16, 40, 48, 64]
        with cache.reserve_snapshot(range(30), 6) as pending:
            assert match.restorable == [16, 40, 48, 64]
            pending.commit()
        assert match.restorable == [16, 30, 40, 48, 64]
    with cache.lookup([*range(48), 7], session=2) as match:
        assert match.restorable == [16, 30, 40]
    with cache.lookup(range(64), session=9, hermetic=True) as match:
        assert match.restorable == [16, 40, 64]
    with cache.lookup(range(64), max_snapshot_tokens=20) as match:
        assert match.restorable == [16, 30, 40, 64]  # within what matched, whatever the limit
    with cache.lookup(range(64), max_snapshot_tokens=20, require_snapshot=True) as match:
        assert match.restorable == [16]


def test_restorable_refuses_to_speak_of_another_prompt(cache_factory: CacheFactory) -> None:
    cache, prompt = cache_with(cache_factory), np.arange(64, dtype=np.uint32)
    cache.insert_intermediate_snapshot(prompt, 1)
    with cache.lookup(prompt) as match, cache.lookup(prompt.tolist()) as of_a_list:
        assert match.restorable == [64]
        prompt += 1  # the caller's own buffer
        with pytest.raises(ValueError, match="were changed since its lookup"):
            _ = match.restorable
        assert of_a_list.restorable == [64]


def test_a_check_that_agrees_is_not_the_same_prompt(cache_factory: CacheFactory) -> None:
    """Prompts that differ only where the check does not look: the hash tells them apart."""
    cache = cache_with(cache_factory, block_size=1)
    other = [*range(64)]
    other[1] = 999  # of 64 tokens the check looks at every fourth and at the last ones
    cache.insert(other, [0, *range(100, 163)])
    cache.insert_intermediate_snapshot(other, 1)
    cache.insert_intermediate_snapshot(range(32), 2)
    checks = {int(check) for check in cache._segment.views.snapshots["check"][1:3]}
    cache.insert_intermediate_snapshot(range(64), 3)
    assert int(cache._segment.views.snapshots["check"][3]) in checks
    assert anchor(cache, other) == (1, 64)
    assert anchor(cache, range(64)) == (3, 64)
    assert cache.insert_intermediate_snapshot(range(63), 4) == []
    assert [cache.evict_snapshot_lru() for _ in range(2)] == [2, 1]
    assert anchor(cache, other) == (None, 0)


# --- what names a prefix --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["prefix_hash", "salt", "adapter_id", "token_count", "check", "epoch"])
def test_every_part_of_a_name_counts(field: str, cache_factory: CacheFactory) -> None:
    """A forged record whose name differs in one bit, wherever, is not found."""
    cache = cache_with(cache_factory)
    cache.insert_intermediate_snapshot(range(32), 1)
    records = cache._segment.views.snapshots.view()
    words = np.atleast_1d(records[field][1])
    for at in range(len(words)):
        place = records[field][1:2] if words.size == 1 else records[field][1, at : at + 1]
        place ^= place.dtype.type(1)
        assert anchor(cache, range(64)) == (None, 0), (field, at)
        place ^= place.dtype.type(1)
    assert anchor(cache, range(64)) == (1, 32)


def test_block_keys_are_part_of_a_prefix(cache_factory: CacheFactory) -> None:
    """The same placeholders for several pictures."""
    cache = cache_factory(max_blocks=64, block_size=16, max_snapshots=16)
    tokens, cat, dog = [151655] * 40, [7, 7, 7], [7, 8, 8]
    longer = [*tokens, *tokens[:8]]
    for first, keys in ((0, cat), (10, dog), (20, None)):
        cache.insert(longer, [first, first + 1, first + 2], block_keys=keys)
    cache.insert_intermediate_snapshot(tokens, 1, block_keys=cat)
    cache.insert_intermediate_snapshot(tokens, 2, block_keys=dog)
    cache.insert_intermediate_snapshot(tokens[:16], 3, block_keys=[7])
    assert cache.snapshot_count() == 3
    assert anchor(cache, longer, block_keys=cat) == (1, 40)
    assert anchor(cache, longer, block_keys=dog) == (2, 40)
    assert anchor(cache, longer, block_keys=[7, 9, 9]) == (3, 16)
    assert anchor(cache, longer) == (None, 0)
    assert cache.insert_intermediate_snapshot(tokens, 4, block_keys=dog) == [2]


def test_a_picture_in_the_partly_filled_block_tells_prefixes_apart(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=64, block_size=16, max_snapshots=16)
    tokens = list(range(24))
    cache.insert_intermediate_snapshot(tokens, 1, block_keys=[0, 5])
    cache.insert_intermediate_snapshot(tokens, 2, block_keys=[0, 6])
    cache.insert_intermediate_snapshot(tokens, 3, block_keys=[0])  # no key: as one of 0
    assert cache.insert_intermediate_snapshot(tokens, 4, block_keys=[0, 0]) == [3]
    assert cache.insert_intermediate_snapshot(tokens, 5) == [4]
    longer = [*tokens, *range(100, 108)]
    for first, key in ((0, 5), (10, 6), (20, 0)):
        cache.insert(longer, [first, first + 1], block_keys=[0, key])
    assert [anchor(cache, longer, block_keys=[0, key]) for key in (5, 6, 0)] == [(1, 24), (2, 24), (5, 24)]
    assert anchor(cache, tokens, block_keys=[0, 5]) == (None, 0)  # a block matched, nothing is as short


def test_a_prefix_is_all_its_tokens(cache_factory: CacheFactory) -> None:
    """Any other token anywhere is another prefix."""
    cache = cache_with(cache_factory, block_size=1, max_blocks=512)
    cache.insert_intermediate_snapshot(range(64), 0)
    for at in (0, 1, 17, 62, 63):
        tokens = list(range(64))
        tokens[at] += 1 << 20
        cache.insert(tokens, range(1000 + 64 * at, 1064 + 64 * at))
        assert anchor(cache, tokens) == (None, 0)
    assert anchor(cache, np.arange(64, dtype=np.uint32)) == (0, 64)
    assert anchor(cache, np.arange(128, dtype=np.int64)[:64:1]) == (0, 64)


# --- bad arguments --------------------------------------------------------------------------------------------------

BIG = 2**64
BAD: dict[str, tuple[type[Exception], str, Call]] = {
    "no tokens": (ValueError, "tokens is empty", lambda cache: cache.insert_intermediate_snapshot([], 5)),
    "a negative token": (ValueError, "-1", lambda cache: cache.insert_intermediate_snapshot([1, -1], 5)),
    "no integers": (TypeError, "0.5", lambda cache: cache.insert_tail_snapshot([0.5], 5, 7)),
    "a negative slot": (ValueError, "slot=-1", lambda cache: cache.insert_intermediate_snapshot([1], -1)),
    "a slot too large": (ValueError, f"slot={2**32}", lambda cache: cache.insert_intermediate_snapshot([1], 2**32)),
    "no slot": (TypeError, "slot=None", lambda cache: cache.insert_intermediate_snapshot([1], None)),  # type: ignore
    "a slot in the index": (errors.SlotError, "slot 1 ", lambda cache: cache.insert_intermediate_snapshot([1], 1)),
    "its very own slot": (errors.SlotError, "slot 1 ", lambda cache: cache.insert_intermediate_snapshot(range(16), 1)),
    "a pending slot": (errors.SlotError, "slot 2 ", lambda cache: cache.insert_with_snapshot(range(32), [0, 1], 2)),
    "a negative session": (ValueError, "session=-1", lambda cache: cache.insert_tail_snapshot([1], 5, -1)),
    "a session too large": (ValueError, f"session={BIG}", lambda cache: cache.insert_tail_snapshot([1], 5, BIG)),
    "a tail of no session": (ValueError, "session=0", lambda cache: cache.insert_tail_snapshot([1], 5, 0)),
    "a sibling of no session": (ValueError, "session=0", lambda cache: cache.insert_tail_sibling_snapshot([1], 5, 0)),
    "no such kind": (ValueError, "kind='head'", lambda cache: cache.reserve_snapshot([1], 5, kind="head")),
    "a tail of none": (ValueError, "session=0", lambda cache: cache.reserve_snapshot([1], 5, kind="tail")),
    "too many keys": (ValueError, "block_keys", lambda cache: cache.reserve_snapshot([1], 5, block_keys=[1, 2])),
    "an empty salt": (ValueError, "salt", lambda cache: cache.insert_intermediate_snapshot([1], 5, salt=b"")),
    "no such argument": (TypeError, "slat", lambda cache: cache.insert_intermediate_snapshot([1], 5, slat=b"")),
    "a match that is none": (TypeError, "match=7", lambda cache: cache.insert_intermediate_snapshot([1], 5, match=7)),
    "a promotion's match": (TypeError, "match=7", lambda cache: cache.promote_snapshot(5, 6, match=7)),
    "a lookup's session": (ValueError, "session=-1", lambda cache: cache.lookup(range(64), session=-1)),
    "a lookup's large session": (ValueError, f"session={BIG}", lambda cache: cache.lookup(range(64), session=BIG)),
    "a lookup's limit": (ValueError, "tokens=-1", lambda cache: cache.lookup(range(64), max_snapshot_tokens=-1)),
    "a lookup's odd limit": (TypeError, "tokens=1.5", lambda cache: cache.lookup([9], max_snapshot_tokens=1.5)),  # type: ignore
    "a negative minimum": (ValueError, "min_tokens=-1", lambda cache: cache.evict_snapshot_to_tier(-1)),
    "a negative key": (ValueError, "key=-1", lambda cache: cache.forget_snapshot_tier_key(-1)),
    "a key too large": (ValueError, f"key={BIG}", lambda cache: cache.promote_snapshot(BIG, 5)),
    "a commit's key": (ValueError, f"key={BIG}", lambda cache: cache.commit_snapshot_spill(BIG)),
    "a promotion's slot": (ValueError, "slot=-1", lambda cache: cache.promote_snapshot(5, -1)),
    "no slots managed": (ValueError, "snapshot_slots", lambda cache: cache.allocate_snapshot_slot()),
    "no slots to free": (ValueError, "snapshot_slots", lambda cache: cache.free_snapshot_slot(1)),
}


@pytest.mark.parametrize(("error", "what", "call"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_change_nothing(
    error: type[Exception], what: str, call: Call, cache_factory: CacheFactory
) -> None:
    cache = cache_with(cache_factory)
    cache.insert_tail_snapshot(range(16), 1, 7)
    with cache.reserve_snapshot(range(32), 2):
        before = cache._segment.views
        image = [array.tobytes() for array in before if array is not before.guards]
        with pytest.raises(error, match=what):
            call(cache)
        assert [array.tobytes() for array in before if array is not before.guards] == image


def test_a_promotion_into_a_slot_that_is_in_use(cache_factory: CacheFactory) -> None:
    cache = cache_with(cache_factory)
    cache.insert_intermediate_snapshot(range(16), 1)
    spilled = cache.evict_snapshot_to_tier()
    assert isinstance(spilled, Spill)
    cache.insert_intermediate_snapshot(range(32), 2)
    with pytest.raises(errors.SlotError, match="slot 2 "):
        cache.promote_snapshot(spilled.key, 2)
    assert cache.promote_snapshot(spilled.key, 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda cache: cache.insert_intermediate_snapshot(range(16), 1),
        lambda cache: cache.insert_with_snapshot(range(16), [1], 1),
        lambda cache: cache.reserve_snapshot(range(16), 1),
        lambda cache: cache.evict_snapshot_lru(),
        lambda cache: cache.evict_snapshot_to_tier(),
        lambda cache: cache.promote_snapshot(1, 1),
        lambda cache: cache.forget_snapshot_tier_key(1),
        lambda cache: cache.lookup(range(16), require_snapshot=True),
        lambda cache: cache.lookup(range(900, 916), require_snapshot=True),
    ],
)
def test_without_an_index(call: Call, cache_factory: CacheFactory) -> None:
    cache = cache_with(cache_factory, max_snapshots=0)
    before = cache.stats()
    with pytest.raises(ValueError, match="max_snapshots"):
        call(cache)
    assert cache.stats() == before
    assert cache.snapshot_count() == 0
    with cache.lookup(range(64), session=3) as match:
        assert (match.snapshot_slot, match.no_snapshot, match.restorable) == (None, "none", [])


GEOMETRY: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ValueError, "max_snapshots=-1", {"max_snapshots": -1}),
    (ValueError, "max_snapshots=65537", {"max_snapshots": 65537}),
    (TypeError, "max_snapshots='8'", {"max_snapshots": "8"}),
    (ValueError, "snapshot_slots=9 beside max_snapshots=8", {"max_snapshots": 8, "snapshot_slots": 9}),
    (ValueError, "snapshot_alpha=8.5", {"max_snapshots": 8, "snapshot_alpha": 8.5}),
    (ValueError, "snapshot_alpha=nan", {"max_snapshots": 8, "snapshot_alpha": float("nan")}),
    (TypeError, "snapshot_alpha='1'", {"max_snapshots": 8, "snapshot_alpha": "1"}),
    (ValueError, "tail_lease=-1", {"max_snapshots": 8, "tail_lease": -1}),
    (ValueError, "retention='lru'", {"max_snapshots": 8, "retention": "lru"}),
]


@pytest.mark.parametrize(("error", "what", "sizes"), GEOMETRY)
def test_bad_sizes(error: type[Exception], what: str, sizes: dict[str, Any]) -> None:
    name = fresh_name()
    try:
        with pytest.raises(error, match=what):
            RadixCache.create(name, max_blocks=8, **sizes)
        assert name not in RadixCache.list()
    finally:
        remove_all(name)


def test_the_policy_is_the_segments_own(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_snapshots=8, retention="chain", snapshot_alpha=2, tail_lease=5)
    with RadixCache.attach(cache.name) as other:
        assert (other.retention, other.snapshot_alpha, other.tail_lease) == ("chain", 2.0, 5)
    with pytest.raises(errors.LayoutMismatch, match="retention"):
        RadixCache.open(cache.name, max_blocks=64, max_snapshots=8, snapshot_alpha=2, tail_lease=5)


# --- statistics -----------------------------------------------------------------------------------------------------


def test_statistics_are_of_all_workers_together(cache_factory: CacheFactory) -> None:
    cache = cache_with(cache_factory)
    with RadixCache.attach(cache.name) as other:
        for kind, depth, slot in (("plain", 16, 1), ("tail", 32, 2), ("sibling", 48, 3)):
            save_as(other, kind, range(depth), slot, 7)
        save_as(cache, "plain", range(16), 4, 0)
        assert anchor(other, range(64), session=7) == (3, 48)
        assert anchor(cache, range(40), max_snapshot_tokens=31) == (4, 16)
        spilled = cache.evict_snapshot_to_tier()
        assert isinstance(spilled, Spill)
        assert (spilled.slot, spilled.tokens) == (4, 16)
        assert anchor(other, range(20)) == (None, 0)  # by its key
        other.promote_snapshot(spilled.key, 4)
        assert isinstance(other.evict_snapshot_to_tier(17), Drop)
    stats = cache.stats()
    assert (stats.snapshot_saves, stats.snapshot_lookups, stats.snapshot_hits, stats.tier_hits) == (4, 3, 3, 1)
    assert stats.snapshot_hit_tokens == 48 + 16 + 16
    assert (stats.recompute_tokens_on_hit, stats.recompute_tokens_on_miss) == (16 + (31 - 16) + 0, 0)
    assert (stats.tier_spills, stats.tier_fault_ins, stats.tier_reaps, stats.snapshot_evictions) == (1, 1, 0, 1)
    assert (stats.snapshots, stats.snapshots_tiered) == (2, 0)
    assert stats.restorable_ratio == 80 / (64 + 40 + 20)
    assert stats.hit_ratio == (64 + 32 + 16) / (64 + 40 + 20)


def test_a_clear_between_the_halves_of_a_lookup_leaves_no_state_beside_old_blocks(
    cache_factory: Callable[..., RadixCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker clears, and saves anew, after this one's walk of the tree and before its look at the index."""
    cache = cache_factory(block_size=4, max_snapshots=4)
    tokens = list(range(8))
    cache.insert_with_snapshot(tokens, [0, 1], 10)
    with RadixCache.attach(cache.name) as other:

        def clear_first(*how: Any) -> None:
            monkeypatch.undo()
            other.clear()
            other.insert_with_snapshot(tokens, [2, 3], 11)
            cache._resume(*how)

        monkeypatch.setattr(cache, "_resume", clear_first)
        with cache.lookup(tokens) as match:
            assert (match.matched_blocks.tolist(), match.snapshot_slot) == ([0, 1], None)
        with cache.lookup(tokens) as match:
            assert (match.matched_blocks.tolist(), match.snapshot_slot) == ([2, 3], 11)
