"""The layout of a segment: numpy dtypes, geometry, version. The only place that knows a byte offset.

A segment is one file of little-endian records. `docs/layout.md` describes the same for readers of other languages.
Index 0 of every table means "none": its record exists, is never used, and makes a fresh, zeroed segment valid.
"""

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash

MAGIC = 0x7869_6461_726D_6873  # the bytes "shmradix"
VERSION = 1
BYTE_ORDER = 0x0102_0304
LINE = 64  # bytes of a cache line; every section starts on one

NO_BLOCK = 0xFFFF_FFFF
NO_DISK = 0xFFFF_FFFF
TOKEN_MAX = 0xFFFF_FFFF
LATEST = (1 << 63) - 1  # later than any clock

HEADER = np.dtype(
    {
        "names": [
            "magic", "version", "byte_order", "fingerprint", "size", "incarnation", "hash_seed", "created_ns",
            "boot_id", "creator_pid", "block_size", "max_blocks", "max_namespaces", "max_leases",
            "max_workers", "max_snapshots", "bucket_count", "snapshot_slots", "tail_lease", "retention",
            "snapshot_alpha", "num_blocks", "max_claims", "block_nbytes", "snapshot_nbytes", "checksums", "huge_pages",
            "block_shape", "block_dtype",
        ],
        "formats": [
            "<u8", "<u4", "<u4", "<u8", "<u8", "<u8", "<u8", "<i8",
            ("<u8", (2,)), "<u4", "<u4", "<u4", "<u4", "<u4",
            "<u4", "<u4", "<u4", "<u4", "<u4", "<u4",
            "<f8", "<u4", "<u4", "<u8", "<u8", "<u4", "<u4",
            ("<u4", (8,)), "S16",
        ],
        "offsets": [
            0, 8, 12, 16, 24, 32, 40, 48, 56, 72, 76, 80, 84, 88, 92, 96, 100, 104, 108, 112, 120, 128, 132, 136, 144,
            152, 156, 160, 192,
        ],
        "itemsize": 4096,
    },
    align=True,
)  # fmt: skip

# A guard is two cache lines: the owner word alone, which all workers hammer, and what its owner writes.
GUARD = np.dtype(
    {
        "names": ["owner", "dirty", "acquired_ns", "recoveries"],
        "formats": ["<i8", "<i8", "<i8", "<i8"],
        "offsets": [0, 64, 72, 80],
        "itemsize": 128,
    },
    align=True,
)
GUARDS = ("tree", "snapshots")
CLAIMS = "claims"
SEMAPHORES = (*GUARDS, CLAIMS)
"""Where workers sleep: on a guard that is taken, or on a claim of another's."""

STATE = np.dtype(
    [
        ("clock", "<i8"),  # orders births and uses; only grows
        ("epoch", "<i8"),  # namespaces of an older epoch are hidden: see clear()
        ("nodes_used", "<u4"),  # nodes from here on were never used
        ("free_node", "<u4"),  # head of the free list, through hash_next
        ("namespaces_used", "<u4"),
        ("free_namespace", "<u4"),
        ("leases_used", "<u4"),
        ("free_lease", "<u4"),
        ("live_blocks", "<u4"),
        ("live_namespaces", "<u4"),
        ("live_leases", "<u4"),
        ("heap_size", "<u4"),
        ("free_block", "<u4"),  # head of the list of free blocks, its number + 1, through next_free
        ("free_blocks", "<u4"),
        ("private_blocks", "<u4"),
        ("claims_used", "<u4"),  # claims from here on were never used
        ("reserved", "<u8", (7,)),
    ],
    align=True,
)

