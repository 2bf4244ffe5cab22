"""What is done with a damaged image, and which answers are allowed. As a program: a process that does many, one by one.

    python -m tests.hostile_calls '{"seed": 1, "first": 0, "count": 100, "step": 1, "name": "...", "plant": {}}'

It says on its standard output which image it begins, and what came of it, each a line of JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import itertools
import json
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from shmradix import PrefixMatch, RadixCache, errors, layout, locks, segment, verify
from shmradix.inputs import as_namespace
from shmradix.layout import Geometry
from shmradix.owner_word import owner_of
from shmradix.prefix_hash import prefix_hashes
from shmradix.results import Spill
from shmradix.snapshot_methods import PendingSnapshot
from tests.hostile_bases import SESSION, A, B, Prompt
from tests.hostile_images import Image, Plan

PROCESSOR_SECONDS = 2.0  # for an image; more is a hang
TIMEOUT = 0.5  # of the handle: nobody else has the guard, so whoever waits that long would wait for ever
DERIVED = (*range(10, 17), 30)  # the invariants that follow from truth
ADDRESS_SPACE = 1 << 30  # that may be added to what is mapped before the first image
NEW = list(range(500, 512))
REFUSALS = (errors.SegmentForeign, errors.LayoutMismatch)  # the segment stays as it is
ALLOWED = (
    errors.CorruptSegment, errors.LeasesFull, errors.NamespacesFull, errors.LeaseError, errors.SnapshotsFull,
    errors.SlotsFull, errors.SlotError, errors.NoFreeBlocks, errors.BlockError,
    errors.ClaimsFull, errors.ClaimError,
)  # fmt: skip


class Wrong(Exception):
    """An answer that can't be."""


def require(holds: object, message: str) -> None:
    if not holds:
        raise Wrong(message)


# --- the oracle -------------------------------------------------------------------------------------------------


