"""RadixCache: the prefix cache that the workers of a host share."""

import builtins
import contextlib
import dataclasses
import importlib
import threading
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Union

import numpy as np

from shmradix import segment as segments
from shmradix import verify
from shmradix.block_methods import BlockMethods
from shmradix.claiming import Claim
from shmradix.errors import (
    BlockError,
    CacheClosed,
    LayoutMismatch,
    LeaseError,
    LeasesFull,
    NamespacesFull,
    SegmentExists,
    SegmentNotFound,
)
from shmradix.inputs import (
    NO_IDS,
    Ids,
    as_block_keys,
    as_block_table,
    as_count,
    as_disk_table,
    as_session,
    as_tokens,
)
from shmradix.layout import COUNTERS, LATEST, Geometry
from shmradix.results import EvictedBlocks, InsertAcquired, PrefixMatch, Stats
from shmradix.segment import Segment
from shmradix.sizes import as_geometry
from shmradix.snapshot_methods import PendingSnapshot, SnapshotMethods
from shmradix.status import BLOCK_NOT_HELD, LEASES_FULL, MISMATCH, NAMESPACES_FULL, STALE
from shmradix.verify import Violation

_EVICT_STEP = 1024  # blocks that are taken out in one critical section


class RadixCache(BlockMethods, SnapshotMethods):
    """A radix tree over block-sized chunks of token ids in shared memory: how much of a prompt is cached, and where.

    Get one with `create`, `attach` or `open`; each handle is one worker. A handle may be used by many threads; a forked
    child that uses it becomes a worker of its own. Closing gives back all that the handle holds; the cache stays until
    `unlink`, also without any process.
    """

    def __init__(self, segment: Segment, lock_timeout: float | None, created: bool) -> None:
        super().__init__(segment)
        self.created = created
        """Whether this very call created the segment."""
        try:
            self._worker = _workers(segment.geometry).Worker(segment, lock_timeout)
        except BaseException:
            if created:
                segments.unlink(segment.name, segment.inode)
            segment.close()
            raise

    # --- life ---------------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        name: str,
        *,
        max_blocks: int | None = None,
        block_size: int = 16,
        max_leases: int = 4096,
        max_workers: int = 64,
        max_namespaces: int = 256,
        max_snapshots: int = 0,
        snapshot_slots: int = 0,
        snapshot_alpha: float = 0.0,
        tail_lease: int = 64,
        retention: str = "session",
        num_blocks: int = 0,
        block_nbytes: int = 0,
        block_shape: Sequence[int] = (),
        dtype: Any = None,
        snapshot_nbytes: int = 0,
        checksums: bool = False,
        huge_pages: bool = False,
        max_claims: int = 256,
        mode: int = 0o600,
        lock_timeout: float | None = None,
    ) -> "RadixCache":
        """Create the segment `/shmradix.<name>`, with all its memory reserved, and attach to it.

        `block_size` is in tokens; `max_leases` bounds the requests in flight, `max_namespaces` the pairs of adapter and
        salt that have blocks. `mode` is the file's, whatever the umask. A call that finds a guard held by a live worker
        for longer than `lock_timeout` seconds raises LockTimeout; None waits.

        `max_snapshots` gives the cache a snapshot index, for saved states of recurrent layers, spilled ones too; of the
        slots that hold them `snapshot_slots` are managed by the cache, 0 leaves that to the callers. `retention`
        ("session" or "chain"), `snapshot_alpha` and `tail_lease` say which go first; see docs/snapshots.md.

        With `num_blocks` the cache manages the blocks themselves, numbered from 0 (see `allocate`), and `max_blocks` is
        as many unless said. `block_nbytes`, or `block_shape` and `dtype`, and `snapshot_nbytes` have it hold their
        bytes, too, see `kv` and `states`: at page boundaries, in huge pages where asked for and the machine has them,
        each block with a checksum where asked for. `max_claims` bounds the prefills under way; see `claim`.

        Raises SegmentExists, SharedMemoryFull, AccessDenied, ValueError, TypeError.
        """
        geometry = as_geometry(
            block_size=block_size, max_blocks=max_blocks, max_namespaces=max_namespaces, max_leases=max_leases,
            max_workers=max_workers, max_snapshots=max_snapshots, snapshot_slots=snapshot_slots,
            snapshot_alpha=snapshot_alpha, tail_lease=tail_lease, retention=retention, num_blocks=num_blocks,
            block_nbytes=block_nbytes, block_shape=block_shape, dtype=dtype, snapshot_nbytes=snapshot_nbytes,
            checksums=checksums, huge_pages=huge_pages, max_claims=max_claims,
        )  # fmt: skip
        mode, timeout = _as_mode(mode), _as_timeout(lock_timeout)
        segments.check_name(name)
        _workers(geometry)  # compiled before anything exists that an interrupted compilation would leave behind
        return cls(segments.create(name, geometry, mode, timeout), timeout, created=True)

    @classmethod
    def attach(cls, name: str, *, lock_timeout: float | None = None) -> "RadixCache":
        """Attach to the segment `name`.

        Raises SegmentNotFound, SegmentForeign (no segment, or cut short), LayoutMismatch (another version, boot or
        geometry), AccessDenied, WorkersFull. The segment stays as it is.
        """
        timeout = _as_timeout(lock_timeout)
        while True:
            cache = cls(segments.attach(name), timeout, created=False)
            try:
                if cache._segment.has_its_name():
                    cache.reap()
                    return cache
            except BaseException:
                cache.close()
                raise
            cache.close()  # unlinked meanwhile: whoever comes next would not meet us there

    @classmethod
    def open(
        cls,
        name: str,
        *,
        max_blocks: int | None = None,
        block_size: int = 16,
        max_leases: int = 4096,
        max_workers: int = 64,
        max_namespaces: int = 256,
        max_snapshots: int = 0,
        snapshot_slots: int = 0,
        snapshot_alpha: float = 0.0,
        tail_lease: int = 64,
        retention: str = "session",
        num_blocks: int = 0,
        block_nbytes: int = 0,
        block_shape: Sequence[int] = (),
        dtype: Any = None,
        snapshot_nbytes: int = 0,
        checksums: bool = False,
        huge_pages: bool = False,
        max_claims: int = 256,
        mode: int = 0o600,
        lock_timeout: float | None = None,
    ) -> "RadixCache":
        """Attach to the segment `name`, or create it; of many processes that do so at once exactly one creates.

        Raises what `create` and `attach` raise, and LayoutMismatch where the segment exists with other sizes.
        """
        geometry = as_geometry(
            block_size=block_size, max_blocks=max_blocks, max_namespaces=max_namespaces, max_leases=max_leases,
            max_workers=max_workers, max_snapshots=max_snapshots, snapshot_slots=snapshot_slots,
            snapshot_alpha=snapshot_alpha, tail_lease=tail_lease, retention=retention, num_blocks=num_blocks,
            block_nbytes=block_nbytes, block_shape=block_shape, dtype=dtype, snapshot_nbytes=snapshot_nbytes,
            checksums=checksums, huge_pages=huge_pages, max_claims=max_claims,
        )  # fmt: skip
        mode, timeout = _as_mode(mode), _as_timeout(lock_timeout)
        while True:
            with contextlib.suppress(SegmentNotFound):
                cache = cls.attach(name, lock_timeout=lock_timeout)
                if cache._segment.geometry != geometry:
                    found = cache._segment.geometry
                    cache.close()
                    raise LayoutMismatch(
                        f"segment {name!r} exists with {found}, asked for was {geometry}: "
                        "attach to it, ask for the same sizes, or unlink it first"
                    )
                return cache
            with contextlib.suppress(SegmentExists, SegmentNotFound):
                return cls(segments.create(name, geometry, mode, timeout), timeout, created=True)

    def unlink(self: Union["RadixCache", str]) -> bool:
        """Remove a segment: `RadixCache.unlink(name)`, or `cache.unlink()` for the very one that the handle has.

        Processes that are attached go on with it. False where it was removed before, or another has its name by now.
        Raises SegmentNotFound where no segment has the given name, AccessDenied.
        """
        if isinstance(self, RadixCache):
            return segments.unlink(self.name, self._segment.inode)
        return segments.unlink(self)

    @staticmethod
    def list() -> "builtins.list[str]":
        """The names of the segments on this host."""
        return segments.names()

    @property
    def closed(self) -> bool:
        """Whether the handle was closed."""
        return self._worker.closed

    def close(self) -> None:
        """Give back the worker's slot and all its leases; the second time does nothing."""
        self._worker.close()

    def __enter__(self) -> "RadixCache":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        worker = getattr(self, "_worker", None)  # none where attaching failed
        if worker is not None and not worker.closed:
            try:
                warnings.warn(f"{self!r} was not closed", ResourceWarning, source=self, stacklevel=2)
            finally:
                worker.close(patience=1.0)

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<RadixCache {self.name!r}, {self.max_blocks} blocks of {self.block_size} tokens{state}>"

    # --- the tree -----------------------------------------------------------------------------------------

    def lookup(
        self,
        tokens: Ids,
        *,
        adapter_id: int = 0,
        salt: bytes | None = None,
        block_keys: Ids | None = None,
        session: int = 0,
        max_snapshot_tokens: int | None = None,
        require_snapshot: bool = False,
        hermetic: bool = False,
    ) -> PrefixMatch:
        """Find the longest cached prefix of `tokens`, and lease it: none of its blocks is evicted until the release.

        `tokens` are uint32 ids; `adapter_id` and `salt` choose the namespace; `block_keys` are uint64, one for each
        full block, and must match too. A match may lease a `partial_block` even where it matched no whole one.

        With a snapshot index the match also names, and pins, the deepest saved state within what matched and within
        `max_snapshot_tokens` (the prompt's length - 1, where the last token's logits are wanted): of any session, but
        tails of this `session` only, and of this session only if `hermetic`. With `require_snapshot` the match is cut
        to the blocks up to that state, and is empty without one. Raises LeasesFull.
        """
        ids = as_tokens(tokens)
        namespace = self._namespace(adapter_id, salt)
        keys = as_block_keys(block_keys, ids, self.block_size)
        gate = as_session(session), bool(hermetic)
        limit = len(ids) if max_snapshot_tokens is None else as_count("max_snapshot_tokens", max_snapshot_tokens)
        if require_snapshot:
            self._entries()
        rows = np.empty((2, len(ids) // self.block_size), np.uint32)
        worker = self._worker
        answer = worker.run(worker.entries.lookup, namespace, ids, keys, rows)
        if answer[0]:
            worker.reap()
            answer = worker.run(worker.entries.lookup, namespace, ids, keys, rows)
            if answer[0]:
                raise self._leases_full()
        _, _, depth, lease, born, block, agree, epoch = answer
        match = PrefixMatch(
            self, namespace, rows, depth, self.block_size, lease, born,
            block if agree else None, agree, epoch,
        )  # fmt: skip
        if worker.snapshots is not None:
            self._find_snapshot(match, ids, keys, min(limit, match.matched_tokens), gate, require_snapshot)
        return match

    def _find_snapshot(
        self,
        match: PrefixMatch,
        ids: np.ndarray,
        keys: np.ndarray,
        limit: int,
        gate: tuple[int, bool],
        require_snapshot: bool,
    ) -> None:
        """The snapshot half of a lookup; gives the lease back where it fails."""
        try:
            if match.matched_tokens:
                self._worker.locked(self._resume, match, ids, keys, limit, gate)
            if require_snapshot:
                self._cut(match)
        except BaseException:
            match.release()
            raise

    def _cut(self, match: PrefixMatch) -> None:
        """Let the match end with the block in which its snapshot does."""
        depth = -(-(match.snapshot_tokens or match.snapshot_tier_tokens) // self.block_size)
        if depth and depth == match._depth:
            return
        if match._lease:
            self._worker.run(self._worker.entries.shorten, match._lease, match._born, depth)
        match._cut_to(depth, self.block_size)

    def claim(
        self, tokens: Ids, *, adapter_id: int = 0, salt: bytes | None = None, block_keys: Ids | None = None
    ) -> Claim:
        """Look a prompt up, and say that this worker computes the rest of it, unless another does: see `Claim`.

        A claim is on the first full block that the cache lacks. It ends with its `release`, when `Claim.insert` has
        stored the last full block, at a `clear`, and with its worker. Raises ClaimsFull, and what `lookup` raises.
        """
        if not self._segment.geometry.max_claims:
            raise ValueError(f"cache {self.name!r} has no claims: create it with max_claims")
        ids = as_tokens(tokens)
        keys = as_block_keys(block_keys, ids, self.block_size)
        return Claim(self, ids.copy(), keys.copy(), adapter_id, salt)

    def peek_matched_tokens(
        self, tokens: Ids, *, adapter_id: int = 0, salt: bytes | None = None, block_keys: Ids | None = None
    ) -> int:
        """How many leading tokens a lookup would match; takes no lease, counts as no use."""
        ids = as_tokens(tokens)
        namespace = self._namespace(adapter_id, salt)
        keys = as_block_keys(block_keys, ids, self.block_size)
        rows = np.empty((2, len(ids) // self.block_size), np.uint32)
        depth: int = self._worker.run(self._worker.entries.peek, namespace, ids, keys, rows)[2]
        return depth * self.block_size

    def insert(
        self,
        tokens: Ids,
        block_table: Ids,
        *,
        disk_block_ids: Ids | None = None,
        matched_tokens: int = 0,
        match: PrefixMatch | None = None,
        adapter_id: int = 0,
        salt: bytes | None = None,
        block_keys: Ids | None = None,
    ) -> InsertAcquired:
        """Store the full blocks of `tokens`; `block_table[i]` holds the KV of block i, and is in no other node.

        With `match`, from a lookup of the same prompt, its lease is extended over all that is stored, and nothing of
        what matched is looked up again; the namespace is the match's. Without, `matched_tokens` says how much of the
        prompt a lease of this worker covers: that lease is extended (LeaseError where there is none of just that many
        blocks), and for less than a block a new one is taken, unless nothing was stored, which `release(tokens)` drops.
        Blocks that the cache manages must be this worker's (BlockError); those not stored stay so, duplicates too.
        Nothing is evicted: what does not fit in `max_blocks` is not stored, see `inserted_tokens`. A match from before
        the last `clear()` stores nothing, see `stale`.

        Raises ValueError where the tokens do not continue the match, LeasesFull, NamespacesFull, LeaseError.
        """
        ids = as_tokens(tokens)
        full = len(ids) // self.block_size
        table = as_block_table(block_table, full)
        disk_table = as_disk_table(disk_block_ids, block_table, full)
        keys = as_block_keys(block_keys, ids, self.block_size)
        matched = as_count("matched_tokens", matched_tokens, len(ids), ", the number of tokens")
        matched -= matched % self.block_size
        namespace = self._namespace(adapter_id, salt)
        if match is not None:
            if matched_tokens:
                raise ValueError(f"matched_tokens={matched_tokens} beside match={match!r}: give one of the two")
            namespace = self._namespace_of(match, namespace)
        out, counts = np.empty((5, full), np.uint32), np.zeros(5, np.int64)
        arguments = namespace, ids, keys, table, disk_table, matched
        status, depth = self._worker.locked(self._insert, match, arguments, out, counts)
        if status == STALE:
            return InsertAcquired(0, NO_IDS, NO_IDS, NO_IDS, NO_IDS, stale=True)
        if status:
            raise self._insert_error(status, matched, match)
        return InsertAcquired(depth * self.block_size, *(out[i, : counts[i]].copy() for i in range(4)))

    def insert_with_snapshot(
        self,
        tokens: Ids,
        block_table: Ids,
        slot: int,
        *,
        session: int = 0,
        finish: bool = False,
        disk_block_ids: Ids | None = None,
        matched_tokens: int = 0,
        match: PrefixMatch | None = None,
        adapter_id: int = 0,
        salt: bytes | None = None,
        block_keys: Ids | None = None,
    ) -> tuple[builtins.list[int], InsertAcquired]:
        """`insert`, and say that `slot` holds the state after all of `tokens`, whether in whole blocks or not.

        `finish`: a prompt with its answer, see `reserve_snapshot`. Returns the slots that are the caller's to free now,
        as `insert_intermediate_snapshot` does, and what the insert did. Raises what the two raise.
        """
        where: dict[str, Any] = {"adapter_id": adapter_id, "salt": salt, "block_keys": block_keys, "match": match}
        prefix = self._prefix(tokens, "finish" if finish else "plain", session, **where)
        with PendingSnapshot(self, prefix, slot, *self._register(prefix, slot)) as pending:
            acquired = self.insert(
                tokens, block_table, disk_block_ids=disk_block_ids, matched_tokens=matched_tokens, **where
            )
            return [slot] if acquired.stale else pending.commit(), acquired

    def _insert(
        self, match: PrefixMatch | None, arguments: tuple[Any, ...], out: np.ndarray, counts: np.ndarray
    ) -> tuple[int, int]:
        """Insert and let the match have the lease, with no other thread's use of the match in between."""
        held = (0, 0, -1)
        if match is not None:
            if match.released:
                raise LeaseError(f"match={match!r} was released: look the prompt up again")
            held = (match._lease, match._born, match._epoch)
        worker = self._worker
        answer = worker.call(worker.entries.insert, *arguments, *held, out, counts)
        if answer[0] in (LEASES_FULL, NAMESPACES_FULL) and worker.reap():
            answer = worker.call(worker.entries.insert, *arguments, *held, out, counts)
        status, _, depth, lease, born = answer
        if match is not None and not status:
            match._lease, match._born = lease, born
        return status, depth

    def release(
        self, tokens: Ids, *, adapter_id: int = 0, salt: bytes | None = None, block_keys: Ids | None = None
    ) -> None:
        """Drop this worker's deepest lease on the path of `tokens`, of equals one that an insert without a match took.

        Raises LeaseError where there is none.
        """
        ids = as_tokens(tokens)
        if not self._release_path(ids, adapter_id, salt, block_keys, 0, len(ids) // self.block_size, True):
            raise LeaseError(f"this worker holds no lease on the path of these {len(ids)} tokens: nothing to release")

    def release_matched(
        self,
        tokens: Ids,
        matched_tokens: int,
        *,
        adapter_id: int = 0,
        salt: bytes | None = None,
        block_keys: Ids | None = None,
    ) -> None:
        """Undo one lookup of `tokens` that matched `matched_tokens`, where its match is not at hand.

        Raises LeaseError where there is no such lease.
        """
        ids = as_tokens(tokens)
        matched = as_count("matched_tokens", matched_tokens, len(ids), ", the number of tokens")
        depth = matched // self.block_size
        if not self._release_path(ids, adapter_id, salt, block_keys, depth, depth, False) and depth:
            raise LeaseError(f"this worker holds no lease on the first {matched} of these tokens: nothing to release")

    def evict(self, num_blocks: int) -> EvictedBlocks:
        """Take out up to `num_blocks` blocks that no lease needs, least recently used leaves first.

        Where that leaves too few, what dead workers leased is freed, too. Blocks that the cache manages are free then.
        """
        return self._evict(as_count("num_blocks", num_blocks), LATEST, reap=True)

    def clear(self) -> EvictedBlocks:
        """Forget everything (new weights, say): from the return on no worker finds anything that is older.

        Returns the blocks that nobody leases. The leased ones come out of `evict`, before all others, once their leases
        are gone. An insert through a match from before stores nothing; one without a match is taken at its word.
        """
        blocks = self._evict(self.max_blocks, self._worker.run(self._worker.entries.hide_all)[2], reap=False)
        if self._worker.snapshots is None:
            return blocks
        return dataclasses.replace(blocks, snapshot_slots=self._drop_hidden())

    def reap(self) -> int:
        """Free the leases of workers that died, and their slots. Returns how many workers that were."""
        return self._worker.reap()

    def verify(self) -> builtins.list[Violation]:
        """Check every invariant of the segment (docs/invariants.md) on a copy of it. Empty where it is sound.

        The copy holds the guards, and so all workers, about half a second a GB.
        """
        geometry, worker = self._segment.geometry, self._worker
        image = np.empty(geometry.size, np.uint8)
        index = np.empty(geometry.size - geometry.index_offset, np.uint8)
        for part in (image, index):
            part.fill(0)  # have the memory before a guard is held
        if worker.snapshots is not None:
            worker.run(worker.snapshots.copy, index)  # first: no snapshot is of a later epoch than the tree's, then
        worker.run(worker.entries.copy, image)
        if worker.snapshots is not None:
            image[geometry.index_offset :] = index
        return verify.check(geometry.views(image), geometry)

    def stats(self) -> Stats:
        """The counters of all workers and the totals of the tree."""
        geometry = self._segment.geometry
        seen = np.zeros(geometry.node_count, np.uint8)
        _, _, blocks, leased, leases, namespaces, *pool = self._worker.run(self._worker.entries.totals, seen)
        free, private = pool if geometry.num_blocks else (geometry.max_blocks - blocks, 0)
        counters, recoveries, workers = self._worker.counters()
        snapshots, tiered = self._snapshot_totals()
        return Stats(
            **dict(zip(COUNTERS, counters)), recoveries=recoveries, blocks_live=blocks, blocks_leased=leased,
            blocks_evictable=blocks - leased, blocks_free=free, blocks_private=private, leases=leases, workers=workers,
            namespaces=namespaces, snapshots=snapshots, snapshots_tiered=tiered,
        )  # fmt: skip

    # --- helpers ------------------------------------------------------------------------------------------

    def _release_match(self, match: PrefixMatch) -> None:
        """Drop the match's lease, once."""
        try:
            self._worker.locked(self._release_lease, match)
        except CacheClosed:  # which gave it back
            match.released = True

    def _release_lease(self, match: PrefixMatch) -> None:
        if match.released:
            return
        worker, anchor, bad = self._worker, match._anchor, False
        if anchor.pin:
            self._pins.pop((match._lease, match._born), None)
            bad = bool(worker.call(self._entries().unpin, anchor.pin, anchor.born)[0])
            match._anchor = anchor._replace(pin=0)
        bad |= bool(match._lease) and bool(worker.call(worker.entries.release, match._lease, match._born)[0])
        if bad:
            raise LeaseError(
                f"the lease of {match!r} is not this worker's: only the process that took it can release it"
            )
        match.released = True

    def _release_path(
        self,
        ids: np.ndarray,
        adapter_id: int,
        salt: bytes | None,
        block_keys: Ids | None,
        low: int,
        high: int,
        by_tokens: bool,
    ) -> bool:
        namespace = self._namespace(adapter_id, salt)
        keys = as_block_keys(block_keys, ids, self.block_size)
        bounds = low, high, int(by_tokens)
        return bool(self._worker.locked(self._drop_path, namespace, ids, keys, *bounds))

    def _drop_path(self, *path: Any) -> bool:
        status, _, lease, born = self._worker.call(self._worker.entries.release_path, *path)
        pin = self._pins.pop((lease, born), None)
        if pin is not None:
            self._worker.call(self._entries().unpin, *pin)
        return not status

    def _evict(self, limit: int, latest: int, reap: bool) -> EvictedBlocks:
        """Take out up to `limit` blocks last used until `latest`; blocks of a call that was cut short come first."""
        return EvictedBlocks(*self._worker.locked(self._evict_rows, limit, latest, reap))

    def _evict_rows(self, limit: int, latest: int, reap: bool) -> np.ndarray:
        worker, parts = self._worker, self._worker.unreturned
        wanted = limit - sum(int(counts[0]) for _, counts in parts)
        while wanted > 0:
            step = min(wanted, _EVICT_STEP)
            rows, counts = np.empty((2, step), np.uint32), np.zeros(1, np.int64)
            parts.append((rows, counts))  # first: an exception, of a signal handler, say, must not lose the blocks
            worker.call(worker.entries.evict, step, latest, rows, counts)
            wanted -= int(counts[0])
            if counts[0] < step and not (reap and worker.reap()):
                break
        taken = np.concatenate([np.empty((2, 0), np.uint32), *(rows[:, : counts[0]] for rows, counts in parts)], axis=1)
        rest = taken[:, limit:]
        worker.unreturned = [(rest, np.array([rest.shape[1]]))] if rest.size else []
        return taken[:, :limit]

    def _insert_error(self, status: int, matched: int, match: PrefixMatch | None) -> Exception:
        if status == MISMATCH:
            return ValueError(
                f"tokens do not start with the prompt that {match!r} was looked up with: nothing was stored"
            )
        if status == LEASES_FULL:
            return self._leases_full()
        if status == BLOCK_NOT_HELD:
            return BlockError(
                f"cache {self.name!r}: block_table has a block that this worker was not given, or that is in the tree "
                "already: expected blocks from allocate() beyond what the cache has of the prompt"
            )
        if status == NAMESPACES_FULL:
            return NamespacesFull(
                f"cache {self.name!r}: all max_namespaces={self._segment.geometry.max_namespaces} pairs of adapter and "
                "salt have blocks: evict all blocks of one, or create the cache with more"
            )
        if match is not None:
            return LeaseError(f"the lease of {match!r} is not this worker's: look the prompt up again")
        return LeaseError(
            f"matched_tokens={matched}: this worker holds no lease on those tokens: look the prompt up first"
        )

    def _leases_full(self) -> LeasesFull:
        return LeasesFull(
            f"cache {self.name!r}: all max_leases={self._segment.geometry.max_leases} leases are in use: "
            "release some, or create the cache with more"
        )


def _workers(geometry: Geometry) -> Any:
    """The module `workers`, imported at first use: importing shmradix must not import numba."""
    workers = importlib.import_module("shmradix.workers")
    workers.compile.load()
    if geometry.max_snapshots:
        workers.compile.load("snapshot_entries")
    if geometry.num_blocks:
        workers.compile.load("block_entries")
    return workers


def _as_mode(value: Any) -> int:
    mode = as_count("mode", value, 0o777)
    if mode & 0o600 != 0o600:
        raise ValueError(f"mode={mode:#o}: expected one that lets the owner read and write, as 0o600 does")
    return mode


def _as_timeout(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"lock_timeout={value!r}: expected seconds, or None to wait")
    if not 0 < value <= threading.TIMEOUT_MAX:
        raise ValueError(f"lock_timeout={value!r}: expected a positive number of seconds, or None to wait")
    return float(value)
