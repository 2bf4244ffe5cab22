"""How long the operations of a cache take: medians of several runs, also for each block.

Prompts are random and distinct, and every run walks all of them, so that no figure is that of one hot line.
The figures for two processes are those of two workers of one cache, each with prompts of its own, at once.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shmradix import RadixCache
from shmradix.owner_word import tag_of

Tokens = NDArray[np.uint32]
Prompts = list[tuple[Tokens, NDArray[np.uint32]]]  # tokens, block table

BLOCK_SIZE = 16
SIZES = {512: 64, 4_096: 64, 32_768: 16, 131_072: 8}  # tokens of a prompt: how many prompts
EVICTION_BLOCKS, EVICTION_BATCH, EVICTION_PROMPT_BLOCKS = 50_000, 1_000, 100
SHORTEST_RUN_NS = 30_000_000
FRESH_PROCESS = """
import sys, time
start = time.perf_counter_ns()
import shmradix
imported = time.perf_counter_ns()
cache = shmradix.RadixCache.attach(sys.argv[1])
attached = time.perf_counter_ns()
cache.lookup([1] * 64).release()
print(imported - start, attached - imported, time.perf_counter_ns() - attached)
"""


@dataclass(frozen=True)
class Row:
    """One line of the table; times in nanoseconds of one operation, over `runs` runs."""

    what: str
    tokens: int
    blocks: int
    runs: int
    least: float
    median: float

    @property
    def each_block(self) -> float:
        return self.median / self.blocks


def row(what: str, tokens: int, blocks: int, times: list[float]) -> Row:
    return Row(what, tokens, blocks, len(times), min(times), statistics.median(times))


@contextmanager
def scratch_cache(max_blocks: int) -> Iterator[RadixCache]:
    """A cache of its own for one measurement, removed afterwards."""
    cache = RadixCache.create(
        f"benchmark-{os.getpid()}-{os.urandom(4).hex()}", max_blocks=max_blocks, block_size=BLOCK_SIZE
    )
    try:
        yield cache
    finally:
        cache.unlink()
        cache.close()


def make_prompts(tokens: int, count: int, seed: int) -> Prompts:
    """Random prompts that share nothing, with block tables that are used once."""
    random = np.random.default_rng([seed, tokens])
    blocks = tokens // BLOCK_SIZE
    return [
        (
            random.integers(0, 150_000, tokens, dtype=np.uint32),
            np.arange((seed * count + i) * blocks, (seed * count + i + 1) * blocks, dtype=np.uint32),
        )
        for i in range(count)
    ]


def store(cache: RadixCache, prompts: Prompts) -> None:
    for tokens, table in prompts:
        if cache.insert(tokens, table).inserted_tokens != len(tokens):
            raise RuntimeError(f"the cache has no room for {len(tokens)} tokens")
        cache.release(tokens)


def hit(cache: RadixCache, prompts: Prompts) -> None:
    for tokens, _ in prompts:
        cache.lookup(tokens).release()


def require_hits(cache: RadixCache, prompts: Prompts, share: float) -> None:
    """Raise RuntimeError unless every prompt matches to exactly `share` of its length."""
    for tokens, _ in prompts:
        with cache.lookup(tokens) as match:
            if match.matched_tokens != len(tokens) * share:
                raise RuntimeError(f"{match.matched_tokens} of {len(tokens)} tokens match")


def measure(batch: Callable[[], None], operations: int, runs: int) -> list[float]:
    """Nanoseconds of one operation in each of `runs` runs; a run repeats the batch until it is long enough."""
    start = time.perf_counter_ns()
    batch()
    repeats = 1 + SHORTEST_RUN_NS // max(time.perf_counter_ns() - start, 1)
    times = []
    for _ in range(runs):
        start = time.perf_counter_ns()
        for _ in range(repeats):
            batch()
        times.append((time.perf_counter_ns() - start) / (repeats * operations))
    return times


def lookups(tokens: int, count: int, runs: int) -> list[Row]:
    """Hits of whole prompts, misses at the first block, and the hits of two processes at once."""
    blocks = tokens // BLOCK_SIZE
    prompts = make_prompts(tokens, count, 0)
    misses = [(np.concatenate([first + 1, rest]), table) for (t, table) in prompts for first, rest in [(t[:1], t[1:])]]
    with scratch_cache(blocks * count) as cache:
        store(cache, prompts)
        require_hits(cache, prompts, 1)
        times = measure(lambda: hit(cache, prompts), count, runs)
        found = row("lookup + release, all found", tokens, blocks, times)
        require_hits(cache, misses, 0)
        times = measure(lambda: hit(cache, misses), count, runs)
    missed = row("lookup + release, nothing found", tokens, blocks, times)
    return [found, two_processes(tokens, count, runs), missed]


def inserts(tokens: int, count: int, runs: int) -> Row:
    """Inserts of prompts of which nothing is stored, into a cache with room for all."""
    blocks = tokens // BLOCK_SIZE
    prompts = make_prompts(tokens, count, 0)
    batches = 1 + 4_096 // (count * blocks)
    times = []
    with scratch_cache(blocks * count) as cache:
        for _ in range(runs + 1):
            elapsed = 0
            for _ in range(batches):
                start = time.perf_counter_ns()
                for prompt, table in prompts:
                    cache.insert(prompt, table)
                elapsed += time.perf_counter_ns() - start
                for prompt, _ in prompts:
                    cache.release(prompt)
                if len(cache.clear()) != count * blocks:
                    raise RuntimeError("not all blocks came back")
            times.append(elapsed / (batches * count))
    return row("insert, all new", tokens, blocks, times[1:])


def evictions(runs: int) -> Row:
    """Evictions of a batch from a full cache, which is filled again in between."""
    count = EVICTION_BLOCKS // EVICTION_PROMPT_BLOCKS
    prompts = make_prompts(EVICTION_PROMPT_BLOCKS * BLOCK_SIZE, count, 0)
    times = []
    with scratch_cache(EVICTION_BLOCKS) as cache:
        for _ in range(runs + 1):
            store(cache, prompts)
            start = time.perf_counter_ns()
            evicted = cache.evict(EVICTION_BATCH)
            times.append(float(time.perf_counter_ns() - start))
            if len(evicted) != EVICTION_BATCH:
                raise RuntimeError(f"{len(evicted)} blocks evicted")
    return row(f"evict, of {EVICTION_BLOCKS:,} blocks", EVICTION_BATCH * BLOCK_SIZE, EVICTION_BATCH, times[1:])


def rebuilds(blocks: int, worn: bool, runs: int) -> Row:
    """Takeovers of the guard from an owner that died in the middle of a change, and the rebuild that takes.

    A worn cache had half its prompts evicted, not in the order in which they came, and others stored.
    """
    count = blocks // EVICTION_PROMPT_BLOCKS
    prompts = make_prompts(EVICTION_PROMPT_BLOCKS * BLOCK_SIZE, count + count // 2, 0)
    times = []
    with scratch_cache(blocks) as cache:
        store(cache, prompts[:count])
        if worn:
            for i in np.random.default_rng(1).permutation(count)[: count // 2]:
                cache.lookup(prompts[i][0]).release()
            cache.evict(count // 2 * EVICTION_PROMPT_BLOCKS)
            store(cache, prompts[count:])
        guards = cache._segment.views.guards
        for _ in range(runs):
            before = cache.stats().rebuild_ns
            guards["owner"][0], guards["dirty"][0] = tag_of(0, 1 << 40), 1  # a generation that slot 0 never had
            times.append(float(cache.stats().rebuild_ns - before))
        del guards
    return row(
        "takeover and rebuild, worn" if worn else "takeover and rebuild",
        count * EVICTION_PROMPT_BLOCKS * BLOCK_SIZE,
        blocks,
        times,
    )


def rival(
    name: str, number: int, tokens: int, count: int, runs: int, barrier: Barrier, answers: Queue[list[float]]
) -> None:
    """One of two workers: its own prompts, measured while the other measures too."""
    with RadixCache.attach(name) as cache:
        prompts = make_prompts(tokens, count, number)
        store(cache, prompts)
        require_hits(cache, prompts, 1)
        measure(lambda: hit(cache, prompts), count, 1)
        barrier.wait(60)
        times = measure(lambda: hit(cache, prompts), count, runs)
        barrier.wait(60)
    answers.put(times)


def two_processes(tokens: int, count: int, runs: int) -> Row:
    """The lookup benchmark in two processes at once; a time is what one process sees."""
    context = multiprocessing.get_context("spawn")
    blocks = tokens // BLOCK_SIZE
    barrier, answers = context.Barrier(2), context.Queue()
    with scratch_cache(2 * blocks * count) as cache:
        processes = [
            context.Process(target=rival, args=(cache.name, i, tokens, count, runs, barrier, answers)) for i in range(2)
        ]
        for process in processes:
            process.start()
        times = [answers.get(timeout=120) for _ in processes]
        for process in processes:
            process.join()
    return row("the same, two processes at once", tokens, blocks, [t for each in times for t in each])


def startups(runs: int) -> list[Row]:
    """Import, attach and first lookup of a fresh process, with a warm compile cache."""
    with scratch_cache(10_000) as cache:
        cache.insert(np.ones(64, np.uint32), np.arange(4, dtype=np.uint32))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        command = [sys.executable, "-c", FRESH_PROCESS, cache.name]
        answers = [
            subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
            for _ in range(runs + 1)
        ]
    columns = zip(*([float(t) for t in answer.split()] for answer in answers[1:]), strict=True)
    names = ("import shmradix", "attach, in a fresh process", "first lookup, in a fresh process")
    return [row(name, 0, 1, list(times)) for name, times in zip(names, columns, strict=True)]


def bytes_a_block() -> float:
    """Bytes of shared memory that one more block costs."""
    sizes = []
    blocks = (200_000, 462_144)  # far enough apart that the power of two of the hash table shows in proportion
    for max_blocks in blocks:
        with scratch_cache(max_blocks) as cache:
            sizes.append(Path(f"/dev/shm/shmradix.{cache.name}").stat().st_size)
    return (sizes[1] - sizes[0]) / (blocks[1] - blocks[0])


def run_all(quick: bool) -> Iterator[Row]:
    """Every measurement, one after another."""
    runs = 5 if quick else 15
    sizes = {tokens: count for tokens, count in SIZES.items() if not quick or tokens <= 4_096}
    for tokens, count in sizes.items():
        yield from lookups(tokens, count, runs)
        yield inserts(tokens, count, runs)
    yield evictions(runs)
    for blocks in (10_000, 100_000) if quick else (10_000, 100_000, 1_000_000):
        yield rebuilds(blocks, False, 5)
        yield rebuilds(blocks, True, 5)
    yield from startups(3 if quick else 7)


def readable(nanoseconds: float) -> str:
    """A time with its unit."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:,.2f} {unit}"
    return f"{nanoseconds:,.0f} ns"


