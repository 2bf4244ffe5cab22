"""Both halves against their plain model: any calls of several workers, every answer and every record compared."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests import test_state_machine as kv
from tests.model import Request
from tests.snapshot_model import Sizes
from tests.snapshot_pair import OWN_SLOTS, SAVED, HybridPair, Save

# --- hypothesis -----------------------------------------------------------------------------------------------------

CLIENT, BOOL = kv.CLIENT, st.booleans()
SESSION = st.integers(0, 3)
LIMIT = st.none() | st.integers(0, 12)
SIZES = st.builds(kv.Sizes, st.integers(1, 3), st.integers(3, 20), st.integers(2, 12), st.integers(1, 4))
INDEX = st.builds(
    lambda table, slots, *rest: Sizes(table, min(table, slots), *rest),
    st.integers(1, 6),
    st.sampled_from([0, 0, 1, 2, 3, 4]),
    st.integers(0, 3),
    st.sampled_from(["session", "chain"]),
    st.sampled_from([0.0, 0.5, 1.0, 8.0]),
)


class HybridMachine(RuleBasedStateMachine):
    pair: HybridPair

    @initialize(sizes=SIZES, index=INDEX)
    def start(self, sizes: kv.Sizes, index: Sizes) -> None:
        self.pair = HybridPair(sizes, index)

    def request(self, data: st.DataObject) -> Request:
        return data.draw(kv.requests(self.pair.sizes.block_size))

    def slot(self, data: st.DataObject, client: int) -> int:
        """Most often one that the worker may use."""
        model, count = self.pair.model, self.pair.index.snapshot_slots or OWN_SLOTS
        usable = [slot for slot in range(count) if model.may_use(client, slot)]
        return data.draw(st.sampled_from(usable * 4 + list(range(count + 1))))

    def save_of(self, data: st.DataObject, client: int) -> Save:
        request = self.request(data)
        depth = data.draw(st.integers(1, len(request.tokens)))
        kind = data.draw(st.sampled_from(SAVED))
        return Save(request, depth, self.slot(data, client), kind, data.draw(SESSION))

    def index_of(self, data: st.DataObject, items: list[Any]) -> int:
        return data.draw(st.integers(0, len(items) - 1))

    def has_matches(self) -> bool:
        return bool(self.pair.matches)

    def has_pendings(self) -> bool:
        return bool(self.pair.pendings)

    def has_keys(self) -> bool:
        return bool(self.pair.keys)

    def is_managed(self) -> bool:
        return self.pair.index.snapshot_slots > 0

    @rule(client=CLIENT, data=st.data(), session=SESSION, limit=LIMIT, require=BOOL, hermetic=BOOL)
    def find(
        self, client: int, data: st.DataObject, session: int, limit: int | None, require: bool, hermetic: bool
    ) -> None:
        self.pair.find(client, self.request(data), session, limit, require, hermetic)

    @rule(client=CLIENT, data=st.data(), table=kv.TABLES)
    def insert(self, client: int, data: st.DataObject, table: kv.Table) -> None:
        self.pair.insert(client, self.request(data), table)

    @rule(client=CLIENT, data=st.data())
    def save(self, client: int, data: st.DataObject) -> None:
        index = self.index_of(data, self.pair.matches) if self.has_matches() and data.draw(BOOL) else -1
        self.pair.save(client, self.save_of(data, client), index)

    @rule(client=CLIENT, data=st.data(), table=kv.TABLES)
    def insert_with_snapshot(self, client: int, data: st.DataObject, table: kv.Table) -> None:
        self.pair.insert_with_snapshot(client, self.save_of(data, client), table)

    @rule(client=CLIENT, data=st.data())
    def reserve(self, client: int, data: st.DataObject) -> None:
        self.pair.reserve(client, self.save_of(data, client))

    @precondition(has_pendings)
    @rule(data=st.data(), wanted=BOOL)
    def finish(self, data: st.DataObject, wanted: bool) -> None:
        index = self.index_of(data, self.pair.pendings)
        if wanted:
            self.pair.commit(index)
        else:
            self.pair.abort(index)

    @precondition(has_matches)
    @rule(data=st.data())
    def release_match(self, data: st.DataObject) -> None:
        self.pair.release_match(self.index_of(data, self.pair.matches))

    @rule(client=CLIENT, data=st.data())
    def release(self, client: int, data: st.DataObject) -> None:
        self.pair.release(client, self.request(data))

    @rule(client=CLIENT, count=st.integers(0, 3))
    def evict(self, client: int, count: int) -> None:
        self.pair.evict(client, count)

    @rule(client=CLIENT)
    def evict_snapshot(self, client: int) -> None:
        self.pair.evict_snapshot(client)

    @rule(client=CLIENT, least=st.integers(0, 3), pending=BOOL)
    def spill(self, client: int, least: int, pending: bool) -> None:
        self.pair.spill(client, least, pending)

    @precondition(has_keys)
    @rule(client=CLIENT, data=st.data(), what=st.sampled_from(["commit", "promote", "forget"]))
    def use_key(self, client: int, data: st.DataObject, what: str) -> None:
        key = data.draw(st.sampled_from(sorted(self.pair.keys)[-4:]))
        if what == "commit":
            self.pair.commit_spill(client, key)
        elif what == "forget":
            self.pair.forget(client, key)
        else:
            index = self.index_of(data, self.pair.matches) if self.has_matches() and data.draw(BOOL) else -1
            self.pair.promote(client, key, self.slot(data, client), index)

    @precondition(is_managed)
    @rule(client=CLIENT, evict=BOOL, finish=BOOL)
    def allocate(self, client: int, evict: bool, finish: bool) -> None:
        self.pair.allocate(client, evict, finish)

    @precondition(is_managed)
    @rule(client=CLIENT, data=st.data())
    def free(self, client: int, data: st.DataObject) -> None:
        self.pair.free(client, self.slot(data, client))

    @rule(client=CLIENT)
    def clear(self, client: int) -> None:
        self.pair.clear(client)

    @rule(client=CLIENT)
    def reopen(self, client: int) -> None:
        self.pair.reopen(client)

    @invariant()
    def check(self) -> None:
        if hasattr(self, "pair"):
            self.pair.check()

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.end()


TestHybridMachine = HybridMachine.TestCase
HybridMachine.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


# --- long walks -----------------------------------------------------------------------------------------------------

CALLS = ["find"] * 30 + ["insert"] * 20 + ["save"] * 30 + ["insert_with_snapshot"] * 6 + ["reserve"] * 10
CALLS += ["finish"] * 14 + ["release_match"] * 40 + ["release"] * 30 + ["evict"] * 8 + ["evict_snapshot"] * 6
CALLS += ["spill"] * 12 + ["use_key"] * 24 + ["allocate"] * 30 + ["free"] * 4 + ["reopen", "clear"]


class HybridWalk(kv.Walk):
    """A long random sequence of calls on one pair, the same for the same seed."""

    pair: HybridPair

    def slot(self, client: int) -> int:
        count = self.pair.index.snapshot_slots or OWN_SLOTS
        usable = [slot for slot in range(count) if self.pair.model.may_use(client, slot)]
        return self.pick.choice(usable) if usable and self.pick.random() < 0.9 else self.pick.randrange(count + 1)

    def save_of(self, client: int, request: Request) -> Save:
        kind = self.pick.choices(SAVED, [6, 3, 2, 2])[0]
        depth = self.pick.choice([len(request.tokens), self.pick.randint(1, len(request.tokens))])
        return Save(request, depth, self.slot(client), kind, self.pick.choice([0, 1, 1, 2, 3]))

    def match_index(self) -> int:
        matches = self.pair.matches
        return self.pick.randrange(len(matches)) if matches and self.pick.random() < 0.4 else -1

    def use_key(self, client: int) -> None:
        pair, key = self.pair, self.pick.choice(sorted(self.pair.keys)[-5:])
        match self.pick.choice(["commit", "promote", "promote", "forget"]):
            case "commit":
                pair.commit_spill(client, key)
            case "forget":
                pair.forget(client, key)
            case "promote":
                named = [i for i, (_, m) in enumerate(pair.matches) if pair.model.anchors[m].key == key]
                index = self.pick.choice(named) if named and self.pick.random() < 0.7 else self.match_index()
                pair.promote(client, key, self.slot(client), index)

    def step(self) -> None:
        pair, (client, request) = self.pair, self.client_and_request()
        pair.matches = [(match, old) for match, old in pair.matches if not old.released]
        pair.pinned = {match: pin for match, pin in pair.pinned.items() if not match.released}
        table = kv.Table(100 * self.pick.randrange(3), None)
        match self.pick.choice(CALLS):
            case "find":
                limit = self.pick.choice([None, None, self.pick.randrange(len(request.tokens) + 1)])
                flags = self.pick.random() < 0.2, self.pick.random() < 0.1
                pair.find(client, request, self.pick.choice([0, 1, 1, 2, 3]), limit, *flags)
            case "insert":
                pair.insert(client, request, table)
                self.owed.append((client, request))
            case "save":
                pair.save(client, self.save_of(client, request), self.match_index())
            case "insert_with_snapshot":
                pair.insert_with_snapshot(client, self.save_of(client, request), table)
            case "reserve":
                pair.reserve(client, self.save_of(client, request))
            case "finish" if pair.pendings:
                index = self.pick.randrange(len(pair.pendings))
                (pair.commit if self.pick.random() < 0.7 else pair.abort)(index)
            case "release_match" if pair.matches:
                pair.release_match(self.pick.randrange(len(pair.matches)))
            case "release":
                if self.owed and self.pick.random() < 0.8:
                    client, request = self.owed.pop(self.pick.randrange(len(self.owed)))
                pair.release(client, request)
            case "evict":
                pair.evict(client, self.pick.randrange(3))
            case "spill":
                pair.spill(client, self.pick.randrange(3), self.pick.random() < 0.4)
            case "use_key" if pair.keys:
                self.use_key(client)
            case "allocate" if pair.index.snapshot_slots:
                pair.allocate(client, self.pick.random() < 0.5, self.pick.random() < 0.2)
            case "free" if pair.index.snapshot_slots:
                pair.free(client, self.slot(client))
            case "evict_snapshot" | "reopen" | "clear" as name:
                getattr(pair, name)(client)


@pytest.mark.parametrize("retention", ["session", "chain"])
@pytest.mark.parametrize(
    ("seed", "sizes", "index"),
    [
        (1, kv.Sizes(2, 60, 40, 4), (12, 0, 4, 0.5)),
        (2, kv.Sizes(3, 60, 40, 4), (8, 5, 2, 0.0)),
        (3, kv.Sizes(1, 40, 20, 4), (3, 3, 1, 8.0)),
        (4, kv.Sizes(2, 60, 40, 4), (30, 20, 10, 1.0)),
        (5, kv.Sizes(2, 20, 6, 2), (2, 0, 64, 0.0)),
    ],
    ids=["own slots", "managed", "tight", "large", "tiny"],
)
def test_a_random_walk_over_both_halves_agrees_with_the_model(
    retention: str, seed: int, sizes: kv.Sizes, index: tuple[int, int, int, float]
) -> None:
    pair = HybridPair(sizes, Sizes(*index[:3], retention, index[3]))
    try:
        walk = HybridWalk(pair, seed)
        for _ in range(3000):
            walk.step()
            pair.check()
        pair.drain()
        done = [
            pair.model.tally[name] for name in ("snapshot_saves", "snapshot_hits", "tier_spills", "snapshot_evictions")
        ]
        assert min(done) > 10
    finally:
        pair.end()
