"""`stat --watch`: a line for each interval, with rates."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from shmradix.inspect.reading import Reading, WorkersBusy

RATES = ("lookups", "inserts", "inserted_blocks", "evicted_blocks", "lock_waits")
_HEADS = "blocks", "leases", "workers", *(f"{name.replace('_', ' ')}/s" for name in RATES), "tokens hit"
_WIDTHS = [max(len(head), 9) for head in _HEADS]


def intervals(read: Callable[[], Reading], seconds: float) -> Iterator[dict[str, Any]]:
    """What changed in each interval: counts at its end, rates per second over it, the hit ratio of its lookups.

    An interval at whose end no reading succeeds is one with the next.
    """
    before, then = read().counters, time.monotonic()
    while True:
        time.sleep(seconds)
        try:
            reading = read()
        except WorkersBusy:
            continue
        now = time.monotonic()
        state, counters = reading.views.state[0], reading.counters
        grown = {name: counters[name] - before[name] for name in counters}
        yield {
            "seconds": now - then,
            "blocks_live": int(state["live_blocks"]),
            "leases": int(state["live_leases"]),
            "workers_alive": sum(worker.alive is True for worker in reading.workers),
            **{f"{name}_per_s": grown[name] / (now - then) for name in RATES},
            "hit_ratio": grown["hit_tokens"] / grown["lookup_tokens"] if grown["lookup_tokens"] else None,
        }
        before, then = counters, now


def watch(read: Callable[[], Reading], seconds: float, is_json: bool) -> None:
    """Print them, until Ctrl-C or until the cache is gone."""
    if not is_json:
        print("  ".join(head.rjust(width) for head, width in zip(_HEADS, _WIDTHS)), flush=True)
    for row in intervals(read, seconds):
        if is_json:
            print(json.dumps(row), flush=True)
            continue
        cells = [f"{row[name]:,}" for name in ("blocks_live", "leases", "workers_alive")]
        cells += [f"{row[f'{name}_per_s']:,.0f}" for name in RATES]
        cells.append("-" if row["hit_ratio"] is None else f"{row['hit_ratio']:.1%}")
        print("  ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS)), flush=True)
