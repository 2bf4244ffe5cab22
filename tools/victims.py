"""What the kill test kills: workers that do all that can be done with a cache, for ever, and what must hold after.

A seat is a row that one process at a time has: what it is doing, and since when. Seats are in anonymous shared
memory, which survives whoever dies. The second half of the seats is for children that workers fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ledger import AWAY, BLOCK_SIZE, HELD, OFFERED, SHARED_PREFIXES, Ledger, Prompt, Prompts
from numpy.typing import NDArray
from saves import check_quiet, require
from stress import Worker

from shmradix import InsertAcquired, PrefixMatch, RadixCache
from shmradix.errors import SegmentExists, SegmentNotFound

IDLE, LOOKUP, RELEASE, INSERT, EVICT, CLEAR, PEEK, ATTACH, CREATE, FORK, SECTION, SAVE, SPILL, CLAIM, ALLOCATE = range(
    15
)
DOING = (
    "between calls", "lookup", "release", "insert", "evict", "clear", "peek", "attach", "create", "fork", "section",
    "save", "spill", "claim", "allocate",
)  # fmt: skip

SEAT = np.dtype(
    [
        ("pid", "<i8"),  # 0: nobody; -1: a child that was not heard of yet
        ("slot", "<i8"),  # of the cache; -1: not known
        ("doing", "<i8"),
        ("evicting", "<i8"),  # blocks asked for by an evict that has not returned
        ("clearing", "<i8"),
        ("cleared_at", "<i8"),  # when its last clear had returned
        ("beat", "<i8"),  # when it last finished an operation
        ("gap", "<i8"),  # the longest time between two
        ("gap_stopped", "<i8"),  # the longest in which somebody else was stopped
        ("operations", "<i8"),
        ("wrong", "<i8"),
    ]
)
SHM = Path("/dev/shm")
BLOCKS = 4096  # ids; the cache holds three quarters of them
SIDES = 2  # caches that are made and unlinked beside
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def shared_array(dtype: Any, count: int) -> Any:
    """An array in anonymous memory that forked processes share."""
    return np.frombuffer(mmap.mmap(-1, max(np.dtype(dtype).itemsize * count, 1)), dtype, count)


STOPPED_UNTIL = shared_array("<i8", 1)
"""When the last worker that was stopped was killed."""


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that forked it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Stock(Prompts):
    """Prompts drawn beforehand, some of them long, so that a worker spends its time in the cache."""

    def __init__(self, seed: int, size: int = 400) -> None:
        super().__init__(seed, 0)
        self._random = np.random.default_rng([seed, 1])
        drawn = [super(Stock, self).draw() for _ in range(size)]
        long = [np.concatenate([prompt.tokens for prompt in drawn[i : i + 40]]) for i in range(0, 120, 40)]
        self._prefixes = long * (SHARED_PREFIXES // len(long))
        self._stock = drawn + [super(Stock, self).draw() for _ in range(size)]

    def draw(self) -> Prompt:
        return random.choice(self._stock)

    def few(self, count: int) -> list[Prompt]:
        """Some of them, long ones among them."""
        return self._stock[-count:] + self._stock[:count]


class Victim(Worker):
    """A worker under kill: all operations of a cache, each announced at its seat."""

    def __init__(
        self, cache: RadixCache, ledger: Ledger, files: str, stock: Stock, seats: Any, offered_at: Any, seat: int
    ) -> None:
        super().__init__(cache, ledger, files, seat, 0)
        self.prompts = stock
        self.seats, self.seat, self.offered_at = seats, seats[seat], offered_at
        self.parents = {os.getppid()}
        random.seed(f"{seat} {os.getpid()} {time.monotonic_ns()}")

    def run_for_ever(self, forks: bool) -> None:
        """Do random operations until the killer is gone."""
        operations: list[tuple[Callable[[], None], int, float]] = [
            (self.start_request, LOOKUP, 40),
            (self.finish_request, RELEASE, 38),
            (self.store_without_match, INSERT, 6),
            (self.store_by_tokens, INSERT, 4),
            (self.peek, PEEK, 8),
            (self.evict_some, EVICT, 4),
            (self.hammer, LOOKUP, 4),
            (self.saver.save, SAVE, 12),
            (self.saver.settle, SAVE, 4),
            (self.saver.make_room, SPILL, 8),
            (self.resume, LOOKUP, 4),
            (self.clear, CLEAR, 0.01),
            (self.attach_again, ATTACH, 0.15),
            (self.create_beside, CREATE, 0.15),
            (self.fork, FORK, 0.3 if forks else 0),
        ]
        weights = [weight for _, _, weight in operations]
        self.note_slot()
        while os.getppid() in self.parents:
            for operation, what, _ in self.random.choices(operations, weights, k=16):
                self.seat["doing"] = what
                operation()
                self.seat["doing"] = IDLE
                self.note_slot()
                beat(self.seat)
        os._exit(0)

    def note_slot(self) -> None:
        self.seat["slot"] = self.cache._worker.slot

    def evict(self, count: int) -> None:
        before = int(self.seat["doing"])
        self.seat["evicting"] = count
        self.seat["doing"] = EVICT
        super().evict(count)
        self.seat["evicting"] = 0
        self.seat["doing"] = before

    def clears_begun(self) -> int:
        """Differs from what it was before if a clear may have hidden anything in between."""
        begun = int(self.ledger.clears_begun.sum())  # odd ones may be of the dead
        return -time.monotonic_ns() if self.seats["clearing"].any() else begun

    def clear(self) -> None:
        self.seat["clearing"] = 1
        super().clear()
        self.seat["cleared_at"] = time.monotonic_ns()
        self.seat["clearing"] = 0

    def offer(self, prompt: Prompt, match: PrefixMatch | None, own: NDArray[np.uint32]) -> InsertAcquired:
        self.offered_at[own] = time.monotonic_ns()
        self.seat["doing"] = INSERT
        return super().offer(prompt, match, own)

    def store_by_tokens(self) -> None:
        """Look up, store the rest and release, all by the tokens and with no match."""
        prompt = self.prompts.draw()
        how: dict[str, Any] = {"adapter_id": prompt.adapter_id, "salt": prompt.salt, "block_keys": prompt.block_keys}
        match = self.look_up(prompt, pins=False)
        known = len(match.matched_blocks)
        own = self.take(prompt.full_blocks - known) if known else None
        if own is None or self.random.random() < 0.3:
            if own is not None:
                self.free += own.tolist()
            if known:
                self.cache.release_matched(prompt.tokens, match.matched_tokens, **how)
            else:
                match.release()
            return
        self.offered_at[own] = time.monotonic_ns()
        content = self.ledger.content
        content["stored_at"][own] = 0
        content["tokens"][own] = prompt.chunks[known:]
        content["key"][own] = prompt.keys[known : prompt.full_blocks]
        content["parent"][own] = prompt.chain[known:-1]
        content["prefix"][own] = prompt.chain[known + 1 :]
        self.ledger.held[self.number, own] = OFFERED
        self.seat["doing"] = INSERT
        table = np.concatenate([match.matched_blocks, own])
        acquired = self.cache.insert(prompt.tokens, table, matched_tokens=match.matched_tokens, **how)
        stored = self.settle(prompt, own, known, acquired)
        self.check_content(prompt, list(stored.values()), list(stored.keys()))
        self.cache.release(prompt.tokens, **how)

    def resume(self) -> None:
        """Look up what can be resumed only."""
        prompt = self.prompts.draw()
        where: dict[str, Any] = {"adapter_id": prompt.adapter_id, "salt": prompt.salt, "block_keys": prompt.block_keys}
        with self.cache.lookup(prompt.tokens, **where, session=1, require_snapshot=True) as match:
            depth = match.snapshot_tokens or match.snapshot_tier_tokens
            require(match.matched_tokens == -(-depth // BLOCK_SIZE) * BLOCK_SIZE, f"{match!r} for {depth} tokens")
            self.check_content(prompt, match.matched_blocks.tolist(), list(range(len(match.matched_blocks))))
            self.saver.check(prompt, match)
            if match.snapshot_tier_key is not None:
                self.saver.fault_in(prompt, match)

    def hammer(self) -> None:
        """One prompt again and again, hardly ever outside the cache."""
        prompt = self.prompts.draw()
        for _ in range(16):
            self.cache.lookup(prompt.tokens, adapter_id=prompt.adapter_id, salt=prompt.salt).release()

    def attach_again(self) -> None:
        """Close with leases in hand, or without, and attach anew."""
        if self.random.random() < 0.5:
            while self.open:
                self.finish_request()
        self.open.clear()
        self.saver.forget_all()
        self.seat["slot"] = -1
        self.cache.close()
        self.cache = RadixCache.attach(self.cache.name)

    def create_beside(self) -> None:
        """Open or unlink another cache, as its other users do at the same time."""
        name = f"{self.cache.name}-{self.random.randrange(SIDES)}"
        with contextlib.suppress(SegmentExists, SegmentNotFound):
            if self.random.random() < 0.4:
                RadixCache.unlink(name)
                return
            make = RadixCache.open if self.random.random() < 0.8 else RadixCache.create
            with make(name, max_blocks=8, block_size=4, max_leases=64, max_namespaces=2) as other:
                with other.lookup([1, 2, 3, 4, 5]) as match:
                    require(match.matched_blocks.tolist() in ([], [7]), f"found {match.matched_blocks}")
                require(other.insert([1, 2, 3, 4], [7]).inserted_tokens == 4, "a block did not fit")

    def fork(self) -> None:
        """Have a child that goes on with the inherited handle, at a seat of its own."""
        child = self.number + len(self.seats) // 2
        if child >= len(self.seats) or self.seats["pid"][child] != 0:
            return
        self.seats["pid"][child] = -1
        parent = os.getpid()
        if os.fork() != 0:
            return
        self.parents |= {parent}
        self.number, self.seat = child, self.seats[child]
        take_seat(self.seat, os.getpid())
        self.random.seed(f"{os.getpid()} {time.monotonic_ns()}")
        random.seed(self.random.random())
        self.open = []
        self.saver.forget_all()
        self.free = np.flatnonzero(self.ledger.held[child] == HELD).tolist()


def take_seat(seat: Any, pid: int) -> None:
    """Say that a new process has the seat."""
    seat["slot"], seat["doing"] = -1, ATTACH
    seat["beat"] = time.monotonic_ns()
    seat["pid"] = pid


def beat(seat: Any) -> None:
    """An operation is done."""
    now, before = time.monotonic_ns(), int(seat["beat"])
    gap = "gap_stopped" if before < STOPPED_UNTIL[0] else "gap"
    seat[gap] = max(int(seat[gap]), now - before)
    seat["beat"] = now
    seat["operations"] += 1


def live(seat: Any, work: Callable[[], None]) -> None:
    """All of a forked worker's life; it does not return."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        work()
    except BaseException:
        seat["wrong"] = 1
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(3)


