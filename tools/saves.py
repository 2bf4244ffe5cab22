"""What the workers of the stress and the kill tool do with snapshots, and what must hold when they are gone.

A slot's content, in the ledger, is the digest of the prefix whose state it is, noted before the snapshot is committed,
so any match that names a slot can be checked for as long as it has it. A slot that is a worker's own holds a mark that
nobody else knows: it is still there when the slot goes back, unless somebody else was handed the slot, too.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from ledger import BLOCK_SIZE, SLOT_STATE, SLOTS, Ledger, Prompt
from numpy.typing import NDArray

from shmradix import RadixCache, tier
from shmradix.errors import LeaseError, SlotsFull
from shmradix.prefix_hash import prefix_hashes
from shmradix.results import Drop, PrefixMatch
from shmradix.tier import FileTier

SIZES: dict[str, Any] = {"max_snapshots": 2 * SLOTS, "snapshot_slots": SLOTS, "tail_lease": 16, "snapshot_alpha": 1.0}
SESSIONS = 5
FILES = 24  # states that the directory has room for
LONGEST_SAVE = 5_000_000_000  # ns between noting a state and its snapshot's commit: more is out of the question
OWN_SLOTS = 2  # that a worker keeps
_PENDING = 8  # flag of a record


class Violation(Exception):
    """The cache answered something that can't be right."""


def require(holds: bool, message: str) -> None:
    """Raise Violation with `message` unless `holds`."""
    if not holds:
        raise Violation(message)


