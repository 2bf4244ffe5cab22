"""Scenarios a serving engine relies on, as a table: each row is a list of calls and the numbers they must answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from shmradix import NO_DISK, PrefixMatch, RadixCache, errors
from tests.model import all_stats

CacheFactory = Callable[..., RadixCache]
Answer = dict[str, Any]
Prompt = int | tuple[int, ...] | list[int]

ADAPTER_A = 0x1111222233334444
ADAPTER_B = 0x5555666677778888
PICTURE = [1, 2, 3] + [151655] * 29


class Step(NamedTuple):
    """One call: its name, its arguments, and the fields its answer must have."""

    op: str
    args: Answer
    expect: Answer


def prompt_tokens(prompt: Prompt) -> list[int]:
    """Token ids of a prompt: 48 is 0..47, (0, 16, 90, 94) is 0..15 followed by 90..93, a list is itself."""
    if isinstance(prompt, list):
        return prompt
    bounds = (0, prompt) if isinstance(prompt, int) else prompt
    return [token for low, high in zip(bounds[::2], bounds[1::2], strict=True) for token in range(low, high)]


def ins(tokens: Prompt, table: list[int], *, disk: Any = None, matched: int = 0, **expect: Any) -> Step:
    """An insert; adapter= and match= (the name of a kept match) are arguments, the rest is expected."""
    args = {
        "tokens": prompt_tokens(tokens),
        "block_table": table,
        "disk_block_ids": disk,
        "matched_tokens": matched,
    }
    args |= {"match": expect.pop("match", ""), "adapter_id": expect.pop("adapter", 0)}
    return Step("insert", args, expect)


def look(tokens: Prompt, matched: int, blocks: list[int], adapter: int = 0, **expect: Any) -> Step:
    """A lookup with its answer; keep= names the match for later steps. The lease stays until released."""
    args = {"tokens": prompt_tokens(tokens), "adapter_id": adapter, "keep": expect.pop("keep", "")}
    return Step("lookup", args, {"matched": matched, "blocks": blocks, "partial": None} | expect)


def rel(tokens: Prompt, adapter: int = 0, **expect: Any) -> Step:
    """A release by tokens."""
    return Step("release", {"tokens": prompt_tokens(tokens), "adapter_id": adapter}, expect)


def rel_matched(tokens: Prompt, matched: int, **expect: Any) -> Step:
    """A release of one lookup of exactly `matched` tokens."""
    return Step("release_matched", {"tokens": prompt_tokens(tokens), "matched_tokens": matched}, expect)


def drop(match: str) -> Step:
    """PrefixMatch.release() of a kept match."""
    return Step("drop", {"match": match}, {"released": True})


def ev(count: int, *blocks: int, **expect: Any) -> Step:
    """An eviction of at most `count` blocks and the blocks it must give, in order."""
    return Step("evict", {"num_blocks": count}, {"blocks": list(blocks), **expect})


def cleared(*blocks: int) -> Step:
    """A clear() and the blocks it must give back."""
    return Step("clear", {}, {"blocks": list(blocks), "disk_ids": [NO_DISK] * len(blocks)})


def stat(**expect: int) -> Step:
    """Statistics that must hold now."""
    return Step("stats", {}, expect)


FAILS: Answer = {"error": "LeaseError"}

BASIC: dict[str, list[Step]] = {
    "exact_prompt_is_found": [ins(16, [42], blocks=[42]), look(16, 16, [42])],
    "exact_prompt_of_several_blocks_is_found": [
        ins(48, [10, 20, 30], blocks=[10, 20, 30], inserted=48),
        look(48, 48, [10, 20, 30]),
    ],
    "longer_prompt_matches_the_cached_part": [ins(32, [10, 20]), look(48, 32, [10, 20])],
    "shorter_prompt_matches_its_own_blocks": [ins(48, [10, 20, 30]), look(32, 32, [10, 20])],
    "other_prompt_is_a_miss": [ins(16, [10]), look((100, 116), 0, []), stat(leases=1, hits=0)],
    "released_block_can_be_evicted_after_a_lookup": [
        ins(16, [42]),
        rel(16),
        look(16, 16, [42]),
        rel(16),
        ev(1, 42),
    ],
    "released_prompt_is_still_found": [ins(32, [10, 20]), rel(32), look(32, 32, [10, 20])],
    "eviction_takes_the_least_recently_used": [
        ins(16, [10]),
        rel(16),
        ins((100, 116), [20]),
        rel((100, 116)),
        ev(1, 10),
        ev(1, 20),
        ev(1),
    ],
    "eviction_skips_leased_blocks": [ins(16, [42]), rel(16), look(16, 16, [42]), ev(1), rel(16), ev(1, 42)],
    "a_chain_is_evicted_leaf_first": [
        ins(48, [10, 20, 30]),
        rel(48),
        ev(1, 30),
        ev(1, 20),
        ev(1, 10),
        stat(blocks_live=0, evicted_blocks=3),
    ],
    "inserting_twice_stores_once": [
        ins(16, [42], blocks=[42], duplicates=[]),
        ins(16, [42], blocks=[], duplicates=[], inserted=16),
        stat(blocks_live=1, leases=2, inserted_blocks=1, inserts=2),
    ],
    "branches_share_their_common_block": [
        ins(32, [10, 20], blocks=[10, 20]),
        ins((0, 16, 100, 116), [10, 30], blocks=[30]),
        look(32, 32, [10, 20]),
        look((0, 16, 100, 116), 32, [10, 30]),
        stat(blocks_live=3),
    ],
    "less_than_a_block_is_not_stored": [
        ins(10, [42], blocks=[], inserted=0),
        stat(blocks_live=0, leases=0),
        look(10, 0, []),
    ],
    "a_second_picture_behind_the_same_placeholders_matches_without_keys": [
        ins(PICTURE, [10, 20]),
        look(PICTURE, 32, [10, 20]),
    ],
}

DISK: dict[str, list[Step]] = {
    "cold_insert_references_every_disk_block": [
        ins(32, [10, 20], disk=[100, 101], blocks=[10, 20], disk_ids=[100, 101]),
        look(32, 32, [10, 20], disk_ids=[100, 101]),
    ],
    "second_insert_references_no_disk_block_again": [
        ins(32, [10, 20], disk=[100, 101]),
        ins(32, [10, 20], disk=[100, 101], blocks=[], disk_ids=[]),
    ],
    "extension_references_only_the_new_disk_block": [
        ins(32, [10, 20], disk=[100, 101]),
        ins(48, [10, 20, 30], disk=[100, 101, 102], blocks=[30], disk_ids=[102]),
    ],
    "no_disk_ids_means_no_disk_references": [
        ins(32, [10, 20], blocks=[10, 20], disk_ids=[]),
        look(32, 32, [10, 20], disk_ids=[]),
    ],
    "a_disk_id_that_comes_later_is_taken": [
        ins(32, [10, 20]),
        ins(32, [10, 20], disk=[NO_DISK, 101], blocks=[], disk_ids=[101]),
        look(32, 32, [10, 20], disk_ids=[NO_DISK, 101]),
    ],
    "another_disk_id_for_a_stored_block_is_reported": [
        ins(32, [10, 20], disk=[100, 101]),
        ins(32, [10, 20], disk=[100, 999], disk_ids=[], duplicates=[], duplicate_disk=[999]),
        look(32, 32, [10, 20], disk_ids=[100, 101]),
    ],
    "evicted_disk_ids_are_parallel_to_the_blocks": [
        ins(48, [10, 20, 30], disk=[100, NO_DISK, 102], disk_ids=[100, 102]),
        rel(48),
        ev(3, 30, 20, 10, disk_ids=[102, NO_DISK, 100]),
    ],
    "evicted_blocks_without_disk_ids_still_have_a_parallel_list": [
        ins(32, [10, 20]),
        rel(32),
        ev(2, 20, 10, disk_ids=[NO_DISK, NO_DISK]),
    ],
}

ADAPTERS: dict[str, list[Step]] = {
    "an_adapter_sees_only_its_own_blocks": [
        ins(32, [10, 20], adapter=ADAPTER_A),
        rel(32, adapter=ADAPTER_A),
        look(32, 0, [], ADAPTER_B),
        look(32, 0, []),
        look(32, 32, [10, 20], ADAPTER_A),
    ],
    "an_adapter_does_not_reuse_the_base_model": [
        ins(32, [10, 20]),
        look(32, 0, [], 0xABCD),
        look(32, 32, [10, 20]),
    ],
    "adapters_with_the_same_prompt_keep_apart": [
        ins(32, [10, 20], adapter=0xAAAA, blocks=[10, 20]),
        ins(32, [30, 40], adapter=0xBBBB, blocks=[30, 40], duplicates=[]),
        look(32, 32, [10, 20], 0xAAAA),
        look(32, 32, [30, 40], 0xBBBB),
    ],
}

WHOLE_BLOCKS: dict[str, list[Step]] = {
    "the_partly_filled_last_block_is_not_stored": [
        ins(20, [10, 11], blocks=[10], inserted=16),
        ins(20, [10, 11], blocks=[]),
        ins((0, 16, 90, 94), [10, 12], blocks=[], duplicates=[], inserted=16),
        look(20, 16, [10]),
        stat(blocks_live=1),
    ],
    "another_tail_matches_the_whole_blocks": [ins(20, [10, 20]), look((0, 16, 100, 104), 16, [10])],
    "a_tail_does_not_serve_a_whole_block": [ins(20, [10, 20]), look(32, 16, [10])],
    "evicting_one_gives_one": [ins(20, [10, 20]), rel(20), ev(1, 10), ev(1)],
    "a_tail_extended_to_a_block_is_reported_as_partial": [
        ins(20, [10, 20]),
        ins(32, [10, 30], blocks=[30]),
        look(20, 16, [10], partial=(30, 4)),
        look(32, 32, [10, 30]),
    ],
    "a_long_prompt_is_cut_to_whole_blocks": [
        ins(396, list(range(25)), blocks=list(range(24)), inserted=384),
        look(396, 384, list(range(24))),
    ],
    "a_shorter_prompt_inside_an_unstored_tail_has_no_partial": [ins(31, [10, 20]), look(22, 16, [10])],
    "a_prompt_that_ends_inside_a_block_reports_it": [
        ins(35, [10, 20, 30], blocks=[10, 20]),
        look(22, 16, [10], partial=(20, 6)),
        look(32, 32, [10, 20]),
    ],
    "a_fork_inside_a_block_reports_what_agrees": [
        ins(32, [10, 20]),
        look((0, 24, 200, 240), 16, [10], partial=(20, 8)),
    ],
    "a_prompt_inside_the_first_block_reports_it": [
        ins(16, [10]),
        rel(16),
        look(10, 0, [], keep="inside", partial=(10, 10)),
        ev(1),
        drop("inside"),
        ev(1, 10),
    ],
    "the_child_that_agrees_most_is_reported": [
        ins((0, 18, 50, 64), [10, 20]),
        ins((0, 23, 50, 59), [10, 30]),
        ins((0, 21, 50, 61), [10, 40]),
        look(26, 16, [10], partial=(30, 7)),
    ],
    "the_oldest_child_is_reported_on_a_tie": [
        ins((0, 20, 50, 62), [10, 20]),
        ins((0, 20, 70, 82), [10, 30]),
        look((0, 20, 90, 102), 16, [10], partial=(20, 4)),
    ],
    "the_reported_child_is_pinned_by_the_match": [
        ins(48, [10, 20, 30]),
        rel(48),
        look(22, 16, [10], keep="copying", partial=(20, 6)),
        ev(9, 30),
        drop("copying"),
        ev(9, 20, 10),
    ],
    "only_committed_blocks_are_published_as_a_prompt_grows": [
        ins(37, [10, 11, 12], disk=[7, 8, 9], blocks=[10, 11], disk_ids=[7, 8]),
        ins(43, [10, 11, 12], matched=37, blocks=[], inserted=32),
        ins(57, [10, 11, 22, 23], matched=43, blocks=[22], inserted=48),
        rel(57),
        ev(9, 22, 11, 10, disk_ids=[NO_DISK, 8, 7]),
    ],
    "an_unaligned_prompt_grown_by_one_block_is_found_later": [
        ins(20, [10, 11], blocks=[10]),
        ins(40, [10, 12, 13], matched=20, blocks=[12], inserted=32),
        rel(40),
        stat(leases=0),
        look(40, 32, [10, 12]),
    ],
    "an_unaligned_prompt_grown_by_three_blocks_is_found_later": [
        ins(20, [10, 11], blocks=[10]),
        ins(64, [10, 11, 12, 13], matched=20, blocks=[11, 12, 13], inserted=64),
        rel(64),
        stat(leases=0),
        look(64, 64, [10, 11, 12, 13]),
    ],
    "a_prompt_shorter_than_a_block_can_grow": [
        ins(10, [10], blocks=[]),
        ins(40, [10, 20, 30], matched=10, blocks=[10, 20], inserted=32),
        rel(40),
        stat(leases=0),
        look(40, 32, [10, 20]),
    ],
    "a_looked_up_unaligned_prompt_grown_through_its_match_is_found_later": [
        ins(20, [10, 11]),
        rel(20),
        look(20, 16, [10], keep="request"),
        ins(64, [10, 11, 12, 13], match="request", blocks=[11, 12, 13], inserted=64),
        drop("request"),
        stat(leases=0),
        look(64, 64, [10, 11, 12, 13]),
    ],
}

SCENARIOS = BASIC | DISK | ADAPTERS | WHOLE_BLOCKS


class Player:
    """Plays steps on one cache and says what each of them answered."""

    def __init__(self, cache: RadixCache) -> None:
        self.cache = cache
        self.matches: dict[str, PrefixMatch] = {}

    def insert(self, match: str, **args: Any) -> Answer:
        if match:
            args["match"] = self.matches[match]
        got = self.cache.insert(**args)
        return {
            "blocks": got.blocks.tolist(),
            "disk_ids": got.disk_block_ids.tolist(),
            "duplicates": got.duplicates.tolist(),
            "duplicate_disk": got.duplicate_disk_block_ids.tolist(),
            "inserted": got.inserted_tokens,
        }

    def lookup(self, keep: str, **args: Any) -> Answer:
        match = self.cache.lookup(**args)
        self.matches[keep or f"unnamed {len(self.matches)}"] = match
        assert self.cache.peek_matched_tokens(**args) == match.matched_tokens
        partial = (match.partial_block, match.partial_tokens)
        return {
            "matched": match.matched_tokens,
            "blocks": match.matched_blocks.tolist(),
            "disk_ids": match.matched_disk_block_ids.tolist(),
            "partial": None if partial == (None, 0) else partial,
        }

    def drop(self, match: str) -> Answer:
        self.matches[match].release()
        return {"released": self.matches[match].released}

    def release(self, **args: Any) -> Answer:
        self.cache.release(**args)
        return {}

    def release_matched(self, **args: Any) -> Answer:
        self.cache.release_matched(**args)
        return {}

    def evict(self, num_blocks: int) -> Answer:
        got = self.cache.evict(num_blocks)
        return {"blocks": got.blocks.tolist(), "disk_ids": got.disk_block_ids.tolist()}

    def clear(self) -> Answer:
        got = self.cache.clear()
        return {"blocks": got.blocks.tolist(), "disk_ids": got.disk_block_ids.tolist()}

    def stats(self) -> Answer:
        return all_stats(self.cache)


def play(cache: RadixCache, steps: list[Step]) -> None:
    """Play the steps and compare each answer; a call that fails must change nothing."""
    player = Player(cache)
    for number, step in enumerate(steps):
        before = all_stats(cache)
        try:
            answer = getattr(player, step.op)(**step.args)
        except errors.ShmradixError as error:
            answer = {"error": type(error).__name__}
            assert all_stats(cache) == before
        where = f"step {number}, {step.op}{step.args}"
        assert {name: answer.get(name) for name in step.expect} == step.expect, where
        assert "error" not in answer or "error" in step.expect, where


@pytest.mark.parametrize("steps", SCENARIOS.values(), ids=SCENARIOS.keys())
def test_scenario(steps: list[Step], cache_factory: CacheFactory) -> None:
    play(cache_factory(max_blocks=64, block_size=16), steps)


def test_a_query_matches_the_whole_blocks_it_shares_with_the_cached_prompt(
    cache_factory: CacheFactory,
) -> None:
    """Every cached length up to 80 (each under its own adapter), every query up to 96, forking anywhere."""
    cache = cache_factory(max_blocks=256, block_size=16)
    for cached in range(1, 81):
        cache.insert(prompt_tokens(cached), list(range(10, 10 + cached // 16)), adapter_id=cached)
        queries = [(query, prompt_tokens(query)) for query in range(1, 97)]
        queries += [(fork, prompt_tokens((0, fork, 1000, 1096))) for fork in range(1, cached)]
        for common, prompt in queries:
            common = min(common, cached // 16 * 16)
            with cache.lookup(prompt, adapter_id=cached) as match:
                assert (match.matched_tokens, match.partial_tokens) == (common // 16 * 16, common % 16)
                assert match.matched_blocks.tolist() == list(range(10, 10 + common // 16))