class CacheJob:
    """All operations of one cache."""

    def __init__(self, cache: RadixCache, path: str, seats: Any, seed: int) -> None:
        self.cache, self.seats = cache, seats
        owners = cache._segment.views.guards["owner"]
        self.words, self.files = [owners[:1].data, owners[1:].data], f"{path}.tier"
        self.ledger = Ledger(path, len(seats), BLOCKS)
        self.offered_at = shared_array("<i8", BLOCKS)
        self.stock = Stock(seed)
        self.random = random.Random(seed)
        self.may_be_missing = self.lost = self.cut_short = self.found = self.checks = 0
        self.last_clear = 0
        self.died_in: Counter[str] = Counter()
        self.share_out(np.zeros(BLOCKS, np.int64))

    def work(self, number: int) -> None:
        attaches = random.Random(os.getpid()).random() < 0.5
        cache = RadixCache.attach(self.cache.name) if attaches else self.cache
        Victim(cache, self.ledger, self.files, self.stock, self.seats, self.offered_at, number).run_for_ever(
            os.getpid() != 1
        )

    def owners(self) -> dict[int, int]:
        return {int(self.seats["slot"][seat]) + 1: seat for seat in np.flatnonzero(self.seats["pid"] > 0).tolist()}

    def died(self, number: int) -> None:
        seat = self.seats[number]
        self.died_in[DOING[seat["doing"]]] += 1
        self.cut_short += int(seat["doing"] == INSERT)
        self.may_be_missing += int(seat["evicting"])
        if seat["clearing"]:
            self.may_be_missing += BLOCKS
            self.last_clear = time.monotonic_ns()

    def check(self, quiet: bool) -> list[str]:
        if not quiet:
            return [f"verify beside living workers: {violation}" for violation in self.cache.verify()]
        self.cache.reap()
        wrong = [f"verify: {violation}" for violation in self.cache.verify()]
        stats = self.cache.stats()
        if stats.leases or stats.blocks_leased or stats.workers != 1:
            wrong.append(f"after all have died: {stats}")
        views = self.cache._segment.views
        nodes: Any = views.nodes
        live = np.flatnonzero(nodes["born"] != 0)
        live = live[live > self.cache._segment.geometry.max_namespaces]
        in_tree = np.bincount(nodes["block"][live], minlength=BLOCKS)
        held = (self.ledger.held == HELD).any(axis=0)
        acknowledged = (self.ledger.content["stored_at"] != 0) & ~held
        missing = int((acknowledged & (in_tree == 0)).sum())
        if len(in_tree) > BLOCKS or (in_tree > 1).any():
            wrong.append(f"blocks in two nodes: {np.flatnonzero(in_tree > 1).tolist()}")
        if (held & (in_tree > 0)).any():
            wrong.append(f"blocks in a node and in a worker's hands: {np.flatnonzero(held & (in_tree > 0)).tolist()}")
        if missing > self.may_be_missing:
            wrong.append(f"{missing} acknowledged blocks are gone, evictions cut short took {self.may_be_missing}")
        self.lost += int((~held & (in_tree == 0)).sum())
        self.checks += 1
        wrong += check_quiet(self.cache, self.ledger, self.files)
        wrong += [f"{path} is left" for path in Path(self.files).glob(".?*") if path.name != ".lock"]
        wrong += self.check_nodes(acknowledged)
        self.share_out(in_tree)
        self.may_be_missing = 0
        return wrong

    def check_nodes(self, acknowledged: Any) -> list[str]:
        """Every node holds what was noted for its block; every path of this epoch is found by a lookup."""
        views, content, wrong = self.cache._segment.views, self.ledger.content, []
        epoch = int(views.state["epoch"][0])
        cleared = max(self.last_clear, int(self.seats["cleared_at"].max()))
        paths = paths_of(views)
        for node, path in paths.items():
            block = int(views.nodes["block"][node])
            if path.digest != int(content["prefix"][block]):
                wrong.append(f"block {block} of node {node} holds something else than what was inserted")
            hidden = int(views.namespaces["epoch"][path.root]) != epoch
            if hidden and acknowledged[block] and self.offered_at[block] > cleared:
                wrong.append(f"block {block} is hidden, and was inserted after the last clear()")
        leaves = [node for node in paths if not views.nodes["first_child"][node]]
        for node in self.random.sample(leaves, min(len(leaves), 50)):
            path = paths[node]
            if int(views.namespaces["epoch"][path.root]) == epoch:
                wrong += self.look_up(path.nodes, views.namespaces[path.root])
        return wrong[:10]

    def look_up(self, path: list[int], namespace: Any) -> list[str]:
        views = self.cache._segment.views
        salt, keys = (b"tenant" if namespace["salt"].any() else None), views.nodes["block_key"][path]
        tokens, block_keys = views.tokens[path].ravel(), keys if keys.any() else None
        self.found += 1
        with self.cache.lookup(
            tokens, adapter_id=int(namespace["adapter_id"]), salt=salt, block_keys=block_keys
        ) as match:
            right = np.array_equal(match.matched_blocks, views.nodes["block"][path])
        return [] if right else [f"the path of nodes {path} is not found"]

    def share_out(self, in_tree: Any) -> None:
        """Give every id that is in no node to some seat, and take what is in one for acknowledged."""
        out = np.flatnonzero(in_tree == 0)
        self.ledger.held[:] = AWAY
        self.ledger.held[np.arange(len(out)) % len(self.seats), np.random.default_rng(len(out)).permutation(out)] = HELD
        self.ledger.content["stored_at"][out] = 0
        unheard = (in_tree > 0) & (self.ledger.content["stored_at"] == 0)
        self.ledger.content["stored_at"][unheard] = time.monotonic_ns()

    def report(self, kills: int) -> list[str]:
        stats, wrong = self.cache.stats(), []
        line(
            "takeovers",
            f"{stats.recoveries} ({stats.recoveries / max(kills, 1):.1%} of the kills left the guard owned)",
        )
        line("rebuilds", f"{stats.rebuilds}, {stats.rebuild_ns / max(stats.rebuilds, 1) / 1e3:.0f} µs each")
        line("died in", ", ".join(f"{what} {number}" for what, number in self.died_in.most_common()))
        line("inserts", f"{stats.inserts:,}, and {self.cut_short} cut short")
        line("evicted, cleared", f"{stats.evicted_blocks:,} blocks, {int(self.ledger.clears_begun.sum()) // 2} times")
        of_snapshots = int(self.cache._segment.views.guards["recoveries"][1])
        line("of snapshots", f"{of_snapshots} takeovers; {stats.snapshot_saves:,} saved, {stats.snapshot_hits:,} found")
        line("tiers", f"{stats.tier_spills:,} spilled, {stats.tier_hits:,} found there, {stats.tier_fault_ins:,} back")
        line("lost ids", f"{self.lost} in {self.checks} checks of all blocks; {self.found} paths were looked up")
        if kills >= 1000 and not (of_snapshots and stats.tier_fault_ins):
            wrong.append("no kill left the snapshots guard owned, or nothing came back from a tier")
        if kills >= 1000 and not (stats.recoveries and stats.rebuilds):
            wrong.append("no kill left the guard owned: this run says nothing")
        for side in range(SIDES):
            name = f"{self.cache.name}-{side}"
            with contextlib.suppress(SegmentNotFound):
                RadixCache.unlink(name)
            wrong += [f"{path.name} is left in {SHM}" for path in SHM.glob(f"*shmradix.{name}*")]
        return wrong


class Branch(NamedTuple):
    """From a root to a node."""

    root: int
    nodes: list[int]
    running: Any  # the hash of what its blocks hold

    @property
    def digest(self) -> int:
        """As `ledger.digest_chain` has it."""
        return int.from_bytes(self.running.digest(), "little")


def paths_of(views: Any) -> dict[int, Branch]:
    """The path to each node, parents first."""
    live = np.flatnonzero(views.nodes["born"] != 0)
    live = live[live >= len(views.namespaces)]
    paths: dict[int, Branch] = {}
    for node in live[np.argsort(views.nodes["born"][live])].tolist():
        parent = int(views.nodes["parent"][node])
        if parent in paths:
            root, nodes, running = paths[parent]
        else:
            namespace, root, nodes = views.namespaces[parent], parent, []
            salt = b"tenant" if namespace["salt"].any() else None
            running = hashlib.blake2b(repr((int(namespace["adapter_id"]), salt)).encode(), digest_size=8)
        running = running.copy()
        running.update(views.tokens[node].tobytes() + views.nodes["block_key"][node].tobytes())
        paths[node] = Branch(root, [*nodes, node], running)
    return paths


def line(what: str, figure: str) -> None:
    print(f"{what:18}{figure}")
