"""A plain-Python model of the cache, and the same picture read from a segment, for comparing the two."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shmradix import NO_DISK, RadixCache, errors

Chunk = tuple[tuple[int, ...], int]  # one block's tokens and its block key
Namespace = tuple[int, bytes]  # adapter, salt (b"" for none)
PARTIAL_CANDIDATES = 64
COUNTERS = ["lookups", "hits", "hit_tokens", "lookup_tokens", "inserts", "inserted_blocks"]
COUNTERS += ["duplicate_blocks", "evicted_blocks"]
GAUGES = ["blocks_live", "blocks_leased", "blocks_evictable", "blocks_free", "leases", "namespaces"]
GAUGES += ["recoveries"]


class Request(NamedTuple):
    """A prompt and where it belongs."""

    tokens: tuple[int, ...]
    namespace: Namespace = (0, b"")
    keys: tuple[int, ...] | None = None

    def identity(self) -> dict[str, Any]:
        """The keyword arguments of a call on a cache."""
        adapter, salt = self.namespace
        return {"adapter_id": adapter, "salt": salt or None, "block_keys": self.keys}


class NodeImage(NamedTuple):
    """One block as seen from outside: where it is, what it holds, who pins it."""

    current: bool
    namespace: tuple[int, str]
    path: tuple[Chunk, ...]
    block: int
    disk: int
    references: int
    pins: int
    children: tuple[Chunk, ...]


@dataclass(eq=False)
class Node:
    """A block, or (no parent) the root of a namespace."""

    namespace: Namespace
    epoch: int
    parent: Node | None = None
    chunk: Chunk = ((), 0)
    block: int = 0
    disk: int = NO_DISK
    last_use: int = 0
    pins: int = 0
    children: dict[Chunk, Node] = field(default_factory=dict)

    def path(self) -> tuple[Chunk, ...]:
        return () if self.parent is None else (*self.parent.path(), self.chunk)

    def below(self) -> Iterator[Node]:
        """All blocks under this node."""
        for child in self.children.values():
            yield child
            yield from child.below()

    def references(self) -> int:
        """Leases on this node or below it."""
        return self.pins + sum(node.pins for node in self.below())


@dataclass(eq=False)
class Lease:
    """What one request of one client holds."""

    client: int
    node: Node
    anchor: Node
    agreed: int  # tokens that the partly matching child below the anchor has in common with the prompt
    by_tokens: bool  # an insert without a match took or moved it

    @property
    def depth(self) -> int:
        return len(self.anchor.path())


@dataclass(eq=False)
class Match:
    """The model's PrefixMatch."""

    client: int
    request: Request
    epoch: int
    lease: Lease | None
    blocks: list[int]
    disks: list[int]
    tokens: int
    partial: tuple[int, int] | None
    released: bool = False


@dataclass
class Inserted:
    """The model's InsertAcquired."""

    blocks: list[int] = field(default_factory=list)
    disks: list[int] = field(default_factory=list)
    duplicates: list[int] = field(default_factory=list)
    duplicate_disks: list[int] = field(default_factory=list)
    tokens: int = 0


