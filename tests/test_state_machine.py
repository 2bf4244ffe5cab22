"""The cache against a plain model: any sequence of calls by several workers, every answer and every count compared."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shmradix import NO_DISK, EvictedBlocks, PrefixMatch, RadixCache, errors
from tests.conftest import fresh_name, remove_all
from tests.model import Match, Model, Namespace, Request, all_stats, segment_image

R = TypeVar("R")
M = TypeVar("M")

CLIENTS = 3
NAMESPACES: list[Namespace] = [(0, b""), (0, b"tenant"), (7, b""), (7, b"tenant")]


class Sizes(NamedTuple):
    """The geometry of one run: small, so that every capacity runs out."""

    block_size: int
    max_blocks: int
    max_leases: int
    max_namespaces: int


class Table(NamedTuple):
    """What an insert brings: block ids from `first` on, and disk ids (of the blocks with a 1 in `disk`) or none."""

    first: int
    disk: tuple[int, ...] | None

    def blocks(self, count: int) -> list[int]:
        return list(range(self.first, self.first + count))

    def disks(self, count: int) -> list[int] | None:
        if self.disk is None:
            return None
        chosen = [self.disk[i % len(self.disk)] for i in range(count)]
        return [1000 + self.first + i if chosen[i] else NO_DISK for i in range(count)]


def pairs(evicted: EvictedBlocks) -> list[tuple[int, int]]:
    return list(zip(evicted.blocks.tolist(), evicted.disk_block_ids.tolist(), strict=True))


class Pair:
    """One cache with several workers, and its model. Each method makes the same call on both and compares."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.name = fresh_name()
        self.model = Model(*sizes)
        self.caches = [RadixCache.create(self.name, max_workers=CLIENTS + 1, **sizes._asdict())]
        self.caches += [RadixCache.attach(self.name) for _ in range(CLIENTS - 1)]
        self.watcher = RadixCache.attach(self.name)
        self.matches: list[tuple[PrefixMatch, Match]] = []

    def end(self) -> None:
        """Close all workers and remove the segment."""
        try:
            for cache in (*self.caches, self.watcher):
                cache.close()
        finally:
            remove_all(self.name)

    def drain(self) -> None:
        """Close and reattach every worker: nothing is leased, so everything can be evicted."""
        for client in range(CLIENTS):
            self.reopen(client)
        self.check()
        self.evict(0, self.sizes.max_blocks)
        self.check()
        assert self.model.nodes() == [] == self.model.roots

    def both(self, real: Callable[[], R], modelled: Callable[[], M]) -> tuple[R, M] | None:
        """The two answers, or None where both refused with the same error."""
        try:
            expected = modelled()
        except (errors.ShmradixError, ValueError) as error:
            with pytest.raises(type(error)):
                real()
            return None
        return real(), expected

    def check(self) -> None:
        """Every block with its place, ids, reference count and children, and every statistic."""
        assert segment_image(self.watcher) == self.model.image()
        assert all_stats(self.watcher) == self.model.stats()

    def lookup(self, client: int, request: Request) -> None:
        cache = self.caches[client]
        answers = self.both(
            lambda: cache.lookup(request.tokens, **request.identity()),
            lambda: self.model.lookup(client, request),
        )
        if answers is None:
            return
        match, expected = answers
        self.matches.append(answers)
        assert match.matched_tokens == expected.tokens
        assert match.matched_blocks.tolist() == expected.blocks
        assert match.matched_disk_block_ids.tolist() == expected.disks
        assert (match.partial_block, match.partial_tokens) == (expected.partial or (None, 0))

    def peek(self, client: int, request: Request) -> None:
        matched = self.caches[client].peek_matched_tokens(request.tokens, **request.identity())
        assert matched == self.model.peek(request)

    def insert(self, client: int, request: Request, table: Table, matched: int = 0) -> None:
        blocks, disks = self.tables(request, table)
        arguments = {"disk_block_ids": disks, "matched_tokens": matched} | request.identity()
        self.compare_insert(
            lambda: self.caches[client].insert(request.tokens, blocks, **arguments),
            lambda: self.model.insert(client, request, blocks, disks, matched, None),
        )

    def extend(self, match_index: int, tokens: tuple[int, ...], keys: tuple[int, ...] | None, table: Table) -> None:
        """Insert through a match of the worker that made it."""
        match, expected = self.matches[match_index]
        request = expected.request._replace(tokens=tokens, keys=keys)
        blocks, disks = self.tables(request, table)
        self.compare_insert(
            lambda: self.caches[expected.client].insert(
                tokens, blocks, disk_block_ids=disks, match=match, block_keys=keys
            ),
            lambda: self.model.insert(expected.client, request, blocks, disks, 0, expected),
        )

    def tables(self, request: Request, table: Table) -> tuple[list[int], list[int] | None]:
        count = -(-len(request.tokens) // self.sizes.block_size)
        return table.blocks(count), table.disks(count)

    def compare_insert(self, real: Callable[[], Any], modelled: Callable[[], Any]) -> None:
        answers = self.both(real, modelled)
        if answers is None:
            return
        got, expected = answers
        assert got.blocks.tolist() == expected.blocks
        assert got.disk_block_ids.tolist() == expected.disks
        assert got.duplicates.tolist() == expected.duplicates
        assert got.duplicate_disk_block_ids.tolist() == expected.duplicate_disks
        assert got.inserted_tokens == expected.tokens

    def release_match(self, match_index: int) -> None:
        match, expected = self.matches[match_index]
        self.both(match.release, lambda: self.model.release_match(expected))
        assert match.released == expected.released

    def release(self, client: int, request: Request, matched: int | None = None) -> None:
        cache, identity = self.caches[client], request.identity()
        self.both(
            lambda: (
                cache.release(request.tokens, **identity)
                if matched is None
                else cache.release_matched(request.tokens, matched, **identity)
            ),
            lambda: self.model.release(client, request, matched),
        )

    def evict(self, client: int, count: int) -> None:
        assert pairs(self.caches[client].evict(count)) == self.model.evict(count)

    def clear(self, client: int) -> None:
        assert pairs(self.caches[client].clear()) == self.model.clear()

    def reopen(self, client: int) -> None:
        """Close a worker, which drops its leases, and attach another in its place."""
        self.caches[client].close()
        self.model.close(client)
        self.matches = [(match, expected) for match, expected in self.matches if expected.client != client]
        self.caches[client] = RadixCache.attach(self.name)

    def refused(self, client: int, request: Request) -> None:
        """Calls with bad arguments; the check after the step sees that they changed nothing."""
        cache, tokens = self.caches[client], request.tokens
        count = -(-len(tokens) // self.sizes.block_size)
        for call in (
            lambda: cache.insert(tokens, [*range(count), -1]),
            lambda: cache.insert(tokens, list(range(count)), disk_block_ids=[1] * (count + 2)),
            lambda: cache.insert(tokens, list(range(count)), matched_tokens=len(tokens) + 1),
            lambda: cache.lookup([*tokens, -1]),
            lambda: cache.evict(-1),
        ):
            with pytest.raises(ValueError):
                call()


# How prompts come about: few different blocks, so that prompts share prefixes and part ways inside a block.


def chunks(block_size: int) -> list[tuple[int, ...]]:
    return [(0,) * block_size, (0,) * (block_size - 1) + (1,), (1,) + (0,) * (block_size - 1)]


def requests(block_size: int) -> st.SearchStrategy[Request]:
    whole = st.lists(st.sampled_from(chunks(block_size)), max_size=5)
    tail = st.lists(st.integers(0, 1), max_size=block_size - 1)
    prompts = st.builds(lambda parts, rest: (*(t for part in parts for t in part), *rest), whole, tail)
    return st.builds(
        lambda tokens, namespace, keyed: Request(tokens or (0,), namespace, keys_for(tokens, block_size, keyed)),
        prompts,
        st.sampled_from(NAMESPACES[:1] * 3 + NAMESPACES),
        st.integers(-6, 1),
    )


def keys_for(tokens: tuple[int, ...], block_size: int, keyed: int) -> tuple[int, ...] | None:
    """No keys for most prompts, else one key on the second block."""
    count = len(tokens) // block_size
    return None if keyed < 0 or count < 2 else (0, keyed, *[0] * (count - 2))


TABLES = st.builds(
    Table,
    st.integers(0, 2).map(lambda n: 100 * n),
    st.none() | st.tuples(st.integers(0, 1), st.integers(0, 1)),
)
CLIENT = st.integers(0, CLIENTS - 1)
SIZES = st.builds(Sizes, st.integers(2, 4), st.integers(3, 20), st.integers(2, 12), st.integers(1, 4))


class CacheMachine(RuleBasedStateMachine):
    """Rules draw what depends on the geometry through `data`."""

    pair: Pair

    @initialize(sizes=SIZES)
    def start(self, sizes: Sizes) -> None:
        self.pair = Pair(sizes)

    def request(self, data: st.DataObject) -> Request:
        return data.draw(requests(self.pair.sizes.block_size))

    def has_matches(self) -> bool:
        return bool(self.pair.matches)

    @rule(client=CLIENT, data=st.data())
    def lookup(self, client: int, data: st.DataObject) -> None:
        self.pair.lookup(client, self.request(data))

    @rule(client=CLIENT, data=st.data())
    def peek(self, client: int, data: st.DataObject) -> None:
        self.pair.peek(client, self.request(data))

    @rule(client=CLIENT, data=st.data(), table=TABLES)
    def insert(self, client: int, data: st.DataObject, table: Table) -> None:
        self.pair.insert(client, self.request(data), table)

    @rule(client=CLIENT, data=st.data(), table=TABLES)
    def insert_after_matched(self, client: int, data: st.DataObject, table: Table) -> None:
        request = self.request(data)
        self.pair.insert(client, request, table, data.draw(st.integers(0, len(request.tokens))))

    @precondition(has_matches)
    @rule(data=st.data(), table=TABLES)
    def insert_with_match(self, data: st.DataObject, table: Table) -> None:
        index, other = data.draw(st.integers(0, len(self.pair.matches) - 1)), self.request(data)
        old = self.pair.matches[index][1].request
        size = self.pair.sizes.block_size
        tokens = data.draw(st.sampled_from([old.tokens, old.tokens + other.tokens, other.tokens]))
        keys = (*(old.keys or ()), *[0] * (len(tokens) // size))[: len(tokens) // size]
        self.pair.extend(index, tokens, keys, table)

    @precondition(has_matches)
    @rule(data=st.data())
    def release_match(self, data: st.DataObject) -> None:
        self.pair.release_match(data.draw(st.integers(0, len(self.pair.matches) - 1)))

    @rule(client=CLIENT, data=st.data())
    def release(self, client: int, data: st.DataObject) -> None:
        self.pair.release(client, self.request(data))

    @rule(client=CLIENT, data=st.data())
    def release_matched(self, client: int, data: st.DataObject) -> None:
        request = self.request(data)
        self.pair.release(client, request, data.draw(st.integers(0, len(request.tokens))))

    @rule(client=CLIENT, count=st.integers(0, 6))
    def evict(self, client: int, count: int) -> None:
        self.pair.evict(client, count)

    @rule(client=CLIENT)
    def clear(self, client: int) -> None:
        self.pair.clear(client)

    @rule(client=CLIENT)
    def reopen(self, client: int) -> None:
        self.pair.reopen(client)

    @rule(client=CLIENT, data=st.data())
    def refused(self, client: int, data: st.DataObject) -> None:
        self.pair.refused(client, self.request(data))

    @invariant()
    def check(self) -> None:
        if hasattr(self, "pair"):
            self.pair.check()

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.end()


TestCacheMachine = CacheMachine.TestCase
CacheMachine.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


CALLS = ["lookup"] * 30 + ["insert"] * 20 + ["grow"] * 12 + ["extend"] * 16 + ["peek"] * 6 + ["refused"]
CALLS += ["release_match"] * 36 + ["release"] * 40 + ["release_matched"] * 12 + ["evict"] * 20
CALLS += ["reopen", "clear"]


class Walk:
    """A long random sequence of calls on one pair, the same for the same seed."""

    def __init__(self, pair: Pair, seed: int) -> None:
        self.pair = pair
        self.pick = random.Random(seed)
        self.recent: list[tuple[int, Request]] = []
        self.owed: list[tuple[int, Request]] = []

    def client_and_request(self) -> tuple[int, Request]:
        """Most often what some worker used lately, so that there is something to hit and to release."""
        if not self.recent or self.pick.random() < 0.3:
            self.recent = [*self.recent[-30:], (self.pick.randrange(CLIENTS), self.request())]
            return self.recent[-1]
        return self.pick.choice(self.recent)

    def request(self) -> Request:
        size = self.pair.sizes.block_size
        parts = self.pick.choices(chunks(size), [3, 1, 1], k=self.pick.randrange(6))
        tail = [self.pick.randrange(2) for _ in range(self.pick.randrange(size))]
        tokens = (*(token for part in parts for token in part), *tail) or (0,)
        namespace = self.pick.choices(NAMESPACES, [12, 2, 1, 1])[0]
        return Request(tokens, namespace, keys_for(tokens, size, self.pick.randrange(-8, 2)))

    def step(self) -> None:
        pair, (client, request) = self.pair, self.client_and_request()
        pair.matches = [(match, old) for match, old in pair.matches if not old.released]
        table = Table(100 * self.pick.randrange(3), self.pick.choice([None, (1,), (1, 0), (0, 1, 1)]))
        part = self.pick.randrange(len(request.tokens) + 1)
        index = self.pick.randrange(len(pair.matches)) if pair.matches else -1
        match self.pick.choice(CALLS):
            case "release" if self.owed and self.pick.random() < 0.8:
                pair.release(*self.owed.pop(self.pick.randrange(len(self.owed))))
            case "lookup" | "peek" | "release" | "refused" as name:
                getattr(pair, name)(client, request)
            case "insert":
                pair.insert(client, request, table)
                self.owed.append((client, request))
            case "grow":
                pair.insert(client, request, table, part)
            case "extend" if pair.matches:
                old = pair.matches[index][1].request
                tokens = old.tokens + request.tokens
                keys = (*(old.keys or ()), *[0] * len(tokens))[: len(tokens) // pair.sizes.block_size]
                pair.extend(index, tokens, keys, table)
            case "release_match" if pair.matches:
                pair.release_match(index)
            case "release_matched":
                pair.release(client, request, part)
            case "evict":
                pair.evict(client, self.pick.randrange(5))
            case "reopen" | "clear" as name:
                getattr(pair, name)(client)


@pytest.mark.parametrize(
    ("seed", "sizes"),
    [(1, Sizes(2, 60, 40, 4)), (2, Sizes(3, 12, 8, 2)), (3, Sizes(4, 200, 100, 8)), (4, Sizes(1, 5, 3, 1))],
    ids=["roomy", "tight", "large", "tiny"],
)
def test_a_random_walk_agrees_with_the_model(seed: int, sizes: Sizes) -> None:
    pair = Pair(sizes)
    try:
        walk = Walk(pair, seed)
        for _ in range(5000):
            walk.step()
            pair.check()
        pair.drain()
        counters = pair.model.counters
        assert min(counters["hits"], counters["inserted_blocks"], counters["evicted_blocks"]) > 100
    finally:
        pair.end()
