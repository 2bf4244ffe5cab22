"""docs/layout.md: a reader made from it alone agrees with the cache, and its tables agree with `layout.py`."""

from __future__ import annotations

import ast
import contextlib
import fcntl
import hashlib
import os
import random
import re
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import shmradix
from shmradix import RadixCache, layout, locks, owner_word
from tests.actors import Actor, attach, files_of, hold
from tests.layout_reader import (
    COUNTERS,
    FIELDS,
    FLAGS,
    HOT,
    NONE,
    RECORDS,
    U64,
    Block,
    Changed,
    Field,
    Lease,
    Namespace,
    Path_,
    Reader,
    Snapshot,
    copy_of_one_instant,
    map_segment,
)

CacheFactory = Callable[..., RadixCache]

ROOT = Path(__file__).parent.parent
DOCUMENT = (ROOT / "docs" / "layout.md").read_text()


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
    assert sorted(nodes.values()) == [node for node in live if reader.node(node, "in_heap")]
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
    with RadixCache.create(name, max_blocks=64, max_snapshots=7, snapshot_alpha=0.5) as cache:
        assert links == [(f"/dev/shm/.shmradix.{name}.new", f"/dev/shm/shmradix.{name}")]
        reader = read(cache)
        tail = f"{reader.get('header', 0, 'incarnation'):016x}"
        semaphores = [f"sem.shmradix.{name}.{tail}.{guard}" for guard in ("claims", "snapshots", "tree")]
        assert files_of(name) == [*semaphores, f"shmradix.{name}"]
        assert reader.get("header", 0, "creator_pid") == os.getpid()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
        assert struct.pack("<2Q", *reader.words("header", 0, "boot_id")).hex() == boot
        assert reader.words("header", 0, "snapshot_alpha") == (0.5,)
        assert reader.image[136:4096] == bytes(4096 - 136)
        assert [reader.get("guards", which, "owner") for which in range(2)] == [0, 0]
        assert [reader.get("guards", which, "dirty") for which in range(2)] == [0, 0]
        assert reader.get("guards", 0, "acquired_ns") > 0
        assert not any(reader.get("snapshots", index, "born") for index in range(8))


def test_the_reader_finds_snapshots_slots_and_pins(
    cache_factory: CacheFactory, read: Callable[[RadixCache], Reader]
) -> None:
    cache = cache_factory(block_size=4, max_snapshots=9, snapshot_slots=6, retention="chain")
    tokens, keys = list(range(50, 61)), [0, 2**64 - 1]
    cache.insert(tokens, [1, 2])
    cache.insert(tokens, [3, 4], salt=b"tenant", block_keys=keys)

    def save(count: int, session: int = 0, kind: str = "plain", **where: Any) -> int:
        slot = cache.allocate_snapshot_slot()
        cache.reserve_snapshot(tokens[:count], slot, session=session, kind=kind, **where).commit()
        return slot

    first, tail = save(3), save(8, 2**64 - 1, "tail")
    other, keyed = save(4, salt=b"tenant"), save(8, salt=b"tenant", block_keys=keys)
    private, pending = cache.allocate_snapshot_slot(), cache.allocate_snapshot_slot()
    announced = cache.reserve_snapshot(tokens, pending, kind="finish")
    match = cache.lookup(tokens, session=2**64 - 1)
    reader, tenant = read(cache), salted(0, b"tenant")
    plain = [Snapshot(BASE, 0, 3, 0, first, 0), Snapshot(BASE, 2**64 - 1, 8, FLAGS["TAIL"], tail, 0)]
    theirs = [Snapshot(tenant, 0, 4, 0, other, 0), Snapshot(tenant, 0, 8, 0, keyed, 0)]
    assert reader.committed() == sorted([*plain, *theirs])
    assert reader.find_snapshots(BASE, tokens) == plain[::-1]
    assert reader.find_snapshots(BASE, [*tokens[:7], 7]) == plain[:1]
    assert reader.find_snapshots(tenant, tokens, keys) == theirs[::-1]
    assert reader.find_snapshots(tenant, tokens) == reader.find_snapshots(tenant, tokens, [0, 1]) == theirs[:1]
    assert reader.find_snapshots(tenant, tokens, [1, 0]) == reader.find_snapshots((1, tenant[1]), tokens) == []
    assert [reader.slot_states()[slot] for slot in (first, tail, other, keyed)] == ["index"] * 4
    assert [reader.slot_states()[slot] for slot in (private, pending)] == ["0", "0"]
    (index,) = {*reader.live_snapshots()} - {i for i in reader.live_snapshots() if reader.is_committed(i)}
    assert reader.snapshot(index) == Snapshot(BASE, 0, 11, FLAGS["LEAF"] | FLAGS["PENDING"], pending, 0)
    assert reader.pins() == [(0, plain[1])]
    assert (reader.last_lookup(2**64 - 1), reader.last_lookup(5)) == (0, None)
    of_tail = next(i for i in reader.live_snapshots() if reader.snapshot(i) == plain[1])
    parent = reader.get("snapshots", of_tail, "parent")
    assert reader.snapshot(parent) == plain[0]
    assert reader.get("snapshots", of_tail, "parent_born") == reader.get("snapshots", parent, "born")

    announced.abort()
    cache.free_snapshot_slot(private)
    spilled: Any = cache.evict_snapshot_to_tier()
    assert reader.slot_states()[spilled.slot] == "0"
    assert reader.slot_states()[private] == "free"
    assert [s for s in reader.committed() if s.tier_key] == [
        next(s for s in [*plain, *theirs] if s.slot == spilled.slot)._replace(slot=None, tier_key=spilled.key)
    ]
    cache.clear()  # what a match has stays, and is not found
    assert reader.committed() == []
    assert [reader.snapshot(i) for i in reader.live_snapshots()] == plain[1:]
    match.release()
    assert reader.pins() == []
    births = [reader.get("snapshots", i, "born") for i in range(reader.get("snapshot_state", 0, "snapshots_used"))]
    assert max(births) <= reader.get("snapshot_state", 0, "clock")