def print_row(line: Row) -> None:
    tokens = f"{line.tokens:,}" if line.tokens else ""
    each = f"{line.each_block:,.1f} ns" if line.tokens else ""
    print(
        f"{line.what:36}{tokens:>9}{readable(line.least):>12}{readable(line.median):>12}{each:>12}{line.runs:>6}",
        flush=True,
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure the operations of a cache.")
    parser.add_argument("--json", action="store_true", help="print one JSON object (times in ns) instead of a table")
    parser.add_argument("--quick", action="store_true", help="small sizes and few runs")
    options = parser.parse_args(arguments)
    with scratch_cache(1):  # so that no compiling falls into a measurement
        pass
    if not options.json:
        print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} (above 0: somebody else is at work, too)")
        print(f"{'block size 16':36}{'tokens':>9}{'least':>12}{'median':>12}{'a block':>12}{'runs':>6}")
    rows = []
    for line in run_all(options.quick):
        rows.append(line)
        if not options.json:
            print_row(line)
    memory = bytes_a_block()
    if options.json:
        report = {"time_unit": "ns", "rows": [asdict(line) for line in rows], "bytes_a_block": memory}
        print(json.dumps(report, indent=1))
    else:
        print(f"{'shared memory of a block':36}{memory:21,.1f} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
