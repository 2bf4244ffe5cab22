"""The snapshot half of `RadixCache`: where the state of recurrent layers was saved, and in which slots.

docs/snapshots.md tells what an engine calls when.
"""

import contextlib
from collections.abc import Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from shmradix.errors import CacheClosed, LeaseError, LeasesFull, SlotError, SlotsFull, SnapshotsFull
from shmradix.handle import Handle
from shmradix.inputs import BASE_NAMESPACE, Ids, as_block_keys, as_count, as_session, as_tokens
from shmradix.layout import LEAF, RETENTIONS, SIBLING, TAIL
from shmradix.payload import Payload, state_rows
from shmradix.prefix_hash import prefix_hash, prefix_hashes
from shmradix.results import Anchor, Drop, PrefixMatch, Spill
from shmradix.status import LEASES_FULL, NOT_FOUND, NOT_HELD, SLOT_NOT_HELD, SLOTS_FULL, SNAPSHOTS_FULL, STALE

KINDS = {"plain": 0, "tail": TAIL, "sibling": SIBLING, "finish": LEAF}
REASONS = ("none", "too deep", "another session", "pending")
_U32, _U64 = (1 << 32) - 1, (1 << 64) - 1
_MAX_DISPLACED = 64  # slots that one insert hands back at most; there are three where all is well
_NO_CANDIDATES = np.empty((0, 4), np.uint64)


class _Prefix(NamedTuple):
    """A prompt's prefix as the kernels take it, and what it is saved as."""

    namespace: np.ndarray
    ids: np.ndarray
    hash: tuple[int, int]
    parents: np.ndarray  # snapshots that may be of its prefixes, see _candidates
    session: int
    kind: int
    epoch: int


class PendingSnapshot:
    """A snapshot whose bytes are being written: `commit()` when they are, `abort()` or leave the block if not.

    Lookups do not see it before the commit. A worker that dies takes its pending snapshots along.
    """

    def __init__(self, owner: "SnapshotMethods", prefix: _Prefix, slot: int, at: int, born: int) -> None:
        self._owner, self._prefix, self._at, self._born = owner, prefix, at, born
        self.slot = slot
        self.done = False
        """Whether it was committed or aborted."""

    def commit(self) -> list[int]:
        """Let lookups find it. Returns the slots that are the caller's to free now, its own if a clear() came between.

        Raises LeaseError where it was committed or aborted before, or is not this worker's.
        """
        if self.done:
            raise LeaseError(f"{self!r}: expected one that was neither committed nor aborted")
        slots = self._owner._commit_pending(self._prefix, self.slot, self._at, self._born)
        self.done = True
        return slots

    def abort(self) -> None:
        """Forget it: the slot stays the caller's. Does nothing once it was committed or aborted."""
        if not self.done:
            self.done = True
            if self._at:
                self._owner._abort_pending(self._at, self._born)

    def __enter__(self) -> "PendingSnapshot":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def __repr__(self) -> str:
        return f"PendingSnapshot(tokens={len(self._prefix.ids)}, slot={self.slot}{', done' if self.done else ''})"