COUNTERS = (
    "lookups", "hits", "hit_tokens", "lookup_tokens", "inserts", "inserted_blocks", "duplicate_blocks",
    "evicted_blocks", "lock_waits", "rebuilds", "rebuild_ns", "snapshot_saves", "snapshot_lookups", "snapshot_hits",
    "snapshot_hit_tokens", "recompute_tokens_on_hit", "recompute_tokens_on_miss", "snapshot_evictions", "tier_spills",
    "tier_hits", "tier_fault_ins", "tier_reaps", "no_snapshot", "snapshot_too_deep", "snapshot_of_another_session",
    "snapshot_pending",
)  # fmt: skip
WORKER = np.dtype(
    [
        ("generation", "<i8"),  # grows each time the slot is claimed
        ("claimed_ns", "<i8"),  # unix time
        ("start_time", "<u8"),  # of the process, in clock ticks after boot: field 22 of /proc/<pid>/stat
        ("pid_namespace", "<u8"),  # inode of /proc/self/ns/pid
        ("pid", "<u4"),  # 0: nobody
        ("padding", "<u4"),
        ("counters", "<i8", (len(COUNTERS),)),  # by the order of COUNTERS
        ("reserved", "<u8"),
    ],
    align=True,
)

NAMESPACE = np.dtype(
    [
        ("adapter_id", "<u8"),
        ("salt", "<u8", (4,)),  # blake2b-256 of the salt, zeros where there is none
        ("epoch", "<i8"),
        ("reserved", "<u8", (2,)),
    ],
    align=True,
)

LEASE = np.dtype(
    [
        ("born", "<i8"),  # 0: free; else unique, written last
        ("taken_ns", "<i8"),  # monotonic
        ("epoch", "<i8"),
        ("generation", "<i8"),  # of the worker's slot
        ("worker", "<u4"),  # slot + 1
        ("node", "<u4"),  # what it pins: the anchor, or the anchor's partly matching child
        ("anchor", "<u4"),  # deepest node that matched wholly (a namespace's root when none did)
        ("depth", "<u4"),  # of the anchor, in blocks
        ("next_free", "<u4"),
        ("partial_tokens", "<u4"),  # in which the partly matching child agreed
        ("by_tokens", "<u4"),  # 1: an insert without a match took or moved it, so release(tokens) is to drop it
        ("reserved", "<u4"),
    ],
    align=True,
)

NODE = np.dtype(
    [
        ("born", "<i8"),  # 0: free; else the clock at its birth, unique, written last
        ("last_use", "<i8"),
        ("block_key", "<u8"),
        ("hash", "<u4"),  # of the parent's hash, the block key and the tokens
        ("parent", "<u4"),  # 0: the root of a namespace
        ("block", "<u4"),
        ("disk_block", "<u4"),
        ("leases", "<u4"),  # that pin this very node
        ("first_child", "<u4"),  # the oldest
        ("next_sibling", "<u4"),  # younger; 0 after the youngest
        ("prev_sibling", "<u4"),  # older; of the oldest: the youngest
        ("hash_next", "<u4"),  # next in its bucket, or in the free list
        ("in_heap", "<u4"),  # 1: it has an entry in the heap
    ],
    align=True,
)

# Of a managed block: a live node has it, else the worker that is named here, else it is free.
BLOCK = np.dtype(
    [
        ("generation", "<i8"),  # of the worker's slot
        ("worker", "<u4"),  # slot + 1; 0: free; IN_TREE: a node has it
        ("next_free", "<u4"),  # the next free block's number + 1
    ],
    align=True,
)
IN_TREE = 0xFFFF_FFFF
CHECKSUM = np.dtype("<u8")  # xxh3-64 of a block's bytes; 0: not sealed since it was allocated

CLAIM = np.dtype(
    [
        ("born", "<i8"),  # 0: free; else unique, written last
        ("taken_ns", "<i8"),  # monotonic
        ("epoch", "<i8"),
        ("generation", "<i8"),  # of the worker's slot
        ("adapter_id", "<u8"),
        ("salt", "<u8", (4,)),  # as a namespace's
        ("prefix_hash", "<u8", (2,)),  # of the prompt up to the end of the block that is computed
        ("next_hash", "<u8", (2,)),  # likewise, of the one behind those that are about to be inserted
        ("token_count", "<u4"),  # up to there
        ("next_count", "<u4"),
        ("worker", "<u4"),  # slot + 1
        ("waiters", "<u4"),  # to wake; some may have gone
        ("reserved", "<u8"),
    ],
    align=True,
)

