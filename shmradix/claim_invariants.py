"""The invariant of claims, checked with numpy alone; `verify.py` for the tree's, and for all."""

from collections.abc import Iterator

import numpy as np

from shmradix.layout import Geometry, Views
from shmradix.snapshot_invariants import few

NAME = "live claims lie below their high-water mark, were born one after the other, and have a worker there is"


def violations(views: Views, geometry: Geometry) -> Iterator[str]:
    """What is wrong with the claims of a segment's image."""
    state, used = views.state[0], max(int(views.state["claims_used"][0]), 1)
    live = np.flatnonzero(views.claims["born"])
    if used > 1 + geometry.max_claims or (live.size and (live[0] == 0 or live[-1] >= used)):
        yield f"claims_used is {used}, but {few(live)} live, of {geometry.max_claims}"
        return
    record = views.claims[live]
    if len(np.unique(record["born"])) != len(live):
        yield "two claims were born at once"
    bad = (record["born"] < 0) | (record["born"] > state["clock"]) | (record["epoch"] > state["epoch"])
    slot = record["worker"].astype(np.int64) - 1
    bad |= (slot < 0) | (slot >= len(views.workers))
    bad[~bad] |= record["generation"][~bad] > views.workers["generation"][slot[~bad]]
    if bad.any():
        yield f"claims {few(live[bad])}"
