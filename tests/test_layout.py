"""docs/layout.md: a reader made from it alone agrees with the cache, and its tables agree with `layout.py`."""

from __future__ import annotations

import ast
import fcntl
import hashlib
import mmap
import os
import random
import re
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

import shmradix
from shmradix import RadixCache, layout, locks, parking
from tests.actors import Actor, attach, files_of, hold

CacheFactory = Callable[..., RadixCache]

ROOT = Path(__file__).parent.parent
DOCUMENT = (ROOT / "docs" / "layout.md").read_text()

# --- what the document says, literally: bytes of a record, then `offset field type` of each field

RECORDS = {
    "header": (
        4096,
        "0 magic u64, 8 version u32, 12 byte_order u32, 16 fingerprint u64, 24 size u64, 32 incarnation u64, "
        "40 hash_seed u64, 48 created_ns i64, 56 boot_id u64[2], 72 creator_pid u32, 76 block_size u32, "
        "80 max_blocks u32, 84 max_namespaces u32, 88 max_leases u32, 92 max_workers u32, 96 max_snapshots u32, "
        "100 bucket_count u32",
    ),
    "guard": (128, "0 owner i64, 64 dirty i64, 72 acquired_ns i64, 80 recoveries i64"),
    "state": (
        128,
        "0 clock i64, 8 epoch i64, 16 nodes_used u32, 20 free_node u32, 24 namespaces_used u32, 28 free_namespace u32, "
        "32 leases_used u32, 36 free_lease u32, 40 live_blocks u32, 44 live_namespaces u32, 48 live_leases u32, "
        "52 heap_size u32, 56 reserved u64[9]",
    ),
    "worker": (
        128,
        "0 generation i64, 8 claimed_ns i64, 16 start_time u64, 24 pid_namespace u64, 32 pid u32, 36 padding u32, "
        "40 counters i64[11]",
    ),
    "namespace": (64, "0 adapter_id u64, 8 salt u64[4], 40 epoch i64, 48 reserved u64[2]"),
    "lease": (
        64,
        "0 born i64, 8 taken_ns i64, 16 epoch i64, 24 generation i64, 32 worker u32, 36 node u32, 40 anchor u32, "
        "44 depth u32, 48 next_free u32, 52 partial_tokens u32, 56 reserved u64",
    ),
    "node": (
        64,
        "0 born i64, 8 last_use i64, 16 block_key u64, 24 hash u32, 28 parent u32, 32 block u32, 36 disk_block u32, "
        "40 leases u32, 44 first_child u32, 48 next_sibling u32, 52 prev_sibling u32, 56 hash_next u32, "
        "60 heap_position u32",
    ),
    "heap": (16, "0 last_use i64, 8 node u32, 12 padding u32"),
    "snapshot": (
        128,
        "0 born i64, 8 last_use i64, 16 prefix_hash u64[2], 32 session u64, 40 adapter_id u64, 48 salt u64[4], "
        "80 token_count u32, 84 slot u32, 88 flags u32, 92 padding u32, 96 reserved u64[4]",
    ),
}
HOT = ("namespace", "lease", "node")
COUNTERS = (
    "lookups", "hits", "hit_tokens", "lookup_tokens", "inserts", "inserted_blocks", "duplicate_blocks",
    "evicted_blocks", "lock_waits", "rebuilds", "rebuild_ns",
)  # fmt: skip
NONE = 2**32 - 1


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
CODES = {"u32": "I", "u64": "Q", "i64": "q"}


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
        assert header["fingerprint"] == 0xC6589C9A4789EEF4
        self.block_size = header["block_size"]
        self.max_blocks, self.max_namespaces = header["max_blocks"], header["max_namespaces"]
        self.max_workers = header["max_workers"]
        self.first_block_node = 1 + self.max_namespaces
        self.node_count = 1 + self.max_namespaces + self.max_blocks
        self.bucket_count = 1
        while self.bucket_count < self.node_count:
            self.bucket_count *= 2
        assert header["bucket_count"] == self.bucket_count
        plan = [
            ("header", "header", 4096, 1),
            ("guards", "guard", 128, 2),
            ("state", "state", 128, 1),
            ("workers", "worker", 128, self.max_workers),
            ("namespaces", "namespace", 64, 1 + self.max_namespaces),
            ("leases", "lease", 64, 1 + header["max_leases"]),
            ("nodes", "node", 64, self.node_count),
            ("tokens", "", 4 * self.block_size, self.node_count),
            ("heap", "heap", 16, 1 + self.max_blocks),
            ("buckets", "", 4, self.bucket_count),
            ("snapshots", "snapshot", 128, header["max_snapshots"]),
        ]
        offset = 0
        for name, record, size, count in plan:
            self.sections[name] = record, offset, count
            offset += (size * count + 63) // 64 * 64
        assert offset == header["size"] == len(image)
        self.hash_keys = list(self._hash_keys(header["hash_seed"]))

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


