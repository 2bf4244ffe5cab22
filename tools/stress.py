"""Several real processes hammer one cache while every answer is checked against what was stored.

Each worker writes what a block or a snapshot's slot holds into a ledger (a mapped temporary file of its own, apart
from the cache) before it inserts it, and checks every match against the ledger while the match is leased.
At the end all leases must be gone, every block id must be either in one worker's hands or in one node, and every slot
free or in one snapshot.
Exit status 1 means that something was wrong; the first lines of the output say what.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
from ledger import AWAY, BLOCK_SIZE, COUNTERS, HELD, MOST_BLOCKS, OFFERED, Ledger, Prompt, Prompts, disk_ids_of
from numpy.typing import NDArray
from saves import SIZES, Saver, check_quiet, require

from shmradix import NO_DISK, EvictedBlocks, InsertAcquired, PrefixMatch, RadixCache, Stats
from shmradix.layout import RETENTIONS

MOST_OPEN_REQUESTS = 6
MOST_WORKERS = 63  # the cache has 64 slots, and we hold one
MOST_IDS = 1_000_000  # the ledger has a byte for each and each worker


@dataclass
class Request:
    """A match under lease and the blocks known to be pinned by it, by their place in the prompt."""

    prompt: Prompt
    match: PrefixMatch
    clears: int  # begun before the lookup
    blocks: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    extended: bool = False  # from then on the lease pins what was inserted, and the partly matching block no more


class Worker:
    """One process's share of the work: its blocks, its open requests, its checks."""

    def __init__(self, cache: RadixCache, ledger: Ledger, files: str, number: int, seed: int) -> None:
        self.cache = cache
        self.ledger = ledger
        self.number = number
        self.prompts = Prompts(seed, number)
        self.random = random.Random(f"{seed} {number} {os.getpid()} {time.monotonic_ns()}")
        self.free: list[int] = np.flatnonzero(ledger.held[number] == HELD).tolist()
        self.open: list[Request] = []
        self.saver = Saver(self, files)

    def run(self, deadline: float) -> None:
        """Do random operations until the monotonic time `deadline`, then give all leases back."""
        operations: list[tuple[Callable[[], None], float]] = [
            (self.start_request, 40),
            (self.finish_request, 40),
            (self.store_without_match, 8),
            (self.peek, 8),
            (self.evict_some, 3),
            (self.saver.save, 8),
            (self.saver.settle, 3),
            (self.saver.make_room, 4),
            (self.clear, 0.02),
        ]
        choices, weights = zip(*operations, strict=True)
        while time.monotonic() < deadline:
            for operation in self.random.choices(choices, weights, k=64):
                operation()
                self.count("operations")
        while self.open:
            self.finish_request()
        self.saver.finish()

    def count(self, counter: str, amount: int = 1) -> None:
        self.ledger.counts[self.number, COUNTERS.index(counter)] += amount

    # --- operations

    def start_request(self) -> None:
        """Look a prompt up, check the match, store the rest of the prompt, and keep the request open."""
        if len(self.open) == MOST_OPEN_REQUESTS:
            self.finish_request()
        prompt = self.prompts.draw()
        clears = self.clears_begun()
        match = self.look_up(prompt)
        known = len(match.matched_blocks)
        request = Request(prompt, match, clears, match.matched_blocks.tolist(), list(range(known)))
        self.open.append(request)
        if match.snapshot_tier_key is not None and self.random.random() < 0.7:
            self.saver.fault_in(prompt, match)
        own = self.take(prompt.full_blocks - known)
        if own is None:
            return
        acquired = self.offer(prompt, match, own)
        request.extended = True
        stored = self.settle(prompt, own, known, acquired)
        request.blocks += stored.values()
        request.places += stored.keys()
        if self.random.random() < 0.2 and acquired.inserted_tokens:
            with self.look_up(prompt) as again:
                if clears == self.clears_begun():
                    require(again.matched_tokens >= acquired.inserted_tokens, "a leased insert is not found")

    def finish_request(self) -> None:
        """Check that an open request still holds what it held, then release it."""
        if not self.open:
            return
        request = self.open.pop(self.random.randrange(len(self.open)))
        self.check_content(request.prompt, request.blocks, request.places)
        if not request.extended:
            self.check_partial(request.prompt, request.match)
        self.saver.check(request.prompt, request.match)
        request.match.release()
        if self.random.random() < 0.1:
            request.match.release()

    def store_without_match(self) -> None:
        """Insert a prompt with no lookup before, then release it by its tokens."""
        prompt = self.prompts.draw()
        own = self.take(prompt.full_blocks)
        if own is None:
            return
        acquired = self.offer(prompt, None, own)
        stored = self.settle(prompt, own, 0, acquired)
        self.check_content(prompt, list(stored.values()), list(stored.keys()))
        if acquired.inserted_tokens:
            self.cache.release(
                prompt.tokens, adapter_id=prompt.adapter_id, salt=prompt.salt, block_keys=prompt.block_keys
            )

    def peek(self) -> None:
        """Ask how much of a prompt is cached; an open request's own prompt must still be."""
        request = self.random.choice(self.open) if self.open else None
        prompt = request.prompt if request else self.prompts.draw()
        tokens = self.cache.peek_matched_tokens(
            prompt.tokens, adapter_id=prompt.adapter_id, salt=prompt.salt, block_keys=prompt.block_keys
        )
        require(tokens % BLOCK_SIZE == 0 and tokens <= len(prompt.tokens), f"peek answers {tokens} tokens")
        if request and request.clears == self.clears_begun():
            pinned = max(request.places, default=-1) + 1
            require(tokens >= pinned * BLOCK_SIZE, f"{pinned} blocks are leased, peek finds {tokens} tokens")

    def evict_some(self) -> None:
        self.evict(self.random.randint(1, 32))

    def clear(self) -> None:
        """Empty the cache; from then on nobody may find what was stored before."""
        begun = time.monotonic_ns()
        self.ledger.clears_begun[self.number] += 1
        self.receive(self.cache.clear())
        self.ledger.clears_begun[self.number] += 1
        self.ledger.cleared_at[self.number] = begun
        self.count("clears")

    # --- the blocks in this worker's hands

    def take(self, count: int) -> NDArray[np.uint32] | None:
        """`count` of this worker's blocks, evicting for them when it has too few; None if there are not enough."""
        if len(self.free) < count:
            self.evict(count - len(self.free) + 8)
        if len(self.free) < count:
            self.count("starved")
            return None
        taken = [self.free.pop(self.random.randrange(len(self.free))) for _ in range(count)]
        return np.array(taken, np.uint32)

    def evict(self, count: int) -> None:
        evicted = self.cache.evict(count)
        require(len(evicted.blocks) <= count, f"evict({count}) gave {len(evicted.blocks)} blocks")
        self.receive(evicted)

    def receive(self, evicted: EvictedBlocks) -> None:
        """Take evicted blocks into this worker's hands after checking that nobody has them."""
        blocks = evicted.blocks
        expected = disk_ids_of(self.ledger.content["prefix"][blocks])
        disks = evicted.disk_block_ids
        require(bool(np.all((disks == NO_DISK) | (disks == expected))), f"evicted disk ids {disks} of {blocks}")
        self.hold(blocks.tolist())
        self.count("evicted", len(blocks))

    def hold(self, blocks: list[int]) -> None:
        require(len(set(blocks)) == len(blocks), f"blocks given twice: {blocks}")
        require(not bool((self.ledger.held[:, blocks] == HELD).any()), f"given a block somebody has: {blocks}")
        self.ledger.held[self.number, blocks] = HELD
        self.free += blocks

    def offer(self, prompt: Prompt, match: PrefixMatch | None, own: NDArray[np.uint32]) -> InsertAcquired:
        """Write down what the blocks `own` hold, then insert them after the match's."""
        first = prompt.full_blocks - len(own)
        content = self.ledger.content
        content["stored_at"][own] = 0
        content["tokens"][own] = prompt.chunks[first:]
        content["key"][own] = prompt.keys[first : prompt.full_blocks]
        content["parent"][own] = prompt.chain[first:-1]
        content["prefix"][own] = prompt.chain[first + 1 :]
        self.ledger.held[self.number, own] = OFFERED
        table = own if match is None else np.concatenate([match.matched_blocks, own])
        disks = disk_ids_of(prompt.chain[1:]) if self.random.random() < 0.5 else None
        how: dict[str, Any] = {"disk_block_ids": disks, "block_keys": prompt.block_keys}
        how |= {"adapter_id": prompt.adapter_id, "salt": prompt.salt} if match is None else {"match": match}
        if self.random.random() < 0.1:
            return self.saver.insert_with_snapshot(prompt, table, **how)
        return self.cache.insert(prompt.tokens, table, **how)

    def settle(self, prompt: Prompt, own: NDArray[np.uint32], first: int, acquired: InsertAcquired) -> dict[int, int]:
        """Take back the offered blocks that were not stored; return the stored ones by their place."""
        reached = acquired.inserted_tokens // BLOCK_SIZE
        require(acquired.inserted_tokens == reached * BLOCK_SIZE, f"{acquired.inserted_tokens} tokens inserted")
        require(reached <= prompt.full_blocks, f"{reached} of {prompt.full_blocks} blocks inserted")
        stored, duplicates = set(acquired.blocks.tolist()), set(acquired.duplicates.tolist())
        within = own[: max(reached - first, 0)].tolist()
        require(
            not stored & duplicates and stored | duplicates == set(within),
            f"offered {own.tolist()} from {first}: reached {reached}, stored {stored}, duplicates {duplicates}",
        )
        places = {first + i: block for i, block in enumerate(within) if block in stored}
        blocks = list(places.values())
        self.ledger.content["stored_at"][blocks] = time.monotonic_ns()
        self.ledger.held[self.number, blocks] = AWAY
        self.hold([block for block in own.tolist() if block not in stored])
        self.count("inserted", len(stored))
        self.count("duplicates", len(duplicates))
        self.count("short", reached < prompt.full_blocks)
        return places

    # --- checks

    def clears_begun(self) -> int:
        """Differs from what it was before if a clear may have hidden anything in between; odd: one is under way."""
        begun = self.ledger.clears_begun
        return -time.monotonic_ns() if (begun & 1).any() else int(begun.sum())

    def look_up(self, prompt: Prompt, pins: bool = True) -> PrefixMatch:
        """A checked lookup; unless it `pins` a snapshot its match may be released by the tokens."""
        horizon = int(self.ledger.cleared_at.max())
        asked = self.saver.asked(prompt) if pins else {"session": 0, "max_snapshot_tokens": 0}
        where: dict[str, Any] = {"adapter_id": prompt.adapter_id, "salt": prompt.salt, "block_keys": prompt.block_keys}
        match = self.cache.lookup(prompt.tokens, **where, **asked)
        blocks, disks = match.matched_blocks, match.matched_disk_block_ids
        known = len(blocks)
        require(match.matched_tokens == known * BLOCK_SIZE, f"{match.matched_tokens} tokens, {known} blocks")
        require(known <= prompt.full_blocks, f"{known} blocks match of {prompt.full_blocks}")
        self.check_content(prompt, blocks.tolist(), list(range(known)))
        self.check_partial(prompt, match)
        self.saver.check_found(prompt, match, asked, horizon)
        stored_at = self.ledger.content["stored_at"][blocks]
        require(not bool(((stored_at != 0) & (stored_at < horizon)).any()), "found what was cleared")
        if len(disks):
            expected = disk_ids_of(prompt.chain[1 : known + 1])
            require(len(disks) == known, f"{len(disks)} disk ids, {known} blocks")
            require(bool(np.all((disks == NO_DISK) | (disks == expected))), f"disk ids {disks}, not {expected}")
        self.count("tokens", match.matched_tokens)
        return match

    def check_content(self, prompt: Prompt, blocks: list[int], places: list[int]) -> None:
        """Every block must hold exactly the prompt's tokens at its place, after exactly the same prefix."""
        content = self.ledger.content
        later = [place + 1 for place in places]
        right = bool(np.array_equal(content["tokens"][blocks], prompt.chunks[places]))
        right &= bool(np.array_equal(content["prefix"][blocks], prompt.chain[later]))
        require(right, f"blocks {blocks} at {places} hold something else than {prompt.tokens.tolist()}")
        self.count("checked")

    def check_partial(self, prompt: Prompt, match: PrefixMatch) -> None:
        """The partly matching block must agree with exactly as many tokens as the match says."""
        block, agreeing = match.partial_block, match.partial_tokens
        if block is None:
            require(agreeing == 0, f"{agreeing} tokens of no block")
            return
        known = match.matched_tokens // BLOCK_SIZE
        rest = prompt.tokens[match.matched_tokens : match.matched_tokens + BLOCK_SIZE]
        record = self.ledger.content[block]
        same = np.equal(record["tokens"][: len(rest)], rest)
        length = len(rest) if same.all() else int(np.argmin(same))
        require(0 < agreeing == length < BLOCK_SIZE, f"partial block {block} agrees with {length}, not {agreeing}")
        require(record["parent"] == prompt.chain[known], f"partial block {block} follows another prefix")
        require(record["key"] == prompt.keys[known], f"partial block {block} has another key")


