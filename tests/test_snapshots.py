"""Saved states of recurrent layers: scenarios a hybrid model relies on, as tables of calls and their answers."""

from __future__ import annotations

import pytest

from tests.snapshot_steps import (
    ELSEWHERE,
    LONG,
    NOTHING,
    A,
    B,
    CacheFactory,
    Step,
    drop,
    evicts,
    find,
    forget,
    gone,
    kv,
    play,
    promote,
    prompt_tokens,
    put,
    save,
    save_as,
    spill,
    stat,
    tiered,
)

# --- beside the tree, blocks of 16 ----------------------------------------------------------------------------------

WITH_THE_TREE: dict[str, list[Step]] = {
    "a_snapshot_of_the_whole_prompt": [put(32, 42), find(32, 42, 32, matched=32, is_tail=False, why="")],
    "a_snapshot_behind_what_matched": [put(48, 99), find(32, matched=32, why="none")],
    "snapshots_outlive_the_tree's_blocks": [
        put(16, 7),
        evicts(10),
        stat(snapshots=1, blocks_live=0),
        find(16, matched=0),
        *gone(7),
        stat(snapshots=0),
        *gone(None),
    ],
    "the_tree_outlives_snapshots": [put(16, 7), *gone(7), find(16, matched=16)],
    "a_second_snapshot_of_the_same_prompt": [put(16, 5), put(16, 8, 5), stat(snapshots=1), find(16, 8, 16)],
    "an_insert_without_one": [kv(16), find(16, matched=16, why="none")],
    "one_within_the_prompt": [kv(64), save(32, 50), find(64, 50, 32, matched=64)],
    "the_deepest_wins": [put(64, 99), save(32, 50), find(64, 99, 64)],
    "one_before_a_fork": [kv(64), save(32, 50), find((0, 48, 200, 216), 50, 32, matched=48)],
    "one_within_the_prompt_outlives_its_blocks": [
        kv(32),
        save(16, 50),
        evicts(11),
        evicts(10),
        stat(snapshots=1),
        *gone(50),
    ],
    "a_depth_inside_a_block": [
        kv(32),
        save(20, 5),
        find(32, 5, 20),
        find((0, 20, 90, 102), matched=16, why="too deep"),
    ],
    "less_than_a_block_is_registered_too": [put(10, 5), stat(blocks_live=0, snapshots=1), kv(16), find(16, 5, 10)],
    "adapters_keep_apart": [
        put(32, 42, adapter=A),
        find(32, adapter_id=B, matched=0),
        kv(32),
        kv(32, adapter_id=B),
        find(32, matched=32, why="none"),
        find(32, adapter_id=B, matched=32, why="none"),
        find(32, 42, 32, adapter_id=A),
    ],
    # The reference hashes the adapter as if it were a token: there the second takes the first's place.
    "an_adapter_is_no_token": [
        save([1, 2] + [0] * 15, 1, adapter_id=5),
        save([5, 1, 2] + [0] * 15, 2),
        stat(snapshots=2),
        kv([5, 1, 2] + [0] * 29),
        find([5, 1, 2] + [0] * 29, 2, 18),
    ],
    "salts_keep_apart": [
        *(kv(32, salt=salt) for salt in (b"one", b"two")),
        save(32, 1, salt=b"one"),
        save(32, 2, salt=b"two"),
        find(32, 1, 32, salt=b"one"),
        find(32, 2, 32, salt=b"two"),
    ],
    "a_miss_in_the_tree_is_no_lookup_here": [
        save(16, 5),
        find(16, matched=0, why="none", session=3),
        stat(lookups=1, snapshot_lookups=0, no_snapshot=0),
    ],
    "a_spill_and_back": [
        put(64, 99, session=7),
        find(64, 99, 64, session=7),
        spill(99, 64, "key"),
        tiered(64, "key", 64, session=7),
        promote("key", 123),
        find(64, 123, 64),
        spill(123, 64, "other"),
        forget("other"),
        find(64, matched=64, why="none"),
    ],
}


@pytest.mark.parametrize("steps", WITH_THE_TREE.values(), ids=WITH_THE_TREE.keys())
def test_beside_the_tree(steps: list[Step], cache_factory: CacheFactory) -> None:
    play(cache_factory(max_blocks=64, block_size=16, max_snapshots=16), steps)


# --- the index, blocks of one token: every depth can match ----------------------------------------------------------

