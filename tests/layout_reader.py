"""A reader of segments written from docs/layout.md alone, with struct and mmap, and nothing of the package.

For the one hash that the document takes from elsewhere there is xxhash.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import xxhash

# --- what the document says, literally: bytes of a record, then `offset field type` of each field

RECORDS = {
    "header": (
        4096,
        "0 magic u64, 8 version u32, 12 byte_order u32, 16 fingerprint u64, 24 size u64, 32 incarnation u64, "
        "40 hash_seed u64, 48 created_ns i64, 56 boot_id u64[2], 72 creator_pid u32, 76 block_size u32, "
        "80 max_blocks u32, 84 max_namespaces u32, 88 max_leases u32, 92 max_workers u32, 96 max_snapshots u32, "
        "100 bucket_count u32, 104 snapshot_slots u32, 108 tail_lease u32, 112 retention u32, 120 snapshot_alpha f64, "
        "128 num_blocks u32, 132 max_claims u32, 136 block_nbytes u64, 144 snapshot_nbytes u64, 152 checksums u32, "
        "156 huge_pages u32, 160 block_shape u32[8], 192 block_dtype char[16]",
    ),
    "guard": (128, "0 owner i64, 64 dirty i64, 72 acquired_ns i64, 80 recoveries i64"),
    "state": (
        128,
        "0 clock i64, 8 epoch i64, 16 nodes_used u32, 20 free_node u32, 24 namespaces_used u32, 28 free_namespace u32, "
        "32 leases_used u32, 36 free_lease u32, 40 live_blocks u32, 44 live_namespaces u32, 48 live_leases u32, "
        "52 heap_size u32, 56 free_block u32, 60 free_blocks u32, 64 private_blocks u32, 68 claims_used u32, "
        "72 reserved u64[7]",
    ),
    "worker": (
        256,
        "0 generation i64, 8 claimed_ns i64, 16 start_time u64, 24 pid_namespace u64, 32 pid u32, 36 padding u32, "
        "40 counters i64[26], 248 reserved u64",
    ),
    "namespace": (64, "0 adapter_id u64, 8 salt u64[4], 40 epoch i64, 48 reserved u64[2]"),
    "lease": (
        64,
        "0 born i64, 8 taken_ns i64, 16 epoch i64, 24 generation i64, 32 worker u32, 36 node u32, 40 anchor u32, "
        "44 depth u32, 48 next_free u32, 52 partial_tokens u32, 56 by_tokens u32, 60 reserved u32",
    ),
    "node": (
        64,
        "0 born i64, 8 last_use i64, 16 block_key u64, 24 hash u32, 28 parent u32, 32 block u32, 36 disk_block u32, "
        "40 leases u32, 44 first_child u32, 48 next_sibling u32, 52 prev_sibling u32, 56 hash_next u32, "
        "60 in_heap u32",
    ),
    "heap": (16, "0 last_use i64, 8 node u32, 12 padding u32"),
    "block": (16, "0 generation i64, 8 worker u32, 12 next_free u32"),
    "claim": (
        128,
        "0 born i64, 8 taken_ns i64, 16 epoch i64, 24 generation i64, 32 adapter_id u64, 40 salt u64[4], "
        "72 prefix_hash u64[2], 88 next_hash u64[2], 104 token_count u32, 108 next_count u32, 112 worker u32, "
        "116 waiters u32, 120 reserved u64",
    ),
    "snapshot_state": (
        64,
        "0 clock i64, 8 evictions i64, 16 snapshots_used u32, 20 pins_used u32, 24 reserved u64[5]",
    ),
    "snapshot": (
        192,
        "0 born i64, 8 epoch i64, 16 adapter_id u64, 24 session u64, 32 token_count u32, 36 flags u32, 40 check u32, "
        "44 slot u32, 48 last_use i64, 56 tier_key u64, 64 prefix_hash u64[2], 80 salt u64[4], 112 generation i64, "
        "120 worker u32, 124 parent u32, 128 parent_born i64, 136 reserved u64[7]",
    ),
    "slot": (16, "0 generation i64, 8 worker u32, 12 reserved u32"),
    "pin": (32, "0 born i64, 8 generation i64, 16 snapshot_born i64, 24 worker u32, 28 snapshot u32"),
    "session": (16, "0 session u64, 8 evictions i64"),
}
HOT = ("namespace", "lease", "node")
COUNTERS = (
    "lookups", "hits", "hit_tokens", "lookup_tokens", "inserts", "inserted_blocks", "duplicate_blocks",
    "evicted_blocks", "lock_waits", "rebuilds", "rebuild_ns", "snapshot_saves", "snapshot_lookups", "snapshot_hits",
    "snapshot_hit_tokens", "recompute_tokens_on_hit", "recompute_tokens_on_miss", "snapshot_evictions", "tier_spills",
    "tier_hits", "tier_fault_ins", "tier_reaps", "no_snapshot", "snapshot_too_deep", "snapshot_of_another_session",
    "snapshot_pending",
)  # fmt: skip
NONE = 2**32 - 1
FLAGS = {"TAIL": 1, "SIBLING": 2, "LEAF": 4, "PENDING": 8, "HIDDEN": 16, "BRANCH": 32}


class Field(NamedTuple):
    offset: int
    kind: str
    length: int  # of an array, 0 of a single number


def fields_of(record: str) -> dict[str, Field]:
    """The literal table above, taken apart."""
    fields = {}
    for text in RECORDS[record][1].split(", "):
        offset, name, kind = text.split()
        base, _, count = kind.partition("[")
        fields[name] = Field(int(offset), base, int(count.rstrip("]") or 0))
    return fields


FIELDS = {record: fields_of(record) for record in RECORDS}

# --- the reader: written from docs/layout.md, with struct and mmap, and nothing of the package

U64 = 2**64 - 1
GOLDEN, KEY = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F
CODES = {"u32": "I", "u64": "Q", "i64": "q", "f64": "d", "char": "s"}


class Block(NamedTuple):
    """One step of a path."""

    tokens: tuple[int, ...]
    key: int
    block: int
    disk_block: int


Path_ = tuple[Block, ...]
Namespace = tuple[int, bytes]


class Lease(NamedTuple):
    slot: int
    depth: int
    anchor: Path_
    pinned: Path_


class Snapshot(NamedTuple):
    namespace: Namespace
    session: int
    token_count: int
    flags: int
    slot: int | None  # of a resident one
    tier_key: int


class Changed(Exception):
    """What was being read changed meanwhile."""


def map_segment(name: str) -> mmap.mmap:
    with open(f"/dev/shm/shmradix.{name}", "rb") as file:
        return mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)


def mix(x: int) -> int:
    x = ((x ^ (x >> 33)) * 0xFF51AFD7ED558CCD) & U64
    x = ((x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53) & U64
    return x ^ (x >> 33)


class Reader:
    """Reads a mapped segment, or a copy of one."""

    def __init__(self, image: mmap.mmap | bytes) -> None:
        self.image = image
        assert image[:8] == b"shmradix"
        self.sections: dict[str, tuple[str, int, int]] = {"header": ("header", 0, 1)}
        header = {name: self.get("header", 0, name) for name in FIELDS["header"]}
        assert (header["version"], header["byte_order"]) == (1, 0x01020304)
        assert header["fingerprint"] == 0xF5F3607D1802E29F
        self.block_size = header["block_size"]
        self.max_blocks, self.max_namespaces = header["max_blocks"], header["max_namespaces"]
        self.max_workers = header["max_workers"]
        self.first_block_node = 1 + self.max_namespaces
        self.node_count = 1 + self.max_namespaces + self.max_blocks
        self.bucket_count = 1
        while self.bucket_count < self.node_count:
            self.bucket_count *= 2
        assert header["bucket_count"] == self.bucket_count
        self.session_count = 1
        while self.session_count <= 2 * header["max_snapshots"]:
            self.session_count *= 2
        plan = [
            ("header", "header", 4096, 1),
            ("guards", "guard", 128, 2),
            ("state", "state", 128, 1),
            ("workers", "worker", 256, self.max_workers),
            ("namespaces", "namespace", 64, 1 + self.max_namespaces),
            ("leases", "lease", 64, 1 + header["max_leases"]),
            ("nodes", "node", 64, self.node_count),
            ("tokens", "", 4 * self.block_size, self.node_count),
            ("heap", "heap", 16, 1 + self.max_blocks),
            ("buckets", "", 4, self.bucket_count),
            ("blocks", "block", 16, header["num_blocks"]),
            ("claims", "claim", 128, 1 + header["max_claims"]),
            ("checksums", "", 8, header["num_blocks"] * header["checksums"]),
            ("snapshot_state", "snapshot_state", 64, 1),
            ("snapshots", "snapshot", 192, 1 + header["max_snapshots"]),
            ("slots", "slot", 16, header["snapshot_slots"]),
            ("pins", "pin", 32, 1 + (header["max_leases"] if header["max_snapshots"] else 0)),
            ("sessions", "session", 16, self.session_count),
        ]
        offset = 0
        for name, record, size, count in plan:
            self.sections[name] = record, offset, count
            offset += (size * count + 63) // 64 * 64
        assert self.end_of_bytes(header, offset) == header["size"] == len(image)
        self.hash_seed = header["hash_seed"]
        self.hash_keys = list(self._hash_keys(self.hash_seed))

    def end_of_bytes(self, header: dict[str, int], end_of_index: int) -> int:
        """The size of the file; notes where blocks and states begin."""
        self.block_stride = (header["block_nbytes"] + 4095) // 4096 * 4096
        self.snapshot_stride = (header["snapshot_nbytes"] + 4095) // 4096 * 4096
        if not self.block_stride + self.snapshot_stride:
            return end_of_index
        step = 2_097_152 if header["huge_pages"] else 65_536
        self.kv_offset = (end_of_index + step - 1) // step * step
        end = self.kv_offset + header["num_blocks"] * self.block_stride
        if not self.snapshot_stride:
            return end
        self.states_offset = (end + 65_535) // 65_536 * 65_536
        return self.states_offset + header["snapshot_slots"] * self.snapshot_stride

    def words(self, section: str, index: int, field: str) -> tuple[int, ...]:
        record, start, count = self.sections[section]
        assert 0 <= index < count
        place = FIELDS[record][field]
        at = start + index * RECORDS[record][0] + place.offset
        return struct.unpack_from(f"<{place.length or 1}{CODES[place.kind]}", self.image, at)

    def get(self, section: str, index: int, field: str) -> int:
        return self.words(section, index, field)[0]

    def node(self, index: int, field: str) -> int:
        return self.get("nodes", index, field)

    def state(self, field: str) -> int:
        return self.get("state", 0, field)

    def tokens(self, node: int) -> tuple[int, ...]:
        _, start, count = self.sections["tokens"]
        assert 0 <= node < count
        return struct.unpack_from(f"<{self.block_size}I", self.image, start + node * 4 * self.block_size)

    def bucket(self, index: int) -> int:
        head: int = struct.unpack_from("<I", self.image, self.sections["buckets"][1] + 4 * index)[0]
        return head

    # namespaces, nodes, leases

    def roots(self) -> dict[int, Namespace]:
        """The live roots that are not hidden."""
        live = (root for root in range(1, self.state("namespaces_used")) if self.node(root, "born"))
        return {root: self.namespace(root) for root in live if not self.is_hidden(root)}

    def is_hidden(self, root: int) -> bool:
        return self.get("namespaces", root, "epoch") != self.state("epoch")

    def namespace(self, root: int) -> Namespace:
        return self.get("namespaces", root, "adapter_id"), struct.pack("<4Q", *self.words("namespaces", root, "salt"))

    def live_nodes(self) -> list[int]:
        return [node for node in range(self.first_block_node, self.state("nodes_used")) if self.node(node, "born")]

    def step(self, node: int) -> Block:
        tokens, fields = self.tokens(node), (self.node(node, field) for field in ("block_key", "block", "disk_block"))
        return Block(tokens, *fields)

    def climb(self, node: int) -> tuple[int, Path_]:
        """The root above a node or root, and the path from there down; raises Changed."""
        born = younger = self.node(node, "born")
        steps: list[Block] = []
        at = node
        while born and at >= self.first_block_node:
            steps.append(self.step(at))
            at = self.node(at, "parent")
            if not 0 < self.node(at, "born") < younger:
                raise Changed
            younger = self.node(at, "born")
        if not born or self.node(node, "born") != born:
            raise Changed
        return at, tuple(reversed(steps))

    def children(self, node: int) -> list[int]:
        found: list[int] = []
        at = self.node(node, "first_child")
        while at:
            found.append(at)
            assert len(found) < self.node_count
            at = self.node(at, "next_sibling")
        return found

    def leaf_paths(self) -> dict[Namespace, set[Path_]]:
        """What can be found: the paths down to every leaf, from the roots along the links."""
        return {namespace: set(self._walk(root, ())) for root, namespace in self.roots().items()}

    def _walk(self, node: int, path: Path_) -> Iterator[Path_]:
        for child in self.children(node):
            below = (*path, self.step(child))
            if not self.children(child):
                yield below
            yield from self._walk(child, below)

    def all_paths(self) -> set[tuple[Namespace, Path_]]:
        """The path of every node, hidden ones too, from truth alone; what changes meanwhile is left out."""
        found = set()
        for node in self.live_nodes():
            try:
                root, path = self.climb(node)
            except Changed:
                continue
            found.add((self.namespace(root), path))
        return found

    def leases(self) -> list[Lease]:
        found = []
        for lease in range(1, self.state("leases_used")):
            if self.get("leases", lease, "born"):
                slot, depth = self.get("leases", lease, "worker") - 1, self.get("leases", lease, "depth")
                assert self.get("leases", lease, "generation") == self.get("workers", slot, "generation")
                anchor, node = self.get("leases", lease, "anchor"), self.get("leases", lease, "node")
                assert node == anchor or self.node(node, "parent") == anchor
                found.append(Lease(slot, depth, self.climb(anchor)[1], self.climb(node)[1]))
        return sorted(found)

    # snapshots, slots, pins

    def live_snapshots(self) -> list[int]:
        used = self.get("snapshot_state", 0, "snapshots_used")
        return [index for index in range(1, used) if self.get("snapshots", index, "born")]

    def is_committed(self, index: int) -> bool:
        is_shown = not self.get("snapshots", index, "flags") & (FLAGS["PENDING"] | FLAGS["HIDDEN"])
        return is_shown and self.get("snapshots", index, "epoch") == self.state("epoch")

    def snapshot(self, index: int) -> Snapshot:
        """What a live record says; raises Changed."""
        born = self.get("snapshots", index, "born")
        salt = struct.pack("<4Q", *self.words("snapshots", index, "salt"))
        namespace = self.get("snapshots", index, "adapter_id"), salt
        session, tokens = self.get("snapshots", index, "session"), self.get("snapshots", index, "token_count")
        key, slot = self.get("snapshots", index, "tier_key"), self.get("snapshots", index, "slot")
        flags = self.get("snapshots", index, "flags")
        if not born or self.get("snapshots", index, "tier_key") != key or self.get("snapshots", index, "born") != born:
            raise Changed
        return Snapshot(namespace, session, tokens, flags, None if key else slot, key)

    def committed(self) -> list[Snapshot]:
        found = [self.snapshot(index) for index in self.live_snapshots() if self.is_committed(index)]
        return sorted(found, key=lambda snapshot: (snapshot[:4], snapshot.tier_key, snapshot.slot or 0))

    def find_snapshots(self, namespace: Namespace, tokens: Sequence[int], keys: Sequence[int] = ()) -> list[Snapshot]:
        """The committed ones of prefixes of the tokens, deepest first."""
        found = []
        for index in self.live_snapshots():
            snapshot, depth = self.snapshot(index), self.get("snapshots", index, "token_count")
            if not self.is_committed(index) or snapshot.namespace != namespace or depth > len(tokens):
                continue
            if self.get("snapshots", index, "check") != self.check(tokens, depth):
                continue
            if self.words("snapshots", index, "prefix_hash") == self.prefix_hash(tokens[:depth], keys):
                found.append(snapshot)
        return sorted(found, key=lambda snapshot: -snapshot.token_count)

    def slot_states(self) -> list[str]:
        """Of each slot of the segment's own: "free", "index", or the worker's slot."""
        resident = [snapshot.slot for snapshot in map(self.snapshot, self.live_snapshots()) if not snapshot.tier_key]
        assert len({*resident}) == len(resident)
        states = []
        for slot in range(self.sections["slots"][2]):
            worker = self.get("slots", slot, "worker")
            states.append(str(worker - 1) if worker else "index" if slot in resident else "free")
        return states

    def pins(self) -> list[tuple[int, Snapshot]]:
        """Who pins what."""
        found = []
        for pin in range(1, self.get("snapshot_state", 0, "pins_used")):
            if self.get("pins", pin, "born"):
                slot, index = self.get("pins", pin, "worker") - 1, self.get("pins", pin, "snapshot")
                assert self.get("pins", pin, "generation") == self.get("workers", slot, "generation")
                assert self.get("pins", pin, "snapshot_born") == self.get("snapshots", index, "born")
                found.append((slot, self.snapshot(index)))
        return sorted(found)

    def last_lookup(self, session: int) -> int | None:
        """How many evictions there had been when the session last looked something up."""
        for at in range(mix(session), mix(session) + 8):
            if self.get("sessions", at % self.session_count, "session") == session:
                return self.get("sessions", at % self.session_count, "evictions")
        return None

    def prefix_hash(self, tokens: Sequence[int], keys: Sequence[int] = ()) -> tuple[int, int]:
        digest = xxhash.xxh3_128_digest(struct.pack(f"<{len(tokens)}I", *tokens), seed=self.hash_seed)
        blocks = (len(tokens) + self.block_size - 1) // self.block_size
        its = [keys[i] if i < len(keys) else 0 for i in range(blocks)]
        if any(its):
            data = digest + struct.pack(f"<{blocks}Q", *its)
            digest = xxhash.xxh3_128_digest(data, seed=self.hash_seed ^ GOLDEN)
        high, low = struct.unpack(">2Q", digest)
        return low, high

    def check(self, tokens: Sequence[int], depth: int) -> int:
        before = tokens[depth - 2] if depth > 1 else 0
        x, y = tokens[depth - 1] * GOLDEN + depth * KEY + before * 0xFF51AFD7ED558CCD & U64, depth
        for i in range(16):
            y = (y ^ tokens[depth * i // 16]) * GOLDEN & U64
        return mix(y) % 2**16 * 2**16 + (x >> 48)

    # free lists, hashes

    def free(self, section: str, head: str, link: str) -> list[int]:
        found: list[int] = []
        at = self.state(head)
        while at:
            assert self.get(section, at, "born") == 0
            found.append(at)
            assert len(found) < self.sections[section][2]
            at = self.get(section, at, link)
        return found

    def _hash_keys(self, seed: int) -> Iterator[int]:
        for _ in range(self.block_size):
            seed = x = (seed + GOLDEN) & U64
            x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & U64
            x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & U64
            yield (x ^ (x >> 31)) >> 32

    def node_hash(self, parent_hash: int, block_key: int, tokens: Sequence[int]) -> int:
        total, keys = parent_hash * GOLDEN + block_key * KEY, self.hash_keys
        for i in range(0, self.block_size - 1, 2):
            total += ((tokens[i] + keys[i]) % 2**32) * ((tokens[i + 1] + keys[i + 1]) % 2**32)
        if self.block_size % 2:
            total += (tokens[-1] + keys[-1]) * KEY
        return mix(total & U64) >> 32

    def root_hash(self, namespace: Namespace) -> int:
        x = self.hash_keys[0]
        for word in (namespace[0], *struct.unpack("<4Q", namespace[1])):
            x = mix(x ^ word) * GOLDEN & U64
        return mix(x) >> 32

    def chain(self, hash_: int) -> list[int]:
        found: list[int] = []
        at = self.bucket(hash_ % self.bucket_count)
        while at:
            found.append(at)
            assert len(found) < self.node_count
            at = self.node(at, "hash_next")
        return found

    def find(self, namespace: Namespace, blocks: Sequence[tuple[tuple[int, ...], int]]) -> list[int]:
        """The block ids of the longest stored prefix of blocks (tokens, key)."""
        hash_ = self.root_hash(namespace)
        found = [
            root
            for root in self.chain(hash_)
            if root < self.first_block_node and self.namespace(root) == namespace and not self.is_hidden(root)
        ]
        path: list[int] = []
        for tokens, key in blocks if found else ():
            hash_ = self.node_hash(hash_, key, tokens)
            at = [
                node
                for node in self.chain(hash_)
                if self.node(node, "hash") == hash_
                and self.node(node, "parent") == found[0]
                and (self.tokens(node), self.node(node, "block_key")) == (tokens, key)
            ]
            if not at:
                break
            path.append(self.node(at[0], "block"))
            found = at
        return path


def copy_slowly(image: mmap.mmap) -> bytes:
    """Piece by piece: a worker often writes between two pieces."""
    return b"".join(image[at : at + 256] for at in range(0, len(image), 256))


def copy_of_one_instant(image: mmap.mmap, guard: int = 0) -> Reader:
    """The segment at an instant at which no worker was writing in the guard's half."""
    live = Reader(image)
    while True:
        before = live.get("guards", guard, "acquired_ns")
        if live.get("guards", guard, "owner") == 0:
            copy = copy_slowly(image)
            if live.get("guards", guard, "acquired_ns") == before:
                return Reader(copy)
