"""What it costs to copy blocks' bytes, beside memcpy and numpy.take, and to allocate and free blocks.

Each round copies the same random blocks in every way, one way after the other; figures are medians of the rounds. Where
memory is not said to be new, it was written before. memcpy copies as much out of the cache in one go, as it lies there.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from shmradix import RadixCache
from shmradix.block_bytes import BlockBytes

SIZES = (16 << 10, 64 << 10, 256 << 10, 1 << 20, 2 << 20)
COUNTS = (1, 16, 256, 4096)
TOTAL, QUICK_TOTAL = 256 << 20, 16 << 20


def seconds(call: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def at_page(nbytes: int) -> np.ndarray:
    """uint8[nbytes], written, from a page boundary on, as the cache's bytes are."""
    memory = np.full(nbytes + 4096, 1, np.uint8)  # zeros would be one page of the kernel's, over and over
    return memory[-memory.ctypes.data % 4096 :][:nbytes]


def created(checksums: bool, count: int, nbytes: int) -> RadixCache:
    """A cache of `count` blocks whose name is gone already."""
    name = f"benchmark-bytes-{os.getpid()}-{os.urandom(4).hex()}"
    cache = RadixCache.create(name, num_blocks=count, block_size=16, block_nbytes=nbytes, checksums=checksums)
    cache.unlink()
    return cache


def ways_to_copy(
    kv: BlockBytes, blocks: np.ndarray, sealing: BlockBytes, sealed: np.ndarray, source: np.ndarray, out: np.ndarray
) -> dict[str, Callable[[], object]]:
    """Copy `blocks` of one cache, or `sealed` of one with checksums."""
    return {
        "memcpy": lambda: ctypes.memmove(out.ctypes.data, kv.address, out.nbytes),
        "gather": lambda: kv.gather(blocks, out),
        "numpy.take": lambda: kv.array.take(blocks, axis=0, out=out, mode="clip"),
        "gather, new memory": lambda: kv.gather(blocks),
        "numpy.take, new memory": lambda: kv.array.take(blocks, axis=0),
        "scatter": lambda: kv.scatter(blocks, source),
        "gather, checksums": lambda: sealing.gather(sealed, out),
        "scatter, checksums": lambda: sealing.scatter(sealed, source),
    }


def copies(nbytes: int, total: int, rounds: int) -> dict[str, float]:
    """GB/s of each way to copy blocks of `nbytes`, `total` bytes in all."""
    count = total // nbytes
    times: dict[str, list[float]] = {}
    with created(False, 2 * count, nbytes) as cache, created(True, count, nbytes) as sealing:
        ours, theirs = cache.allocate(2 * count), sealing.allocate(count)
        source, out = at_page(total).reshape(count, nbytes), at_page(total).reshape(count, nbytes)
        for kv, blocks in ((cache.kv, ours[:count]), (cache.kv, ours[count:]), (sealing.kv, theirs)):
            kv.scatter(blocks, source)
        random = np.random.default_rng(0)
        for _ in range(rounds):
            blocks, sealed = random.permutation(ours)[:count], random.permutation(theirs)
            ways = ways_to_copy(cache.kv, blocks, sealing.kv, sealed, source, out)
            for way, call in ways.items():
                times.setdefault(way, []).append(seconds(call))
    return {way: total / statistics.median(taken) / 1e9 for way, taken in times.items()}


def allocations(rounds: int) -> dict[int, float]:
    """Nanoseconds per block to allocate and free so many at once, of 8,192 that are free."""
    found = {}
    with created(False, 8192, 1) as cache:
        for count in COUNTS:
            calls = max(1, 1000 // count)

            def work(count: int = count, calls: int = calls) -> None:
                for _ in range(calls):
                    cache.free(cache.allocate(count))

            found[count] = statistics.median(seconds(work) for _ in range(rounds)) / calls / count * 1e9
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure copies of blocks, and their allocation.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="copy 16 MiB and not 256, in 3 rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    total, rounds = (QUICK_TOTAL, 3) if options.quick else (TOTAL, options.rounds)
    report: dict[str, Any] = {
        "bytes": total,
        "rounds": rounds,
        "copy_gb_per_s": {nbytes: copies(nbytes, total, rounds) for nbytes in SIZES},
        "allocate_and_free_ns_per_block": allocations(rounds),
    }
    if options.json:
        print(json.dumps(report, indent=2))
        return 0
    print(f"{total >> 20} MiB in blocks of the size at the top, GB/s, and as a share of memcpy:\n")
    print(f"{'':<24}" + "".join(f"{nbytes >> 10:>9} KiB" for nbytes in SIZES))
    by_size = report["copy_gb_per_s"]
    for way in by_size[SIZES[0]]:
        cells = ((by_size[nbytes][way], by_size[nbytes][way] / by_size[nbytes]["memcpy"]) for nbytes in SIZES)
        print(f"{way:<24}" + "".join(f"{rate:>7.2f} {share:>5.2f}" for rate, share in cells))
    print("\nallocate and free, ns per block:")
    for count, cost in report["allocate_and_free_ns_per_block"].items():
        print(f"{count:>6} at once {cost:>9,.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