HEAP = np.dtype([("last_use", "<i8"), ("node", "<u4"), ("padding", "<u4")], align=True)
TOKEN = np.dtype("<u4")
BUCKET = np.dtype("<u4")

SNAPSHOT_STATE = np.dtype(
    [
        ("clock", "<i8"),  # orders births and uses of snapshots; only grows
        ("evictions", "<i8"),  # that the tail lease counts; only grows
        ("snapshots_used", "<u4"),  # snapshots from here on were never used
        ("pins_used", "<u4"),
        ("reserved", "<u8", (5,)),
    ],
    align=True,
)

# The first cache line is what a lookup reads of every snapshot.
SNAPSHOT = np.dtype(
    [
        ("born", "<i8"),  # 0: free; else the clock at its birth, unique, written last
        ("epoch", "<i8"),  # hidden where it is not that of the tree: see clear()
        ("adapter_id", "<u8"),
        ("session", "<u8"),  # 0: none
        ("token_count", "<u4"),
        ("flags", "<u4"),  # TAIL and so on, below
        ("check", "<u4"),  # of some of its tokens: spares hashing the others where it differs
        ("slot", "<u4"),
        ("last_use", "<i8"),
        ("tier_key", "<u8"),  # 0: resident
        ("prefix_hash", "<u8", (2,)),  # seeded xxh3-128 of the tokens and block keys: see prefix_hash.py
        ("salt", "<u8", (4,)),  # as a namespace's
        ("generation", "<i8"),  # of the worker's slot
        ("worker", "<u4"),  # slot + 1 of who registered it
        ("parent", "<u4"),  # the deepest snapshot of a prefix of its tokens when it was committed
        ("parent_born", "<i8"),
        ("reserved", "<u8", (7,)),
    ],
    align=True,
)
TAIL, SIBLING, LEAF, PENDING, HIDDEN, BRANCH = 1, 2, 4, 8, 16, 32

SLOT = np.dtype([("generation", "<i8"), ("worker", "<u4"), ("reserved", "<u4")], align=True)
PIN = np.dtype(
    [
        ("born", "<i8"),  # 0: free; else unique, written last
        ("generation", "<i8"),  # of the worker's slot
        ("snapshot_born", "<i8"),
        ("worker", "<u4"),  # slot + 1
        ("snapshot", "<u4"),
    ],
    align=True,
)
SESSION = np.dtype([("session", "<u8"), ("evictions", "<i8")], align=True)

RETENTIONS = ("session", "chain")

LIMITS = {
    "block_size": (1, 1 << 16),
    "max_blocks": (1, 1 << 30),
    "max_namespaces": (1, 1 << 20),
    "max_leases": (1, 1 << 24),
    "max_workers": (1, 1 << 14),
    "max_snapshots": (0, 1 << 16),
    "snapshot_slots": (0, 1 << 16),
    "tail_lease": (0, 1 << 30),
    "retention": (0, len(RETENTIONS) - 1),
    "num_blocks": (0, 1 << 30),
    "max_claims": (0, 1 << 16),
    "block_nbytes": (0, 1 << 40),
    "snapshot_nbytes": (0, 1 << 40),
    "checksums": (0, 1),
    "huge_pages": (0, 1),
}
MAX_ALPHA = 8.0
PAGE = 4096
MAP_STEP = 1 << 16  # what a mapping may begin at: the largest page of the machines that we run on
HUGE_PAGE = 2 << 20
MAX_DIMENSIONS, MAX_DTYPE_NAME = 8, 16


def words_of(dtype: np.dtype[Any]) -> int:
    """Int64 words of a record: the atomics see an array of records as an array of words."""
    return dtype.itemsize // 8


def word_of(dtype: np.dtype[Any], field: str) -> int:
    """Which of them a field is."""
    assert dtype.fields is not None
    return int(dtype.fields[field][1]) // 8