def work(name: str, path: str, files: str, workers: int, blocks: int, number: int, seed: int, seconds: float) -> None:
    """A worker process: exit status 0 if all it saw was right."""
    with RadixCache.attach(name) as cache:
        Worker(cache, Ledger(path, workers, blocks), files, number, seed).run(time.monotonic() + seconds)


def check_end(cache: RadixCache, ledger: Ledger, files: str) -> list[str]:
    """What is wrong with the final state: invariants, leases left, a block that is nowhere or in two places."""
    nodes = cache._segment.views.nodes
    live = np.flatnonzero(nodes["born"] != 0)
    in_nodes = nodes["block"][live[live > cache._segment.geometry.max_namespaces]]
    wrong = [f"verify: {violation}" for violation in cache.verify()]
    wrong += tally(ledger, in_nodes, cache.stats())
    wrong += check_quiet(cache, ledger, files)
    evicted = cache.evict(cache.max_blocks)
    if sorted(evicted.blocks.tolist()) != sorted(in_nodes.tolist()):
        wrong.append(f"evicting everything gave {len(evicted.blocks)} blocks of {len(in_nodes)}")
    if cache.stats().blocks_live or cache.stats().namespaces:
        wrong.append(f"not empty after everything was evicted: {cache.stats()}")
    return wrong


