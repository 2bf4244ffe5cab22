"""Managed blocks against a ledger: after every call of any worker, whatever was refused, each block is in one place."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shmradix import RadixCache, errors
from shmradix.layout import IN_TREE
from tests.conftest import fresh_name, remove_all
from tests.model import Match, Model, Request, segment_image

CLIENTS, BLOCKS, SIZE = 3, 12, 2
CLIENT = st.integers(0, CLIENTS - 1)
PROMPT = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(
    lambda steps: Request(tuple(token for step in steps for token in (step, 1)))
)
SHARE = st.lists(st.booleans(), min_size=BLOCKS, max_size=BLOCKS)


class Ledger:
    """Real handles, the model of the tree, and who has what else."""

    def __init__(self) -> None:
        self.name = fresh_name()
        self.caches = [
            RadixCache.open(self.name, num_blocks=BLOCKS, block_size=SIZE, max_leases=8, max_workers=CLIENTS + 1)
            for _ in range(CLIENTS)
        ]
        self.model = Model(SIZE, BLOCKS, 8, 256)
        self.free = set(range(BLOCKS))
        self.private: list[list[int]] = [[] for _ in range(CLIENTS)]
        self.matches: list[tuple[Any, Match]] = []

    def end(self) -> None:
        for cache in self.caches:
            cache.close()
        remove_all(self.name)

    def stored(self) -> list[int]:
        return [node.block for node in self.model.nodes()]

    def check(self) -> None:
        assert segment_image(self.caches[0]) == self.model.image()
        owners = self.caches[0]._segment.views.blocks["worker"].tolist()
        slots = [cache._worker.slot + 1 for cache in self.caches]
        stored = self.stored()
        for block in range(BLOCKS):
            holders = [i for i, mine in enumerate(self.private) if block in mine]
            assert len(holders) + stored.count(block) + (block in self.free) == 1
            assert owners[block] == (slots[holders[0]] if holders else IN_TREE if block in stored else 0)
        assert self.caches[0].verify() == []

    def allocate(self, client: int, count: int) -> None:
        leased = sum(node.references() > 0 for node in self.model.nodes())
        evictable = len(self.model.nodes()) - leased
        if count > len(self.free) + evictable:
            with pytest.raises(errors.NoFreeBlocks) as raised:
                self.caches[client].allocate(count)
            error, private = raised.value, sum(map(len, self.private))
            said = (error.free, error.evictable, error.leased, error.private)
            assert said == (len(self.free), evictable, leased, private)
            return
        given = self.caches[client].allocate(count).tolist()
        self.free |= {block for block, _ in self.model.evict(max(0, count - len(self.free)))}
        assert len(given) == len({*given}) == count
        assert self.free >= {*given}
        self.free -= {*given}
        self.private[client] += given

    def give_back(self, client: int, blocks: list[int]) -> None:
        self.caches[client].free(blocks)
        self.free |= {*blocks}
        self.private[client] = [block for block in self.private[client] if block not in blocks]

    def insert(self, client: int, request: Request, table: list[int], match: tuple[Any, Match] | None) -> None:
        real, ours = match or (None, None)
        try:
            expected = self.model.insert(client, request, table, None, 0, ours)
        except errors.ShmradixError as error:
            with pytest.raises(type(error)):
                self.caches[client].insert(request.tokens, table, match=real)
            return
        got = self.caches[client].insert(request.tokens, table, match=real)
        assert (got.blocks.tolist(), got.duplicates.tolist()) == (expected.blocks, expected.duplicates)
        self.private[client] = [block for block in self.private[client] if block not in expected.blocks]

    def refused(self, client: int, request: Request, wrong: int) -> None:
        """Blocks that are not the worker's are refused, and so are those that are named twice."""
        cache, missing = self.caches[client], len(request.tokens) // SIZE - (len(self.model.walk(request)) or 1) + 1
        if wrong not in self.private[client]:
            with pytest.raises(errors.BlockError):
                cache.free([*self.private[client], wrong])
        with pytest.raises(ValueError):
            cache.free([wrong, wrong])
        own = [block for block in self.private[client] if block != wrong]
        table = [*own, *range(100, 110)][: len(request.tokens) // SIZE - 1]
        if missing and wrong not in self.private[client] and len(self.model.leases) < self.model.max_leases:
            with pytest.raises(errors.BlockError):
                cache.insert(request.tokens, [*table, wrong])

    def reopen(self, client: int, killed: bool = False) -> None:
        """Close the handle, or let it die: its lock goes, and somebody else has to free what it holds."""
        if killed:
            self.caches[client]._worker.forget()
            assert self.caches[(client + 1) % CLIENTS].reap() == 1
        self.caches[client].close()
        self.model.close(client)
        self.free |= {*self.private[client]}
        self.private[client] = []
        self.matches = [match for match in self.matches if match[1].client != client]
        self.caches[client] = RadixCache.attach(self.name)


class BlockMachine(RuleBasedStateMachine):
    """Three workers in one process."""

    ledger: Ledger

    @initialize()
    def start(self) -> None:
        self.ledger = Ledger()

    @rule(client=CLIENT, count=st.integers(0, BLOCKS))
    def allocate(self, client: int, count: int) -> None:
        self.ledger.allocate(client, count)

    @rule(client=CLIENT, share=SHARE)
    def give_back(self, client: int, share: list[bool]) -> None:
        mine = self.ledger.private[client]
        self.ledger.give_back(client, [block for block, chosen in zip(mine, share) if chosen])

    @rule(client=CLIENT, request=PROMPT)
    def lookup(self, client: int, request: Request) -> None:
        ledger = self.ledger
        try:
            expected = ledger.model.lookup(client, request)
        except errors.LeasesFull:
            return
        ledger.matches.append((ledger.caches[client].lookup(request.tokens), expected))

    @rule(client=CLIENT, request=PROMPT, reuse=st.booleans())
    def insert(self, client: int, request: Request, reuse: bool) -> None:
        """With own blocks for what is missing, and for the rest those of the tree, or own ones, which come back."""
        ledger, count = self.ledger, len(request.tokens) // SIZE
        held = [match for match in ledger.matches if match[1].client == client and not match[1].released]
        match = next((one for one in held if one[1].request == request), None)
        path = [node.block for node in ledger.model.walk(request)[1:]]
        table = [*(path if reuse else []), *ledger.private[client]][:count]
        if len(table) == count:
            ledger.insert(client, request, table, match)

    @rule(client=CLIENT, request=PROMPT, wrong=st.integers(0, BLOCKS - 1))
    def refused(self, client: int, request: Request, wrong: int) -> None:
        self.ledger.refused(client, request, wrong)

    @rule(which=st.integers(0, 100))
    def release(self, which: int) -> None:
        if self.ledger.matches:
            real, ours = self.ledger.matches.pop(which % len(self.ledger.matches))
            real.release()
            self.ledger.model.release_match(ours)

    @rule(client=CLIENT, count=st.integers(1, 4))
    def evict(self, client: int, count: int) -> None:
        evicted = self.ledger.caches[client].evict(count).blocks.tolist()
        assert evicted == [block for block, _ in self.ledger.model.evict(count)]
        self.ledger.free |= {*evicted}

    @rule(client=CLIENT)
    def clear(self, client: int) -> None:
        evicted = self.ledger.caches[client].clear().blocks.tolist()
        assert evicted == [block for block, _ in self.ledger.model.clear()]
        self.ledger.free |= {*evicted}

    @rule(client=CLIENT, killed=st.booleans())
    def reopen(self, client: int, killed: bool) -> None:
        self.ledger.reopen(client, killed)

    @invariant()
    def check(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.check()

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.ledger.end()


TestBlockMachine = BlockMachine.TestCase
BlockMachine.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def test_blocks_of_many_random_calls_are_each_in_one_place() -> None:
    chance, ledger = np.random.default_rng(7), Ledger()
    try:
        counts = {"evicted": 0, "duplicates": 0}
        for step in range(3000):
            client = int(chance.integers(CLIENTS))
            tokens = tuple(int(token) for step in chance.integers(0, 2, chance.integers(1, 6)) for token in (step, 1))
            count = len(tokens) // SIZE
            before = ledger.caches[0].stats()
            try:
                mine = ledger.caches[client].allocate(count).tolist()
            except errors.NoFreeBlocks:
                ledger.reopen(int(chance.integers(CLIENTS)), killed=bool(step % 2))
                ledger.check()
                continue
            evicted = ledger.caches[0].stats().evicted_blocks - before.evicted_blocks
            freed = [block for block, _ in ledger.model.evict(evicted)]
            ledger.free = (ledger.free | {*freed}) - {*mine}
            ledger.private[client] += mine
            ledger.insert(client, Request(tokens), mine, None)
            counts["evicted"] += evicted
            counts["duplicates"] += len({*mine} & {*ledger.private[client]})
            if chance.random() < 0.8:
                ledger.caches[client].release(tokens)
                ledger.model.release(client, Request(tokens))
                ledger.give_back(client, ledger.private[client].copy())
            ledger.check()
        assert min(counts.values()) > 500, counts
    finally:
        ledger.end()