class Section(NamedTuple):
    """One array of the segment: `shape` records of `dtype` at byte `offset`."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Views(NamedTuple):
    """The segment as numpy arrays, with no copy. `nodes` starts with the namespaces' roots."""

    header: np.ndarray
    guards: np.ndarray
    state: np.ndarray
    workers: np.ndarray
    namespaces: np.ndarray
    leases: np.ndarray
    nodes: np.ndarray
    tokens: np.ndarray
    heap: np.ndarray
    buckets: np.ndarray
    blocks: np.ndarray
    claims: np.ndarray
    checksums: np.ndarray
    snapshot_state: np.ndarray
    snapshots: np.ndarray
    slots: np.ndarray
    pins: np.ndarray
    sessions: np.ndarray


@dataclass(frozen=True)
class Geometry:
    """The sizes that are fixed when a segment is created. Raises TypeError or ValueError for senseless ones."""

    block_size: int
    max_blocks: int
    max_namespaces: int
    max_leases: int
    max_workers: int
    max_snapshots: int = 0
    snapshot_slots: int = 0
    tail_lease: int = 64
    retention: int = 0
    snapshot_alpha: float = 0.0
    num_blocks: int = 0
    max_claims: int = 0
    block_nbytes: int = 0
    snapshot_nbytes: int = 0
    checksums: int = 0
    huge_pages: int = 0
    block_shape: tuple[int, ...] = ()
    block_dtype: str = ""

    def __post_init__(self) -> None:
        for name, (low, high) in LIMITS.items():
            value = getattr(self, name)
            try:
                number = operator.index(value)
            except TypeError:
                raise TypeError(f"{name}={value!r}: expected an integer") from None
            if isinstance(value, bool) or not low <= number <= high:
                raise ValueError(f"{name}={value!r}: expected an integer from {low} to {high:,}")
            object.__setattr__(self, name, number)
        if not isinstance(self.snapshot_alpha, (int, float)) or isinstance(self.snapshot_alpha, bool):
            raise TypeError(f"snapshot_alpha={self.snapshot_alpha!r}: expected a number")
        if not 0 <= self.snapshot_alpha <= MAX_ALPHA:
            raise ValueError(f"snapshot_alpha={self.snapshot_alpha!r}: expected a number from 0 to {MAX_ALPHA}")
        object.__setattr__(self, "snapshot_alpha", float(self.snapshot_alpha))
        self._check_bytes()
        if self.snapshot_slots > self.max_snapshots:
            raise ValueError(
                f"snapshot_slots={self.snapshot_slots} beside max_snapshots={self.max_snapshots}: expected "
                "max_snapshots at least as large, and larger by as many as may be in a tier"
            )

    def _check_bytes(self) -> None:
        if self.block_nbytes and not self.num_blocks:
            raise ValueError(f"block_nbytes={self.block_nbytes} without num_blocks: expected how many blocks there are")
        if self.snapshot_nbytes and not self.snapshot_slots:
            raise ValueError(
                f"snapshot_nbytes={self.snapshot_nbytes} without snapshot_slots: expected how many slots there are"
            )
        if self.checksums and not self.block_nbytes:
            raise ValueError("checksums without block_nbytes: expected the size of the blocks that they are of")
        if len(self.block_shape) > MAX_DIMENSIONS:
            raise ValueError(f"block_shape={self.block_shape}: expected at most {MAX_DIMENSIONS} dimensions")
        if len(self.block_dtype) > MAX_DTYPE_NAME or not self.block_dtype.isascii():
            raise ValueError(f"dtype={self.block_dtype!r}: expected at most {MAX_DTYPE_NAME} ASCII characters")
        object.__setattr__(self, "block_shape", tuple(int(length) for length in self.block_shape))

    @property
    def node_count(self) -> int:
        """Records in the node table: none, the namespaces' roots, the blocks."""
        return 1 + self.max_namespaces + self.max_blocks

    @property
    def bucket_count(self) -> int:
        """A power of two, at least one bucket for each node."""
        return 1 << (self.node_count - 1).bit_length()

    @property
    def pin_count(self) -> int:
        """Records in the table of pins: none, and one for each lease, for a match has both or neither."""
        return 1 + (self.max_leases if self.max_snapshots else 0)

    @property
    def session_count(self) -> int:
        """A power of two, at least two records for each snapshot."""
        return 1 << (2 * self.max_snapshots).bit_length() if self.max_snapshots else 1

    def sections(self) -> list[Section]:
        """All arrays of the segment in the order in which they lie."""
        plan: list[tuple[str, np.dtype[Any], tuple[int, ...]]] = [
            ("header", HEADER, (1,)),
            ("guards", GUARD, (len(GUARDS),)),
            ("state", STATE, (1,)),
            ("workers", WORKER, (self.max_workers,)),
            ("namespaces", NAMESPACE, (1 + self.max_namespaces,)),
            ("leases", LEASE, (1 + self.max_leases,)),
            ("nodes", NODE, (self.node_count,)),
            ("tokens", TOKEN, (self.node_count, self.block_size)),
            ("heap", HEAP, (1 + self.max_blocks,)),
            ("buckets", BUCKET, (self.bucket_count,)),
            ("blocks", BLOCK, (self.num_blocks,)),
            ("claims", CLAIM, (1 + self.max_claims,)),
            ("checksums", CHECKSUM, (self.num_blocks if self.checksums else 0,)),
            ("snapshot_state", SNAPSHOT_STATE, (1,)),
            ("snapshots", SNAPSHOT, (1 + self.max_snapshots,)),
            ("slots", SLOT, (self.snapshot_slots,)),
            ("pins", PIN, (self.pin_count,)),
            ("sessions", SESSION, (self.session_count,)),
        ]
        sections, offset = [], 0
        for name, dtype, shape in plan:
            section = Section(name, dtype, shape, offset)
            sections.append(section)
            offset += -(-section.nbytes // LINE) * LINE
        return sections

    @property
    def index_offset(self) -> int:
        """Where the sections of the snapshot index begin, which are the last."""
        return next(section.offset for section in self.sections() if section.name == "snapshot_state")

    @property
    def size(self) -> int:
        """Bytes of all sections: the index."""
        last = self.sections()[-1]
        return last.offset + -(-last.nbytes // LINE) * LINE

    @property
    def block_stride(self) -> int:
        """Bytes from one block's KV to the next one's: whole pages."""
        return -(-self.block_nbytes // PAGE) * PAGE

    @property
    def snapshot_stride(self) -> int:
        """Bytes from one slot's state to the next one's: whole pages."""
        return -(-self.snapshot_nbytes // PAGE) * PAGE

    @property
    def kv_offset(self) -> int:
        """Where the KV of block 0 begins, behind the index; `size` where there are no bytes at all."""
        if not self.block_stride and not self.snapshot_stride:
            return self.size
        step = HUGE_PAGE if self.huge_pages else MAP_STEP
        return -(-self.size // step) * step

    @property
    def states_offset(self) -> int:
        """Where the state in slot 0 begins."""
        end = self.kv_offset + self.num_blocks * self.block_stride
        return -(-end // MAP_STEP) * MAP_STEP if self.snapshot_stride else end

    @property
    def file_size(self) -> int:
        """Bytes of the file: the index, and behind it the KV bytes and the snapshots' states."""
        return self.states_offset + self.snapshot_slots * self.snapshot_stride

    def views(self, buffer: Any) -> Views:
        """The segment in `buffer` (anything with the buffer protocol, at least `size` bytes) as arrays."""
        return Views(*(np.ndarray(s.shape, s.dtype, buffer=buffer, offset=s.offset) for s in self.sections()))


_RECORDS = (
    HEADER, GUARD, STATE, WORKER, NAMESPACE, LEASE, NODE, HEAP, BLOCK, CLAIM, SNAPSHOT_STATE, SNAPSHOT, SLOT, PIN,
    SESSION,
)  # fmt: skip


def _fingerprint() -> int:
    lines = []
    for dtype in _RECORDS:
        for name, (field, offset, *_) in (dtype.fields or {}).items():
            lines.append(f"{name} {field.base.str} {field.shape} {offset}")
        lines.append(str(dtype.itemsize))
    return xxhash.xxh3_64_intdigest("\n".join(lines).encode())


FINGERPRINT = _fingerprint()
"""xxh3-64 over the name, type and offset of every field: two builds that disagree on a byte differ here."""