def copy_of_one_instant(image: mmap.mmap) -> Reader:
    """The segment at an instant at which no worker was writing."""
    live = Reader(image)
    while True:
        before = live.get("guards", 0, "acquired_ns")
        if live.get("guards", 0, "owner") == 0:
            copy = copy_slowly(image)
            if live.get("guards", 0, "acquired_ns") == before:
                return Reader(copy)


# --- the reader against a cache

BASE = (0, bytes(32))


@pytest.fixture
def read(cache_factory: CacheFactory) -> Callable[[RadixCache], Reader]:
    return lambda cache: Reader(map_segment(cache.name))


def salted(adapter_id: int, salt: bytes) -> Namespace:
    return adapter_id, hashlib.blake2b(salt, digest_size=32).digest()


def path_of(
    tokens: Sequence[int], blocks: Sequence[int], size: int, keys: Sequence[int] = (), disk: Sequence[int] = ()
) -> Path_:
    """What the reader should find of a prompt."""
    return tuple(
        Block(
            tuple(tokens[i * size : (i + 1) * size]),
            keys[i] if keys else 0,
            blocks[i],
            disk[i] if disk else NONE,
        )
        for i in range(len(tokens) // size)
    )


def test_the_reader_finds_every_path_and_nothing_else(
    cache_factory: CacheFactory, read: Callable[[RadixCache], Reader]
) -> None:
    cache = cache_factory(block_size=4)
    first, branch = list(range(18)), [*range(8), 70, 71, 72, NONE]
    cache.insert(first, [10, 11, 12, 13])
    cache.insert(branch, [10, 11, 20], disk_block_ids=[NONE, 5, 6])
    cache.insert(first[:8], [30, 31], adapter_id=2**64 - 1)
    cache.insert(first[:8], [40, 41], adapter_id=7, salt=b"tenant")
    cache.insert(first[:8], [50, 51], block_keys=[2**64 - 1, 9])
    reader = read(cache)
    expected = {
        BASE: {
            path_of(first, [10, 11, 12, 13], 4, disk=[NONE, 5, NONE, NONE]),
            path_of(branch, [10, 11, 20], 4, disk=[NONE, 5, 6]),
            path_of(first[:8], [50, 51], 4, keys=[2**64 - 1, 9]),
        },
        (2**64 - 1, bytes(32)): {path_of(first[:8], [30, 31], 4)},
        salted(7, b"tenant"): {path_of(first[:8], [40, 41], 4)},
    }
    assert reader.leaf_paths() == expected
    prefixes = {
        (space, path[:n]) for space, paths in expected.items() for path in paths for n in range(1, 1 + len(path))
    }
    assert reader.all_paths() == prefixes
    for space, path in prefixes:
        assert reader.find(space, [(block.tokens, block.key) for block in path]) == [block.block for block in path]
    assert reader.find(salted(8, b"tenant"), [((0, 1, 2, 3), 0)]) == []


def test_the_reader_finds_every_lease(cache_factory: CacheFactory, read: Callable[[RadixCache], Reader]) -> None:
    cache = cache_factory(block_size=4)
    tokens = list(range(12))
    whole = path_of(tokens, [1, 2, 3], 4)
    cache.insert(tokens, [1, 2, 3])
    match = cache.lookup(tokens[:8])
    with RadixCache.attach(cache.name) as other:
        partial = [other.lookup([*tokens[:6], 99]), other.lookup([0])]
        assert [match.partial_block for match in partial] == [2, 1]
        assert read(cache).leases() == [
            Lease(0, 2, whole[:2], whole[:2]),
            Lease(0, 3, whole, whole),
            Lease(1, 0, (), whole[:1]),
            Lease(1, 1, whole[:1], whole[:2]),
        ]
        cache.release(tokens)
        assert cache.insert(tokens, [1, 2, 3], match=match).inserted_tokens == 12
    assert read(cache).leases() == [Lease(0, 3, whole, whole)]
    match.release()
    assert read(cache).leases() == []


def test_the_reader_sees_what_clear_hides(cache_factory: CacheFactory, read: Callable[[RadixCache], Reader]) -> None:
    cache = cache_factory(block_size=2)
    cache.insert([1, 2], [1])
    cache.release([1, 2])
    match = cache.lookup([1, 2])
    cache.clear()
    cache.insert([1, 2], [2])
    reader = read(cache)
    old, new = path_of([1, 2], [1], 2), path_of([1, 2], [2], 2)
    assert reader.leaf_paths() == {BASE: {new}}
    assert reader.all_paths() == {(BASE, old), (BASE, new)}
    assert reader.find(BASE, [((1, 2), 0)]) == [2]
    assert reader.state("live_namespaces") == 2
    match.release()
    assert list(cache.evict(1).blocks) == [1]
    assert reader.all_paths() == {(BASE, new)}
    assert reader.state("live_namespaces") == 1


def check_derived(reader: Reader) -> None:
    """All that the document says of derived data while the guard is free."""
    live = reader.live_nodes()
    roots = [root for root in range(1, reader.state("namespaces_used")) if reader.node(root, "born")]
    chained = [node for bucket in range(reader.bucket_count) for node in reader.chain(bucket)]
    assert sorted(chained) == roots + live
    pinned = [
        reader.get("leases", lease, "node")
        for lease in range(1, reader.state("leases_used"))
        if reader.get("leases", lease, "born")
    ]
    for node in roots + live:
        if node in roots:
            assert reader.node(node, "hash") == reader.root_hash(reader.namespace(node))
            assert (reader.node(node, "block"), reader.node(node, "disk_block")) == (NONE, NONE)
            zero = {*FIELDS["node"]} - {"born", "hash", "first_child", "hash_next", "block", "disk_block", "last_use"}
            assert {field: reader.node(node, field) for field in zero} == dict.fromkeys(zero, 0)
        else:
            key, parent_hash = reader.node(node, "block_key"), reader.node(reader.node(node, "parent"), "hash")
            assert reader.node(node, "hash") == reader.node_hash(parent_hash, key, reader.tokens(node))
        assert node in reader.chain(reader.node(node, "hash"))
        children = reader.children(node)
        offspring = {reader.node(child, "born"): child for child in live if reader.node(child, "parent") == node}
        assert children == [offspring[born] for born in sorted(offspring)]
        assert [reader.node(child, "prev_sibling") for child in children] == [*children[-1:], *children[:-1]]
        assert reader.node(node, "leases") == pinned.count(node)
    check_heap(reader, live)
    nodes = reader.free("nodes", "free_node", "hash_next")
    assert reader.state("live_blocks") == len(live)
    assert sorted(nodes + live) == list(range(reader.first_block_node, reader.state("nodes_used")))
    assert all((reader.node(node, "block"), reader.node(node, "disk_block")) == (NONE, NONE) for node in nodes)
    assert reader.state("live_namespaces") == len(roots)
    free_roots = reader.free("nodes", "free_namespace", "hash_next")
    assert sorted(roots + free_roots) == list(range(1, reader.state("namespaces_used")))
    assert reader.state("live_leases") == len(pinned)
    free_leases = reader.free("leases", "free_lease", "next_free")
    assert len(pinned) + len(free_leases) + 1 == reader.state("leases_used")
    births = [reader.node(node, "born") for node in roots + live]
    assert len({*births}) == len(births)
    assert max(births, default=1) <= reader.state("clock")


def check_heap(reader: Reader, live: list[int]) -> None:
    entries = range(1, reader.state("heap_size") + 1)
    keys = {at: reader.get("heap", at, "last_use") for at in entries}
    nodes = {at: reader.get("heap", at, "node") for at in entries}
    assert all(keys[at // 2] <= keys[at] <= reader.node(nodes[at], "last_use") for at in entries[1:])
    positions = {node: reader.node(node, "heap_position") for node in live}
    assert {node: at for node, at in positions.items() if at} == {node: at for at, node in nodes.items()}
    free = {node for node in live if not reader.node(node, "first_child") and not reader.node(node, "leases")}
    assert free <= {*nodes.values()}


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
def test_hashes_links_heap_and_free_lists_are_as_described(
    cache_factory: CacheFactory, read: Callable[[RadixCache], Reader], block_size: int
) -> None:
    cache = cache_factory(block_size=block_size, max_blocks=60, max_namespaces=3, max_leases=20)
    rng = random.Random(block_size)
    matches = []
    for step in range(300):
        tokens = [rng.choice((step % 5, NONE)) for _ in range(block_size * rng.randint(1, 5))]
        space: dict[str, Any] = {"adapter_id": rng.randrange(2)} if step % 50 else {"salt": b"one more"}
        keys = [rng.randrange(2) * U64 for _ in range(len(tokens) // block_size)]
        if cache.stats().blocks_free < 5 or step % 100 == 99:
            cache.evict(rng.randrange(30))
        matches.append(cache.lookup(tokens, block_keys=keys, **space))
        if cache.stats().namespaces < 3 or matches[-1]:
            cache.insert(tokens, range(len(keys)), block_keys=keys, match=matches[-1])
        if len(matches) > 10:
            matches.pop(rng.randrange(len(matches))).release()
    assert read(cache).state("free_node")
    check_derived(read(cache))
    for match in matches:
        match.release()
    cache.clear()
    check_derived(read(cache))
    assert read(cache).state("live_blocks") == 0


def test_workers_their_locks_and_their_counters(
    cache_factory: CacheFactory, read: Callable[[RadixCache], Reader]
) -> None:
    cache = cache_factory(block_size=4, max_workers=5)
    reader = read(cache)

    def is_held(slot: int) -> bool:
        with open(f"/dev/shm/shmradix.{cache.name}", "rb") as file:
            question = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 2**60 + 2**32 + slot, 1, 0)
            return bool(struct.unpack("hhqqi4x", fcntl.fcntl(file, 36, question))[0] != fcntl.F_UNLCK)

    def leases_of(slot: int) -> int:
        return sum(lease.slot == slot for lease in reader.leases())

    cache.insert(range(8), [1, 2])
    with Actor() as actor:
        actor.do(attach, cache.name)
        actor.do(hold, list(range(8)))
        assert [reader.get("workers", slot, "pid") for slot in range(5)] == [os.getpid(), actor.pid, 0, 0, 0]
        assert [is_held(slot) for slot in range(5)] == [True, True, False, False, False]
        start_time = int(Path(f"/proc/{actor.pid}/stat").read_text().rpartition(")")[2].split()[19])
        assert reader.get("workers", 1, "start_time") == start_time
        assert reader.get("workers", 1, "pid_namespace") == os.stat(f"/proc/{actor.pid}/ns/pid").st_ino
        actor.kill()
    assert not is_held(1)
    assert reader.get("workers", 1, "pid")
    assert leases_of(1) == 1
    assert cache.reap() == 1
    assert (reader.get("workers", 1, "pid"), leases_of(1)) == (0, 0)
    RadixCache.attach(cache.name).close()
    assert reader.get("workers", 1, "generation") == 2
    sums = [sum(column) for column in zip(*(reader.words("workers", slot, "counters") for slot in range(5)))]
    stats = cache.stats()
    assert dict(zip(COUNTERS, sums)) == {counter: getattr(stats, counter) for counter in COUNTERS}
    assert (stats.lookups, stats.inserted_blocks) == (1, 2)


def test_the_header_and_the_files(
    name: str, read: Callable[[RadixCache], Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    link, links = os.link, []

    def spy(source: Path, target: Path) -> None:
        links.append((str(source), str(target)))
        link(source, target)

    monkeypatch.setattr(os, "link", spy)
    with RadixCache.create(name, max_blocks=64, max_snapshots=7) as cache:
        assert links == [(f"/dev/shm/.shmradix.{name}.new", f"/dev/shm/shmradix.{name}")]
        reader = read(cache)
        tail = f"{reader.get('header', 0, 'incarnation'):016x}"
        semaphores = [f"sem.shmradix.{name}.{tail}.{guard}" for guard in ("snapshots", "tree")]
        assert files_of(name) == [*semaphores, f"shmradix.{name}"]
        assert reader.get("header", 0, "creator_pid") == os.getpid()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
        assert struct.pack("<2Q", *reader.words("header", 0, "boot_id")).hex() == boot
        assert reader.image[104:4096] == bytes(4096 - 104)
        assert [reader.get("guards", which, "owner") for which in range(2)] == [0, 0]
        assert [reader.get("guards", which, "dirty") for which in range(2)] == [0, 0]
        assert reader.get("guards", 0, "acquired_ns") > 0
        assert not any(reader.get("snapshots", index, "born") for index in range(7))


def table_of(tokens: list[int]) -> list[int]:
    """A block table that follows from the tokens, so that tokens and blocks of two prompts can't be mixed unnoticed."""
    return [0, *tokens[4::4]]


def churn(state: SimpleNamespace, prompts: list[list[int]]) -> None:
    """Store and evict until killed."""
    rng = random.Random(1)
    while True:
        tokens = rng.choice(prompts)
        state.cache.insert(tokens, table_of(tokens))
        state.cache.release(tokens)
        state.cache.evict(rng.choice((0, 1, 3, 24)))


def test_a_reader_without_the_guard_is_never_fooled(cache_factory: CacheFactory) -> None:
    cache = cache_factory(block_size=4, max_blocks=24, max_leases=8, max_namespaces=2)
    prompts = [[*range(4), *(n * 10 + i for i in range(8))] for n in range(1, 30)]
    stored = {path_of(tokens, table_of(tokens), 4) for tokens in prompts}
    prefixes = {path[:n] for path in stored for n in (1, 2, 3)}
    image = map_segment(cache.name)
    seen: set[Path_] = set()
    with Actor() as actor:
        actor.do(attach, cache.name)
        actor.begin(churn, prompts)
        deadline = time.monotonic() + 30
        rounds = 0
        while (rounds < 300 or not prefixes <= seen) and time.monotonic() < deadline:
            seen |= {path for _, path in Reader(image).all_paths()}
            check_derived(copy_of_one_instant(image))
            rounds += 1
        actor.kill()
    assert seen == prefixes
    assert {path for _, path in Reader(image).all_paths()} <= prefixes
    cache.stats()  # takes the guard over if the worker died with it
    check_derived(copy_of_one_instant(image))


# --- the document, the literal table and layout.py

DTYPES = {
    "header": layout.HEADER, "guard": layout.GUARD, "state": layout.STATE, "worker": layout.WORKER,
    "namespace": layout.NAMESPACE, "lease": layout.LEASE, "node": layout.NODE, "heap": layout.HEAP,
    "snapshot": layout.SNAPSHOT,
}  # fmt: skip
KINDS = {"<u4": "u32", "<u8": "u64", "<i8": "i64"}


def as_fields(dtype: np.dtype[Any]) -> dict[str, Field]:
    found = {}
    for name, (kind, offset, *_) in (dtype.fields or {}).items():
        found[name] = Field(offset, KINDS[kind.base.str], kind.shape[0] if kind.shape else 0)
    return found


def document_section(heading: str) -> str:
    """The text under a heading, up to the next one."""
    match = re.search(rf"^#+ {re.escape(heading)}$(.*?)(?=^#|\Z)", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert match, f"docs/layout.md has no heading {heading!r}"
    return match[1]


def rows(text: str) -> list[list[str]]:
    """The tables of a text, with their headings, cell by cell."""
    lines = (line for line in text.splitlines() if line.startswith("|") and not line.startswith("| ---"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_no_record_is_missing() -> None:
    structured = {value for value in vars(layout).values() if isinstance(value, np.dtype) and value.fields}
    assert structured == {*DTYPES.values()}
    assert {*re.findall(r"^### (\w+): [\d,]+ bytes$", DOCUMENT, re.MULTILINE)} == {*DTYPES}


@pytest.mark.parametrize("record", RECORDS)
def test_records_lie_as_documented(record: str) -> None:
    dtype, fields = DTYPES[record], FIELDS[record]
    assert dtype.itemsize == RECORDS[record][0]
    assert as_fields(dtype) == fields
    table = rows(document_section(f"{record}: {dtype.itemsize} bytes"))
    assert table[0] == ["offset", "size", "type", "field", "meaning"]
    width = {"u32": 4, "u64": 8, "i64": 8}
    assert [row[:4] for row in table[1 : 1 + len(fields)]] == [
        [
            str(field.offset),
            str(width[field.kind] * (field.length or 1)),
            field.kind + f"[{field.length}]" * bool(field.length),
            f"`{name}`",
        ]
        for name, field in fields.items()
    ]


@pytest.mark.parametrize("record", RECORDS)
def test_fields_are_aligned_and_do_not_overlap(record: str) -> None:
    size, end = RECORDS[record][0], 0
    for field in FIELDS[record].values():
        width = 4 if field.kind == "u32" else 8
        assert field.offset % width == 0
        assert field.offset >= end
        end = field.offset + width * (field.length or 1)
    assert end <= size
    assert size % 64 == 0 or 64 % size == 0, "a record would straddle cache lines"
    assert record not in HOT or size == 64


def test_the_owner_word_has_a_cache_line_of_its_own() -> None:
    assert sum(field.offset < 64 for field in FIELDS["guard"].values()) == 1


@pytest.mark.parametrize(
    "sizes",
    [
        (16, 64, 256, 4096, 64, 0),
        (1, 1, 1, 1, 1, 1),
        (3, 5, 2, 9, 3, 4),
        (1 << 16, 1 << 30, 1 << 20, 1 << 24, 1 << 14, 1 << 24),
    ],
)
def test_sections_lie_as_documented(sizes: tuple[int, ...]) -> None:
    geometry = layout.Geometry(*sizes)
    meaning = {
        **dict(zip(layout.LIMITS, sizes)), "bucket_count": geometry.bucket_count, "4096": 4096,
        **{str(number): number for number in (1, 2, 4, 16, 64, 128)},
    }  # fmt: skip

    def value(text: str) -> int:
        product = [sum(meaning[word.strip()] for word in part.split("+")) for part in text.split("*")]
        return product[0] if len(product) == 1 else product[0] * product[1]

    offset, found = 0, []
    for _, name, size, count, _ in rows(document_section("Sections"))[1:12]:
        found.append((name, offset, value(size) * value(count)))
        offset += (found[-1][2] + 63) // 64 * 64
    assert found == [(section.name, section.offset, section.nbytes) for section in geometry.sections()]
    assert offset == geometry.size
    assert all(at % 64 == 0 for _, at, _ in found)


def test_the_example_is_right() -> None:
    geometry = layout.Geometry(16, 64, 256, 4096, 64, 0)
    expected = [[section.name, str(section.offset), str(section.nbytes)] for section in geometry.sections()]
    assert rows(document_section("Sections"))[13:] == [*expected, ["(end)", str(geometry.size), ""]]


def test_numbers_in_the_document() -> None:
    header = {row[3]: row[4] for row in rows(document_section("header: 4096 bytes"))}
    assert header["`version`"] == str(layout.VERSION)
    assert f"{layout.FINGERPRINT:#018x}" in header["`fingerprint`"]
    assert layout.MAGIC == 0x786964_61726D6873 == int.from_bytes(b"shmradix", "little")
    assert layout.BYTE_ORDER == 0x01020304
    for size, (low, high) in layout.LIMITS.items():
        assert header[f"`{size}`"].endswith(f"{low} to {high:,}")
    counters = [row[1].strip("`") for row in rows(document_section("worker: 128 bytes")) if row[0].isdigit()][
        -len(COUNTERS) :
    ]
    assert tuple(counters) == layout.COUNTERS == COUNTERS
    assert layout.NO_BLOCK == layout.NO_DISK == NONE
    assert layout.GUARDS == ("tree", "snapshots")
    assert (locks.CREATOR_BYTE, locks.REMOVER_BYTE, locks.FIRST_WORKER_BYTE) == (2**60, 2**60 + 1, 2**60 + 2**32)
    assert parking.tag_of(3, 7) == 7 << 16 | 4
    assert parking.owner_of(1 << 62 | 7 << 16 | 4) == (3, 7)


# --- what compiled code depends on


def imports_of(module: Path) -> dict[str, set[str]]:
    """What a module imports from the package: module -> names."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "shmradix":
            names = {alias.name for alias in node.names}
            if node.module == "shmradix":
                found.update({name: set() for name in names})
            elif node.module:
                found.setdefault(node.module.partition(".")[2], set()).update(names)
    return found


def test_the_compile_cache_knows_every_module_with_kernels() -> None:
    from shmradix.compile import SOURCES

    package = Path(shmradix.__file__).parent
    imports = {path.stem: imports_of(path) for path in package.glob("*.py")}
    with_kernels = {module for module, names in imports.items() if names.get("compile", set()) & {"kernel", "entry"}}
    assert "tree" in with_kernels
    assert with_kernels <= {*SOURCES}
    needed = {module for source in with_kernels for module in imports[source]}
    assert needed <= {*SOURCES}, "a constant in one of these modules ends up in compiled code"
    assert [*SOURCES] == sorted({*SOURCES})