INDEX: dict[str, list[Step]] = {
    "a_lookup_is_no_merit_for_an_eviction": [
        save(40, 1, session=7),
        *[find(60, 1, 40, session=7)] * 5,
        save(80, 2, session=7),
        save(90, 3, session=7),
        *gone(1),
    ],
    "a_lookup_touches_what_it_found_only": [
        save(40, 1),
        save((600, 610), 3),
        save(80, 2),
        find(100, 2, 80),
        *gone(1, 3, 2),
    ],
    "counts": [
        find(100, why="none"),
        save(40, 3),
        find(100, 3, 40),
        stat(snapshot_lookups=2, snapshot_hits=1, snapshot_saves=1, snapshot_hit_tokens=40),
        stat(recompute_tokens_on_hit=60, recompute_tokens_on_miss=100, no_snapshot=1),
    ],
    "found_by_any_session_until_it_becomes_a_tail": [
        save(16, 42, session=100),
        *(find(16, 42, 16, session=session) for session in (200, 100, 0)),
        save(16, 43, 42, kind="tail", session=100),
        find(16, session=200, why="another session"),
        find(16, session=0, why="another session"),
        find(16, 43, 16, session=100, is_tail=True),
    ],
    "overwritten": [save(16, 5), save(16, 8, 5), stat(snapshots=1, snapshot_saves=2), find(16, 8, 16)],
    "a_limit": [
        save(16, 10),
        save(32, 20),
        find(48, 20, 32),
        find(20, 10, 16),
        find(48, 10, 16, max_snapshot_tokens=31),
        find(48, 20, 32, max_snapshot_tokens=32),
        find(48, why="too deep", max_snapshot_tokens=15),
        find(48, why="too deep", max_snapshot_tokens=0),
    ],
    "evicted_in_order_of_use": [save(10, 1), save(20, 2), *gone(1), stat(snapshots=1), *gone(2, None)],
    "evicting_counts": [save(10, 1), save(20, 2), *gone(1, 2, None), stat(snapshot_evictions=2, tier_spills=0)],
    "an_overwritten_tail_is_none": [
        save(50, 1, kind="tail", session=7),
        save(50, 2, 1, session=8),
        find(50, 2, 50, session=9, is_tail=False),
    ],
    "an_overwritten_sibling_is_none": [
        save(50, 1, kind="sibling", session=7),
        save(50, 2, 1, session=8),
        save(60, 3, kind="tail", session=7),  # would take the sibling with it
        stat(snapshots=2),
    ],
    "a_new_tail_takes_the_place_of_tail_and_sibling": [
        save(50, 1, kind="tail", session=7),
        save(49, 2, kind="sibling", session=7),
        save(90, 3, 1, 2, kind="tail", session=7),
        stat(snapshots=1),
        find(100, 3, 90, session=7),
    ],
    "a_new_tail_of_the_same_prompt": [
        save(50, 1, kind="tail", session=7),
        save(49, 2, kind="sibling", session=7),
        save(50, 3, 1, 2, kind="tail", session=7),
        stat(snapshots=1),
    ],
    "another_session's_tail_of_the_same_prompt": [
        save(50, 1, kind="tail", session=7),
        save(50, 2, 1, kind="tail", session=8),
        find(50, session=7, why="another session"),
        find(50, 2, 50, session=8),
    ],
    # In the reference siblings pile up where the order of calls is not kept.
    "a_new_sibling_takes_the_place_of_the_old_one": [
        save(49, 2, kind="sibling", session=7),
        save(39, 3, 2, kind="sibling", session=7),
        stat(snapshots=1),
    ],
    "a_sibling_spares_the_tail": [
        save(50, 1, kind="tail", session=7),
        save(49, 2, kind="sibling", session=7),
        stat(snapshots=2),
        find(100, 1, 50, session=7),
    ],
    "a_sibling_of_the_tail's_own_prompt_takes_its_place": [
        save(50, 1, kind="tail", session=7),
        save(50, 2, 1, kind="sibling", session=7),
        find(50, 2, 50, session=0, is_tail=False),
    ],
    "a_sibling_is_anybody's": [
        save(64, 4, kind="sibling", session=7),
        find(64, 4, 64, session=7, is_tail=False),
        find(64, 4, 64),
    ],
    # In the reference a session's tails are swept in all adapters.
    "tails_are_swept_within_their_namespace": [
        save(50, 1, kind="tail", session=7),
        save(60, 2, kind="tail", session=7, adapter_id=A),
        save(70, 3, kind="tail", session=7, salt=b"salt"),
        stat(snapshots=3),
        save(80, 4, 2, kind="tail", session=7, adapter_id=A),
    ],
    "sweeping_spares_other_sessions": [
        save(50, 1, kind="tail", session=7),
        save(49, 2, kind="sibling", session=7),
        save(80, 3, kind="tail", session=8),
        stat(snapshots=3),
    ],
}