@dataclass
class Model:
    """The cache with dictionaries and full scans; raises the same errors and then changes nothing."""

    block_size: int
    max_blocks: int
    max_leases: int
    max_namespaces: int
    clock: int = 0
    epoch: int = 0
    roots: list[Node] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))

    # Walking

    def nodes(self) -> list[Node]:
        return [node for root in self.roots for node in root.below()]

    def chunks(self, request: Request) -> list[Chunk]:
        """The prompt cut into blocks; the last may be partly filled (or empty)."""
        size = self.block_size
        count = len(request.tokens) // size + 1
        keys = [*(request.keys or ()), *[0] * count]
        return [(request.tokens[i * size : (i + 1) * size], keys[i]) for i in range(count)]

    def walk(self, request: Request) -> list[Node]:
        """The visible root and the matching nodes under it; empty where nothing has that namespace."""
        key = (request.namespace, self.epoch)
        found = [root for root in self.roots if (root.namespace, root.epoch) == key]
        for chunk in self.chunks(request)[:-1]:
            if not found or chunk not in found[-1].children:
                break
            found.append(found[-1].children[chunk])
        return found

    def partial(self, node: Node, chunk: Chunk) -> tuple[Node, int] | None:
        """The child that agrees with most of `chunk`, and with how many tokens."""
        best: tuple[Node, int] | None = None
        for child in list(node.children.values())[:PARTIAL_CANDIDATES]:
            agreed = 0
            while agreed < len(chunk[0]) and child.chunk[0][agreed] == chunk[0][agreed]:
                agreed += 1
            if child.chunk[1] == chunk[1] and agreed > (best[1] if best else 0):
                best = (child, agreed)
        return best

    def held(
        self, client: int, request: Request, depths: range, by_tokens: bool = False, oldest: bool = False
    ) -> Lease | None:
        """The client's lease on that path: newest (or oldest) epoch, deepest, taken so, most partial, youngest."""
        best, best_rank = None, (-self.epoch - 1, -1, False, -1)
        for lease in self.leases:  # the oldest first
            epoch = -lease.anchor.epoch if oldest else lease.anchor.epoch
            rank = (epoch, lease.depth, lease.by_tokens == by_tokens, lease.agreed)
            mine = (lease.client, lease.anchor.namespace) == (client, request.namespace)
            if mine and lease.depth in depths and rank >= best_rank and self.leads_to(lease, request):
                best, best_rank = lease, rank
        return best

    def leads_to(self, lease: Lease, request: Request) -> bool:
        """Whether the request goes through the lease's anchor, and begins what the lease pins below it."""
        chunks, path = self.chunks(request), list(lease.anchor.path())
        if path != chunks[:-1][: len(path)]:
            return False
        rest, agreed = chunks[len(path)], lease.agreed
        if agreed == 0:
            return True
        return lease.node.chunk[0][:agreed] == rest[0][:agreed] and lease.node.chunk[1] == rest[1]

    # Leases

    def stamp(self, path: list[Node]) -> None:
        """Every block on the path was used now; the cache stamps the last one only and must evict alike."""
        self.clock += 1
        for node in path:
            node.last_use = self.clock

    def need_lease(self) -> None:
        if len(self.leases) == self.max_leases:
            raise errors.LeasesFull

    def take(self, client: int, node: Node, anchor: Node, agreed: int = 0, by_tokens: bool = False) -> Lease:
        lease = Lease(client, node, anchor, agreed, by_tokens)
        node.pins += 1
        self.leases.append(lease)
        return lease

    def lease_to_extend(self, match: Match, request: Request) -> Lease | None:
        """The lease of the match, if the request goes through what it holds."""
        if match.released or (match.lease and match.lease not in self.leases):
            raise errors.LeaseError
        path = match.lease.anchor.path() if match.lease else ()
        if self.chunks(request)[:-1][: len(path)] != list(path):
            raise ValueError
        return match.lease

    def drop(self, lease: Lease) -> None:
        lease.node.pins -= 1
        self.leases.remove(lease)

    def close(self, client: int) -> None:
        for lease in [lease for lease in self.leases if lease.client == client]:
            self.drop(lease)

    # Operations

    def peek(self, request: Request) -> int:
        return max(0, len(self.walk(request)) - 1) * self.block_size

    def lookup(self, client: int, request: Request) -> Match:
        path = self.walk(request)
        partial = self.partial(path[-1], self.chunks(request)[len(path) - 1]) if path else None
        nodes = path[1:]
        lease = None
        if nodes or partial:
            self.need_lease()
            pinned, agreed = partial or (path[-1], 0)
            lease = self.take(client, pinned, path[-1], agreed)
        self.stamp(nodes)
        matched = len(nodes) * self.block_size
        self.count(lookups=1, hits=bool(nodes), hit_tokens=matched, lookup_tokens=len(request.tokens))
        blocks, disks = [node.block for node in nodes], [node.disk for node in nodes]
        disks = disks if set(disks) - {NO_DISK} else []
        report = (partial[0].block, partial[1]) if partial else None
        return Match(client, request, self.epoch, lease, blocks, disks, matched, report)

    def insert(
        self,
        client: int,
        request: Request,
        table: list[int],
        disks: list[int] | None,
        matched: int,
        match: Match | None,
    ) -> Inserted:
        lease = self.lease_to_extend(match, request) if match else None
        if matched >= self.block_size:
            covered = matched // self.block_size
            lease = self.held(client, request, range(covered, covered + 1), oldest=True)
            if lease is None:
                raise errors.LeaseError
        if (lease.anchor.epoch if lease else match.epoch if match else self.epoch) != self.epoch:
            return Inserted()
        chunks, path = self.chunks(request), self.walk(request)
        missing = min(len(chunks) - max(1, len(path)), self.max_blocks - len(self.nodes()))
        if (len(path) > 1 or missing) and lease is None:
            self.need_lease()
        if missing and not path:
            if len(self.roots) == self.max_namespaces:
                raise errors.NamespacesFull
            self.roots.append(Node(request.namespace, self.epoch))
            path = [self.roots[-1]]
        answer = Inserted()
        if len(path) < 2 and not missing:
            return answer
        given = [NO_DISK] * len(table) if disks is None else disks
        for node, block, disk in zip(path[1:], table, given, strict=False):
            self.offer(node, block, disk, answer)
        for index in range(len(path) - 1, len(path) - 1 + missing):
            path.append(self.create(path[-1], chunks[index], table[index], given[index], answer))
        answer.tokens = (len(path) - 1) * self.block_size
        self.count(inserts=1, inserted_blocks=len(answer.blocks), duplicate_blocks=len(answer.duplicates))
        self.stamp(path[1:])
        if lease:
            lease.node.pins -= 1
            path[-1].pins += 1
            lease.node, lease.anchor, lease.agreed, lease.by_tokens = path[-1], path[-1], 0, match is None
        else:
            lease = self.take(client, path[-1], path[-1], 0, by_tokens=match is None)
        if match:
            match.lease = lease
        return answer

    def offer(self, node: Node, block: int, disk: int, answer: Inserted) -> None:
        """A caller's block for a node that exists."""
        if node.block != block:
            answer.duplicates.append(block)
        if disk not in (NO_DISK, node.disk):
            if node.disk == NO_DISK:
                node.disk = disk
                answer.disks.append(disk)
            else:
                answer.duplicate_disks.append(disk)

    def create(self, parent: Node, chunk: Chunk, block: int, disk: int, answer: Inserted) -> Node:
        node = Node(parent.namespace, parent.epoch, parent, chunk, block, disk)
        parent.children[chunk] = node
        answer.blocks.append(block)
        answer.disks += [disk] if disk != NO_DISK else []
        return node

    def release(self, client: int, request: Request, matched: int | None = None) -> None:
        depth = 0 if matched is None else matched // self.block_size
        depths = range(len(request.tokens) + 1) if matched is None else range(depth, depth + 1)
        lease = self.held(client, request, depths, by_tokens=matched is None)
        if lease:
            self.drop(lease)
        elif matched is None or depth:
            raise errors.LeaseError

    def release_match(self, match: Match) -> None:
        if not match.released and match.lease:
            if match.lease not in self.leases:
                raise errors.LeaseError
            self.drop(match.lease)
        match.released = True

    def evict(self, count: int) -> list[tuple[int, int]]:
        """Blocks and disk ids in eviction order: hidden ones first, then the least recently used leaf."""
        out: list[tuple[int, int]] = []
        while len(out) < count:
            leaves = [node for node in self.nodes() if not node.children and not node.pins]
            if not leaves:
                break
            out.append(self.remove(min(leaves, key=lambda leaf: (leaf.epoch == self.epoch, leaf.last_use))))
        self.count(evicted_blocks=len(out))
        return out

    def remove(self, leaf: Node) -> tuple[int, int]:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.chunk]
        if parent.parent is None and not parent.children:
            self.roots.remove(parent)
        return leaf.block, leaf.disk

    def clear(self) -> list[tuple[int, int]]:
        """Hide everything; what nobody leases comes back at once."""
        self.epoch += 1
        return self.evict(len(self.nodes()))

    # Pictures

    def count(self, **more: int) -> None:
        for name, number in more.items():
            self.counters[name] += number

    def stats(self) -> dict[str, int]:
        nodes = self.nodes()
        leased = sum(node.references() > 0 for node in nodes)
        blocks = [len(nodes), leased, len(nodes) - leased, self.max_blocks - len(nodes)]
        return self.counters | dict(zip(GAUGES, [*blocks, len(self.leases), len(self.roots), 0], strict=True))

    def image(self) -> list[NodeImage]:
        return sorted(map(self.image_of, self.nodes()))

    def image_of(self, node: Node) -> NodeImage:
        adapter, salt = node.namespace
        digest = hashlib.blake2b(salt, digest_size=32).hexdigest() if salt else "00" * 32
        shown = node.epoch == self.epoch
        place = (shown, (adapter, digest), node.path())
        return NodeImage(*place, node.block, node.disk, node.references(), node.pins, tuple(node.children))


