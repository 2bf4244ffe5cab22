"""A cache with both halves and its model: each method makes the same call on the two and compares."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from shmradix import PrefixMatch, RadixCache, errors
from shmradix.layout import HIDDEN, PENDING, SIBLING, TAIL
from shmradix.results import Spill
from shmradix.snapshot_methods import PendingSnapshot
from tests import test_state_machine as kv
from tests.conftest import fresh_name
from tests.model import Match, Request
from tests.snapshot_model import HybridModel, Prefix, Sizes, Snapshot, prefix_of
from tests.snapshot_reader import snapshot_image, snapshot_stats

CLIENTS = kv.CLIENTS
SAVED = ("plain", "tail", "sibling", "finish")
OWN_SLOTS = 8  # that the callers number, where the cache manages none


class Save(NamedTuple):
    """What to save: the first `depth` tokens of a prompt."""

    request: Request
    depth: int
    slot: int
    kind: str
    session: int

    def arguments(self, block_size: int) -> dict[str, Any]:
        keys, blocks = self.request.keys, -(-self.depth // block_size)
        return self.request.identity() | {"block_keys": None if keys is None else keys[:blocks]}


class State(NamedTuple):
    """What stands for a state's bytes."""

    prefix: Prefix
    kind: str
    session: int


class Pinned(NamedTuple):
    """What is in the slot that a match has."""

    slot: int
    state: State