TIERS: dict[str, list[Step]] = {
    "spilled_it_stays": [
        save(8192 // 4, 3, session=1),
        save(LONG, 9, session=1),
        find(10, session=1),
        save(8192 // 4, 3 + 1, 3, session=1),  # used later than 9
        spill(9, LONG, "9"),
        stat(snapshots=2, snapshots_tiered=1, tier_spills=1, snapshot_evictions=0),
        *gone(4),
    ],
    "a_shallow_one_is_dropped": [
        save(100, 9),
        spill(9, 100, least=1024),
        stat(snapshots=0, tier_spills=0, snapshot_evictions=1),
        spill(None),
    ],
    "a_deep_one_is_spilled": [save(1024, 9), spill(9, 1024, "9", least=1024), stat(snapshots=1, tier_spills=1)],
    "a_spilled_one_is_found_by_its_key": [
        save(50, 4),
        spill(4, 50, "4"),
        tiered(50, "4", 50),
        stat(tier_hits=1, snapshot_hits=1, snapshot_hit_tokens=50),
    ],
    "a_deeper_spilled_one_wins": [save(50, 4), save(60, 5), find(50, 4, 50), spill(5, 60, "5"), tiered(70, "5", 60)],
    "promoted": [
        save(30, 1),
        spill(1, 30, "1"),
        promote("1", 12),
        stat(tier_fault_ins=1, snapshots_tiered=0),
        find(30, 12, 30),
    ],
    # In the reference a promotion of what is resident overwrites, and so loses, its slot.
    "not_promoted_twice": [
        save(30, 1),
        spill(1, 30, "1"),
        promote("1", 12),
        promote("1", 13, False),
        stat(tier_fault_ins=1),
        find(30, 12, 30),
    ],
    # Keys are those of one spill; in the reference they are the prefix's hash.
    "a_key_of_an_earlier_spill_is_worth_nothing": [
        save(30, 1),
        spill(1, 30, "first"),
        promote("first", 2),
        spill(2, 30, "second"),
        promote("first", 3, False),
        forget("first", False),
        tiered(30, "second", 30),
        forget("second"),
    ],
    "promotion_is_no_use": [
        save(30, 1),
        spill(1, 30, "1"),
        save((600, 610), 2),
        promote("1", 3),
        *gone(3, 2),
    ],
    "nothing_resident_is_left": [
        save(10, 0, session=7),
        save(20, 1, session=7),
        spill(0, 10, "0"),
        spill(1, 20, "1"),
        spill(None),
        *gone(None),
    ],
    "saved_again_it_is_resident": [
        save(40, 1, session=7),
        spill(1, 40, "1"),
        save(40, 5, session=7),
        stat(snapshots=1, snapshots_tiered=0),
        forget("1", False),
        *gone(5),
    ],
    "a_tail_over_a_spilled_one": [
        save(LONG, 3, session=7),
        spill(3, LONG, "3"),
        save(LONG, 5, kind="tail", session=7),
        stat(snapshots=1),
    ],
    "a_spilled_one_rehomed": [
        save(40, 6, session=7),
        spill(6, 40, "6"),
        save(40, 13, kind="tail", session=7),
        find(40, 13, 40, session=7),
        *gone(13),
    ],
    "a_sibling_over_a_spilled_one": [
        save(40, 7, session=7),
        spill(7, 40, "7"),
        save(40, 8, kind="sibling", session=7),
        find(40, 8, 40),
    ],
    "a_spilled_tail_is_swept_without_its_slot": [
        save(60, 41, kind="tail", session=7),
        spill(41, 60, "41"),
        save(70, 42, kind="tail", session=7),
        stat(snapshots=1),
        forget("41", False),
    ],
    "a_resident_one_gives_its_slot": [save(40, 21), save(40, 22, 21)],
    "a_tail_displaces_a_tail": [save(10, 31, kind="tail", session=7), save(20, 32, 31, kind="tail", session=7)],
    "a_spilled_tail_keeps_its_gate": [
        save(64, 4, kind="tail", session=7),
        find(64, 4, 64, session=7),
        spill(4, 64, "4"),
        tiered(64, "4", 64, session=7),
        find(64, session=8, why="another session"),
        find(64, session=0, why="another session"),
    ],
    "keys_that_never_were": [promote("never a key", 0, False), forget("never a key", False), spill(None)],
    "forgotten": [
        save(32, 42, session=7),
        spill(42, 32, "42"),
        forget("42"),
        stat(snapshots=0, tier_reaps=1, snapshot_evictions=0),
        find(32, why="none"),
        forget("42", False),
        forget("never a key", False),
        stat(tier_reaps=1),
    ],
    "what_is_resident_is_not_forgotten": [
        save(32, 42),
        spill(42, 32, "42"),
        promote("42", 123),
        forget("42", False),
        stat(snapshots=1, tier_reaps=0),
        find(32, 123, 32),
    ],
}

# Where the reference pins nothing.
PINS: dict[str, list[Step]] = {
    "what_a_match_has_is_not_evicted": [
        save(20, 1),
        find(20, 1, 20, keep="match"),
        *gone(None),
        spill(None),
        drop("match"),
        *gone(1),
    ],
    "the_next_one_goes_instead": [
        save(20, 1),
        find(20, 1, 20, keep="match"),
        save(30, 2),
        *gone(2, None),
        drop("match"),
        *gone(1),
    ],
    "superseded_it_comes_out_after_the_match,_before_all_others": [
        save(20, 1),
        find(20, 1, 20, keep="match"),
        save((600, 610), 2),
        save(20, 3),  # would give back 1
        find(20, 3, 20),
        stat(snapshots=2),
        *gone(2),
        drop("match"),
        *gone(1),
        stat(snapshots=1, snapshot_evictions=1),
        *gone(3, None),
    ],
    "a_swept_tail_comes_out_after_the_match": [
        save(20, 1, kind="tail", session=7),
        find(20, 1, 20, keep="match", session=7),
        save(30, 2, kind="tail", session=7),
        stat(snapshots=1),
        drop("match"),
        spill(1, 20, least=0),  # dropped: nobody could find it by a key
        *gone(2),
    ],
    "a_release_by_tokens_lets_it_go": [
        save(20, 1),
        find(20, 1, 20, keep="one"),
        find(20, 1, 20, keep="two"),
        Step("release", {"tokens": prompt_tokens(20)}, {}),
        *gone(None),
        Step("release_matched", {"tokens": prompt_tokens(20), "matched_tokens": 20}, {}),
        *gone(1),
    ],
    "a_promoted_one_is_pinned_by_its_match": [
        save(20, 1),
        spill(1, 20, "1"),
        Step("find", {"tokens": prompt_tokens(20), "keep": "match"}, NOTHING | {"key": "1", "tier_tokens": 20}),
        Step("promote", {"key": "1", "slot": 2, "match": "match"}, {"done": True}),
        *gone(None),
        drop("match"),
        *gone(2),
    ],
    "two_matches": [
        save(20, 1),
        find(20, 1, 20, keep="one"),
        find(25, 1, 20, keep="two"),
        drop("one"),
        *gone(None),
        drop("two"),
        *gone(1),
    ],
    "a_spilled_one_is_not_pinned": [
        save(20, 1),
        spill(1, 20, "1"),
        Step("find", {"tokens": prompt_tokens(20), "keep": "match"}, NOTHING | {"key": "1", "tier_tokens": 20}),
        promote("1", 2),
        *gone(2),
        drop("match"),
    ],
}


@pytest.mark.parametrize("steps", (INDEX | TIERS | PINS).values(), ids=(INDEX | TIERS | PINS).keys())
def test_index(steps: list[Step], cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=600, block_size=1, max_snapshots=16)
    everything = [kv(100), kv(100, adapter_id=A), kv((600, 610)), kv(ELSEWHERE)]
    play(cache, [*everything, *steps])
    assert cache.stats().leases == 0 or any(step.args.get("keep") for step in steps)


GATE = [  # kind, whose, asked by, hermetic, whether it is found
    ("plain", 11, 22, False, True),
    ("plain", 11, 22, True, False),
    ("plain", 11, 11, False, True),
    ("plain", 11, 11, True, True),
    ("plain", 0, 0, False, True),
    ("plain", 0, 0, True, False),
    ("plain", 11, 0, False, True),
    ("plain", 11, 0, True, False),
    ("plain", 0, 22, True, False),
    ("tail", 11, 22, False, False),
    ("tail", 11, 22, True, False),
    ("tail", 11, 0, False, False),
    ("tail", 11, 0, True, False),
    ("tail", 11, 11, False, True),
    ("tail", 11, 11, True, True),
    ("sibling", 11, 22, False, True),
    ("sibling", 11, 22, True, False),
    ("sibling", 11, 0, False, True),
    ("sibling", 11, 11, True, True),
    ("plain", 2**64 - 1, 2**64 - 1, True, True),
    ("tail", 2**63, 2**63, False, True),
    ("tail", 2**63, 2**63 + 1, False, False),
]


@pytest.mark.parametrize("is_spilled", [False, True], ids=["resident", "spilled"])
def test_whose_snapshots_a_session_finds(is_spilled: bool, cache_factory: CacheFactory) -> None:
    for kind, owner, session, hermetic, is_found in GATE:
        cache = cache_factory(block_size=1, max_snapshots=4)
        cache.insert(range(20), range(20))
        save_as(cache, kind, range(20), 5, owner)
        if is_spilled:
            assert cache.evict_snapshot_to_tier() is not None
        with cache.lookup(range(20), session=session, hermetic=hermetic) as match:
            found = (match.snapshot_tier_key is not None) if is_spilled else (match.snapshot_slot == 5)
            where = kind, owner, session, hermetic
            assert (found, match.no_snapshot) == (is_found, "" if is_found else "another session"), where
            assert match.restorable == ([20] if is_found else [])
        cache.close()
