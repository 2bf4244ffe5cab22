"""What `kills.py --job kv` kills: workers that compute KV into blocks of the cache, and read each other's.

The KV of a block follows from the digest of its prompt up to the block's end, each word of it from its place, too: a
single word of another prompt's block, of another block of the prompt, or of a half-written one is told.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import victims
from ledger import BLOCK_SIZE, Prompt
from numpy.typing import NDArray
from saves import require
from victims import DOING, Stock, beat, line, paths_of, shared_array

from shmradix import Claim, PrefixMatch, RadixCache
from shmradix.errors import NoFreeBlocks

BLOCKS, WORDS = 1024, 512  # of 4 KiB
PROMPTS = 10  # short ones, and long ones: so few that workers want the same at the same time
_STEPS = np.arange(WORDS, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
TOTALS = np.dtype(
    [
        ("computed", "<i8"),  # blocks
        ("duplicates", "<i8"),
        ("read", "<i8"),  # blocks compared
        ("served", "<i8"),  # claims that found the prompt whole after a wait
        ("inherited", "<i8"),  # claims that were this worker's after a wait
        ("gave_up", "<i8"),  # at the deadline
        ("late", "<i8"),  # ns behind it, at most
        ("short", "<i8"),  # allocations refused
    ]
)
SIZES: dict[str, Any] = {
    "num_blocks": BLOCKS, "block_size": BLOCK_SIZE, "block_shape": (WORDS,), "dtype": np.uint64, "max_namespaces": 64,
    "max_claims": 64,
}  # fmt: skip


def kv_of(digests: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The KV of blocks, uint64[n, WORDS]; no word is the same as the one at its place in another block."""
    return np.asarray(digests, np.uint64)[:, None] ^ _STEPS