def churn_snapshots(state: SimpleNamespace, prompts: list[list[int]]) -> None:
    """Save, spill, promote, pin and evict until killed."""
    rng, cache, keys = random.Random(1), state.cache, [0]
    while True:
        tokens = rng.choice(prompts)
        cache.insert_intermediate_snapshot(tokens[: rng.randint(1, 12)], cache.allocate_snapshot_slot())
        cache.lookup(tokens).release()
        if spilled := rng.random() < 0.5 and cache.evict_snapshot_to_tier():
            keys.append(spilled.key)
            if not cache.promote_snapshot(rng.choice(keys) or spilled.key, spilled.slot):
                cache.free_snapshot_slot(spilled.slot)
        if (slot := cache.evict_snapshot_lru()) is not None:
            cache.free_snapshot_slot(slot)


def test_a_reader_without_the_guard_is_never_fooled_by_snapshots(cache_factory: CacheFactory) -> None:
    cache = cache_factory(block_size=4, max_leases=8, max_snapshots=12, snapshot_slots=5)
    prompts = [[*range(4), *(n * 10 + i for i in range(8))] for n in range(1, 10)]
    for n, tokens in enumerate(prompts):
        cache.insert(tokens, [0, 2 * n + 1, 2 * n + 2])
        cache.release(tokens)
    image, seen, slots = map_segment(cache.name), set[int](), set[str]()
    known = {Reader(image).prefix_hash(tokens[:n]) for tokens in prompts for n in range(1, 13)}
    with Actor() as actor:
        actor.do(attach, cache.name)
        actor.begin(churn_snapshots, prompts)
        deadline = time.monotonic() + 30
        rounds = 0
        while (rounds < 300 or len(seen) < 12 or len(slots) < 3) and time.monotonic() < deadline:
            rounds += 1
            copy = copy_of_one_instant(image, 1)
            slots |= {*copy.slot_states()}
            found = copy.committed()
            seen |= {snapshot.token_count for snapshot in found}
            assert all(copy.words("snapshots", i, "prefix_hash") in known for i in copy.live_snapshots())
            assert all(snapshot in found for _, snapshot in copy.pins())
            live = Reader(image)
            for index in live.live_snapshots():
                with contextlib.suppress(Changed):
                    snapshot = live.snapshot(index)
                    assert 1 <= snapshot.token_count <= 12
                    assert snapshot.slot is None or snapshot.slot < 5
        actor.kill()
    assert seen == {*range(1, 13)}
    assert {"1", "index", "free"} <= slots
    assert cache.reap() == 1
    states = Reader(image).slot_states()
    assert "1" not in states
    assert Reader(image).pins() == []


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
    "snapshot_state": layout.SNAPSHOT_STATE, "snapshot": layout.SNAPSHOT, "slot": layout.SLOT, "pin": layout.PIN,
    "session": layout.SESSION, "block": layout.BLOCK, "claim": layout.CLAIM,
}  # fmt: skip
WIDTHS = {"u32": 4, "u64": 8, "i64": 8, "f64": 8, "char": 1}
KINDS = {"<u4": "u32", "<u8": "u64", "<i8": "i64", "<f8": "f64"}


