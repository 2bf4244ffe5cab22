"""The snapshots in a reading."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shmradix.layout import BRANCH, HIDDEN, LEAF, PENDING, SIBLING, TAIL, Views

FLAGS = {TAIL: "tail", SIBLING: "sibling", LEAF: "leaf", PENDING: "pending", HIDDEN: "displaced", BRANCH: "branch"}


@dataclass(frozen=True)
class Snapshot:
    """A saved state: of how many tokens, whose, where, and who resumes from it now; see docs/snapshots.md."""

    tokens: int
    session: int
    """0: of none."""
    adapter_id: int
    flags: list[str]
    """Of "tail", "sibling", "leaf", "pending", "displaced", "branch"."""
    slot: int | None
    """None where it is in a tier."""
    tier_key: int | None
    pins: int
    """Matches that hold it."""
    idle: int
    """Births and uses of snapshots since its last use."""
    is_cleared: bool
    """Of before the last clear(): found by nobody."""


def snapshots(views: Views) -> list[Snapshot]:
    """All snapshots, the oldest first."""
    records, pins = views.snapshots, views.pins
    live = 1 + np.flatnonzero(records["born"][1:])
    live = live[np.argsort(records["born"][live], kind="stable")]
    pinned = np.bincount(pins["snapshot"][pins["born"] != 0].astype(np.int64), minlength=len(records))
    clock, epoch, found = int(views.snapshot_state["clock"][0]), int(views.state["epoch"][0]), []
    for at in live.tolist():
        record = records[at]
        key = int(record["tier_key"])
        found.append(
            Snapshot(
                tokens=int(record["token_count"]),
                session=int(record["session"]),
                adapter_id=int(record["adapter_id"]),
                flags=[name for flag, name in FLAGS.items() if record["flags"] & flag],
                slot=None if key else int(record["slot"]),
                tier_key=key or None,
                pins=int(pinned[at]),
                idle=clock - int(record["last_use"]),
                is_cleared=int(record["epoch"]) != epoch,
            )
        )
    return found