class KvVictim:
    """A worker under kill: serves prompts from the cache, with all that lies between a claim and the last byte."""

    def __init__(self, cache: RadixCache, prompts: list[Prompt], seats: Any, totals: Any, number: int) -> None:
        self.cache, self.prompts, self.seats, self.seat, self.totals = cache, prompts, seats, seats[number], totals
        self.own: dict[int, int] = {}  # blocks in hand, and the digests that they were filled from
        self.random = random.Random(f"{number} {os.getpid()} {time.monotonic_ns()}")
        random.seed(self.random.random())

    def run_for_ever(self) -> None:
        """Do random operations until the killer is gone."""
        operations: list[tuple[Callable[[], None], int, float]] = [
            (self.serve, victims.CLAIM, 40),
            (self.read, victims.LOOKUP, 40),
            (self.store_unclaimed, victims.INSERT, 4),
            (self.fill, victims.ALLOCATE, 10),
            (self.give_back, victims.ALLOCATE, 8),
            (self.evict_some, victims.EVICT, 4),
            (self.clear, victims.CLEAR, 0.05),
            (self.attach_again, victims.ATTACH, 0.15),
        ]
        weights, killer = [weight for _, _, weight in operations], os.getppid()
        while os.getppid() == killer:
            for operation, what, _ in self.random.choices(operations, weights, k=16):
                self.seat["doing"] = what
                operation()
                self.seat["doing"], self.seat["slot"] = victims.IDLE, self.cache._worker.slot
                beat(self.seat)
        os._exit(0)

    def serve(self) -> None:
        """Claim a prompt, wait for whoever computes it, or compute it."""
        prompt, seconds = self.random.choice(self.prompts), self.random.choice((0.0, 0.001, 0.02, 0.1))
        with self.cache.claim(prompt.tokens, **where(prompt)) as claim:
            has_waited, begun = claim.is_waiting, time.monotonic_ns()
            claim.wait(seconds)
            if claim.match is None:
                self.totals["gave_up"] += 1
                self.totals["late"] = max(int(self.totals["late"]), time.monotonic_ns() - begun - int(seconds * 1e9))
                return
            self.totals["inherited" if claim.is_mine else "served"] += has_waited
            self.check(prompt, claim.match)
            if claim.is_mine:
                self.compute(prompt, claim, claim.match)

    def store_unclaimed(self) -> None:
        """Compute what is missing of a prompt, whoever else does."""
        prompt = self.random.choice(self.prompts)
        with self.cache.lookup(prompt.tokens, **where(prompt)) as match:
            own = self.allocate(prompt.full_blocks - len(match.matched_blocks))
            if own is not None and prompt.full_blocks:
                self.write(own, prompt.chain[len(match.matched_blocks) + 1 :])
                acquired = self.cache.insert(
                    prompt.tokens, np.concatenate([match.matched_blocks, own]), match=match, **where(prompt)
                )
                self.totals["duplicates"] += len(acquired.duplicates)
                self.cache.free(np.setdiff1d(own, acquired.blocks))

    def compute(self, prompt: Prompt, claim: Claim, match: PrefixMatch) -> None:
        """Fill blocks for what is missing, and insert them, perhaps in two parts; what was stored must be found."""
        known, clears = len(match.matched_blocks), self.clears()
        own = self.allocate(prompt.full_blocks - known)
        if own is None:
            return
        self.write(own, prompt.chain[known + 1 :])
        table, stored, reached = np.concatenate([match.matched_blocks, own]), set(), 0
        self.seat["doing"] = victims.INSERT
        for end in sorted({self.random.randint(known + 1, prompt.full_blocks), prompt.full_blocks}):
            acquired = claim.insert(table[:end], num_tokens=min(end * BLOCK_SIZE, len(prompt.tokens)))
            stored |= {*acquired.blocks.tolist()}
            reached = acquired.inserted_tokens
            self.totals["duplicates"] += len(acquired.duplicates)
        self.totals["computed"] += len(own)
        self.cache.free([block for block in own.tolist() if block not in stored])
        with self.cache.lookup(prompt.tokens, **where(prompt)) as again:
            self.check(prompt, again)
            require(again.matched_tokens >= reached or clears != self.clears(), f"{again!r}, inserted were {reached}")

    def read(self) -> None:
        prompt = self.random.choice(self.prompts)
        with self.cache.lookup(prompt.tokens, **where(prompt)) as match:
            self.check(prompt, match)

    def fill(self) -> None:
        """Keep some blocks, filled with what nobody else writes."""
        if len(self.own) < BLOCKS // 32 and (blocks := self.allocate(self.random.randint(1, 12))) is not None:
            digests = np.random.default_rng(self.random.getrandbits(64)).integers(1, 1 << 63, len(blocks), np.uint64)
            self.write(blocks, digests)
            self.own |= zip(blocks.tolist(), digests.tolist())

    def give_back(self) -> None:
        """Free what was kept, if nobody has written on it."""
        blocks, digests = [*self.own], np.array([*self.own.values()], np.uint64)
        require(np.array_equal(self.cache.kv.gather(blocks), kv_of(digests)), f"another wrote on {blocks}")
        self.own.clear()
        self.cache.free(blocks)

    def evict_some(self) -> None:
        self.cache.evict(self.random.randint(1, 64))

    def clear(self) -> None:
        self.seat["clearing"] = 1
        self.cache.clear()
        self.seat["cleared_at"] = time.monotonic_ns()
        self.seat["clearing"] = 0

    def attach_again(self) -> None:
        """Close with blocks in hand, and attach anew."""
        self.own.clear()
        self.seat["slot"] = -1
        self.cache.close()
        self.cache = RadixCache.attach(self.cache.name)

    def clears(self) -> int:
        """Differs from what it was before if a clear may have hidden anything in between."""
        return -time.monotonic_ns() if self.seats["clearing"].any() else int(self.seats["cleared_at"].max())

    def allocate(self, count: int) -> NDArray[np.uint32] | None:
        """None where too few are free or evictable."""
        with contextlib.suppress(NoFreeBlocks):
            return self.cache.allocate(count)
        self.totals["short"] += 1
        return None

    def write(self, blocks: NDArray[np.uint32], digests: NDArray[np.uint64]) -> None:
        """Write blocks in place, or copy them in."""
        if self.random.random() < 0.5:
            self.cache.kv.scatter(blocks, kv_of(digests))
            return
        for block, row in zip(blocks.tolist(), kv_of(digests), strict=True):
            self.cache.kv[block][:] = row
        if self.cache._segment.geometry.checksums:
            self.cache.kv.seal(blocks)

    def check(self, prompt: Prompt, match: PrefixMatch) -> None:
        """Every word of every matched block must be the prompt's."""
        known = len(match.matched_blocks)
        right = np.array_equal(self.cache.kv.gather(match.matched_blocks), kv_of(prompt.chain[1 : known + 1]))
        require(right, f"blocks {match.matched_blocks} hold something else than {prompt.tokens.tolist()}")
        self.totals["read"] += known


