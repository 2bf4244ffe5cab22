"""The plain model with the snapshot half: full scans of a list, both policies, slots managed by the cache or not.

The list is as long as the segment's table was used, with None where a record is free: only where two snapshots are
equally good victims does it matter which comes first.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shmradix import errors
from shmradix.layout import COUNTERS
from tests.model import Lease, Match, Model, Namespace, Request

SNAPSHOT_COUNTERS = [name for name in COUNTERS if "snapshot" in name or "tier" in name or "recompute" in name]
REASONS = ("none", "too deep", "another session", "pending")


class Sizes(NamedTuple):
    """The snapshot half's geometry."""

    max_snapshots: int
    snapshot_slots: int
    tail_lease: int
    retention: str
    snapshot_alpha: float


class Prefix(NamedTuple):
    """What a snapshot is of: tokens, and the keys of the blocks they reach into, () where all are 0."""

    namespace: Namespace
    tokens: tuple[int, ...]
    keys: tuple[int, ...]


@dataclass(eq=False)
class Snapshot:
    prefix: Prefix
    kind: str
    session: int
    epoch: int
    slot: int
    client: int  # who reserved or spilled it
    last_use: int = 0
    key: int = 0  # of its spill; 0: resident
    pending: bool = True
    hidden: bool = False
    branch: bool = False
    parent: Snapshot | None = None
    ancestors: list[tuple[int, Prefix]] = field(default_factory=list)  # places in the table that may be its parent

    @property
    def depth(self) -> int:
        return len(self.prefix.tokens)


class Anchor(NamedTuple):
    """What a match says about a snapshot."""

    snapshot: Snapshot | None
    slot: int | None
    tokens: int
    key: int
    tier_tokens: int
    is_tail: bool
    reason: str


NO_ANCHOR = Anchor(None, None, 0, 0, 0, False, "none")