def tally(ledger: Ledger, in_nodes: NDArray[np.uint32], stats: Stats) -> list[str]:
    """What disagrees between the ledger, the nodes and the statistics."""
    blocks = ledger.held.shape[1]
    homes = (ledger.held == HELD).sum(axis=0) + np.bincount(in_nodes, minlength=blocks)[:blocks]
    counted = dict(zip(COUNTERS, ledger.counts.sum(axis=0).tolist(), strict=True))
    expected = {
        "leases": (stats.leases, 0),
        "workers": (stats.workers, 1),
        "blocks_live": (stats.blocks_live, len(in_nodes)),
        "blocks_leased": (stats.blocks_leased, 0),
        "inserted_blocks": (stats.inserted_blocks, counted["inserted"]),
        "duplicate_blocks": (stats.duplicate_blocks, counted["duplicates"]),
        "hit_tokens": (stats.hit_tokens, counted["tokens"]),
    }
    wrong = [f"{what} is {got}, not {right}" for what, (got, right) in expected.items() if got != right]
    if (homes != 1).any():
        wrong.append(f"{(homes == 0).sum()} blocks are nowhere, {(homes > 1).sum()} in two places")
    return wrong


def start(context: multiprocessing.context.SpawnContext, number: int, arguments: tuple[object, ...]) -> BaseProcess:
    process = context.Process(target=work, args=arguments, name=f"worker {number}")
    process.start()
    return process