def started(depth: int) -> int:
    """How many blocks `depth` tokens have begun."""
    return -(-depth // BLOCK_SIZE)


def digest_of(prompt: Prompt, depth: int) -> int:
    """A digest of all that the state after `depth` tokens depends on."""
    running = hashlib.blake2b(repr((prompt.adapter_id, prompt.salt)).encode(), digest_size=8)
    running.update(prompt.tokens[:depth].tobytes())
    if prompt.block_keys is not None:
        running.update(b"keys" + prompt.block_keys[: started(depth)].tobytes())
    return int.from_bytes(running.digest(), "little")


class MemoryTier:
    """A tier in the ledger's memory: a new state takes its place whatever was there.

    Many workers write one record at a time, field by field: its check covers the key too, so what two of them wrote
    between them is nobody's state.
    """

    def __init__(self, records: NDArray[np.void]) -> None:
        self._records = records

    def put(self, key: int, state: bytes) -> bool:
        record = self._records[key % len(self._records)]
        record["key"] = 0
        record["state"] = np.frombuffer(state, SLOT_STATE)[0]
        record["check"] = _check_of(key, state)
        record["key"] = key
        return True

    def get(self, key: int) -> bytes | None:
        record = self._records[key % len(self._records)].copy()
        state: bytes = record["state"].tobytes()
        return state if record["key"] == key and record["check"] == _check_of(key, state) else None

    def remove(self, key: int) -> bool:
        record = self._records[key % len(self._records)]
        found = bool(record["key"] == key)
        if found:
            record["key"] = 0
        return found


def _check_of(key: int, state: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(key.to_bytes(8, "little") + state, digest_size=8).digest(), "little")


class EitherTier:
    """Files and memory by turns."""

    def __init__(self, ledger: Ledger, path: str) -> None:
        self.files, self.memory = FileTier(path, FILES * (SLOT_STATE.itemsize + 32)), MemoryTier(ledger.tiered)

    def put(self, key: int, state: bytes) -> bool:
        return self.files.put(key, state) if key % 2 else self.memory.put(key, state)

    def get(self, key: int) -> bytes | None:
        return self.files.get(key) if key % 2 else self.memory.get(key)

    def remove(self, key: int) -> bool:
        return self.files.remove(key) if key % 2 else self.memory.remove(key)


class Saver:
    """One worker's snapshots: its slots, its pending snapshots, its checks."""

    def __init__(self, worker: Any, files: str) -> None:
        self.worker, self.ledger, self.random = worker, worker.ledger, worker.random
        self.tier: Any = EitherTier(worker.ledger, files)
        self.forget_all()

    def forget_all(self) -> None:
        """Nothing is ours any more: the handle was closed, or is a forked child's."""
        self.mine: dict[int, bytes] = {}  # own slots and what is in them
        self.pending: list[tuple[Any, bytes]] = []
        self.keys: list[int] = []  # some that were spilled

    @property
    def cache(self) -> RadixCache:
        cache: RadixCache = self.worker.cache
        return cache

    # --- operations

    def save(self) -> None:
        """Save the state of some prefix of a prompt, at once or later."""
        slot = self.take()
        if slot is None:
            return
        request = self.random.choice(self.worker.open) if self.worker.open and self.random.random() < 0.5 else None
        prompt = request.prompt if request else self.worker.prompts.draw()
        depth = self.depth_within(prompt)
        where = self.where(prompt, depth)
        if request and not request.match.released:
            where = {"block_keys": where["block_keys"], "match": request.match}
        tokens, session = prompt.tokens[:depth], self.random.randrange(1, SESSIONS)
        way = self.random.random()
        if way < 0.3:
            kind = self.random.choice(["plain", "tail", "sibling", "finish"])
            self.note(slot, prompt, depth)
            try:
                pending = self.cache.reserve_snapshot(tokens, slot, kind=kind, session=session, **where)
            except LeaseError:  # the match is older than a clear()
                return
            self.pending.append((pending, self.mine.pop(slot)))
        elif way < 0.5:
            self.give(slot, prompt, depth, lambda: self.cache.insert_tail_snapshot(tokens, slot, session, **where))
            earlier = depth - BLOCK_SIZE
            if earlier > 0 and (other := self.take()) is not None:
                how = {**where, "block_keys": self.where(prompt, earlier)["block_keys"]}
                sibling = self.cache.insert_tail_sibling_snapshot
                self.give(other, prompt, earlier, lambda: sibling(tokens[:earlier], other, session, **how))
        else:
            session *= self.random.randrange(2)
            plain = self.cache.insert_intermediate_snapshot
            self.give(slot, prompt, depth, lambda: plain(tokens, slot, session=session, **where))

    def settle(self) -> None:
        """Commit or abort a pending snapshot."""
        if not self.pending:
            return
        pending, state = self.pending.pop(self.random.randrange(len(self.pending)))
        require(self.read(pending.slot) == state, f"somebody wrote into slot {pending.slot}, of a pending snapshot")
        if self.random.random() < 0.8:
            self.receive(pending.commit())
            self.worker.count("saved")
        else:
            pending.abort()
            self.mark(pending.slot)

    def make_room(self) -> None:
        """Evict, spill, promote or forget a snapshot, or free slots."""
        way = self.random.random()
        if way < 0.3:
            slot = self.cache.evict_snapshot_lru()
            self.receive([] if slot is None else [slot])
        elif way < 0.5:
            slot = tier.spill(self.cache, self.tier, self.read, 2)
            self.receive([] if slot is None else [slot])
        elif way < 0.7:
            self.spill_by_hand()
        elif way < 0.8 and self.keys:
            self.cache.forget_snapshot_tier_key(self.keys.pop())
        elif way < 0.9 and self.keys:
            self.promote_by_hand(self.keys.pop())
        while len(self.mine) > OWN_SLOTS or (self.mine and self.random.random() < 0.3):
            self.free(self.random.choice(list(self.mine)))

    def spill_by_hand(self) -> None:
        """Spill without the help of `shmradix.tier`, and not always to the end."""
        waits = self.random.random() < 0.7
        gone = self.cache.evict_snapshot_to_tier(self.random.choice([0, 8]), pending=waits)
        if gone is not None and not isinstance(gone, Drop):
            kept = self.tier.put(gone.key, self.read(gone.slot))
            kept = kept and (not waits or (self.random.random() < 0.9 and self.cache.commit_snapshot_spill(gone.key)))
            if kept:
                self.keys = [*self.keys[-3:], gone.key]
                self.worker.count("spilled")
            else:
                self.cache.forget_snapshot_tier_key(gone.key)
                self.tier.remove(gone.key)
        self.receive([] if gone is None else [gone.slot])

    def promote_by_hand(self, key: int) -> None:
        state, slot = self.tier.get(key), self.take()
        if slot is None:
            return
        if state is not None:
            self.check_mine(slot)
            self.write(slot, state)
            if self.cache.promote_snapshot(key, slot):
                del self.mine[slot]
                self.tier.remove(key)
                return
            self.mine[slot] = state
        self.free(slot)

    def fault_in(self, prompt: Prompt, match: PrefixMatch) -> None:
        """Bring in what the match found in the tier."""
        how: dict[str, Any] = {"min_tokens": self.random.choice([1, 4]), "spill_tokens": 2}
        if tier.fault_in(self.cache, self.tier, match, self.read, self.write, **how):
            self.worker.count("faulted_in")
            self.check(prompt, match)

    def insert_with_snapshot(self, prompt: Prompt, table: Any, **how: Any) -> Any:
        """What `insert` does, and, where there is a slot, a snapshot of the whole prompt besides."""
        slot = self.take()
        if slot is None:
            return self.cache.insert(prompt.tokens, table, **how)
        acquired = None

        def insert() -> list[int]:
            nonlocal acquired
            finish = self.random.random() < 0.3
            back, acquired = self.cache.insert_with_snapshot(prompt.tokens, table, slot, finish=finish, **how)
            return back

        self.give(slot, prompt, len(prompt.tokens), insert)
        return acquired

    def finish(self) -> None:
        """Let everything go."""
        while self.pending:
            self.settle()
        for slot in list(self.mine):
            self.free(slot)

    # --- slots

    def take(self) -> int | None:
        """A slot of our own, None if there is none to be had."""
        if self.mine and self.random.random() < 0.5:
            return self.random.choice(list(self.mine))
        way = self.random.random()
        try:
            if way < 0.4:
                slot = tier.allocate(self.cache, self.tier, self.read, 2, finish=way < 0.05)
            else:
                slot = self.cache.allocate_snapshot_slot(evict=way < 0.9)
        except SlotsFull:
            self.worker.count("slotless")
            return None
        self.receive([slot])
        return slot

    def receive(self, slots: list[int]) -> None:
        """Slots became ours."""
        require(len(set(slots)) == len(slots), f"slots handed out twice: {slots}")
        for slot in slots:
            require(slot not in self.mine, f"slot {slot}, which is ours, was handed to us")
            self.mark(slot)

    def mark(self, slot: int) -> None:
        """Fill a slot of ours with what nobody else knows."""
        content = np.zeros(1, SLOT_STATE)
        content["digest"], content["depth"] = self.random.getrandbits(64), -1
        self.mine[slot] = content.tobytes()
        self.write(slot, self.mine[slot])

    def check_mine(self, slot: int) -> None:
        require(self.read(slot) == self.mine[slot], f"somebody wrote into slot {slot}, which is ours")

    def free(self, slot: int) -> None:
        self.check_mine(slot)
        del self.mine[slot]
        self.cache.free_snapshot_slot(slot)

    def read(self, slot: int) -> bytes:
        content: bytes = self.ledger.slots[slot].tobytes()
        return content

    def write(self, slot: int, state: bytes) -> None:
        self.ledger.slots[slot] = np.frombuffer(state, SLOT_STATE)[0]

    # --- what is saved

    def note(self, slot: int, prompt: Prompt, depth: int) -> None:
        """Write the state after `depth` tokens into a slot of ours."""
        self.check_mine(slot)
        content = np.zeros(1, SLOT_STATE)
        keys = np.empty(0, np.uint64) if prompt.block_keys is None else prompt.block_keys[: started(depth)]
        content["digest"], content["depth"] = digest_of(prompt, depth), depth
        content["hash"] = prefix_hashes(self.cache._hash_seed, prompt.tokens[:depth], keys, BLOCK_SIZE, [depth])
        content["saved_at"] = time.monotonic_ns()
        self.mine[slot] = content.tobytes()
        self.write(slot, self.mine[slot])

    def give(self, slot: int, prompt: Prompt, depth: int, call: Callable[[], list[int]]) -> None:
        """Note the state, have it in the index by the call, and take what that hands back."""
        self.note(slot, prompt, depth)
        del self.mine[slot]
        self.receive(call())
        self.worker.count("saved")

    def depth_within(self, prompt: Prompt) -> int:
        """Most often at the end of a block, as far as something is likely to be cached."""
        length = len(prompt.tokens)
        if self.random.random() < 0.7 and prompt.full_blocks:
            return BLOCK_SIZE * self.random.randint(1, prompt.full_blocks)
        return self.random.randint(1, length)

    def where(self, prompt: Prompt, depth: int) -> dict[str, Any]:
        """The namespace and keys of a prefix, as arguments."""
        keys = None if prompt.block_keys is None else prompt.block_keys[: started(depth)]
        return {"adapter_id": prompt.adapter_id, "salt": prompt.salt, "block_keys": keys}

    # --- checks

    def asked(self, prompt: Prompt) -> dict[str, Any]:
        """Arguments of a lookup that say what it may resume from."""
        limit = self.random.choice([None, len(prompt.tokens) - 1, self.random.randrange(len(prompt.tokens))])
        hermetic = self.random.random() < 0.05
        return {"session": self.random.randrange(SESSIONS), "max_snapshot_tokens": limit, "hermetic": hermetic}

    def check_found(self, prompt: Prompt, match: PrefixMatch, asked: dict[str, Any], horizon: int) -> None:
        """What a lookup that was asked so has found, after all that was cleared before `horizon`."""
        depth = match.snapshot_tokens or match.snapshot_tier_tokens
        limit = asked["max_snapshot_tokens"]
        require(depth <= match.matched_tokens, f"a state after {depth} of {match.matched_tokens} matched tokens")
        require(limit is None or depth <= limit, f"a state after {depth} tokens, asked for {limit} at most")
        require(not match.snapshot_is_tail or asked["session"] > 0, "a tail without a session")
        require((depth > 0) == (match.no_snapshot == ""), f"no snapshot: {match.no_snapshot!r}, yet at {depth}")
        if match.snapshot_slot is not None:
            self.check(prompt, match)
            saved_at = int(self.ledger.slots["saved_at"][match.snapshot_slot])
            require(saved_at + LONGEST_SAVE > horizon, "found a state that was cleared")
            self.worker.count("resumed")

    def check(self, prompt: Prompt, match: PrefixMatch) -> None:
        """While a match has a slot, that holds exactly the state of the prompt's prefix."""
        slot, depth = match.snapshot_slot, match.snapshot_tokens
        if slot is None:
            return
        content = self.ledger.slots[slot]
        right = int(content["depth"]) == depth and int(content["digest"]) == digest_of(prompt, depth)
        require(right, f"slot {slot} does not hold the state after {depth} tokens of {prompt.tokens.tolist()}")


def check_quiet(cache: RadixCache, ledger: Ledger, files: str) -> list[str]:
    """What is wrong when nobody is there any more: what the dead still have, slots in no or two places, contents."""
    views = cache._segment.views
    records: Any = views.snapshots
    live = np.flatnonzero(records["born"])
    resident = live[records["tier_key"][live] == 0]
    slots, private = records["slot"][resident], np.flatnonzero(views.slots["worker"])
    wrong = []
    if (records["flags"][live] & _PENDING).any():
        wrong.append(f"pending snapshots are left: {live[(records['flags'][live] & _PENDING) != 0].tolist()}")
    if views.pins["born"].any():
        wrong.append(f"pins are left: {np.flatnonzero(views.pins['born']).tolist()}")
    if private.size:
        wrong.append(f"slots are still somebody's: {private.tolist()}")
    if len(np.unique(slots)) != len(slots):
        wrong.append(f"slots in two snapshots: {sorted(slots.tolist())}")
    tiers = EitherTier(ledger, files)
    for at in live.tolist():
        record, key = records[at], int(records["tier_key"][at])
        state = tiers.get(key) if key else ledger.slots[int(record["slot"])].tobytes()
        content = None if state is None else np.frombuffer(state, SLOT_STATE)[0]
        is_right = content is None or (
            int(content["depth"]) == int(record["token_count"]) and (content["hash"] == record["prefix_hash"]).all()
        )
        if not is_right:
            wrong.append(f"snapshot {at} is of {record['token_count']} tokens, what is saved is {content}")
    taken: list[int] = []
    try:
        while len(taken) <= SLOTS:
            taken.append(cache.allocate_snapshot_slot(evict=False))
    except SlotsFull:
        pass
    for slot in taken:
        cache.free_snapshot_slot(slot)
    if sorted([*taken, *slots.tolist()]) != list(range(SLOTS)):
        wrong.append(f"slots {sorted(taken)} are free, {sorted(slots.tolist())} in the index: not each in one place")
    return wrong[:10]