def all_stats(cache: RadixCache) -> dict[str, int]:
    """Every statistic except how often a lock was waited for and how many workers there are."""
    stats = cache.stats()
    return {name: getattr(stats, name) for name in COUNTERS + GAUGES}


def segment_image(cache: RadixCache) -> list[NodeImage]:
    """The live blocks of a segment in the same form as Model.image(); reads the arrays only."""
    views = cache._segment.views
    fields = views.nodes.dtype.names or ()
    nodes = [dict(zip(fields, record, strict=True)) for record in views.nodes.tolist()]
    first_block = len(views.namespaces)  # before it: none, and the roots
    blocks = [i for i in range(first_block, len(nodes)) if nodes[i]["born"]]
    chunks = {i: (tuple(views.tokens[i].tolist()), nodes[i]["block_key"]) for i in blocks}
    references = [0] * len(nodes)
    upward = {index: [index] for index in blocks}
    for index, line in upward.items():
        while parent := nodes[line[-1]]["parent"]:
            line.append(parent)
        for above in line:
            references[above] += nodes[index]["leases"]
    images = []
    for index, (*line, root) in upward.items():
        node, namespace = nodes[index], views.namespaces[root]
        children, child = [], node["first_child"]
        while child:
            children.append(chunks[child])
            child = nodes[child]["next_sibling"]
        shown = bool(namespace["epoch"] == views.state["epoch"][0])
        place = (shown, (int(namespace["adapter_id"]), namespace["salt"].tobytes().hex()))
        path = tuple(chunks[i] for i in reversed(line))
        held = (node["block"], node["disk_block"], references[index], node["leases"])
        images.append(NodeImage(*place, path, *held, tuple(children)))
    return sorted(images)