def as_fields(dtype: np.dtype[Any]) -> dict[str, Field]:
    found = {}
    for name, (kind, offset, *_) in (dtype.fields or {}).items():
        length = kind.shape[0] if kind.shape else kind.itemsize if kind.kind == "S" else 0
        found[name] = Field(offset, "char" if kind.kind == "S" else KINDS[kind.base.str], length)
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
    assert [row[:4] for row in table[1 : 1 + len(fields)]] == [
        [
            str(field.offset),
            str(WIDTHS[field.kind] * (field.length or 1)),
            field.kind + f"[{field.length}]" * bool(field.length),
            f"`{name}`",
        ]
        for name, field in fields.items()
    ]


@pytest.mark.parametrize("record", RECORDS)
def test_fields_are_aligned_and_do_not_overlap(record: str) -> None:
    size, end = RECORDS[record][0], 0
    for field in FIELDS[record].values():
        width = WIDTHS[field.kind]
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
        (16, 64, 256, 4096, 64, 0, 0, 64, 0),
        (1, 1, 1, 1, 1, 1, 1, 0, 1),
        (3, 5, 2, 9, 3, 4, 3, 2, 0),
        (1 << 16, 1 << 30, 1 << 20, 1 << 24, 1 << 14, 1 << 16, 1 << 16, 1 << 30, 1),
    ],
)
@pytest.mark.parametrize(
    "more", [{}, {"num_blocks": 7, "max_claims": 3}, {"num_blocks": 9, "block_nbytes": 1, "checksums": 1}]
)
def test_sections_lie_as_documented(sizes: tuple[int, ...], more: dict[str, int]) -> None:
    geometry = layout.Geometry(*sizes, **more)
    meaning = {
        **{name: getattr(geometry, name) for name in (*layout.LIMITS, "bucket_count", "pin_count", "session_count")},
        **{str(number): number for number in (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 4096)},
    }  # fmt: skip

    def value(text: str) -> int:
        product = [sum(meaning[word.strip()] for word in part.split("+")) for part in text.split("*")]
        return product[0] if len(product) == 1 else product[0] * product[1]

    offset, found = 0, []
    for _, name, size, count, _ in rows(document_section("Sections"))[1:19]:
        found.append((name, offset, value(size) * value(count)))
        offset += (found[-1][2] + 63) // 64 * 64
    assert found == [(section.name, section.offset, section.nbytes) for section in geometry.sections()]
    assert offset == geometry.size
    assert all(at % 64 == 0 for _, at, _ in found)


def test_the_example_is_right() -> None:
    geometry = layout.Geometry(16, 64, 256, 4096, 64, 512, 64)
    expected = [[section.name, str(section.offset), str(section.nbytes)] for section in geometry.sections()]
    assert rows(document_section("Sections"))[20:] == [*expected, ["(end)", str(geometry.size), ""]]


def test_numbers_in_the_document() -> None:
    header = {row[3]: row[4] for row in rows(document_section("header: 4096 bytes"))}
    assert header["`version`"] == str(layout.VERSION)
    assert f"{layout.FINGERPRINT:#018x}" in header["`fingerprint`"]
    assert layout.MAGIC == 0x786964_61726D6873 == int.from_bytes(b"shmradix", "little")
    assert layout.BYTE_ORDER == 0x01020304
    for size, (low, high) in layout.LIMITS.items():
        assert header[f"`{size}`"].endswith(f"{low} to {high:,}")
    assert header["`snapshot_alpha`"].endswith(f"0.0 to {layout.MAX_ALPHA}")
    flags = {row[1]: int(row[0]) for row in rows(document_section("snapshot: 192 bytes"))[-len(FLAGS) :]}
    assert flags == FLAGS == {name: getattr(layout, name) for name in FLAGS}
    assert layout.RETENTIONS == ("session", "chain")
    counters = [row[1].strip("`") for row in rows(document_section("worker: 256 bytes")) if row[0].isdigit()][
        -len(COUNTERS) :
    ]
    assert tuple(counters) == layout.COUNTERS == COUNTERS
    assert layout.NO_BLOCK == layout.NO_DISK == NONE
    assert layout.GUARDS == ("tree", "snapshots")
    assert (locks.CREATOR_BYTE, locks.REMOVER_BYTE, locks.FIRST_WORKER_BYTE) == (2**60, 2**60 + 1, 2**60 + 2**32)
    assert owner_word.tag_of(3, 7) == 7 << 16 | 4
    assert owner_word.owner_of(1 << 62 | 7 << 16 | 4) == (3, 7)


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
