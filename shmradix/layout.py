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

HEADER = np.dtype(
    {
        "names": [
            "magic", "version", "byte_order", "fingerprint", "size", "incarnation", "hash_seed", "created_ns",
            "boot_id", "creator_pid", "block_size", "max_blocks", "max_namespaces", "max_leases",
            "max_workers", "max_snapshots", "bucket_count",
        ],
        "formats": [
            "<u8", "<u4", "<u4", "<u8", "<u8", "<u8", "<u8", "<i8",
            ("<u8", (2,)), "<u4", "<u4", "<u4", "<u4", "<u4",
            "<u4", "<u4", "<u4",
        ],
        "offsets": [0, 8, 12, 16, 24, 32, 40, 48, 56, 72, 76, 80, 84, 88, 92, 96, 100],
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
        ("reserved", "<u8", (9,)),
    ],
    align=True,
)

COUNTERS = (
    "lookups", "hits", "hit_tokens", "lookup_tokens", "inserts", "inserted_blocks", "duplicate_blocks",
    "evicted_blocks", "lock_waits", "rebuilds", "rebuild_ns",
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

HEAP = np.dtype([("last_use", "<i8"), ("node", "<u4"), ("padding", "<u4")], align=True)
TOKEN = np.dtype("<u4")
BUCKET = np.dtype("<u4")

SNAPSHOT = np.dtype(
    [
        ("born", "<i8"),  # 0: free
        ("last_use", "<i8"),
        ("prefix_hash", "<u8", (2,)),  # seeded xxh3-128 of tokens and block keys
        ("session", "<u8"),
        ("adapter_id", "<u8"),
        ("salt", "<u8", (4,)),
        ("token_count", "<u4"),
        ("slot", "<u4"),
        ("flags", "<u4"),
        ("padding", "<u4"),
        ("reserved", "<u8", (4,)),
    ],
    align=True,
)

LIMITS = {
    "block_size": (1, 1 << 16),
    "max_blocks": (1, 1 << 30),
    "max_namespaces": (1, 1 << 20),
    "max_leases": (1, 1 << 24),
    "max_workers": (1, 1 << 14),
    "max_snapshots": (0, 1 << 24),
}


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
    snapshots: np.ndarray


@dataclass(frozen=True)
class Geometry:
    """The sizes that are fixed when a segment is created. Raises TypeError or ValueError for senseless ones."""

    block_size: int
    max_blocks: int
    max_namespaces: int
    max_leases: int
    max_workers: int
    max_snapshots: int

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

    @property
    def node_count(self) -> int:
        """Records in the node table: none, the namespaces' roots, the blocks."""
        return 1 + self.max_namespaces + self.max_blocks

    @property
    def bucket_count(self) -> int:
        """A power of two, at least one bucket for each node."""
        return 1 << (self.node_count - 1).bit_length()

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
            ("snapshots", SNAPSHOT, (self.max_snapshots,)),
        ]
        sections, offset = [], 0
        for name, dtype, shape in plan:
            section = Section(name, dtype, shape, offset)
            sections.append(section)
            offset += -(-section.nbytes // LINE) * LINE
        return sections

    @property
    def size(self) -> int:
        """Bytes of the whole segment."""
        last = self.sections()[-1]
        return last.offset + -(-last.nbytes // LINE) * LINE

    def views(self, buffer: Any) -> Views:
        """The segment in `buffer` (anything with the buffer protocol, at least `size` bytes) as arrays."""
        return Views(*(np.ndarray(s.shape, s.dtype, buffer=buffer, offset=s.offset) for s in self.sections()))


def _fingerprint() -> int:
    lines = []
    for dtype in (HEADER, GUARD, STATE, WORKER, NAMESPACE, LEASE, NODE, HEAP, SNAPSHOT):
        for name, (field, offset, *_) in (dtype.fields or {}).items():
            lines.append(f"{name} {field.base.str} {field.shape} {offset}")
        lines.append(str(dtype.itemsize))
    return xxhash.xxh3_64_intdigest("\n".join(lines).encode())


FINGERPRINT = _fingerprint()
"""xxh3-64 over the name, type and offset of every field: two builds that disagree on a byte differ here."""
