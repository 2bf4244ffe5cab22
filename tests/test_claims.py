"""Claims: of the workers that want one prompt, one computes it, and the others wait for that, not for ever."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from shmradix import Claim, RadixCache, errors
from tests.actors import Actor, attach
from tests.children import in_child

CacheFactory = Callable[..., RadixCache]

SIZE = 4
PROMPT = list(range(10 * SIZE))
OTHER = [*PROMPT[: 4 * SIZE], *range(500, 500 + 4 * SIZE)]  # shares the first four blocks
SOON = 60.0  # seconds in which what must happen does, on whatever machine


@pytest.fixture
def cache(cache_factory: CacheFactory) -> RadixCache:
    return cache_factory(max_blocks=None, num_blocks=64, block_size=SIZE, max_leases=32, max_workers=16, max_claims=4)


@pytest.fixture
def other(cache: RadixCache) -> Iterator[RadixCache]:
    """A second worker, in this process."""
    with RadixCache.attach(cache.name) as attached:
        yield attached


def compute(claim: Claim, upto: int | None = None) -> None:
    """Insert the prompt's first `upto` tokens, blocks for which are allocated."""
    assert claim.match is not None
    cache, matched = claim._cache, claim.match.matched_blocks.tolist()
    count = len(PROMPT) if upto is None else upto
    missing = count // SIZE - len(matched)
    claim.insert([*matched, *cache.allocate(missing).tolist()], num_tokens=upto)


def test_the_first_is_the_owner_and_the_others_are_told_who_and_since_when(
    cache: RadixCache, other: RadixCache
) -> None:
    before = time.monotonic_ns()
    first, second = cache.claim(PROMPT), other.claim(PROMPT)
    assert first.is_mine
    assert not first.is_waiting
    assert first.match is not None
    assert not second.is_mine
    assert second.is_waiting
    assert second.match is None
    assert f"pid {os.getpid()}" in second.owner == first.owner
    assert before <= second.taken_ns == first.taken_ns <= time.monotonic_ns()
    assert cache.stats().leases == 0  # nothing matched, and waiters hold no blocks


def test_what_is_cached_whole_is_nobodys(cache: RadixCache, other: RadixCache) -> None:
    with cache.claim(PROMPT) as claim:
        compute(claim)
    for prompt in (PROMPT, [*PROMPT, 1, 2, 3], [1, 2, 3]):
        found = other.claim(prompt)
        assert not found.is_mine
        assert not found.is_waiting
        assert found.owner == ""
        assert found.wait(0)
        assert found.match is not None
        assert found.match.matched_tokens == len(prompt) // SIZE * SIZE
        found.release()


def test_a_waiter_finds_what_was_inserted(cache: RadixCache, other: RadixCache) -> None:
    first, second = cache.claim(PROMPT), other.claim(PROMPT)
    assert not second.wait(0.0)
    compute(first)
    assert second.wait(SOON)
    assert not second.is_mine
    assert second.match is not None
    assert second.match.matched_tokens == len(PROMPT)
    assert not first.is_mine
    assert first.match is not None
    assert not first.match.released


def test_a_prompt_inserted_in_parts_stays_claimed(cache: RadixCache, other: RadixCache) -> None:
    first, second = cache.claim(PROMPT), other.claim(PROMPT)
    for upto in (3 * SIZE, 7 * SIZE + 2):
        compute(first, upto)
        assert not second.wait(0.05)
        assert not second.is_mine
        assert first.is_mine
        assert cache.peek_matched_tokens(PROMPT) == upto // SIZE * SIZE
    compute(first)
    assert second.wait(SOON)
    assert not second.is_mine


def test_who_shares_only_the_beginning_goes_on_alone(cache: RadixCache, other: RadixCache) -> None:
    first, second = cache.claim(PROMPT), other.claim(OTHER)
    assert second.is_waiting
    compute(first, 5 * SIZE)
    assert second.wait(SOON)
    assert second.is_mine
    assert second.match is not None
    assert second.match.matched_tokens == 4 * SIZE
    assert first.is_mine


