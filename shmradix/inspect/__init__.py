"""Readings of a cache, live or in a file, that take no guard, no slot and nothing from its workers; needs no numba."""

from shmradix.inspect.reading import Reading, Worker, WorkersBusy, dump, open

__all__ = ["Reading", "Worker", "WorkersBusy", "dump", "open"]
