"""One prefill for many waiters: workers that get the same prompt at the same moment, with claims and without.

Each round has a fresh prompt, whose prefill is a sleep, so that the workers do not take the cores from each other. With
claims one worker should compute it, and the others be done soon after its insert. Without, each computes it. The last
column is of waiters whose timeout is half the prefill: how long behind it they give up.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from shmradix import RadixCache

TOKENS, BLOCK_SIZE = 8_000, 16
BLOCKS = TOKENS // BLOCK_SIZE


class Turn(NamedTuple):
    """What one worker did in a round; times by CLOCK_MONOTONIC, in seconds."""

    computed: bool
    served: bool  # it had the whole prompt in the end
    started: float
    ended: float


def prompt_of(turn: int) -> np.ndarray:
    """uint32[TOKENS], of each round another one."""
    return np.random.default_rng(turn).integers(0, 150_000, TOKENS, dtype=np.uint32)


def prefill(cache: RadixCache, prompt: np.ndarray, seconds: float) -> None:
    """Compute the prompt, and insert it."""
    time.sleep(seconds)
    blocks = cache.allocate(BLOCKS)
    with cache.lookup(prompt) as match:
        new = blocks[match.matched_tokens // BLOCK_SIZE :]
        table = np.concatenate([match.matched_blocks, new])
        stored = cache.insert(prompt, table, match=match)
    kept = np.setdiff1d(blocks, np.setdiff1d(new, stored.duplicates))
    cache.free(kept)


def take_turn(cache: RadixCache, prompt: np.ndarray, how: str, seconds: float, timeout: float | None) -> Turn:
    """Serve the prompt with a claim, or alone."""
    started = time.monotonic()
    if how == "alone":
        prefill(cache, prompt, seconds)
        return Turn(True, True, started, time.monotonic())
    with cache.claim(prompt) as claim:
        served = claim.wait(timeout)
        computed = claim.is_mine
        if computed:
            time.sleep(seconds)
            claim.insert(cache.allocate(BLOCKS))
        return Turn(computed, served, started, time.monotonic())


def worker(name: str, orders: Connection) -> None:
    """Take the turns that come through `orders`: (turn, when, how, seconds, timeout); None ends it."""
    with RadixCache.attach(name) as cache:
        orders.send("ready")
        while order := orders.recv():
            turn, when, *rest = order
            prompt = prompt_of(turn)
            time.sleep(max(0.0, when - time.monotonic()))
            orders.send(take_turn(cache, prompt, *rest))


class Crew:
    """So many workers of one cache."""

    def __init__(self, count: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.turn = 0
        name = f"benchmark-claims-{os.getpid()}-{os.urandom(4).hex()}"
        self.cache = RadixCache.create(name, num_blocks=2 * count * BLOCKS, block_size=BLOCK_SIZE)
        self.orders, self.processes = [], []
        for _ in range(count):
            ours, theirs = spawn.Pipe()
            self.processes.append(spawn.Process(target=worker, args=(name, theirs), daemon=True))
            self.orders.append(ours)
            self.processes[-1].start()
        for ours in self.orders:
            ours.recv()

    def round(self, how: str, seconds: float, timeout: float | None = None) -> list[Turn]:
        """All workers get one prompt at one moment."""
        self.turn += 1
        when = time.monotonic() + 0.01
        for ours in self.orders:
            ours.send((self.turn, when, how, seconds, timeout))
        return [ours.recv() for ours in self.orders]

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for ours in self.orders:
            ours.send(None)
        for process in self.processes:
            process.join()
        self.cache.unlink()
        self.cache.close()


def milliseconds(times: list[float]) -> dict[str, float]:
    """Median, 99th percentile and longest."""
    ordered = sorted(times)
    chosen = statistics.median(ordered), ordered[int(0.99 * (len(ordered) - 1))], ordered[-1]
    return {key: round(value * 1e3, 2) for key, value in zip(("median", "p99", "max"), chosen)}


def measure(count: int, rounds: int, seconds: float) -> dict[str, Any]:
    """The figures of so many workers."""
    behind, ends, alone, late = [], [], [], []
    prefills = []
    with Crew(count) as crew:
        for _ in range(rounds):
            turns = crew.round("claim", seconds)
            prefills.append(sum(turn.computed for turn in turns))
            done = min(turn.ended for turn in turns if turn.computed)
            behind += [turn.ended - done for turn in turns if not turn.computed]
            ends += [turn.ended - turn.started for turn in turns]
            alone += [turn.ended - turn.started for turn in crew.round("alone", seconds)]
            given_up = [turn for turn in crew.round("claim", seconds, seconds / 2) if not turn.served]
            late += [turn.ended - turn.started - seconds / 2 for turn in given_up]
    return {
        "workers": count,
        "prefills": max(prefills),
        "behind_insert_ms": milliseconds(behind),
        "claim_ms": milliseconds(ends),
        "alone_ms": milliseconds(alone),
        "late_ms": milliseconds(late),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure claims: one prefill for many waiters.")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--prefill", type=float, default=0.1, help="seconds (default %(default)s)")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--json", action="store_true", help="print a JSON object for each number of workers")
    options = parser.parse_args(arguments)
    if not options.json:
        print(f"{options.rounds} prompts of {TOKENS} tokens, prefill {options.prefill * 1e3:.0f} ms; milliseconds:\n")
        head = "workers", "prefills", "behind the insert", "with claims", "each alone", "behind a deadline"
        print("{:>7}  {:>8}  {:>22}  {:>22}  {:>22}  {:>22}".format(*head))
        print(" " * 19 + "  median    p99     max" * 4)
    for count in options.workers:
        figures = measure(count, options.rounds, options.prefill)
        if options.json:
            print(json.dumps(figures))
            continue
        times = [
            value for key in ("behind_insert_ms", "claim_ms", "alone_ms", "late_ms") for value in figures[key].values()
        ]
        print(f"{count:>7}  {figures['prefills']:>8}" + "".join(f"{value:>8.2f}" for value in times), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
