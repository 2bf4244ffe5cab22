"""Claims, Python half: workers that want the same prompt have one of them compute it."""

from __future__ import annotations

import contextlib
import time
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from shmradix.errors import CacheClosed, ClaimError, ClaimsFull
from shmradix.inputs import Ids, as_count
from shmradix.prefix_hash import prefix_hash
from shmradix.results import InsertAcquired, PrefixMatch
from shmradix.status import CLAIMS_FULL, STALE

if TYPE_CHECKING:
    from shmradix.cache import RadixCache


class Claim:
    """Who computes what the cache lacks of a prompt: this worker, another, or nobody, for it lacks no full block.

    Get one with `RadixCache.claim`. A context manager: leaving it, or `release()`, ends the claim, wakes who waits for
    it, and releases the match. For one thread.
    """

    def __init__(
        self, cache: RadixCache, ids: np.ndarray, keys: np.ndarray, adapter_id: int, salt: bytes | None
    ) -> None:
        self._cache, self._worker, self._ids, self._keys = cache, cache._worker, ids, keys
        self._blocks = len(ids) // cache.block_size
        self._prompt = ids, (keys if len(keys) else None), adapter_id, salt
        self._at, self._born, self._epoch, self._depth = 0, 0, 0, 0
        self._owner = (-1, 0)  # its slot and generation
        self.match: PrefixMatch | None = None
        """What a lookup of the prompt found, leased; None while another computes the rest: waiters hold no blocks."""
        self.is_mine = False
        """Whether this worker is to compute the rest, from `match.matched_tokens` on, and to `insert` it."""
        self.owner = ""
        """Who computes it, for people; "" where nobody does."""
        self.taken_ns = 0
        """Since when, by `time.monotonic_ns()`; 0 where nobody does."""
        self._try()

    @property
    def is_waiting(self) -> bool:
        """Whether another computes it."""
        return self.match is None

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep while another computes the prompt's next block. False where `timeout` seconds were too few for that.

        Else there is a `match`, and what is still missing, whether the other inserted a part, gave up or died, is this
        worker's (`is_mine`). However many others come and go meanwhile, the time is that of all.
        """
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while self.is_waiting:
            rest = deadline - time.monotonic()
            if rest > 0:
                self._worker.claimers.sleep(rest)
            if self._worker.locked(self._is_over):
                self._try()
            elif time.monotonic() >= deadline:
                return False
        return True

    def insert(
        self, block_table: Ids, *, num_tokens: int | None = None, disk_block_ids: Ids | None = None
    ) -> InsertAcquired:
        """Insert the prompt, or its first `num_tokens`, as `RadixCache.insert` does, and wake who waits for it.

        Parts may follow each other; with the last full block the claim ends, and the match stays. Raises ClaimError
        where the claim is not this worker's, and what `RadixCache.insert` raises.
        """
        ids, keys, adapter_id, salt = self._prompt
        count = len(ids) if num_tokens is None else as_count("num_tokens", num_tokens, len(ids), ", the prompt's")
        full = count // self._cache.block_size
        if not count:
            raise ValueError(f"num_tokens=0: expected 1 to {len(ids)}, the prompt's")
        if not self.is_mine:
            raise ClaimError(f"{self!r}: expected one that is this worker's, see is_mine")
        waiters = 0
        if full < self._blocks:  # first: what comes behind must be claimed when waiters see what is stored
            key = *self._key(full), (full + 1) * self._cache.block_size
            status, _, waiters = self._worker.run(self._worker.claims.advance, self._at, self._born, *key)
            if status:
                raise self._not_held()
        acquired = self._cache.insert(
            ids[:count], block_table, disk_block_ids=disk_block_ids, match=self.match, adapter_id=adapter_id, salt=salt,
            block_keys=None if keys is None else keys[:full],
        )  # fmt: skip
        self._worker.claimers.wake(waiters)
        if acquired.inserted_tokens == self._blocks * self._cache.block_size:
            self._end()
        return acquired

    def release(self) -> None:
        """End the claim, if it is this worker's, and release the match. Does nothing the second time.

        Raises ClaimError, LeaseError in a process that did not take them.
        """
        try:
            self._end()
        finally:
            if self.match is not None:
                self.match.release()

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        state = f"waiting for {self.owner}" if self.is_waiting else "mine" if self.is_mine else "nobody's"
        return f"<Claim on {len(self._ids)} tokens, {state}>"

    # --- helpers ------------------------------------------------------------------------------------------

    def _key(self, depth: int) -> tuple[int, int]:
        """The hash of the prompt up to the end of the block behind its first `depth` ones."""
        size = self._cache.block_size
        return prefix_hash(self._cache._hash_seed, self._ids, self._keys, size, (depth + 1) * size)

    def _try(self) -> None:
        """Look the prompt up, and claim what it lacks; again where it was inserted, or evicted, in between."""
        ids, keys, adapter_id, salt = self._prompt
        status = STALE
        while status == STALE:
            match = self._cache.lookup(ids, adapter_id=adapter_id, salt=salt, block_keys=keys)
            try:
                if match._depth == self._blocks:
                    self.match, self.owner, self.taken_ns = match, "", 0
                    return
                status = self._worker.locked(self._take, match)
            except BaseException:
                match.release()
                raise
            if status:
                match.release()

    def _take(self, match: PrefixMatch) -> int:
        """Claim the block behind the match for this worker, within `locked`, or note who has. Returns the status."""
        worker, rows = self._worker, np.empty((2, self._blocks), np.uint32)
        prompt = match._namespace, self._ids, self._keys, match._depth, *self._key(match._depth), rows
        answer = worker.call(worker.claims.take, *prompt)
        if answer[0] == CLAIMS_FULL and worker.reap():
            answer = worker.call(worker.claims.take, *prompt)
        status, _, at, born, slot, generation, taken = answer
        if status == CLAIMS_FULL:
            raise ClaimsFull(
                f"cache {self._cache.name!r}: all max_claims={self._cache._segment.geometry.max_claims} are in use: "
                "release some, or create the cache with more"
            )
        if status != STALE:
            self._at, self._born, self._epoch, self._depth = at, born, match._epoch, match._depth
            self._owner, self.owner, self.taken_ns = (slot, generation), worker.describe(slot), taken
        if not status:
            self.match, self.is_mine = match, True
        return int(status)

    def _is_over(self) -> bool:
        """Whether it makes sense to try again; within `locked`."""
        worker, views = self._worker, self._worker.segment.views
        if views.claims["born"][self._at] != self._born or views.state["epoch"][0] != self._epoch:
            return True
        if worker.is_dead(*self._owner):
            worker.bury(*self._owner)
            return True
        ids, keys, adapter_id, salt = self._prompt
        matched = self._cache.peek_matched_tokens(ids, adapter_id=adapter_id, salt=salt, block_keys=keys)
        return matched > self._depth * self._cache.block_size

    def _end(self) -> None:
        if not self.is_mine:
            return
        with contextlib.suppress(CacheClosed):  # which ended it
            status, _, waiters = self._worker.run(self._worker.claims.drop, self._at, self._born)
            if status:
                raise self._not_held()
            self._worker.claimers.wake(waiters)
        self.is_mine, self.owner, self.taken_ns = False, "", 0

    def _not_held(self) -> ClaimError:
        return ClaimError(f"{self!r} was taken by another process, which alone can insert or release it")
