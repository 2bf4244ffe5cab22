"""What the cache's methods return."""

from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shmradix.layout import NO_DISK

if TYPE_CHECKING:
    from shmradix.cache import RadixCache


class Anchor(NamedTuple):
    """The snapshot that a match may resume from, and the pin that keeps it."""

    slot: int | None = None
    tokens: int = 0
    tier_key: int | None = None
    tier_tokens: int = 0
    is_tail: bool = False
    reason: str = ""
    pin: int = 0
    born: int = 0


NO_ANCHOR = Anchor(reason="none")


class Spill(NamedTuple):
    """A snapshot that went to a tier: its bytes belong under `key`, its slot is the caller's to free once they are."""

    slot: int
    key: int
    tokens: int


class Drop(NamedTuple):
    """A snapshot that was taken out: its slot is the caller's to free."""

    slot: int
    tokens: int


class PrefixMatch:
    """How much of a prompt is cached, and the lease that keeps it so until `release()`.

    A context manager: leaving it releases. Hand it to `RadixCache.insert` to extend the lease over what is stored.
    """

    __slots__ = (
        "_anchor", "_born", "_depth", "_epoch", "_lease", "_namespace", "_owner", "_prompt", "_rows", "matched_tokens",
        "partial_block", "partial_tokens", "released",
    )  # fmt: skip

    def __init__(
        self,
        owner: "RadixCache",
        namespace: np.ndarray,
        rows: np.ndarray,
        depth: int,
        block_size: int,
        lease: int,
        born: int,
        partial_block: int | None,
        partial_tokens: int,
        epoch: int,
    ) -> None:
        self._owner, self._namespace, self._rows, self._depth = owner, namespace, rows, depth
        self._lease, self._born, self._epoch = lease, born, epoch
        self._anchor = NO_ANCHOR
        self._prompt: tuple[np.ndarray, int, np.ndarray, tuple[int, bool]] | None = None
        self.matched_tokens = depth * block_size
        """Leading tokens of the prompt that are cached, a multiple of the block size."""
        self.partial_block = partial_block
        """A block to *copy* from: it agrees with the next `partial_tokens` tokens. None where there is none."""
        self.partial_tokens = partial_tokens
        self.released = False

    @property
    def matched_blocks(self) -> np.ndarray:
        """The blocks that hold the matched tokens, in order, uint32."""
        return self._rows[0, : self._depth]

    @property
    def matched_disk_block_ids(self) -> np.ndarray:
        """Their disk blocks, NO_DISK where one has none; empty where none has one. uint32."""
        disk = self._rows[1, : self._depth]
        return disk if (disk != NO_DISK).any() else disk[:0]

    @property
    def snapshot_slot(self) -> int | None:
        """The slot of the deepest saved state of this prompt, kept as it is until the release. None: not resident."""
        return self._anchor.slot

    @property
    def snapshot_tokens(self) -> int:
        """After how many tokens the state in `snapshot_slot` was saved; 0 if there is none."""
        return self._anchor.tokens

    @property
    def snapshot_tier_key(self) -> int | None:
        """The key of the deepest saved state where that was spilled to a tier; else None."""
        return self._anchor.tier_key

    @property
    def snapshot_tier_tokens(self) -> int:
        """After how many tokens the spilled state was saved; 0 if there is none."""
        return self._anchor.tier_tokens

    @property
    def snapshot_is_tail(self) -> bool:
        """Whether the state is the session's tail."""
        return self._anchor.is_tail

    @property
    def no_snapshot(self) -> str:
        """Why there is no state to resume from: "none", "too deep", "another session", "pending"; "" if there is one.

        Of several reasons the last one. By a check of a few of a prompt's tokens: a hint, not a proof.
        """
        return self._anchor.reason

    @property
    def restorable(self) -> list[int]:
        """Every number of matched tokens, rising, after which a saved state could be resumed from now.

        Reads the tokens once more: a uint32 array that was looked up must still hold them, else ValueError.
        """
        return self._owner._restorable(self)

    def release(self) -> None:
        """Drop the lease; the second time does nothing. Raises LeaseError where it is not this worker's any more."""
        if not self.released:
            self._owner._release_match(self)

    def _cut_to(self, depth: int, block_size: int) -> None:
        """Let the match, whose lease was shortened, be of `depth` blocks only; at 0 the lease is gone."""
        self._depth, self.matched_tokens = depth, depth * block_size
        self.partial_block, self.partial_tokens = None, 0
        if not depth:
            self._lease = 0

    def __bool__(self) -> bool:
        return self.matched_tokens > 0

    def __enter__(self) -> "PrefixMatch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        state = ", released" if self.released else ""
        return f"PrefixMatch(matched_tokens={self.matched_tokens}, partial_tokens={self.partial_tokens}{state})"