def stress(name: str, path: str, files: str, options: argparse.Namespace) -> int:
    """Run the workers, check what they leave, print the summary; the number of things that went wrong."""
    context = multiprocessing.get_context("spawn")
    sizes = {**SIZES, "retention": RETENTIONS[options.seed % 2]}
    cache = RadixCache.create(name, max_blocks=options.blocks * 7 // 8, block_size=BLOCK_SIZE, **sizes)
    try:
        ledger = Ledger(path, options.workers, options.blocks)
        for number in range(options.workers):
            ledger.held[number, number :: options.workers] = HELD
        common = (name, path, files, options.workers, options.blocks)
        processes = [
            start(context, number, (*common, number, options.seed, options.seconds))
            for number in range(options.workers)
        ]
        for process in processes:
            process.join()
        wrong = [f"{process.name} ended with {process.exitcode}" for process in processes if process.exitcode]
        stats = cache.stats()
        wrong += check_end(cache, ledger, files)
    finally:
        cache.unlink()
        cache.close()
    for line in wrong:
        print(f"WRONG: {line}")
    report(ledger, stats, options.seconds)
    return len(wrong)


def report(ledger: Ledger, stats: Stats, seconds: float) -> None:
    for counter, total in zip(COUNTERS, ledger.counts.sum(axis=0).tolist(), strict=True):
        print(f"{counter:16}{total:14,}")
    for name in ("lookups", "hits", "inserts", "lock_waits", "recoveries", "blocks_live", "snapshots"):
        print(f"{name:16}{getattr(stats, name):14,}")
    print(f"{'operations/s':16}{int(ledger.counts[:, 0].sum() / seconds):14,}")


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """The checked options."""
    parser = argparse.ArgumentParser(description="Hammer a cache from several processes and check every answer.")
    parser.add_argument("--seconds", type=float, default=60, help="how long (default %(default)s)")
    parser.add_argument("--workers", type=int, default=4, help="how many processes (default %(default)s)")
    parser.add_argument(
        "--blocks", type=int, default=2048,
        help=f"how many block ids the workers share, at least {MOST_BLOCKS} for each (default %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=int, default=0,
        help="which prefixes the prompts share; snapshots are retained by session, by chain if it is odd "
        "(default %(default)s)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if not 0 < options.seconds < math.inf:
        parser.error(f"--seconds {options.seconds}: expected more than 0")
    if not 1 <= options.workers <= MOST_WORKERS:
        parser.error(f"--workers {options.workers}: expected 1 to {MOST_WORKERS}")
    least = MOST_BLOCKS * options.workers
    if not least <= options.blocks <= MOST_IDS:
        reason = f"{MOST_BLOCKS}, a prompt's most, for each of --workers {options.workers}"
        parser.error(f"--blocks {options.blocks}: expected {least} ({reason}) to {MOST_IDS:,}")
    if options.seed < 0:
        parser.error(f"--seed {options.seed}: expected 0 or more")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = options_of(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="stress-") as directory:
            path, files = os.path.join(directory, "ledger"), os.path.join(directory, "tier")
            open(path, "xb").close()
            wrong = stress(f"stress-{os.getpid()}-{os.urandom(4).hex()}", path, files, options)
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads on, as in `stress.py | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