def test_an_insert_without_the_claim_wakes_waiters_too(cache: RadixCache, other: RadixCache) -> None:
    first, second = cache.claim(PROMPT), other.claim(PROMPT)
    cache.insert(PROMPT, cache.allocate(10), match=first.match)
    assert second.wait(SOON)
    assert not second.is_mine
    assert second.match is not None
    assert second.match.matched_tokens == len(PROMPT)


@pytest.mark.parametrize("end", ["release", "error", "close", "clear"])
def test_who_waits_for_one_that_gives_up_takes_its_place(cache: RadixCache, other: RadixCache, end: str) -> None:
    first = other.claim(PROMPT)
    second = cache.claim(PROMPT)
    if end == "release":
        first.release()
    elif end == "error":
        with pytest.raises(KeyError), first:
            raise KeyError
    elif end == "close":
        other.close()
    else:
        cache.clear()
    assert second.wait(SOON)
    assert second.is_mine
    first.release()  # once more does no harm
    assert cache.claim(PROMPT).is_waiting


def test_after_a_clear_the_old_owner_stores_nothing(cache: RadixCache, other: RadixCache) -> None:
    first = cache.claim(PROMPT)
    cache.clear()
    second = other.claim(PROMPT)
    assert second.is_mine
    compute(first)
    assert cache.peek_matched_tokens(PROMPT) == 0
    assert second.is_mine
    first.release()
    compute(second)
    assert cache.peek_matched_tokens(PROMPT) == len(PROMPT)


@pytest.mark.parametrize("name", ["adapter_id", "salt", "block_keys"])
def test_claims_are_apart_where_prompts_are(cache: RadixCache, other: RadixCache, name: str) -> None:
    values: dict[str, tuple[Any, Any]] = {
        "adapter_id": (1, 2), "salt": (b"a", b"b"), "block_keys": ([1] * 10, [2, *[1] * 9]),
    }  # fmt: skip
    claims = [cache.claim(PROMPT, **{name: value}) for value in values[name]]
    assert all(claim.is_mine for claim in claims)
    assert cache.claim(PROMPT).is_mine
    again = [other.claim(PROMPT, **{name: value}) for value in values[name]]
    assert all(claim.is_waiting for claim in again)
    for claim in claims:
        compute(claim)
    assert all(claim.wait(SOON) and not claim.is_mine for claim in again)


@pytest.mark.parametrize("timeout", [0, 0.001, 0.03, 0.2])
def test_no_wait_ends_before_its_time_without_a_reason(cache: RadixCache, other: RadixCache, timeout: float) -> None:
    cache.claim(PROMPT)
    waiting = other.claim(PROMPT)
    started = time.monotonic()
    assert not waiting.wait(timeout)
    assert time.monotonic() - started >= timeout
    assert waiting.is_waiting


def test_the_time_is_for_all_rounds_together(cache: RadixCache, other: RadixCache) -> None:
    """Owners that come and go every few milliseconds don't keep a waiter beyond its deadline."""
    waiting, ended = other.claim(OTHER[:SIZE]), threading.Event()
    waiting.release()

    def come_and_go() -> None:
        claim = cache.claim(PROMPT)
        while not ended.is_set():
            cache.clear()
            claim.release()
            claim = cache.claim(PROMPT)
            time.sleep(0.001)
        claim.release()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(20):
            with other.claim(PROMPT) as claim:
                started = time.monotonic()
                claim.wait(0.02)
                assert time.monotonic() - started < SOON
    finally:
        ended.set()
        thread.join()


def test_a_sleeping_waiter_outlives_the_end_of_its_handle(cache: RadixCache) -> None:
    cache.claim(PROMPT)
    other = RadixCache.attach(cache.name)
    waiting, said = other.claim(PROMPT), []

    def wait() -> None:
        try:
            waiting.wait()
        except errors.CacheClosed as error:
            said.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    other.close()
    thread.join(SOON)
    assert len(said) == 1


