"""Checks that one worker hits exactly as often as an exact LRU cache that evicts leaves first.

    python tools/replay_exact.py conversation_trace.jsonl

The trace is Mooncake's FAST '25 conversation trace; the expected hits come from an independent simulation of
it. Prints a table; the exit status is 1 where a number differs, 2 where the trace can't be used.
"""

from __future__ import annotations

import argparse
import sys

from shmradix.replay import Counts, Phase, Plan, replay_phase
from shmradix.trace import TOKENS_PER_ID, TraceError, read_trace

LOOKUP_BLOCKS = 288_500
DISTINCT_BLOCKS = 182_790
EXPECTED_HITS = {
    1_000: 12_847,
    3_000: 18_850,
    10_000: 61_046,
    30_000: 93_978,
    100_000: 104_924,
    DISTINCT_BLOCKS: 105_710,  # room for all: no limit
}


class Silent:
    """Shows no progress."""

    def started(self, phase: str, requests: int) -> None:
        """Do nothing."""

    def progressed(self, counts: Counts) -> None:
        """Do nothing."""

    def finished(self, phase: Phase) -> None:
        """Do nothing."""


def main() -> int:
    """Replay the trace at every capacity and compare; return the exit status."""
    parser = argparse.ArgumentParser(description="Compare one worker's hits with those of an exact leaf-first LRU.")
    parser.add_argument("trace", metavar="TRACE", help="Mooncake's FAST '25 conversation_trace.jsonl")
    path = parser.parse_args().trace
    try:
        trace = read_trace(path)
    except TraceError as error:
        parser.exit(2, f"{error}\n")
    if (len(trace.ids), trace.distinct_ids) != (LOOKUP_BLOCKS, DISTINCT_BLOCKS):
        parser.exit(2, f"{path}: not the whole conversation trace, for which the expected hits hold\n")
    print(f"{'capacity':>10} {'expected':>10} {'got':>10} {'of blocks':>10} {'seconds':>8}")
    differences = sum(not _check(path, capacity, hits) for capacity, hits in EXPECTED_HITS.items())
    print(f"{differences} of {len(EXPECTED_HITS)} differ")
    return 1 if differences else 0


def _check(path: str, capacity: int, expected: int) -> bool:
    """Replay at one capacity, print a line and return whether the hits are as expected."""
    plan = Plan(path, workers=1, blocks=capacity, block_size=TOKENS_PER_ID)
    total = replay_phase(plan, "shared", 1, Silent()).total()
    counts = total.counts
    good = (counts.hit_blocks, counts.lookup_blocks) == (expected, LOOKUP_BLOCKS)
    print(
        f"{capacity:>10,} {expected:>10,} {counts.hit_blocks:>10,} {counts.lookup_blocks:>10,}"
        f" {total.seconds:>8.2f}{'' if good else '  DIFFERS'}",
        flush=True,
    )
    return good


if __name__ == "__main__":
    sys.exit(main())