class KvJob:
    """One cache with managed blocks and their KV."""

    def __init__(self, cache: RadixCache, seats: Any, seed: int) -> None:
        self.cache, self.seats = cache, seats
        self.words = [cache._segment.views.guards["owner"][:1].data]
        self.totals, self.prompts = shared_array(TOTALS, len(seats)), Stock(seed).few(PROMPTS)
        self.died_in: Counter[str] = Counter()
        self.compared = 0
        cache.kv.gather([])  # maps them

    def work(self, number: int) -> None:
        KvVictim(self.cache, self.prompts, self.seats, self.totals[number], number).run_for_ever()

    def owners(self) -> dict[int, int]:
        return {int(self.seats["slot"][seat]) + 1: seat for seat in np.flatnonzero(self.seats["pid"] > 0).tolist()}

    def died(self, number: int) -> None:
        self.died_in[DOING[self.seats["doing"][number]]] += 1

    def check(self, quiet: bool) -> list[str]:
        if not quiet:
            return [f"verify beside living workers: {violation}" for violation in self.cache.verify()]
        self.cache.reap()
        wrong = [f"verify: {violation}" for violation in self.cache.verify()]
        stats, views = self.cache.stats(), self.cache._segment.views
        claims = np.flatnonzero(views.claims["born"])
        if stats.leases or stats.blocks_leased or stats.blocks_private or stats.workers != 1 or len(claims):
            wrong.append(f"after all have died: {stats}, claims {claims.tolist()}")
        if stats.blocks_free + stats.blocks_live != BLOCKS:
            wrong.append(f"{stats.blocks_free} blocks are free, {stats.blocks_live} stored, of {BLOCKS}")
        paths = paths_of(views)
        blocks, digests = views.nodes["block"][[*paths]], [path.digest for path in paths.values()]
        right = (self.cache.kv.gather(blocks) == kv_of(np.array(digests, np.uint64))).all(axis=1)
        self.compared += len(blocks)
        return wrong + [f"block {block} holds something else than its node" for block in blocks[~right][:10].tolist()]

    def report(self, kills: int) -> list[str]:
        total = {field: int(self.totals[field].sum()) for field in TOTALS.names or ()}
        stats = self.cache.stats()
        line("takeovers", f"{stats.recoveries}, of the guard; {stats.rebuilds} rebuilds")
        line("died in", ", ".join(f"{what} {count}" for what, count in self.died_in.most_common()))
        line("blocks", f"{total['computed']:,} computed, {total['duplicates']:,} twice; {total['short']:,} refusals")
        line("compared", f"{total['read']:,} read beside writers, {self.compared:,} after all had died")
        line("waits", f"{total['served']:,} served, {total['inherited']:,} inherited, {total['gave_up']:,} given up")
        line("given up late", f"{int(self.totals['late'].max()) / 1e6:.0f} ms behind the deadline, at most")
        return []


def where(prompt: Prompt) -> dict[str, Any]:
    """What a prompt's tokens don't say."""
    return {"adapter_id": prompt.adapter_id, "salt": prompt.salt, "block_keys": prompt.block_keys}