def test_claims_that_run_out_are_told_and_a_place_comes_back(cache: RadixCache) -> None:
    prompts = [[number] * SIZE for number in range(5)]
    claims = [cache.claim(prompt) for prompt in prompts[:4]]
    with pytest.raises(errors.ClaimsFull, match="max_claims=4"):
        cache.claim(prompts[4])
    assert cache.stats().leases == 0
    claims[1].release()
    assert cache.claim(prompts[4]).is_mine
    assert cache.verify() == []


def test_a_cache_without_claims_says_so(cache_factory: CacheFactory) -> None:
    with pytest.raises(ValueError, match="create it with max_claims"):
        cache_factory(max_blocks=4, max_claims=0).claim(PROMPT)


def test_what_is_not_ones_own_is_refused(cache: RadixCache, other: RadixCache) -> None:
    first, second = cache.claim(PROMPT), other.claim(PROMPT)
    with pytest.raises(errors.ClaimError, match="is_mine"):
        second.insert(range(10))
    for count in (0, 41):
        with pytest.raises(ValueError, match=f"num_tokens={count}"):
            first.insert(range(10), num_tokens=count)
    assert "ClaimError" in in_child(first.release)
    assert "ClaimError" in in_child(lambda: first.insert(range(2), num_tokens=2 * SIZE))
    compute(first)
    assert second.wait(SOON)


def test_a_failed_insert_leaves_the_claim(cache: RadixCache, other: RadixCache) -> None:
    first, second = cache.claim(PROMPT), other.claim(PROMPT)
    with pytest.raises(errors.BlockError):
        first.insert(range(10))
    assert first.is_mine
    assert not second.wait(0)
    compute(first)
    assert second.wait(SOON)
    assert not second.is_mine


# --- processes ----------------------------------------------------------------------------------------------------


def prepare(state: SimpleNamespace, name: str) -> int:
    pid = attach(state, name)
    state.cache.claim([9] * SIZE).release()  # all is loaded
    return pid


def want(state: SimpleNamespace, tokens: list[int], pause: float) -> tuple[bool, bool, int]:
    """Claim, wait, compute if it is ours: whether we were the owner at first, whether we computed, what we found."""
    with state.cache.claim(tokens) as claim:
        was_mine = claim.is_mine
        assert claim.wait(SOON)
        computed = claim.is_mine
        if computed:
            time.sleep(pause)
            claim.insert([*claim.match.matched_blocks, *state.cache.allocate(len(tokens) // SIZE)])
        return was_mine, computed, claim.match.matched_tokens


def keep(state: SimpleNamespace, tokens: list[int]) -> bool:
    state.claim = state.cache.claim(tokens)
    return bool(state.claim.is_mine)


@pytest.fixture
def actors(cache: RadixCache) -> Iterator[list[Actor]]:
    made: list[Actor] = []
    try:
        for _ in range(8):
            made.append(Actor())
            made[-1].begin(prepare, cache.name)
        for actor in made:
            actor.answer()
        yield made
    finally:
        for actor in made:
            actor.kill()


def test_of_many_equal_prompts_just_one_is_computed(cache: RadixCache, actors: list[Actor]) -> None:
    for count in (2, 4, 8):
        prompt = [count] * SIZE * 5
        for actor in actors[:count]:
            actor.begin(want, prompt, 0.1)
        answers = [actor.answer() for actor in actors[:count]]
        assert sum(computed for _, computed, _ in answers) == 1
        assert sorted(found for *_, found in answers) == [0, *[5 * SIZE] * (count - 1)]
    assert cache.stats().inserts == 3
    assert cache.verify() == []


def test_the_next_takes_over_from_a_killed_owner(cache: RadixCache, actors: list[Actor]) -> None:
    assert actors[0].do(keep, PROMPT)
    for actor in actors[1:4]:
        actor.begin(want, PROMPT, 0.05)
    time.sleep(0.1)
    actors[0].kill()
    answers = [actor.answer() for actor in actors[1:4]]
    assert not any(was_mine for was_mine, *_ in answers)
    assert sum(computed for _, computed, _ in answers) == 1
    assert cache.verify() == []
