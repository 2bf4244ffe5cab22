"""Readings of a cache, live or in a file, that take no guard, no slot and nothing from its workers; needs no numba."""

from shmradix.inspect.reading import Lease, Reading, Worker, WorkersBusy, dump, open
from shmradix.inspect.tree import Explanation, Other, Run, explain, runs

__all__ = [
    "Explanation", "Lease", "Other", "Reading", "Run", "Worker", "WorkersBusy", "dump", "explain", "open", "runs",
]  # fmt: skip
