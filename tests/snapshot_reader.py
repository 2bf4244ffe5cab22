"""The snapshot half of a segment in the form of the model's pictures; reads the arrays only."""

from __future__ import annotations

from typing import Any

from shmradix import RadixCache
from shmradix.layout import BRANCH, HIDDEN, LEAF, PENDING, SIBLING, TAIL
from tests.snapshot_model import SNAPSHOT_COUNTERS

KINDS = {0: "plain", TAIL: "tail", SIBLING: "sibling", LEAF: "finish"}


def snapshot_image(cache: RadixCache, clients: list[RadixCache]) -> list[tuple[Any, ...]]:
    """Each record in use, and which of the clients has which slot."""
    views, images = cache._segment.views, []
    epoch = int(views.state["epoch"][0])
    for index, record in enumerate(views.snapshots):
        if record["born"]:
            flags, born = int(record["flags"]), int(record["born"])
            is_tiered = bool(record["tier_key"])
            place = int(record["adapter_id"]), record["salt"].tobytes().hex(), int(record["token_count"])
            what = KINDS[flags & (TAIL | SIBLING | LEAF)], int(record["session"])
            state = is_tiered, None if is_tiered else int(record["slot"])
            marks = bool(flags & PENDING), bool(flags & HIDDEN), bool(flags & BRANCH), int(record["epoch"]) == epoch
            pins = sum(
                bool(pin["born"]) and int(pin["snapshot"]) == index and int(pin["snapshot_born"]) == born
                for pin in views.pins
            )
            above = views.snapshots[record["parent"]]
            parent = int(record["parent"]) - 1 if above["born"] and above["born"] == record["parent_born"] else None
            images.append((index - 1, *place, *what, *state, *marks, pins, parent))
    owners = {client._worker.slot + 1: number for number, client in enumerate(clients)}
    slots = ((index, owners[int(slot["worker"])]) for index, slot in enumerate(views.slots) if slot["worker"])
    return [*images, *slots]


def snapshot_stats(cache: RadixCache) -> dict[str, int]:
    stats = cache.stats()
    return {name: getattr(stats, name) for name in [*SNAPSHOT_COUNTERS, "snapshots", "snapshots_tiered"]}