@dataclass(frozen=True, slots=True)
class InsertAcquired:
    """What an insert did with the caller's blocks; all arrays are uint32, in the order of the prompt."""

    inserted_tokens: int
    """Leading tokens of the prompt that the cache holds now. Less than all full blocks: there was no room for more."""
    blocks: np.ndarray
    """Blocks that the cache stores from now on, until `evict` returns them."""
    disk_block_ids: np.ndarray
    """Disk blocks that the cache refers to from now on."""
    duplicates: np.ndarray
    """Blocks that the cache did not take: it has the same tokens in another block. Named again by each insert that has
    them in its table: of a prompt inserted in parts, free those of the last."""
    duplicate_disk_block_ids: np.ndarray
    """Disk blocks that it did not take, likewise."""
    stale: bool = False
    """Nothing was stored: the match is older than the last `clear()`. Its blocks stay the cache's until evicted."""


@dataclass(frozen=True, slots=True)
class EvictedBlocks:
    """Blocks that the cache gave back, in the order of eviction; two parallel uint32 arrays."""

    blocks: np.ndarray
    disk_block_ids: np.ndarray
    """NO_DISK where a block had none."""
    snapshot_slots: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint32))
    """Of a `clear()` where slot ids are the callers' own: slots that hold no snapshot any more, uint32."""

    def __len__(self) -> int:
        return len(self.blocks)


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters since the segment's creation, all workers together, dead ones too; then what there is now."""

    lookups: int
    hits: int
    """Lookups that matched at least one block."""
    hit_tokens: int
    lookup_tokens: int
    inserts: int
    inserted_blocks: int
    duplicate_blocks: int
    evicted_blocks: int
    lock_waits: int
    """Times that a worker found a guard taken and went to sleep."""
    rebuilds: int
    """Recoveries that had to make all derived data anew, because the dead worker was in the middle of a change."""
    rebuild_ns: int
    """Nanoseconds that the rebuilds took, together."""
    snapshot_saves: int
    snapshot_lookups: int
    """Lookups that matched some tokens, in a cache with a snapshot index."""
    snapshot_hits: int
    """Those of them that found a saved state."""
    snapshot_hit_tokens: int
    """Tokens before those states, together: what was really spared."""
    recompute_tokens_on_hit: int
    """Matched tokens behind the states, which have to be computed again."""
    recompute_tokens_on_miss: int
    """Matched tokens of lookups without a state."""
    snapshot_evictions: int
    tier_spills: int
    tier_hits: int
    """Hits whose state was spilled."""
    tier_fault_ins: int
    tier_reaps: int
    """Spilled states that were forgotten."""
    no_snapshot: int
    """Lookups without a state because none was saved; the next three likewise, see `PrefixMatch.no_snapshot`."""
    snapshot_too_deep: int
    snapshot_of_another_session: int
    snapshot_pending: int
    recoveries: int
    """Guards taken over from a worker that died while it held one."""
    blocks_live: int
    blocks_leased: int
    """Blocks on a leased path: not evictable."""
    blocks_evictable: int
    blocks_free: int
    """Blocks that can be allocated without an eviction; where callers manage them: that can still be stored."""
    blocks_private: int
    """Managed blocks that a worker has and did not insert."""
    leases: int
    workers: int
    namespaces: int
    snapshots: int
    """Snapshots that lookups may find."""
    snapshots_tiered: int

    @property
    def hit_ratio(self) -> float:
        """Matched tokens of all tokens looked up."""
        return self.hit_tokens / max(1, self.lookup_tokens)

    @property
    def restorable_ratio(self) -> float:
        """Tokens that a saved state stood behind of all tokens looked up: what a hybrid model's prefill is spared."""
        return self.snapshot_hit_tokens / max(1, self.lookup_tokens)
