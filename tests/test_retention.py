"""Which snapshot goes when a slot is needed: both policies, and what they make of fast and slow conversations."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from shmradix import errors
from tests.snapshot_steps import ELSEWHERE, CacheFactory, drop, find, gone, kv, play, save, see, spill
from tests.test_scenarios import Step


class Entry(NamedTuple):
    """A snapshot of a prompt of its own: recency orders the saves."""

    slot: int
    session: int
    depth: int
    recency: int
    kind: str = "plain"


def tail(slot: int, session: int, depth: int, recency: int) -> Entry:
    return Entry(slot, session, depth, recency, "tail")


def sibling(slot: int, session: int, depth: int, recency: int) -> Entry:
    return Entry(slot, session, depth, recency, "sibling")


def saves(*entries: Entry) -> list[Step]:
    steps = []
    for entry in sorted(entries, key=lambda entry: entry.recency):
        tokens = (entry.slot << 16, (entry.slot << 16) + entry.depth)
        steps.append(save(tokens, entry.slot, kind=entry.kind, session=entry.session))
    return steps


# --- "session" ------------------------------------------------------------------------------------------------------

SESSION: dict[str, tuple[list[Step], dict[str, Any]]] = {
    "the_older_first": ([*saves(Entry(7, 1, 8192, 100), Entry(9, 1, 16000, 50)), *gone(9, 7, None)], {}),
    "the_tail_of_a_live_session_is_leased": (
        [*saves(Entry(7, 1, 8192, 100), tail(9, 1, 6064, 50)), see(1), *gone(7, 9)],
        {},
    ),
    "a_tail_whose_session_looked_nothing_up_is_not": (
        [*saves(Entry(7, 1, 8192, 100), tail(9, 1, 6064, 50)), *gone(9, 7)],
        {},
    ),
    "a_lookup_without_a_match_in_the_tree_leases_nothing": (
        [*saves(Entry(7, 1, 8192, 100), tail(9, 1, 6064, 50)), find((1, 17), session=1, matched=0), *gone(9)],
        {},
    ),
    "no_lease_where_it_lasts_for_no_eviction": (
        [*saves(Entry(7, 1, 8192, 100), tail(9, 1, 6064, 50)), see(1), *gone(9, 7)],
        {"tail_lease": 0},
    ),
    "what_comes_after_the_tail_is_not_leased": (
        [*saves(Entry(7, 1, 6080, 50), tail(9, 1, 6064, 90)), see(1), *gone(7, 9)],
        {},
    ),
    "a_dormant_session's_tail_may_go": (
        [*saves(tail(1, 1, 20000, 10), Entry(2, 2, 4000, 90), tail(3, 2, 12000, 95)), see(2), *gone(1, 2, 3)],
        {},
    ),
    # In the reference only the session that looked up last has a lease: it would give up 1 first.
    "every_session_has_its_own_lease": (
        [*saves(tail(1, 1, 20000, 10), Entry(2, 2, 4000, 90), tail(3, 2, 12000, 95)), see(1), see(2), *gone(2, 1, 3)],
        {},
    ),
    "all_that_there_is_may_go_leased_or_not": ([*saves(tail(5, 1, 16000, 50)), see(1), *gone(5, None)], {}),
    "tail_and_sibling_alone": ([*saves(tail(5, 7, 64, 1), sibling(6, 7, 48, 2)), see(7), *gone(5, 6)], {}),
    "a_lease_ends_by_evictions": (
        [
            *saves(tail(9, 1, 6064, 50), Entry(7, 2, 4000, 100)),
            see(1),
            *gone(7),
            *saves(Entry(8, 2, 4000, 101)),
            *gone(9),
        ],
        {"tail_lease": 1},
    ),
    "a_lookup_starts_it_again": (
        [
            *saves(tail(9, 1, 6064, 50), Entry(7, 2, 4000, 100)),
            see(1),
            *gone(7),
            *saves(Entry(8, 2, 4000, 101)),
            see(1),
            *gone(8),
        ],
        {"tail_lease": 1},
    ),
    "a_spill_counts_as_an_eviction": (
        [
            *saves(tail(9, 1, 6064, 50), Entry(7, 2, 4000, 100)),
            see(1),
            spill(7, 4000, "7"),
            *saves(Entry(8, 2, 4000, 101)),
            *gone(9),
        ],
        {"tail_lease": 1},
    ),
    "64_evictions_and_not_65": (
        [
            *saves(tail(100, 1, 64, 0), sibling(101, 1, 48, 1), *(Entry(n, 2, 32, 2 + n) for n in range(65))),
            see(1),
            *gone(*range(64), 100, 101, 64),
        ],
        {"max_snapshots": 80},
    ),
    "a_sibling_is_leased": ([*saves(Entry(7, 1, 8192, 100), sibling(9, 1, 6048, 10)), see(1), *gone(7, 9)], {}),
    "the_stalest_session_first": (
        [
            kv(48),
            *(save(depth, slot, session=1) for slot, depth in ((10, 16), (11, 32), (12, 48))),
            *saves(*(Entry(slot, 2, 16, slot) for slot in (20, 21, 22))),
            find(48, 12, 48, session=1),
            *gone(20, 21, 22, 10, 11, 12),
        ],
        {},
    ),
    "no_session_is_one_session": (
        [*saves(Entry(1, 0, 16, 10), Entry(2, 5, 16, 20), Entry(3, 0, 16, 30)), *gone(2, 1, 3)],
        {},
    ),
    "depth_weighs_nothing": ([*saves(Entry(1, 7, 20000, 10), Entry(2, 7, 100, 90)), *gone(1)], {}),
    "depth_weighs_more_than_recency": (
        [*saves(Entry(1, 7, 20000, 50), Entry(2, 7, 100, 60)), *gone(2)],
        {"snapshot_alpha": 2},
    ),
    "depth_never_outweighs_a_session": (
        [*saves(Entry(1, 1, 20000, 10), Entry(2, 2, 100, 90)), *gone(1)],
        {"snapshot_alpha": 8},
    ),
    "depth_weighs_half": (
        [*saves(Entry(1, 7, 1000, 1), Entry(2, 7, 500, 2), Entry(3, 7, 100, 3)), *gone(1, 2, 3)],
        {"snapshot_alpha": 0.5},
    ),
    "depth_weighs_as_much": (  # both are scaled again for each eviction; of equals the first in the table
        [*saves(Entry(1, 7, 1000, 1), Entry(2, 7, 500, 2), Entry(3, 7, 100, 3)), *gone(2, 1, 3)],
        {"snapshot_alpha": 1},
    ),
    "depth_weighs_twice": (
        [*saves(Entry(1, 7, 1000, 1), Entry(2, 7, 500, 2), Entry(3, 7, 100, 3)), *gone(3, 2, 1)],
        {"snapshot_alpha": 2},
    ),
}


@pytest.mark.parametrize(("steps", "sizes"), SESSION.values(), ids=SESSION.keys())
def test_session_policy(steps: list[Step], sizes: dict[str, Any], cache_factory: CacheFactory) -> None:
    cache = cache_factory(**{"max_blocks": 64, "block_size": 16, "max_snapshots": 16, **sizes})
    play(cache, [kv(ELSEWHERE), *steps])


def test_many_sessions_each_have_their_lease(cache_factory: CacheFactory) -> None:
    """Before any eviction as well: no session's record is taken for another's while there are unused ones."""
    cache = cache_factory(max_blocks=64, block_size=16, max_snapshots=8, tail_lease=1)
    play(cache, [kv(ELSEWHERE)])
    for sessions in range(1, 200, 7):
        entries = [tail(n, sessions + n, 32, n) for n in range(7)]
        play(cache, [*saves(*entries, Entry(9, 1000, 32, 9)), *(see(sessions + n) for n in range(7)), *gone(9)])
        play(cache, gone(*range(7), None))
        cache.close()
        cache = cache_factory(max_blocks=64, block_size=16, max_snapshots=8, tail_lease=1)
        play(cache, [kv(ELSEWHERE)])


# --- "chain" --------------------------------------------------------------------------------------------------------

OLD = save((900, 910), 9)  # a conversation of its own, older than the others
CHAIN: dict[str, list[Step]] = {
    "history_first": [OLD, save(10, 1), save(20, 2), save(30, 3), *gone(1, 2, 9, 3, None)],
    "history_by_recency": [OLD, save(10, 1), save(20, 2), save(30, 3), find(15, 1, 10), *gone(2, 1, 9, 3)],
    "frontiers_by_recency": [OLD, save(10, 1), save((50, 60), 2), find(10, 1, 10), *gone(9, 2, 1)],
    "the_deepest_ancestor_is_continued": [OLD, save(10, 1), save(20, 2), save(40, 3), save(30, 4), *gone(1)],
    "a_branch_point_is_no_history": [
        OLD,
        save(10, 1),
        save((0, 10, 100, 110), 2),
        save((0, 10, 200, 210), 3),
        find(10, 1, 10),
        *gone(9, 2, 3, 1),
    ],
    "a_branch_point_stays_one": [
        save((900, 905), 8),
        save(10, 1),
        save((0, 10, 100, 110), 2),
        save((0, 10, 200, 210), 3),
        OLD,
        find(10, 1, 10),
        find((900, 905), 8, 5),
        *gone(8, 2, 3, 9, 1),
    ],
    "history_that_went_leaves_history": [
        OLD,
        save(10, 1),
        save(20, 2),
        save(30, 3),
        find(10, 1, 10),
        *gone(2, 1, 9, 3),
    ],
    "a_frontier_that_went_makes_its_history_the_frontier": [
        save(10, 1),
        save(20, 2),
        OLD,
        find(10, 1, 10, keep="match"),
        *gone(2),
        drop("match"),
        *gone(9, 1),
    ],
    "what_is_spilled_continues_still": [
        save(10, 1),
        save(20, 2),
        find(10, 1, 10, keep="match"),
        OLD,
        spill(2, 20, "2"),
        drop("match"),
        *gone(1, 9),
    ],
    "saved_again_it_keeps_what_continues_it": [
        OLD,
        save(10, 1),
        save(20, 2),
        save(30, 3),
        save(20, 4, 2),
        *gone(1, 4, 9, 3),
    ],
    "saved_again_while_a_match_has_it,_too": [
        OLD,
        save(10, 1),
        save(20, 2),
        save(30, 3),
        find(20, 2, 20, keep="match"),
        save(20, 4),
        drop("match"),
        *gone(2, 1, 4, 9, 3),
    ],
    "hidden_it_is_out_of_the_chain": [
        OLD,
        save(10, 1),
        save(20, 2, kind="tail", session=7),
        save(30, 3, session=7),
        find(25, 2, 20, keep="match", session=7),
        save((800, 810), 4, kind="tail", session=7),
        *gone(1, 9, 3),
    ],
    "a_branch_point_saved_again_is_one": [
        save(10, 1),
        save((0, 10, 100, 110), 2),
        save((0, 10, 200, 210), 3),
        save(10, 4, 1),
        *gone(2, 3, 4),
    ],
    # Finish leaves
    "history,_finish_leaves,_frontiers": [
        OLD,
        save(5, 1),
        save(10, 2),
        save(20, 3, kind="finish"),
        *gone(1, 3, 9, 2),
    ],
    "finish_leaves_by_recency": [
        OLD,
        save(20, 1, kind="finish"),
        save((50, 60), 2, kind="finish"),
        find(20, 1, 20),
        *gone(2, 1, 9),
    ],
    "a_finish_leaf_that_is_continued_is_history": [
        OLD,
        save(10, 1),
        save(20, 2, kind="finish"),
        save(30, 3),
        *gone(1, 2, 9, 3),
    ],
    "a_finish_leaf_that_is_passed_by_makes_no_branch": [
        OLD,
        save(10, 1),
        save(20, 2, kind="finish"),
        save((0, 10, 100, 120), 3),
        *gone(1, 2, 9, 3),
    ],
    "two_answers_make_no_branch": [
        OLD,
        save(10, 1),
        save((0, 10, 100, 110), 2, kind="finish"),
        save((0, 10, 200, 210), 3, kind="finish"),
        save((0, 10, 200, 220), 4),
        *gone(1, 3, 2, 9, 4),
    ],
    "two_answers_that_are_continued_do": [  # while both are there
        save(10, 1),
        save((0, 10, 100, 110), 2, kind="finish"),
        save((0, 10, 200, 210), 3, kind="finish"),
        save((0, 10, 200, 220), 4),
        save((0, 10, 100, 120), 5),
        find(10, 1, 10),
        *gone(2, 3, 4, 1, 5),
    ],
    "a_checkpoint_takes_a_finish_leaf's_place": [save(20, 1, kind="finish"), save(20, 2, 1), OLD, *gone(2, 9)],
    "a_finish_leaf_does_not_make_a_checkpoint_less": [OLD, save(20, 1), save(20, 2, 1, kind="finish"), *gone(9, 2)],
    "a_finish_leaf_again": [OLD, save(20, 1, kind="finish"), save(20, 2, 1, kind="finish"), *gone(2, 9)],
    # Tails
    "a_new_tail_is_in_the_place_of_the_old_one": [
        OLD,
        save(10, 1),
        save(20, 2, kind="tail", session=7),
        save(30, 3, 2, kind="tail", session=7),
        *gone(1, 9, 3),
    ],
    "a_sibling_comes_before_its_tail": [
        OLD,
        save(10, 1),
        save(30, 2, kind="tail", session=7),
        save(29, 3, kind="sibling", session=7),
        *gone(1, 3, 9, 2),
    ],
    "a_sibling_comes_before_its_tail_where_nothing_comes_before_both": [
        OLD,
        save(30, 2, kind="tail", session=7),
        save(29, 3, kind="sibling", session=7),
        *gone(3, 9, 2),
    ],
    "another's_sibling_does_not": [
        OLD,
        save(30, 2, kind="tail", session=7),
        save(29, 3, kind="sibling", session=8),
        *gone(9, 2, 3),
    ],
    "a_sibling_in_another_adapter_does_not": [
        OLD,
        save(30, 2, kind="tail", session=7),
        save(29, 3, kind="sibling", session=7, adapter_id=1),
        *gone(9, 2, 3),
    ],
    "another's_tail_is_no_ancestor": [
        OLD,
        save(10, 1, kind="tail", session=7),
        save(20, 2, session=8),
        *gone(9, 1, 2),
    ],
    "one's_own_tail_is": [OLD, save(10, 1, kind="tail", session=7), save(20, 2, session=7), *gone(1, 9, 2)],
    "other_adapters_are_other_chains": [OLD, save(10, 1), save(20, 2, adapter_id=1), *gone(9, 1, 2)],
    "other_pictures_are_other_chains": [OLD, save(10, 1, block_keys=[7] * 10), save(20, 2), *gone(9, 1, 2)],
    "the_same_picture_is_the_same_chain": [
        OLD,
        save(10, 1, block_keys=[7] * 10),
        save(20, 2, block_keys=[7] * 10 + [8] * 10),
        *gone(1, 9, 2),
    ],
    "no_tail_is_leased": [save(30, 2, kind="tail", session=7), OLD, see(7), *gone(2, 9)],
}


@pytest.mark.parametrize("steps", CHAIN.values(), ids=CHAIN.keys())
def test_chain_policy(steps: list[Step], cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=256, block_size=1, max_snapshots=16, retention="chain")
    play(cache, [kv(40), kv((50, 60)), kv((900, 910)), kv(ELSEWHERE), *steps])


def test_a_finish_leaf_never_takes_the_slot_of_what_the_chain_policy_keeps(cache_factory: CacheFactory) -> None:
    cache = cache_factory(block_size=16, max_snapshots=4, snapshot_slots=2, retention="chain")
    cache.insert_intermediate_snapshot(range(16), cache.allocate_snapshot_slot())
    cache.insert_intermediate_snapshot([5] * 16, cache.allocate_snapshot_slot())
    with pytest.raises(errors.SlotsFull, match="no snapshot may go"):
        cache.allocate_snapshot_slot(finish=True)
    slot = cache.allocate_snapshot_slot()
    assert slot == 0
    cache.insert_with_snapshot([5] * 32, [1, 2], slot, finish=True)
    assert cache.allocate_snapshot_slot(finish=True) == slot  # another finish leaf's
    cache.insert_with_snapshot([5] * 32, [1, 2], slot)
    assert cache.allocate_snapshot_slot(finish=True) == 1  # history