def prefix_of(request: Request, depth: int, block_size: int) -> Prefix:
    """The first tokens of a request."""
    blocks = -(-depth // block_size)
    keys = (*(request.keys or ()), *[0] * blocks)[:blocks]
    return Prefix(request.namespace, request.tokens[:depth], keys if any(keys) else ())


@dataclass
class HybridModel(Model):
    """The cache's model with a snapshot half."""

    sizes: Sizes = field(default_factory=lambda: Sizes(4, 0, 64, "session", 0.0))
    use: int = 0
    evictions: int = 0
    keys: int = 0
    table: list[Snapshot | None] = field(default_factory=list)
    pins: dict[Lease, Snapshot] = field(default_factory=dict)
    anchors: dict[Match, Anchor] = field(default_factory=dict)
    gates: dict[Match, tuple[Request, int, bool]] = field(default_factory=dict)
    sessions: dict[int, int] = field(default_factory=dict)
    owners: dict[int, int] = field(default_factory=dict)
    tally: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SNAPSHOT_COUNTERS, 0))

    # Scans

    def live(self) -> list[Snapshot]:
        return [snapshot for snapshot in self.table if snapshot]

    def is_current(self, snapshot: Snapshot) -> bool:
        return not snapshot.hidden and snapshot.epoch == self.epoch

    def is_committed(self, snapshot: Snapshot) -> bool:
        return self.is_current(snapshot) and not snapshot.pending

    def is_settled(self, snapshot: Snapshot) -> bool:
        """Committed, or on its way to the tier."""
        return self.is_current(snapshot) and (not snapshot.pending or snapshot.key != 0)

    def is_pinned(self, snapshot: Snapshot) -> bool:
        return any(pinned is snapshot for pinned in self.pins.values())

    def open_to(self, snapshot: Snapshot, session: int, hermetic: bool) -> bool:
        return session == snapshot.session != 0 or not (hermetic or snapshot.kind == "tail")

    def holder_of(self, slot: int) -> Snapshot | None:
        return next((s for s in self.live() if s.slot == slot and not s.key), None)

    def may_use(self, client: int, slot: int) -> bool:
        managed = self.sizes.snapshot_slots
        return (not managed or self.owners.get(slot) == client) and self.holder_of(slot) is None

    def tick(self) -> int:
        """The clock; births of pins and keys advance it, too, which alpha's scale feels."""
        self.use += 1
        return self.use

    def pin(self, lease: Lease, snapshot: Snapshot) -> None:
        self.pins[lease] = snapshot
        self.tick()

    def note(self, **more: int) -> None:
        for name, number in more.items():
            self.tally[name] += number

    # Lookups

    def resume(
        self, match: Match, request: Request, limit: int | None, require: bool, session: int, hermetic: bool
    ) -> None:
        """The snapshot half of a lookup."""
        self.anchors[match] = NO_ANCHOR
        limit = match.tokens if limit is None else min(limit, match.tokens)
        if match.tokens:
            self.gates[match] = request, session, hermetic
            try:
                self.anchors[match] = self.find_and_pin(match, request, limit, session, hermetic)
            except errors.LeasesFull:
                self.release_match(match)
                raise
        if require:
            self.cut(match, -(-(self.anchors[match].tokens or self.anchors[match].tier_tokens) // self.block_size))

    def usable(self, request: Request, limit: int, session: int, hermetic: bool) -> list[Snapshot]:
        """Snapshots of prefixes within `limit` that the session may use, deepest first."""
        found = [
            snapshot
            for snapshot in self.live()
            if snapshot.prefix == prefix_of(request, snapshot.depth, self.block_size)
            and 0 < snapshot.depth <= limit
            and self.is_committed(snapshot)
            and self.open_to(snapshot, session, hermetic)
        ]
        return sorted(found, key=lambda snapshot: -snapshot.depth)

    def find_and_pin(self, match: Match, request: Request, limit: int, session: int, hermetic: bool) -> Anchor:
        reason = self.reason(request, limit, session, hermetic)
        if session:
            self.sessions[session] = self.evictions
        found = self.usable(request, limit, session, hermetic)
        if not found:
            self.note(snapshot_lookups=1, recompute_tokens_on_miss=limit)
            self.note(
                **{("no_snapshot", "snapshot_too_deep", "snapshot_of_another_session", "snapshot_pending")[reason]: 1}
            )
            return NO_ANCHOR._replace(reason=REASONS[reason])
        best = found[0]
        is_tail = best.kind == "tail"
        if not best.key:
            if len(self.pins) == self.max_leases:
                raise errors.LeasesFull
            assert match.lease
            self.pin(match.lease, best)
        best.last_use = self.tick()
        self.note(snapshot_lookups=1, snapshot_hits=1, snapshot_hit_tokens=best.depth, tier_hits=best.key > 0)
        self.note(recompute_tokens_on_hit=limit - best.depth)
        if best.key:
            return Anchor(None, None, 0, best.key, best.depth, is_tail, "")
        return Anchor(best, best.slot, best.depth, 0, 0, is_tail, "")

    def reason(self, request: Request, limit: int, session: int, hermetic: bool) -> int:
        """Why there is no snapshot, by the tokens alone: keys are not looked at."""
        deepest, reason = 0, 0
        for snapshot in reversed(self.live()):
            depth, prefix = snapshot.depth, snapshot.prefix
            is_prefix = (prefix.namespace, prefix.tokens) == (request.namespace, request.tokens[:depth])
            if depth <= deepest or not is_prefix or not self.is_current(snapshot):
                continue
            if snapshot.pending:
                reason = 3
            elif not self.open_to(snapshot, session, hermetic):
                reason = max(reason, 2)
            elif depth > limit:
                reason = max(reason, 1)
            else:
                deepest = depth
        return reason

    def restorable(self, match: Match) -> list[int]:
        if match not in self.gates:
            return []
        request, session, hermetic = self.gates[match]
        return [snapshot.depth for snapshot in reversed(self.usable(request, match.tokens, session, hermetic))]

    def cut(self, match: Match, depth: int) -> None:
        """Let the match be of `depth` blocks."""
        if depth and depth * self.block_size == match.tokens:
            return
        if match.lease:
            self.count(hit_tokens=depth * self.block_size - match.tokens, hits=-(match.tokens > 0 == depth))
            node = match.lease.anchor
            for _ in range(match.lease.depth - depth):
                assert node.parent
                node = node.parent
            if depth:
                match.lease.node.pins -= 1
                node.pins += 1
                match.lease.node, match.lease.anchor, match.lease.agreed = node, node, 0
            else:
                self.drop(match.lease)
                match.lease = None
        match.tokens, match.partial = depth * self.block_size, None
        match.blocks, match.disks = match.blocks[:depth], match.disks[:depth]

    def drop(self, lease: Lease) -> None:
        super().drop(lease)
        self.pins.pop(lease, None)

    def release_match(self, match: Match) -> None:
        if not match.released and match.lease:
            self.pins.pop(match.lease, None)
        super().release_match(match)

    # Saving

    def reserve(
        self, client: int, request: Request, depth: int, slot: int, kind: str, session: int, match: Match | None
    ) -> Snapshot | None:
        """A pending snapshot, None if the match is older than the last clear()."""
        if kind in ("tail", "sibling") and not session:
            raise ValueError
        ancestors = self.possible_ancestors(request, depth, session)
        if not self.may_use(client, slot):
            raise errors.SlotError
        if match is not None and match.epoch != self.epoch:
            return None
        prefix = prefix_of(request, depth, self.block_size)
        new = Snapshot(prefix, kind, session, self.epoch, slot, client, ancestors=ancestors)
        self.place(new)
        new.last_use = self.tick()
        return new

    def possible_ancestors(self, request: Request, depth: int, session: int) -> list[tuple[int, Prefix]]:
        """Places in the table, and what has to be there at the commit, deepest first."""
        found = []
        for index, snapshot in enumerate(self.table):
            if snapshot and snapshot.depth < depth and self.is_committed(snapshot):
                wanted = prefix_of(request, snapshot.depth, self.block_size)
                if snapshot.prefix[:2] == wanted[:2] and self.open_to(snapshot, session, False):
                    found.append((index, wanted))
        return sorted(found, key=lambda place: -len(place[1].tokens))

    def place(self, new: Snapshot) -> None:
        if None in self.table:
            self.table[self.table.index(None)] = new
        elif len(self.table) < self.sizes.max_snapshots:
            self.table.append(new)
        else:
            tiered = [snapshot for snapshot in self.live() if snapshot.key and not snapshot.pending]
            if not tiered:
                raise errors.SnapshotsFull
            coldest = min(tiered, key=lambda snapshot: snapshot.last_use)
            index = self.table.index(coldest)
            self.uproot(coldest)
            self.table[index] = new

    def commit(self, client: int, new: Snapshot) -> list[int]:
        """The slots that are the client's now."""
        if new not in self.table or not new.pending or new.key or new.client != client:
            raise errors.LeaseError
        if new.epoch != self.epoch:
            self.uproot(new)
            return [new.slot]
        freed: list[int] = []
        swept = {"tail": ("tail", "sibling"), "sibling": ("sibling",)}.get(new.kind, ())
        for other in self.live():
            is_same = (other.session, other.prefix.namespace) == (new.session, new.prefix.namespace)
            if other is not new and is_same and other.kind in swept and self.is_settled(other):
                self.displace(client, other, freed)
        for same in [s for s in self.live() if s is not new and s.prefix == new.prefix and self.is_settled(s)]:
            self.bequeath(same, new)
            new.branch |= same.branch
            if new.kind == "finish" != same.kind:
                new.kind = "plain"
            self.displace(client, same, freed)
        new.last_use, new.pending = self.tick(), False
        self.owners.pop(new.slot, None)
        self.note(snapshot_saves=1)
        if self.sizes.retention == "chain":
            self.adopt(new)
        return freed

    def adopt(self, new: Snapshot) -> None:
        """Link it to its deepest ancestor."""
        for index, prefix in new.ancestors:
            there = self.table[index]
            if there and there.prefix == prefix and self.is_committed(there):
                new.parent = there
                break
        for other in self.live():
            if other is new or other.parent is not new.parent or not self.is_committed(other):
                continue
            is_same = (other.session, other.prefix.namespace) == (new.session, new.prefix.namespace)
            if (new.kind, other.kind) == ("sibling", "tail") and is_same and other.depth > new.depth:
                other.parent = new
            elif new.parent and "finish" not in (new.kind, other.kind):
                new.parent.branch = True

    def abort(self, snapshot: Snapshot) -> None:
        if snapshot in self.table and snapshot.pending and not snapshot.key:
            self.uproot(snapshot)

    # Going

    def bequeath(self, snapshot: Snapshot, heir: Snapshot | None) -> None:
        for child in self.live():
            if child.parent is snapshot:
                child.parent = heir

    def uproot(self, snapshot: Snapshot) -> None:
        self.bequeath(snapshot, snapshot.parent)
        self.table[self.table.index(snapshot)] = None

    def own(self, client: int, slot: int) -> None:
        if self.sizes.snapshot_slots:
            self.owners[slot] = client

    def displace(self, client: int, snapshot: Snapshot, freed: list[int]) -> None:
        if self.is_pinned(snapshot):
            self.bequeath(snapshot, snapshot.parent)
            snapshot.hidden = True
            return
        if not snapshot.key:
            self.own(client, snapshot.slot)
            freed.append(snapshot.slot)
        self.uproot(snapshot)

    def victim(self) -> tuple[Snapshot | None, int]:
        """The snapshot that goes first, and its class: 0 hidden, 1 history, 2 finish leaf, 3 another."""
        idle = [s for s in self.live() if not s.key and not s.pending and not self.is_pinned(s)]
        hidden = [snapshot for snapshot in idle if not self.is_current(snapshot)]
        if hidden:
            return min(hidden, key=lambda snapshot: snapshot.last_use), 0
        if not idle:
            return None, 3
        if self.sizes.retention == "session":
            return self.victim_by_session(idle), 2
        classes = {snapshot: self.class_of(snapshot) for snapshot in idle}
        first = min(idle, key=lambda snapshot: (classes[snapshot], snapshot.last_use))
        return first, classes[first]

    def victim_by_session(self, idle: list[Snapshot]) -> Snapshot:
        freshness: dict[int, int] = {}
        for snapshot in idle:
            freshness[snapshot.session] = max(freshness.get(snapshot.session, 0), snapshot.last_use)

        def scaled(values: list[int], value: int) -> float:
            return (value - min(values)) / (max(values) - min(values)) if max(values) > min(values) else 0.0

        uses, depths = [s.last_use for s in idle], [s.depth for s in idle]
        unleased = [snapshot for snapshot in idle if not self.is_leased(snapshot)]

        def rank(snapshot: Snapshot) -> tuple[int, float]:
            depth = scaled(depths, snapshot.depth)
            return freshness[snapshot.session], scaled(uses, snapshot.last_use) + self.sizes.snapshot_alpha * depth

        return min(unleased or idle, key=rank)

    def is_leased(self, snapshot: Snapshot) -> bool:
        seen = self.sessions.get(snapshot.session) if snapshot.kind in ("tail", "sibling") else None
        return seen is not None and self.evictions - seen < self.sizes.tail_lease

    def class_of(self, snapshot: Snapshot) -> int:
        children = [child for child in self.live() if child.parent is snapshot and self.is_committed(child)]
        continuing = [child for child in children if child.kind != "finish" or self.is_continued(child)]
        if len(continuing) == 1 and not snapshot.branch:
            return 1
        return 3 if continuing or snapshot.kind != "finish" else 2

    def is_continued(self, snapshot: Snapshot) -> bool:
        return any(child.parent is snapshot and self.is_committed(child) for child in self.live())

    def take_out(self, its_class: int) -> None:
        """Count an eviction."""
        self.evictions += its_class > 0
        self.note(snapshot_evictions=its_class > 0)

    def evict_snapshot(self, client: int) -> int | None:
        first, its_class = self.victim()
        if first is None:
            return None
        self.displace(client, first, [])
        self.take_out(its_class)
        return first.slot

    def spill(self, client: int, least: int, pending: bool) -> tuple[int, int, int] | None:
        """(slot, key, 0 if it was dropped; depth)."""
        first, its_class = self.victim()
        if first is None:
            return None
        if its_class == 0 or first.depth < least:
            self.displace(client, first, [])
            self.take_out(its_class)
            return first.slot, 0, first.depth
        self.evictions += 1
        self.keys = self.tick()
        first.key, first.pending = self.keys, pending
        first.client = client if pending else first.client
        self.own(client, first.slot)
        self.note(tier_spills=1)
        return first.slot, first.key, first.depth

    def find_tiered(self, client: int, key: int) -> Snapshot | None:
        for snapshot in self.live():
            if snapshot.key == key != 0 and self.is_current(snapshot):
                return snapshot if not snapshot.pending or snapshot.client == client else None
        return None

    def commit_spill(self, client: int, key: int) -> bool:
        found = self.find_tiered(client, key)
        if found:
            found.pending = False
        return found is not None

    def promote(self, client: int, key: int, slot: int, match: Match | None) -> bool:
        if match is not None and self.anchors[match].key != key:
            raise ValueError
        if match is not None and match.released:
            raise errors.LeaseError
        found = self.find_tiered(client, key)
        if not found or found.pending:
            return False
        if not self.may_use(client, slot):
            raise errors.SlotError
        found.slot, found.key = slot, 0
        self.owners.pop(slot, None)
        self.note(tier_fault_ins=1)
        if match is not None:
            assert match.lease
            self.pin(match.lease, found)
            self.anchors[match] = Anchor(found, slot, found.depth, 0, 0, self.anchors[match].is_tail, "")
        return True

    def forget(self, client: int, key: int) -> bool:
        found = self.find_tiered(client, key)
        if found:
            self.uproot(found)
            self.note(tier_reaps=1)
        return found is not None

    # Slots and all at once

    def allocate(self, client: int, evict: bool, finish: bool) -> int:
        for slot in range(self.sizes.snapshot_slots):
            if slot not in self.owners and not self.holder_of(slot):
                self.owners[slot] = client
                return slot
        first, its_class = self.victim() if evict else (None, 3)
        if first is None or (finish and its_class == 3):
            raise errors.SlotsFull
        self.owners[first.slot] = client
        self.uproot(first)
        self.take_out(its_class)
        return first.slot

    def free(self, client: int, slot: int) -> None:
        if not self.may_use(client, slot):
            raise errors.SlotError
        del self.owners[slot]

    def close(self, client: int) -> None:
        super().close(client)
        self.pins = {lease: snapshot for lease, snapshot in self.pins.items() if lease.client != client}
        for snapshot in self.live():
            if snapshot.pending and snapshot.client == client:
                self.uproot(snapshot)
        self.owners = {slot: owner for slot, owner in self.owners.items() if owner != client}

    def drop_hidden(self) -> list[int]:
        """After a clear(): the slots that are the caller's to free."""
        freed = []
        for snapshot in self.live():
            is_waiting = snapshot.pending and not snapshot.key
            if self.is_current(snapshot) or self.is_pinned(snapshot) or is_waiting:
                continue
            if not snapshot.key and not self.sizes.snapshot_slots:
                freed.append(snapshot.slot)
            self.uproot(snapshot)
        return freed

    # Pictures

    def snapshot_stats(self) -> dict[str, int]:
        found = [snapshot for snapshot in self.live() if self.is_committed(snapshot)]
        tiered = sum(snapshot.key > 0 for snapshot in found)
        return self.tally | {"snapshots": len(found), "snapshots_tiered": tiered}

    def snapshot_image(self) -> list[tuple[Any, ...]]:
        """Each record in use, and who has which slot."""
        images: list[tuple[Any, ...]] = []
        for index, s in enumerate(self.table):
            if s:
                adapter, salt = s.prefix.namespace
                digest = hashlib.blake2b(salt, digest_size=32).hexdigest() if salt else "00" * 32
                state = bool(s.key), None if s.key else s.slot, s.pending, s.hidden, s.branch, s.epoch == self.epoch
                pins = sum(pinned is s for pinned in self.pins.values())
                parent = self.table.index(s.parent) if s.parent in self.table and s.parent else None
                images.append((index, adapter, digest, s.depth, s.kind, s.session, *state, pins, parent))
        return [*images, *sorted(self.owners.items())]
