"""What the snapshot index costs: a lookup's snapshot half beside hashing the prompt, a save beside an insert.

All on one prompt of 131,072 tokens and an index of 4,096 snapshots, once of prefixes of this prompt, once of others.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import xxhash

from shmradix import RadixCache
from shmradix.inputs import NO_KEYS

TOKENS, SNAPSHOTS, BLOCK_SIZE = 131_072, 4_096, 16
SESSION = 7


@contextmanager
def filled_cache(own: bool, retention: str) -> Iterator[tuple[RadixCache, np.ndarray]]:
    """A cache with the prompt, and snapshots of its prefixes, or of other prompts and one of its own."""
    random = np.random.default_rng(0)
    prompt = random.integers(0, 150_000, TOKENS, dtype=np.uint32)
    name = f"benchmark-snapshots-{os.getpid()}-{os.urandom(4).hex()}"
    with RadixCache.create(
        name, max_blocks=TOKENS // BLOCK_SIZE, block_size=BLOCK_SIZE, max_snapshots=SNAPSHOTS + 2, retention=retention
    ) as cache:
        try:
            cache.insert(prompt, np.arange(TOKENS // BLOCK_SIZE))
            cache.release(prompt)
            for slot in range(SNAPSHOTS):
                tokens = prompt[: (slot + 1) * TOKENS // SNAPSHOTS]
                if not own and slot < SNAPSHOTS - 1:
                    tokens = random.integers(0, 150_000, len(tokens), dtype=np.uint32)
                cache.insert_intermediate_snapshot(tokens, slot)
            yield cache, prompt
        finally:
            cache.unlink()


def microseconds(call: Callable[[], object], runs: int, undo: Callable[[], object] = lambda: None) -> float:
    """The median of the runs; `undo` comes after each and is not timed."""
    times = []
    for _ in range(runs):
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1e3)
        undo()
    return statistics.median(times)


def measure(cache: RadixCache, prompt: np.ndarray, runs: int) -> dict[str, float]:
    """Each operation's time, in microseconds."""
    slots = itertools.cycle((SNAPSHOTS, SNAPSHOTS + 1))
    table = np.arange(TOKENS // BLOCK_SIZE)
    match = cache.lookup(prompt)

    def find_and_pin() -> None:
        cache._worker.locked(cache._resume, match, prompt, NO_KEYS, TOKENS, (SESSION, False))

    def unpin() -> None:
        cache._worker.run(cache._entries().unpin, match._anchor.pin, match._anchor.born)

    def reinsert() -> None:
        cache.insert(prompt, table)
        cache.release(prompt)

    def evict_and_save() -> None:
        slot = cache.evict_snapshot_lru()
        assert slot is not None
        cache.insert_intermediate_snapshot(prompt[: TOKENS - 1], slot)

    unpin()
    return {
        "hash the prompt once (xxh3-128)": microseconds(lambda: xxhash.xxh3_128_intdigest(prompt.data), runs),
        "snapshot half of a lookup": microseconds(find_and_pin, runs, unpin),
        "all depths to resume at": microseconds(lambda: match.restorable, max(1, runs // 10)),
        "save a tail": microseconds(lambda: cache.insert_tail_snapshot(prompt, next(slots), SESSION), runs),
        "insert the prompt again instead": microseconds(reinsert, max(1, runs // 10)),
        "evict one and save one": microseconds(evict_and_save, runs),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure what the snapshot index costs.")
    parser.add_argument("--runs", type=int, default=300)
    options = parser.parse_args(arguments)
    print(f"{TOKENS:,} tokens, {SNAPSHOTS:,} snapshots; medians of {options.runs} runs, microseconds")
    for own, retention in itertools.product((True, False), ("session", "chain")):
        print(f"\nsnapshots of {'this prompt' if own else 'other prompts'}, retention {retention}")
        with filled_cache(own, retention) as (cache, prompt):
            results = measure(cache, prompt, options.runs)
        base = results["hash the prompt once (xxh3-128)"]
        for what, time_us in results.items():
            print(f"  {what:44} {time_us:10.1f}  {time_us / base:8.1f} x the hash")
    return 0


if __name__ == "__main__":
    sys.exit(main())