class Truth:
    """What an image holds, by its truth alone. Records that are dead count too if `dead`."""

    def __init__(self, views: Any, geometry: Geometry, dead: bool = False) -> None:
        self.views, self.geometry = views, geometry
        self.lives = np.ones(len(views.nodes), bool) if dead else views.nodes["born"] != 0

    def roots(self, prompt: Prompt) -> set[int]:
        """The roots of the prompt's namespace in the current epoch."""
        wanted, records = as_namespace(prompt.adapter_id, prompt.salt), self.views.namespaces
        same = (records["adapter_id"] == wanted[0]) & (records["salt"] == wanted[1:]).all(axis=1)
        same &= (records["epoch"] == self.views.state["epoch"][0]) & self.lives[: len(records)]
        return set(np.flatnonzero(same).tolist()) - {0}

    def below(self, parents: set[int], prompt: Prompt, depth: int, agree: int) -> np.ndarray:
        """The nodes below one of these parents that agree with so many tokens of the prompt's block `depth`."""
        start, nodes, keys = depth * self.geometry.block_size, self.views.nodes, prompt.block_keys or []
        key = keys[depth] if depth < len(keys) else 0
        same = self.lives & (nodes["block_key"] == key) & np.isin(nodes["parent"], list(parents))
        wanted = np.array(prompt.tokens[start : start + agree], np.uint32)
        same &= (self.views.tokens[:, :agree] == wanted).all(axis=1)
        same[: 1 + self.geometry.max_namespaces] = False
        return np.flatnonzero(same)

    def ends(self, prompt: Prompt, blocks: list[int]) -> set[int]:
        """Where the paths end from the prompt's root that hold just these blocks and the prompt's tokens."""
        found = self.roots(prompt)
        for depth, block in enumerate(blocks):
            below = self.below(found, prompt, depth, self.geometry.block_size)
            found = set(below[self.views.nodes["block"][below] == block].tolist())
        return found

    def depth(self, prompt: Prompt) -> int:
        """How many blocks of the prompt are stored."""
        found = self.roots(prompt)
        for depth in range(len(prompt.tokens) // self.geometry.block_size):
            found = set(self.below(found, prompt, depth, self.geometry.block_size).tolist())
            if not found:
                return depth
        return len(prompt.tokens) // self.geometry.block_size


def flaw_of_match(truth: Truth, prompt: Prompt, match: PrefixMatch) -> str:
    """What is wrong with an answer, "" if it is what the image holds."""
    size, blocks = truth.geometry.block_size, match.matched_blocks.tolist()
    depth, agree = len(blocks), match.partial_tokens
    if match.matched_tokens != depth * size or depth * size > len(prompt.tokens):
        return f"lengths: {match!r} of {depth} blocks"
    if not 0 <= agree <= min(size, len(prompt.tokens) - depth * size) or (match.partial_block is None) != (agree == 0):
        return f"partial tokens: {match!r} of block {match.partial_block}"
    ends = truth.ends(prompt, blocks)
    if blocks and not ends:
        return f"blocks {blocks} hold something else"
    if agree:
        below = truth.below(ends, prompt, depth, agree)
        if match.partial_block not in truth.views.nodes["block"][below]:
            return f"below depth {depth}: the first {agree} tokens of block {match.partial_block} are others"
    return ""


# --- the calls --------------------------------------------------------------------------------------------------


class Visit:
    """An attached worker that makes every call, each judged by what the segment held before it."""

    def __init__(self, image: Image, cache: RadixCache) -> None:
        self.image, self.cache, self.geometry = image, cache, cache._segment.geometry
        self.bytes = np.ndarray(self.geometry.size, np.uint8, cache._segment._map)
        self.said: Counter[str] = Counter()
        self.match: tuple[Prompt, Any] | None = None
        self.slots: set[int] = set()  # what the cache gave this worker, and is in no snapshot
        self.pending: list[PendingSnapshot] = []
        self.keys: list[int] = [5, *self.before().snapshots["tier_key"].tolist()]
        self.next_slot = itertools.count(5000)
        self.blocks: set[int] = set()  # what the cache gave this worker, and is in no node

    def before(self) -> Any:
        return self.geometry.views(self.bytes.copy())

    def truth(self) -> Truth:
        return Truth(self.before(), self.geometry)

    def fitted(self, prompt: Prompt) -> Prompt:
        """The prompt with as many block keys as it has blocks here, where blocks may have another size."""
        if prompt.block_keys is None:
            return prompt
        keys = [*prompt.block_keys, *[0] * len(prompt.tokens)]
        return prompt._replace(block_keys=keys[: len(prompt.tokens) // self.geometry.block_size])

    def lookup(self, prompt: Prompt) -> None:
        truth = self.truth()
        match = self.cache.lookup(prompt.tokens, session=SESSION, **prompt.named())
        self.match = (prompt, match)
        self.check_anchor(prompt, match, truth.views)
        flaw = flaw_of_match(truth, prompt, match)
        if flaw:
            is_of_dead = not flaw_of_match(Truth(truth.views, self.geometry, dead=True), prompt, match)
            raise Wrong(("DEAD MATCH: " if is_of_dead else "WRONG MATCH: ") + flaw)

    def check_anchor(self, prompt: Prompt, match: Any, views: Any) -> None:
        """Whether the state that the match named is one of a prefix of the prompt, in a slot that there is."""
        slot, key, tokens = match.snapshot_slot, match.snapshot_tier_key, match.snapshot_tokens
        if slot is None and key is None:
            require(not tokens and not match.snapshot_tier_tokens, f"tokens without a state: {match._anchor}")
            return
        tokens += match.snapshot_tier_tokens
        record, keys = views.snapshots, np.array(prompt.block_keys or [], np.uint64)
        size, seed = self.geometry.block_size, int(views.header["hash_seed"][0])
        hash_ = prefix_hashes(seed, np.array(prompt.tokens, np.uint32), keys, size, [tokens])[0]
        same = (record["born"] != 0) & (record["token_count"] == tokens) & (record["prefix_hash"] == hash_).all(axis=1)
        wanted = as_namespace(prompt.adapter_id, prompt.salt)
        same &= (record["adapter_id"] == wanted[0]) & (record["salt"] == wanted[1:]).all(axis=1)
        same &= record["tier_key"] == (key or 0)
        if slot is not None:
            same &= record["slot"] == slot
            slots = self.geometry.snapshot_slots
            require(not slots or slot < slots, f"STATE NOWHERE: slot {slot} of {slots}")
        require(same.any(), f"WRONG STATE: {match._anchor}")
        require(0 < tokens <= match.matched_tokens, f"a state after {tokens} of {match.matched_tokens} tokens")

    def got(self, *slots: int) -> None:
        """Note slots that a call returned: they are this worker's now, and nobody else's."""
        views, managed = self.before(), self.geometry.snapshot_slots
        record = views.snapshots[: max(1, int(views.snapshot_state["snapshots_used"][0]))]
        resident = record["slot"][1:][(record["born"][1:] != 0) & (record["tier_key"][1:] == 0)].tolist()
        for slot in slots:
            require(slot not in self.slots, f"SLOT TWICE: {slot} was given out before")
            require(slot not in resident, f"SLOT TWICE: {slot} is in the index")
            require(not managed or slot < managed, f"SLOT NOWHERE: {slot} of {managed}")
            self.slots.add(slot)

    def allocate(self, **how: bool) -> None:
        self.got(self.cache.allocate_snapshot_slot(**how))

    def slot(self) -> int:
        """One to save in."""
        if not self.geometry.snapshot_slots:
            return next(self.next_slot)
        if not self.slots:
            self.allocate()
        return min(self.slots)

    def save(self, prompt: Prompt, kind: str) -> None:
        slot, named = self.slot(), {**prompt.named(), "session": SESSION}
        pending = self.cache.reserve_snapshot(prompt.tokens, slot, kind=kind, **named)
        self.slots.discard(slot)
        if kind == "finish":
            self.pending.append(pending)
            return
        self.got(*pending.commit())

    def insert_with_snapshot(self, prompt: Prompt) -> None:
        slot, full = self.slot(), len(prompt.tokens) // self.geometry.block_size
        self.slots.discard(slot)
        self.got(
            *self.cache.insert_with_snapshot(prompt.tokens, list(range(3000, 3000 + full)), slot, **prompt.named())[0]
        )

    def settle(self, commit: bool) -> None:
        for pending in self.pending:
            if commit:
                self.got(*pending.commit())
            else:
                pending.abort()
        self.pending.clear()

    def spill(self, pending: bool) -> None:
        done = self.cache.evict_snapshot_to_tier(pending=pending)
        if done is not None:
            self.got(done.slot)
            self.keys += [done.key] if isinstance(done, Spill) else []

    def promote(self) -> None:
        for key in self.keys:
            slot = self.slot()
            self.slots.discard(slot)
            if not self.cache.promote_snapshot(key, slot):
                self.got(slot)

    def tier(self) -> None:
        for key in self.keys:
            self.cache.commit_snapshot_spill(key)
            self.cache.forget_snapshot_tier_key(key)

    def evict_snapshots(self, count: int) -> None:
        for _ in range(count):
            if (slot := self.cache.evict_snapshot_lru()) is not None:
                self.got(slot)

    def free_slots(self) -> None:
        while self.slots and self.geometry.snapshot_slots:
            self.cache.free_snapshot_slot(self.slots.pop())

    def restorable(self) -> None:
        if self.match is not None and not self.match[1].released:
            found = self.match[1].restorable
            require(found == sorted(found) and max(found, default=0) <= len(self.match[0].tokens), f"{found}")

    def clear(self) -> None:
        taken: list[int] = []

        def clear() -> Any:
            blocks = self.cache.clear()
            taken.extend(blocks.snapshot_slots.tolist())
            return blocks

        self.evict(clear, self.geometry.max_blocks)
        self.got(*taken)

    def peek(self, prompt: Prompt) -> None:
        truth, size = self.truth(), self.geometry.block_size
        matched = self.cache.peek_matched_tokens(prompt.tokens, **prompt.named())
        require(matched % size == 0 and 0 <= matched <= len(prompt.tokens), f"{matched} tokens")
        if matched > truth.depth(prompt) * size:
            is_of_dead = matched <= Truth(truth.views, self.geometry, dead=True).depth(prompt) * size
            raise Wrong(f"{'DEAD' if is_of_dead else 'WRONG'} PEEK: {matched}, stored are {truth.depth(prompt) * size}")

    def insert(self, prompt: Prompt, **more: Any) -> None:
        size = self.geometry.block_size
        table = self.table(len(prompt.tokens) // size)
        try:
            done = self.cache.insert(prompt.tokens, table, disk_block_ids=table, **{**prompt.named(), **more})
        except ValueError as error:
            require("do not start with the prompt" in str(error), f"ValueError: {error}")
            return
        except errors.CorruptSegment:
            self.blocks -= {*table}  # a part may be in the tree
            raise
        given = Counter(done.blocks.tolist() + done.duplicates.tolist())
        self.blocks -= {*done.blocks.tolist()}
        require(set(given) <= set(table) and max(given.values(), default=0) <= 1, f"{done}")
        require(done.inserted_tokens % size == 0 and 0 <= done.inserted_tokens <= len(prompt.tokens), f"{done}")
        truth = self.truth()
        stored = truth.depth(prompt) * size
        require(done.inserted_tokens <= stored, f"LOST INSERT: {done.inserted_tokens} tokens, stored are {stored}")
        lost = set(done.blocks.tolist()) - set(truth.views.nodes["block"][truth.lives].tolist())
        require(not lost, f"LOST INSERT: took blocks {lost}, and no node has them")

    def table(self, count: int) -> list[int]:
        """Blocks to store."""
        if not self.geometry.num_blocks:
            return list(range(2000, 2000 + count))
        while len(self.blocks) < count:
            self.allocate_blocks(1)
        return sorted(self.blocks)[:count]

    def allocate_blocks(self, count: int) -> None:
        before = self.before()
        given = self.cache.allocate(count).tolist() if count <= self.geometry.num_blocks else []
        views, others = self.before(), before.blocks["worker"]
        first, used = 1 + self.geometry.max_namespaces, int(views.state["nodes_used"][0])
        nodes, then = views.nodes[first:used], before.nodes[first:used]
        stored = {*nodes["block"][nodes["born"] != 0].tolist()}
        evicted = {*then["block"][(then["born"] != 0) & (nodes["born"] == 0)].tolist()}
        for block in given:
            require(block < self.geometry.num_blocks, f"BLOCK NOWHERE: {block}")
            require(block not in self.blocks, f"BLOCK TWICE: {block} was given out before")
            # One that was known as free, or another node's, and that a node has all the same: that is what is damaged.
            is_known = others[block] == 0 or block in evicted
            require(block not in stored or is_known, f"BLOCK TWICE: {block} is in the tree")
            is_anothers = self.image.are_alive and int(others[block]) - 1 in self.image.base.slots
            require(not is_anothers or self.image.is_dirty, f"BLOCK TWICE: {block} is a worker's")
            self.blocks.add(block)

    def free_blocks(self) -> None:
        blocks, self.blocks = self.blocks, set()
        self.cache.free(sorted(blocks))

    def claim(self, prompt: Prompt) -> None:
        """Claim the rest of a prompt, or see that a claim of a live worker's is on it; insert it in two parts."""
        truth, size = self.truth(), self.geometry.block_size
        blocks = len(prompt.tokens) // size
        with self.cache.claim(prompt.tokens, **prompt.named()) as claim:
            claim.wait(0)
            if claim.is_waiting:
                record = truth.views.claims[1:]
                others = record[(record["born"] != 0) & (record["epoch"] == truth.views.state["epoch"][0])]
                ends = {*others["token_count"].tolist(), *others["next_count"].tolist()}
                require(any(0 < end <= blocks * size for end in ends), f"WAITS FOR NOBODY: {claim!r}")
                return
            require(claim.match is not None and claim.match.matched_tokens <= blocks * size, f"{claim!r}")
            require(claim.is_mine or claim.match.matched_tokens == blocks * size, f"NOBODY'S, yet missing: {claim!r}")
            if claim.is_mine:
                known = claim.match.matched_blocks.tolist()
                table = [*known, *(block for block in self.table(2 * blocks) if block not in known)][:blocks]
                self.blocks -= {*table}  # whatever comes of them
                if len({*table}) < len(table) or max(table) >= layout.NO_BLOCK:
                    return  # the damage is in what was matched: no table that an engine has
                for count in (claim.match.matched_tokens + size, len(prompt.tokens)):
                    claim.insert(table[: count // size], num_tokens=min(count, len(prompt.tokens)))

    def insert_match(self) -> None:
        if self.match is not None:
            prompt, match = self.match
            longer = prompt._replace(tokens=[*prompt.tokens, *NEW], block_keys=None)
            if prompt.block_keys is None:
                self.insert(longer, match=match, adapter_id=0, salt=None)

    def evict(self, call: Callable[[], Any], limit: int) -> None:
        views, kept = self.before(), [block for rows, _ in self.cache._worker.unreturned for block in rows[0].tolist()]
        taken = call().blocks.tolist()
        require(len(taken) <= limit + len(kept), f"{len(taken)} blocks evicted, at most {limit} wanted")
        there = Counter(views.nodes["block"].tolist() + kept)  # `kept`: by a call that then met the damage
        extra = Counter(taken) - there
        require(not extra, f"evicted blocks {dict(extra)} more often than they were stored")

    def stats(self) -> None:
        stats, geometry = self.cache.stats(), self.geometry
        sane = 0 <= stats.blocks_leased <= stats.blocks_live <= geometry.max_blocks
        sane &= stats.blocks_evictable == stats.blocks_live - stats.blocks_leased
        if geometry.num_blocks:
            sane &= 0 <= stats.blocks_free <= geometry.num_blocks and 0 <= stats.blocks_private <= geometry.num_blocks
        else:
            sane &= stats.blocks_free == geometry.max_blocks - stats.blocks_live
        sane &= 0 <= stats.snapshots_tiered <= stats.snapshots <= geometry.max_snapshots
        sane &= 0 <= stats.leases <= geometry.max_leases and 0 <= stats.namespaces <= geometry.max_namespaces
        require(sane and 0 <= stats.workers <= geometry.max_workers, f"{stats}")

    def verify(self) -> None:
        require(isinstance(self.cache.verify(), list), "verify returns no list")

    def calls(self) -> list[tuple[str, Callable[[], None]]]:
        """All calls in an order of the image's own."""
        prompts = [self.fitted(prompt) for prompt in self.image.base.prompts]
        any_of, most = self.image.any_of, self.geometry.max_blocks
        other, deeper = Prompt(B, salt=b"another"), any_of(prompts)
        deeper, mine = deeper._replace(tokens=[*deeper.tokens, *NEW], block_keys=None), any_of(prompts)
        plan = [
            *((f"lookup {p}", lambda p=p: self.lookup(p)) for p in prompts),
            *((f"peek {p}", lambda p=p: self.peek(p)) for p in prompts),
            ("insert new", lambda: self.insert(Prompt(NEW))),
            ("insert below", lambda: self.insert(deeper)),
            ("insert namespace", lambda: self.insert(other)),
            ("insert matched", lambda: self.insert(Prompt([*A, *NEW]), matched_tokens=self.geometry.block_size)),
            ("insert match", self.insert_match),
            ("release", lambda: self.cache.release(mine.tokens, **mine.named())),
            ("release matched", lambda: self.cache.release_matched(mine.tokens, 4, **mine.named())),
            ("release match", lambda: self.match and self.match[1].release()),
            ("evict", lambda: self.evict(lambda: self.cache.evict(2), 2)),
            ("evict all", lambda: self.evict(lambda: self.cache.evict(10**6), most)),
            ("clear", self.clear),
            ("stats", self.stats), ("reap", lambda: require(self.cache.reap() >= 0, "reap")), ("verify", self.verify),
        ]  # fmt: skip
        if self.geometry.num_blocks:
            plan += [
                (f"allocate {count} blocks", lambda count=count: self.allocate_blocks(count)) for count in (2, 9, most)
            ]
            plan.append(("free blocks", self.free_blocks))
        if self.geometry.max_claims:
            plan += [(f"claim {p}", lambda p=p: self.claim(p)) for p in (*prompts, Prompt(NEW), deeper)]
        if self.geometry.max_snapshots:
            plan += self.snapshot_calls(prompts)
        order = self.image.chance.permutation(len(plan)).tolist()
        again = [*((f"lookup {p}, after all", lambda p=p: self.lookup(p)) for p in prompts), ("verify", self.verify)]
        return [plan[i] for i in order] + again

    def snapshot_calls(self, prompts: list[Prompt]) -> list[tuple[str, Callable[[], None]]]:
        """Those of the snapshot index."""
        plan: list[tuple[str, Callable[[], None]]] = [
            *((f"save {kind}", lambda kind=kind: self.save(self.image.any_of(prompts), kind))  # type: ignore[misc]
              for kind in ("plain", "tail", "sibling", "finish", "finish")),
            ("insert with snapshot", lambda: self.insert_with_snapshot(Prompt(NEW))),
            ("commit", lambda: self.settle(True)), ("abort", lambda: self.settle(False)),
            ("evict snapshots", lambda: self.evict_snapshots(2)),
            ("evict all snapshots", lambda: self.evict_snapshots(20)),
            ("spill", lambda: self.spill(False)), ("spill, pending", lambda: self.spill(True)),
            ("promote", self.promote), ("tier", self.tier), ("restorable", self.restorable),
            ("free slots", self.free_slots),
            ("count", lambda: require(0 <= self.cache.snapshot_count() <= self.geometry.max_snapshots, "count")),
        ]  # fmt: skip
        if self.geometry.snapshot_slots:
            plan += [("allocate", self.allocate), ("allocate all", lambda: [self.allocate() for _ in range(20)]),  # type: ignore[func-returns-value, list-item]
                     ("allocate to finish", lambda: self.allocate(finish=True))]  # fmt: skip
        return plan

    def make(self) -> Iterator[str]:
        """Make all calls; what is wrong, if anything."""
        header = bytes(self.bytes[: layout.HEADER.itemsize])
        for name, call in self.calls():
            try:
                call()
                self.said["answer"] += 1
            except ALLOWED as error:
                self.said[type(error).__name__] += 1
            except Exception as error:
                yield f"{name}: {_told(error)}"
        require(bytes(self.bytes[: layout.HEADER.itemsize]) == header, "the header was written to")
        end = self.bytes.ctypes.data + len(self.bytes)
        require(not any(ctypes.string_at(end, -end % 4096)), "something was written behind the segment's end")

    def check_rebuilt(self) -> Iterator[str]:
        """A rebuild leaves derived data sound. On sound truth, all is, and what was there is found."""
        if not self.image.is_rebuilt and not self.image.is_dirty:
            return
        found = [violation for violation in self.cache.verify() if self.image.is_rebuilt or violation.number in DERIVED]
        if found:
            yield f"after a rebuild: {found}"
        if not self.image.is_rebuilt:
            return
        whole = Truth(self.geometry.views(self.image.base.image), self.geometry)
        for prompt in self.image.base.prompts:
            depth = whole.depth(prompt) * self.geometry.block_size
            peeked = self.cache.peek_matched_tokens(prompt.tokens, **prompt.named())
            if peeked != depth:
                yield f"after a rebuild: {prompt}: {peeked} tokens found, {depth} stored"


def _told(error: BaseException) -> str:
    if isinstance(error, Wrong):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"UNTYPED {type(error).__name__}: {error} ({os.path.basename(frame.filename)}:{frame.lineno})"


# --- one image --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def laid_out(name: str, image: Image) -> Iterator[None]:
    """The image as the segment `name`, its workers alive if they are to be."""
    path = segment.path_of(name)
    path.write_bytes(image.data.tobytes())
    path.chmod(0o600)
    try:
        with io.FileIO(path, "r+") as file:
            for slot in image.base.slots if image.are_alive else ():
                locks.try_lock(file, locks.FIRST_WORKER_BYTE + slot)
            yield
    finally:
        path.unlink()
        if len(image.data) >= layout.HEADER.itemsize:
            header = image.data[: layout.HEADER.itemsize].view(layout.HEADER)
            for which in layout.SEMAPHORES:
                incarnation = int(header["incarnation"][0])
                (segment.SHM / f"sem.shmradix.{name}.{incarnation:016x}.{which}").unlink(missing_ok=True)


def _has_live_owner(image: Image) -> bool:
    for word in image.views.guards["owner"].tolist():
        slot, generation = owner_of(word)
        is_held = image.are_alive and slot in image.base.slots
        if is_held and int(image.views.workers["generation"][slot]) == generation:
            return True
    return False


def judge(name: str, image: Image) -> tuple[str, list[str]]:
    """Lay the image out, attach, make all calls: the outcome, and what was wrong."""
    wrong: list[str] = []
    with laid_out(name, image):
        try:
            cache = RadixCache.attach(name, lock_timeout=TIMEOUT)
        except REFUSALS as error:
            if segment.path_of(name).read_bytes() != image.data.tobytes():
                wrong.append(f"refused with {error!r}, yet changed")
            return type(error).__name__, wrong
        except errors.LockTimeout as error:
            return "LockTimeout", [] if _has_live_owner(image) else [f"attach: HANG without lock_timeout: {error}"]
        except errors.WorkersFull as error:
            return "WorkersFull", [] if image.are_alive else [f"attach: {error}"]
        except errors.CorruptSegment:
            return "CorruptSegment at attach", wrong
        except Exception as error:
            return "?", [f"attach: {_told(error)}"]
        visit = Visit(image, cache)
        try:
            if not isinstance(verify.check(visit.before(), visit.geometry), list):
                wrong.append("verify.check returns no list")
            wrong += [*visit.check_rebuilt(), *visit.make()]
        except Exception as error:
            wrong.append(_told(error))
        del visit.bytes
        try:
            cache.close()
        except ALLOWED as error:
            visit.said[type(error).__name__] += 1
        except Exception as error:
            wrong.append(f"close: {_told(error)}")
    return "CorruptSegment" if visit.said["CorruptSegment"] else "answered", wrong


# --- many images ------------------------------------------------------------------------------------------------


def _status(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def plant(what: str, image: Image) -> None:
    """Behave as a broken package would, for the tests of the tests."""
    if what == "signal":
        ctypes.string_at(0)
    elif what == "loop":
        while True:
            pass
    elif what == "sleep":
        time.sleep(3600)
    elif what == "memory":
        np.ones(_status("VmRSS") * 2, np.uint8)
    elif what == "leak":
        os.dup(0)


def main(job: dict[str, Any]) -> None:
    """Do the images of the job."""

    def say(**what: Any) -> None:
        os.write(1, (json.dumps(what) + "\n").encode())

    warnings.simplefilter("error", RuntimeWarning)  # numpy's, of an overflow
    plan, name = Plan(job["seed"], job["name"]), job["name"]
    judge(name, Image(-1, plan.bases[0], np.random.default_rng(0)))  # everything is loaded
    descriptors, memory, limit = len(os.listdir("/proc/self/fd")), _status("VmRSS"), _status("VmSize") + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for number in range(job["first"], job["count"], job["step"]):
        image = plan.image(number)
        say(begins=number, kind=image.kind, base=image.base.name)
        signal.setitimer(signal.ITIMER_PROF, PROCESSOR_SECONDS)
        plant(job.get("plant", {}).get(str(number), ""), image)
        outcome, wrong = judge(name, image)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if len(os.listdir("/proc/self/fd")) != descriptors:
            wrong.append("descriptors are left open")
            descriptors = len(os.listdir("/proc/self/fd"))
        if _status("VmHWM") > 2 * memory:
            wrong.append(f"memory grew to {_status('VmHWM'):,} bytes from {memory:,}")
            memory = _status("VmHWM")
        say(ends=number, outcome=outcome, wrong=wrong)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
