"""What the cache's methods return."""

from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from shmradix.layout import NO_DISK

if TYPE_CHECKING:
    from shmradix.cache import RadixCache


class PrefixMatch:
    """How much of a prompt is cached, and the lease that keeps it so until `release()`.

    A context manager: leaving it releases. Hand it to `RadixCache.insert` to extend the lease over what is stored.
    """

    __slots__ = (
        "_born", "_depth", "_epoch", "_lease", "_namespace", "_owner", "_rows", "matched_tokens", "partial_block",
        "partial_tokens", "released",
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

    def release(self) -> None:
        """Drop the lease; the second time does nothing. Raises LeaseError where it is not this worker's any more."""
        if not self.released:
            self._owner._release_match(self)

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
    """Blocks that the cache did not take: it has the same tokens in another block."""
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
    recoveries: int
    """Guards taken over from a worker that died while it held one."""
    blocks_live: int
    blocks_leased: int
    """Blocks on a leased path: not evictable."""
    blocks_evictable: int
    blocks_free: int
    leases: int
    workers: int
    namespaces: int
