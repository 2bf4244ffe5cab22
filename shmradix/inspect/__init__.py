"""Readings of a cache, live or in a file, that take no guard, no slot and nothing from its workers; needs no numba."""

from shmradix.inspect.reading import Guard, Lease, Reading, Worker, WorkersBusy, dump, guards, open
from shmradix.inspect.snapshots import Snapshot
from shmradix.inspect.tree import Candidate, Explanation, Other, Run, explain, runs

__all__ = [
    "Candidate", "Explanation", "Guard", "Lease", "Other", "Reading", "Run", "Snapshot", "Worker", "WorkersBusy",
    "dump", "explain", "guards", "open", "runs",
]  # fmt: skip