class HybridPair(kv.Pair):
    """One cache with several workers, and its model; `slots` and `tier` stand for the states' bytes."""

    model: HybridModel

    def __init__(self, sizes: kv.Sizes, index: Sizes) -> None:
        self.sizes, self.index = sizes, index
        self.name = fresh_name()
        self.model = HybridModel(*sizes, sizes=index)
        geometry = sizes._asdict() | index._asdict()
        self.caches = [RadixCache.create(self.name, max_workers=CLIENTS + 1, **geometry)]
        self.caches += [RadixCache.attach(self.name) for _ in range(CLIENTS - 1)]
        self.watcher = RadixCache.attach(self.name)
        self.matches: list[tuple[PrefixMatch, Match]] = []
        self.pendings: list[tuple[PendingSnapshot, Snapshot]] = []
        self.keys: dict[int, int] = {}  # real ones by the model's
        self.slots: dict[int, State] = {}
        self.tier: dict[int, State] = {}
        self.pinned: dict[Match, Pinned] = {}

    def check(self) -> None:
        super().check()
        assert snapshot_image(self.watcher, self.caches) == self.model.snapshot_image()
        assert snapshot_stats(self.watcher) == self.model.snapshot_stats()
        self.check_slots()
        self.check_tails()

    def check_slots(self) -> None:
        """No slot is in two places; what a match has is what it was when it was found."""
        views = self.watcher._segment.views
        live = views.snapshots[(views.snapshots["born"] != 0) & (views.snapshots["tier_key"] == 0)]
        taken = live["slot"].tolist()
        assert len(set(taken)) == len(taken)
        owned = {slot for slot in range(len(views.slots)) if views.slots["worker"][slot]}
        pending = live["slot"][live["flags"] & PENDING != 0].tolist()
        assert not owned & set(taken) - set(pending)
        for match, pin in self.pinned.items():
            if match.lease in self.model.pins:
                assert self.slots[pin.slot] == pin.state

    def check_tails(self) -> None:
        views = self.watcher._segment.views
        current = views.snapshots[(views.snapshots["born"] != 0) & (views.snapshots["flags"] & (PENDING | HIDDEN) == 0)]
        for flag in (TAIL, SIBLING):
            found = current[(current["flags"] & flag != 0) & (current["epoch"] == views.state["epoch"][0])]
            names = [(s["session"].item(), s["adapter_id"].item(), s["salt"].tobytes()) for s in found]
            assert len(set(names)) == len(names)

    # Lookups

    def find(
        self, client: int, request: Request, session: int, limit: int | None, require: bool, hermetic: bool
    ) -> None:
        def modelled() -> Match:
            match = self.model.lookup(client, request)
            self.model.resume(match, request, limit, require, session, hermetic)
            return match

        how = {"session": session, "max_snapshot_tokens": limit, "require_snapshot": require, "hermetic": hermetic}
        answers = self.both(lambda: self.caches[client].lookup(request.tokens, **request.identity(), **how), modelled)
        if answers is None:
            return
        match, expected = answers
        self.matches.append(answers)
        assert (match.matched_tokens, match.matched_blocks.tolist()) == (expected.tokens, expected.blocks)
        assert match.matched_disk_block_ids.tolist() == expected.disks[: len(expected.blocks)]
        assert (match.partial_block, match.partial_tokens) == (expected.partial or (None, 0))
        self.compare_anchor(match, expected)
        assert match.restorable == self.model.restorable(expected)
        self.check_state(match, request, session, hermetic)
        if match.snapshot_slot is not None:
            self.pinned[expected] = Pinned(match.snapshot_slot, self.slots[match.snapshot_slot])

    def compare_anchor(self, match: PrefixMatch, expected: Match) -> None:
        anchor = self.model.anchors[expected]
        assert (match.snapshot_slot, match.snapshot_tokens) == (anchor.slot, anchor.tokens)
        key = self.keys[anchor.key] if anchor.key else None
        assert (match.snapshot_tier_key, match.snapshot_tier_tokens) == (key, anchor.tier_tokens)
        assert (match.snapshot_is_tail, match.no_snapshot) == (anchor.is_tail, anchor.reason)

    def check_state(self, match: PrefixMatch, request: Request, session: int, hermetic: bool) -> None:
        """Whatever the model says: the bytes that a match names are of the prompt, and it may use them."""
        if match.snapshot_slot is not None:
            state, depth = self.slots[match.snapshot_slot], match.snapshot_tokens
        elif match.snapshot_tier_key is not None:
            state, depth = self.tier[match.snapshot_tier_key], match.snapshot_tier_tokens
        else:
            return
        assert state.prefix == prefix_of(request, depth, self.sizes.block_size)
        assert depth <= match.matched_tokens
        assert match.snapshot_is_tail == (state.kind == "tail")
        if hermetic or state.kind == "tail":
            assert session == state.session != 0

    def lookup(self, client: int, request: Request) -> None:
        self.find(client, request, 0, None, False, False)

    # Saving

    def save(self, client: int, save: Save, match_index: int = -1) -> None:
        """Save at once: the method for the kind, or, for a finish snapshot, a reservation that is committed."""
        match, expected = self.match_of(client, save, match_index)
        cache, arguments = self.caches[client], save.arguments(self.sizes.block_size)
        if match is not None:
            arguments |= {"match": match, "adapter_id": 0, "salt": None}
        tokens, slot, session = save.request.tokens[: save.depth], save.slot, save.session

        def modelled() -> list[int]:
            new = self.model.reserve(client, *save, expected)
            return [slot] if new is None else self.model.commit(client, new)

        def real() -> list[int]:
            if save.kind == "tail":
                return cache.insert_tail_snapshot(tokens, slot, session, **arguments)
            if save.kind == "sibling":
                return cache.insert_tail_sibling_snapshot(tokens, slot, session, **arguments)
            if save.kind == "plain":
                return cache.insert_intermediate_snapshot(tokens, slot, session=session, **arguments)
            with cache.reserve_snapshot(tokens, slot, kind=save.kind, session=session, **arguments) as pending:
                return pending.commit()

        is_stale = expected is not None and expected.epoch != self.model.epoch
        if is_stale and save.kind == "finish":  # a reservation has no other way to say so
            with pytest.raises((errors.LeaseError, errors.SlotError)):
                real()
            return
        answers = self.both(real, modelled)
        if answers is not None:
            assert sorted(answers[0]) == sorted(answers[1])
            if not is_stale:
                self.slots[slot] = self.state(save)

    def insert_with_snapshot(self, client: int, save: Save, table: kv.Table) -> None:
        """Both halves in one call; nothing of either where it is refused."""
        request = save.request._replace(tokens=save.request.tokens[: save.depth])
        arguments = save.arguments(self.sizes.block_size)
        request = request._replace(keys=arguments["block_keys"])
        blocks, _ = self.tables(request, table)
        is_finish = save.kind == "finish"

        def modelled() -> tuple[list[int], Any]:
            new = self.model.reserve(client, *save._replace(kind="finish" if is_finish else "plain"), None)
            assert new
            try:
                acquired = self.model.insert(client, request, blocks, None, 0, None)
            except errors.ShmradixError:
                self.model.abort(new)
                raise
            return self.model.commit(client, new), acquired

        answers = self.both(
            lambda: self.caches[client].insert_with_snapshot(
                request.tokens, blocks, save.slot, session=save.session, finish=is_finish, **arguments
            ),
            modelled,
        )
        if answers is None:
            return
        (freed, got), (expected_freed, expected) = answers
        assert sorted(freed) == sorted(expected_freed)
        assert (got.blocks.tolist(), got.inserted_tokens) == (expected.blocks, expected.tokens)
        self.slots[save.slot] = self.state(save._replace(kind="finish" if is_finish else "plain"))

    def state(self, save: Save) -> State:
        return State(prefix_of(save.request, save.depth, self.sizes.block_size), save.kind, save.session)

    def match_of(self, client: int, save: Save, index: int) -> tuple[PrefixMatch | None, Match | None]:
        """A match of this worker in the save's namespace, if the indexed one is."""
        if not 0 <= index < len(self.matches):
            return None, None
        match, expected = self.matches[index]
        is_fit = (expected.client, expected.request.namespace) == (client, save.request.namespace)
        return (match, expected) if is_fit else (None, None)

    def reserve(self, client: int, save: Save) -> None:
        arguments = save.arguments(self.sizes.block_size)
        answers = self.both(
            lambda: self.caches[client].reserve_snapshot(
                save.request.tokens[: save.depth], save.slot, kind=save.kind, session=save.session, **arguments
            ),
            lambda: self.model.reserve(client, *save, None),
        )
        if answers is not None:
            pending, expected = answers
            assert expected is not None
            self.pendings.append((pending, expected))
            self.slots[save.slot] = self.state(save)

    def commit(self, index: int) -> None:
        pending, expected = self.pendings.pop(index)
        answers = self.both(pending.commit, lambda: self.model.commit(expected.client, expected))
        if answers is not None:
            assert sorted(answers[0]) == sorted(answers[1])

    def abort(self, index: int) -> None:
        pending, expected = self.pendings.pop(index)
        pending.abort()
        self.model.abort(expected)

    # Going

    def evict_snapshot(self, client: int) -> None:
        slot = self.caches[client].evict_snapshot_lru()
        assert slot == self.model.evict_snapshot(client)
        if slot is None:
            self.check_that_nothing_may_go()

    def check_that_nothing_may_go(self) -> None:
        for snapshot in self.model.live():
            assert snapshot.key or snapshot.pending or self.model.is_pinned(snapshot)

    def spill(self, client: int, least: int, pending: bool) -> None:
        got = self.caches[client].evict_snapshot_to_tier(least, pending=pending)
        expected = self.model.spill(client, least, pending)
        if got is None or expected is None:
            assert got == expected
            self.check_that_nothing_may_go()
            return
        assert (got.slot, isinstance(got, Spill), got.tokens) == (expected[0], expected[1] > 0, expected[2])
        if isinstance(got, Spill):
            assert got.key not in self.tier
            self.keys[expected[1]] = got.key
            self.tier[got.key] = self.slots[got.slot]

    def commit_spill(self, client: int, key: int) -> None:
        assert self.caches[client].commit_snapshot_spill(self.keys[key]) == self.model.commit_spill(client, key)

    def promote(self, client: int, key: int, slot: int, match_index: int = -1) -> None:
        match, expected = None, None
        if 0 <= match_index < len(self.matches) and self.matches[match_index][1].client == client:
            match, expected = self.matches[match_index]
        answers = self.both(
            lambda: self.caches[client].promote_snapshot(self.keys[key], slot, match=match),
            lambda: self.model.promote(client, key, slot, expected),
        )
        if answers is not None:
            assert answers[0] == answers[1]
            if answers[0]:
                self.slots[slot] = self.tier[self.keys[key]]
            if match is not None and expected is not None:
                self.compare_anchor(match, expected)

    def forget(self, client: int, key: int) -> None:
        assert self.caches[client].forget_snapshot_tier_key(self.keys[key]) == self.model.forget(client, key)

    # Slots and all at once

    def allocate(self, client: int, evict: bool, finish: bool) -> None:
        answers = self.both(
            lambda: self.caches[client].allocate_snapshot_slot(evict=evict, finish=finish),
            lambda: self.model.allocate(client, evict, finish),
        )
        assert answers is None or answers[0] == answers[1]

    def free(self, client: int, slot: int) -> None:
        self.both(lambda: self.caches[client].free_snapshot_slot(slot), lambda: self.model.free(client, slot))

    def clear(self, client: int) -> None:
        got, expected = self.caches[client].clear(), self.model.clear()
        assert kv.pairs(got) == expected
        assert sorted(got.snapshot_slots.tolist()) == sorted(self.model.drop_hidden())

    def reopen(self, client: int) -> None:
        super().reopen(client)
        self.pendings = [(p, snapshot) for p, snapshot in self.pendings if snapshot.client != client]

    def drain(self) -> None:
        """Nothing is held any more: every slot can be had."""
        super().drain()
        managed = self.index.snapshot_slots
        while self.model.victim()[0]:
            self.evict_snapshot(0)
            self.check()
        self.reopen(0)
        for _ in range(managed):
            self.allocate(0, False, False)
        assert set(self.model.owners) == set(range(managed))
        assert all(snapshot.key for snapshot in self.model.live())