class SnapshotMethods(Handle):
    """What `RadixCache` offers for snapshots; needs `max_snapshots` at creation."""

    _scratch: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def snapshot_alpha(self) -> float:
        """How much depth weighs beside recency when a snapshot has to go; fixed at creation."""
        return self._segment.geometry.snapshot_alpha

    @property
    def tail_lease(self) -> int:
        """For how many evictions a session's tail is kept after its last lookup; fixed at creation."""
        return self._segment.geometry.tail_lease

    @property
    def retention(self) -> str:
        """The policy, "session" or "chain"; fixed at creation."""
        return RETENTIONS[self._segment.geometry.retention]

    @cached_property
    def states(self) -> Payload:
        """The bytes of the slots, uint8[snapshot_nbytes] each; no checksums. ValueError where the cache holds none.

        A slot is written by the worker that has it, and read while a match pins it.
        """
        if not self._segment.geometry.snapshot_nbytes:
            raise ValueError(f"cache {self.name!r} holds no states: create it with snapshot_slots and snapshot_nbytes")
        return Payload(self._worker, state_rows(self._segment.geometry))

    # --- saving -------------------------------------------------------------------------------------------

    def insert_intermediate_snapshot(self, tokens: Ids, slot: int, *, session: int = 0, **where: Any) -> list[int]:
        """Say that `slot` holds the state after exactly `tokens`, within a prompt. Any session may resume from it.

        Touches the index only; the blocks are those of an insert. `where` is `adapter_id`, `salt`, `block_keys`, or the
        prompt's `match`. Returns the slots that are the caller's to free now: what it took the place of, or `slot`
        itself where the match is older than the last `clear()`. Raises SlotError, SnapshotsFull, ValueError.
        """
        return self._save(self._prefix(tokens, "plain", session, **where), slot)

    def insert_tail_snapshot(self, tokens: Ids, slot: int, session: int, **where: Any) -> list[int]:
        """Save where the session's next prompt will resume; only that session may. Takes the place of its last tail.

        As `insert_intermediate_snapshot`; the last tail's sibling goes, too. `session` is not 0.
        """
        return self._save(self._prefix(tokens, "tail", session, **where), slot)

    def insert_tail_sibling_snapshot(self, tokens: Ids, slot: int, session: int, **where: Any) -> list[int]:
        """Save a state one block before the session's tail, after `insert_tail_snapshot`; any session may resume."""
        return self._save(self._prefix(tokens, "sibling", session, **where), slot)

    def reserve_snapshot(
        self, tokens: Ids, slot: int, *, kind: str = "plain", session: int = 0, **where: Any
    ) -> PendingSnapshot:
        """Announce a snapshot whose bytes are not written yet: it counts from its `commit()` on.

        `kind` is "plain", "tail", "sibling", or "finish": a prompt with its answer, which the chain policy gives up
        before others. The rest is as for `insert_intermediate_snapshot`.
        """
        prefix = self._prefix(tokens, kind, session, **where)
        at, born = self._register(prefix, slot)
        if at == 0:
            raise LeaseError("the match is older than the last clear(): look the prompt up again")
        return PendingSnapshot(self, prefix, slot, at, born)

    # --- slots --------------------------------------------------------------------------------------------

    def allocate_snapshot_slot(self, *, evict: bool = True, finish: bool = False) -> int:
        """A slot to save a state in, the caller's until it is freed or in the index; may `evict` a snapshot for it.

        Needs `snapshot_slots` at creation. For a `finish` snapshot none goes that the chain policy wants to keep.
        Raises SlotsFull where all slots are some worker's own, or pinned by matches.
        """
        self._need_slots()
        marks, sessions = self._scratch_arrays()
        entry, how = self._entries().allocate, (int(evict), int(finish))
        answer = self._worker.run(entry, marks, sessions, *how)
        if answer[0] == SLOTS_FULL and self._worker.reap():
            answer = self._worker.run(entry, marks, sessions, *how)
        if answer[0]:
            slots = self._segment.geometry.snapshot_slots
            raise SlotsFull(
                f"cache {self.name!r}: all snapshot_slots={slots} are in use, and no snapshot may go for this: "
                "free or release some, or create the cache with more"
            )
        return int(answer[2])

    def free_snapshot_slot(self, slot: int) -> None:
        """Give back a slot of this worker that is in no snapshot. Raises SlotError where it is not."""
        self._need_slots()
        if self._worker.run(self._entries().free, as_count("slot", slot, _U32))[0]:
            raise self._slot_error(slot)

    def evict_snapshot_lru(self) -> int | None:
        """Take out the snapshot that the policy gives up first, None if none may. Its slot is the caller's to free."""
        out, counts = np.empty(1, np.uint32), np.zeros(1, np.int64)
        self._evicting(self._entries().evict, out, counts)
        return int(out[0]) if counts[0] else None

    # --- tiers --------------------------------------------------------------------------------------------

    def evict_snapshot_to_tier(self, min_tokens: int = 0, *, pending: bool = False) -> Spill | Drop | None:
        """Make room like `evict_snapshot_lru`, but keep the snapshot findable by a key, for a copy of its bytes.

        One of fewer than `min_tokens` tokens is dropped. The slot is the caller's: save its bytes under the key, then
        free it. With `pending`, lookups find the key only after `commit_snapshot_spill`. `shmradix.tier` does it all.
        """
        minimum = as_count("min_tokens", min_tokens)
        out, counts = np.empty(1, np.uint32), np.zeros(1, np.int64)
        answer = self._evicting(self._entries().spill, out, counts, minimum, int(pending))
        if not counts[0]:
            return None
        _, _, key, depth = answer
        return Spill(int(out[0]), key & _U64, depth) if key else Drop(int(out[0]), depth)

    def commit_snapshot_spill(self, key: int) -> bool:
        """Let lookups find a pending spill. False where it was superseded: the caller removes its bytes."""
        return not self._worker.run(self._entries().commit_spill, as_count("key", key, _U64))[0]

    def promote_snapshot(self, key: int, slot: int, *, match: PrefixMatch | None = None) -> bool:
        """Say that the spilled snapshot's bytes are in `slot` again. False where it is gone: the slot is the caller's.

        With the `match` that named the key, the slot is pinned by it from then on, and is its `snapshot_slot`.
        Raises SlotError where the slot is in the index, or not this worker's, LeaseError for a released match, and
        LeasesFull where no pin is left.
        """
        key, slot = as_count("key", key, _U64), as_count("slot", slot, _U32)
        if match is not None:
            self._namespace_of(match, BASE_NAMESPACE)
            if match.snapshot_tier_key != key:
                raise ValueError(f"key={key} is not that of match={match!r}, which is {match.snapshot_tier_key}")
        status = self._worker.locked(self._promote, key, slot, match)
        if status == SLOT_NOT_HELD:
            raise self._slot_error(slot)
        if status == LEASES_FULL:
            raise self._pins_full()
        return not status

    def _promote(self, key: int, slot: int, match: PrefixMatch | None) -> int:
        """Promote and let the match have the pin, with no other thread's release of it in between."""
        if match is not None and match.released:
            raise LeaseError(f"match={match!r} was released: look the prompt up again")
        arguments = self._entries().promote, key, slot, int(match is not None)
        status, _, pin, born = self._worker.call(*arguments)
        if status == LEASES_FULL and self._worker.reap():
            status, _, pin, born = self._worker.call(*arguments)
        if match is not None and not status:
            old = match._anchor
            match._anchor = Anchor(slot=slot, tokens=old.tier_tokens, is_tail=old.is_tail, pin=pin, born=born)
            self._pins[match._lease, match._born] = pin, born
        return status

    def forget_snapshot_tier_key(self, key: int) -> bool:
        """Take out the spilled snapshot with this key, whose bytes are gone. False where there is none any more."""
        return not self._worker.run(self._entries().forget, as_count("key", key, _U64))[0]

    def snapshot_count(self) -> int:
        """How many snapshots lookups may find, resident and spilled ones."""
        count: int = self._snapshot_totals()[0]
        return count

    # --- helpers ------------------------------------------------------------------------------------------

    def _entries(self) -> Any:
        if self._worker.snapshots is None:
            raise ValueError(f"cache {self.name!r} has no snapshot index: create it with max_snapshots")
        return self._worker.snapshots

    def _need_slots(self) -> None:
        if not self._segment.geometry.snapshot_slots:
            raise ValueError(
                f"cache {self.name!r} manages no slots: create it with snapshot_slots, or use slot ids of your own"
            )

    def _scratch_arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """What choosing a victim needs, made once; only one thread is in a call at a time."""
        if self._scratch is None:
            geometry = self._segment.geometry
            self._scratch = (
                np.empty(1 + geometry.max_snapshots, np.int64),
                np.empty((geometry.session_count, 2), np.int64),
            )
        return self._scratch

    def _evicting(self, entry: Any, out: np.ndarray, counts: np.ndarray, *how: int) -> tuple[int, ...]:
        marks, sessions = self._scratch_arrays()
        answer: tuple[int, ...] = self._worker.run(entry, marks, sessions, *how, out, counts)
        if answer[0] == NOT_FOUND and self._worker.reap():
            answer = self._worker.run(entry, marks, sessions, *how, out, counts)
        return answer

    def _snapshot_totals(self) -> tuple[int, int]:
        """Snapshots that lookups may find, and how many of them are spilled."""
        if self._worker.snapshots is None:
            return 0, 0
        _, _, found, tiered = self._worker.run(self._worker.snapshots.totals, self._scratch_arrays()[0])
        return found, tiered

    def _prefix(
        self,
        tokens: Ids,
        kind: str,
        session: int,
        *,
        adapter_id: int = 0,
        salt: bytes | None = None,
        block_keys: Ids | None = None,
        match: PrefixMatch | None = None,
    ) -> _Prefix:
        ids = as_tokens(tokens)
        keys = as_block_keys(block_keys, ids, self.block_size)
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r}: expected one of {', '.join(KINDS)}")
        session = as_session(session)
        if kind in ("tail", "sibling") and session == 0:
            raise ValueError(
                f"session=0 for a {kind} snapshot, which no lookup could find: expected the session's hash"
            )
        namespace = self._namespace(adapter_id, salt)
        if match is not None:
            namespace = self._namespace_of(match, namespace)
        parents = _NO_CANDIDATES
        if self._segment.geometry.retention:
            parents = self._candidates(namespace, ids, keys, len(ids) - 1, session, False)
        own = prefix_hash(self._hash_seed, ids, keys, self.block_size, len(ids))
        return _Prefix(namespace, ids, own, parents, session, KINDS[kind], -1 if match is None else match._epoch)

    def _candidates(
        self, namespace: np.ndarray, ids: np.ndarray, keys: np.ndarray, limit: int, session: int, hermetic: bool
    ) -> np.ndarray:
        """Snapshots within `limit` that may be of prefixes of `ids`, deepest first: uint64[k, 4], rows of depth, where
        it is, and the low and high half of the prefix's hash."""
        out = np.empty((self._segment.geometry.max_snapshots, 4), np.uint64)
        count = self._worker.read(self._entries().all_within, namespace, ids, limit, session, hermetic, out)
        rising = out[:count][np.argsort(out[:count, 0])]
        rising[:, 2:] = prefix_hashes(self._hash_seed, ids, keys, self.block_size, rising[:, 0].tolist())
        return np.ascontiguousarray(rising[::-1])

    def _resume(
        self, match: PrefixMatch, ids: np.ndarray, keys: np.ndarray, limit: int, gate: tuple[int, bool]
    ) -> None:
        """Find and pin the deepest snapshot within `limit` tokens, for the match; within `Worker.locked`."""
        worker, entries, namespace = self._worker, self._entries(), match._namespace
        depth, at, reason, check = entries.deepest(worker.address, namespace, ids, limit, *gate)
        # A copy of all tokens would cost more than the rest of this.
        match._prompt = ids, check, keys.copy() if len(keys) else keys, gate
        if depth:
            hash_ = prefix_hash(self._hash_seed, ids, keys, self.block_size, depth)
            if self._take(match, (depth, at, *hash_), limit, gate):
                return
            # It was another prompt's, or went meanwhile.
            for candidate in self._candidates(namespace, ids, keys, depth, *gate).tolist():
                if self._take(match, candidate, limit, gate):
                    return
        worker.call(entries.miss, limit, gate[0], reason)
        match._anchor = Anchor(reason=REASONS[reason])

    def _take(self, match: PrefixMatch, candidate: Sequence[int], limit: int, gate: tuple[int, bool]) -> bool:
        """Pin the candidate (depth, snapshot, low and high half of the hash) for the match, if it is there."""
        arguments = self._entries().take, match._namespace, *candidate, limit, *gate, match._epoch
        status, _, slot, key, flags, pin, born = self._worker.call(*arguments)
        if status == LEASES_FULL and self._worker.reap():
            status, _, slot, key, flags, pin, born = self._worker.call(*arguments)
        if status == LEASES_FULL:
            raise self._pins_full()
        if status == NOT_FOUND:
            return False
        is_tail = bool(flags & TAIL)
        if key:
            match._anchor = Anchor(None, 0, key & _U64, candidate[0], is_tail)
        else:
            match._anchor = Anchor(slot, candidate[0], None, 0, is_tail, "", pin, born)
            self._pins[match._lease, match._born] = pin, born
        return True

    def _restorable(self, match: PrefixMatch) -> list[int]:
        """The depths, rising, at which the match's prompt could resume now."""
        if match._prompt is None:
            return []
        ids, check, keys, gate = match._prompt
        if self._worker.read(self._entries().check, ids) != check:
            raise ValueError(f"the tokens of {match!r} were changed since its lookup: look them up again")
        candidates = self._candidates(match._namespace, ids, keys, match.matched_tokens, *gate)
        is_there = np.zeros(len(candidates), np.int64)
        if len(candidates):
            self._worker.run(self._entries().which, match._namespace, candidates, *gate, is_there)
        depths: list[int] = candidates[is_there > 0, 0][::-1].tolist()
        return depths

    def _register(self, prefix: _Prefix, slot: int) -> tuple[int, int]:
        """Make a pending snapshot. Returns where it is and its birth; 0 if the match is older than the last clear()."""
        status, at, born = self._call_save(prefix, slot, True, np.empty(0, np.uint32), np.zeros(1, np.int64))
        return (0, 0) if status == STALE else (at, born)

    def _save(self, prefix: _Prefix, slot: int) -> list[int]:
        out, counts = np.empty(_MAX_DISPLACED, np.uint32), np.zeros(1, np.int64)
        status, _, _ = self._call_save(prefix, slot, False, out, counts)
        return [slot] if status == STALE else self._handed_back(out, counts)

    def _call_save(
        self, prefix: _Prefix, slot: int, pending: bool, out: np.ndarray, counts: np.ndarray
    ) -> tuple[int, int, int]:
        entries, slot = self._entries(), as_count("slot", slot, _U32)
        saved = prefix.namespace, prefix.ids, *prefix.hash, slot, prefix.session, prefix.kind, prefix.epoch
        arguments = *saved, int(pending), prefix.parents, out, counts
        answer = self._worker.run(entries.save, *arguments)
        if answer[0] == SNAPSHOTS_FULL and self._worker.reap():
            answer = self._worker.run(entries.save, *arguments)
        if answer[0] == SLOT_NOT_HELD:
            raise self._slot_error(slot)
        if answer[0] == SNAPSHOTS_FULL:
            raise SnapshotsFull(
                f"cache {self.name!r}: all max_snapshots={self._segment.geometry.max_snapshots} are in use, none "
                "spilled (what takes the place of one needs its own first): evict one, or create it with more"
            )
        return answer[0], answer[2], answer[3]

    def _commit_pending(self, prefix: _Prefix, slot: int, at: int, born: int) -> list[int]:
        out, counts = np.empty(_MAX_DISPLACED, np.uint32), np.zeros(1, np.int64)
        entry = self._entries().commit
        status, _ = self._worker.run(entry, prefix.namespace, at, born, prefix.parents, out, counts)
        if status == NOT_HELD:
            raise LeaseError(f"the pending snapshot of slot {slot} is not this worker's: reserve it again")
        return [slot] if status == STALE else self._handed_back(out, counts)

    def _abort_pending(self, at: int, born: int) -> None:
        with contextlib.suppress(CacheClosed):  # which took it along
            self._worker.run(self._entries().abort, at, born)

    def _handed_back(self, out: np.ndarray, counts: np.ndarray) -> list[int]:
        slots: list[int] = out[: counts[0]].tolist()
        return slots

    def _drop_hidden(self) -> np.ndarray:
        """Take out the snapshots from before a clear(). Returns the slots that are the caller's to free, uint32."""
        out, counts = np.empty(self._segment.geometry.max_snapshots, np.uint32), np.zeros(1, np.int64)
        self._worker.run(self._entries().drop_hidden, self._scratch_arrays()[0], out, counts)
        return out[: counts[0]].copy()

    def _pins_full(self) -> LeasesFull:
        return LeasesFull(
            f"cache {self.name!r}: all max_leases={self._segment.geometry.max_leases} pins are in use: "
            "release some matches, or create the cache with more"
        )

    def _slot_error(self, slot: int) -> SlotError:
        slots = self._segment.geometry.snapshot_slots
        if slots:
            return SlotError(
                f"slot {slot} is in the index, or not one of the {slots} slots that this worker was given: "
                "allocate_snapshot_slot() gives one"
            )
        return SlotError(f"slot {slot} is in the index already: expected one that holds no other snapshot")
