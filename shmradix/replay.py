"""Replays a trace with worker processes, on one shared cache and on one private cache per worker.

The parent makes the segments, starts the workers, waits until all are attached, removes the segments' names (so
that nothing is left behind whoever is killed from then on), lets the workers go together and gathers what they
measured. A worker takes the next request whenever it is free.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from contextlib import suppress
from ctypes import c_int64
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from shmradix import NO_BLOCK, PrefixMatch, RadixCache
from shmradix.crew import EXIT_SECONDS, SPAWN, crew, one_message_from_each, segments, stops_put_off
from shmradix.trace import Trace, TraceError, read_trace

MAX_WORKERS = 256
CALLS = ("lookup", "insert", "evict")

_Array = npt.NDArray[np.uint32]
_SCRATCH_BLOCKS, _SCRATCH_BLOCK_SIZE = 64, 16


class Counts(NamedTuple):
    """Requests served, the full blocks and the prompt tokens looked up, and those found in the cache."""

    requests: int
    lookup_blocks: int
    hit_blocks: int
    lookup_tokens: int
    hit_tokens: int

    @property
    def hit_ratio(self) -> float:
        """Blocks found per block looked up, 0 where none was."""
        return self.hit_blocks / max(self.lookup_blocks, 1)

    @property
    def token_hit_ratio(self) -> float:
        """Tokens found per token looked up, 0 where none was."""
        return self.hit_tokens / max(self.lookup_tokens, 1)


@dataclass(frozen=True)
class WorkerResult:
    """What one worker (or all together) did, and the nanoseconds that every call took, by kind of call."""

    counts: Counts
    started_ns: int
    ended_ns: int
    call_ns: dict[str, npt.NDArray[np.int64]]

    @property
    def seconds(self) -> float:
        """Time from the common start to the end of the last request."""
        return (self.ended_ns - self.started_ns) / 1e9

    @property
    def requests_per_s(self) -> float:
        """Requests served per second."""
        return self.counts.requests / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class Phase:
    """One pass over the trace: its name ("shared" or "private"), blocks of each cache, results per worker."""

    name: str
    blocks_per_cache: int
    begun_ns: int
    """When the start of the workers began, on the clock of the results."""
    workers: list[WorkerResult]

    def total(self) -> WorkerResult:
        """Return all workers' results as one."""
        return WorkerResult(
            Counts(*(sum(column) for column in zip(*(w.counts for w in self.workers), strict=True))),
            min(w.started_ns for w in self.workers),
            max(w.ended_ns for w in self.workers),
            {call: np.concatenate([w.call_ns[call] for w in self.workers]) for call in CALLS},
        )

    @property
    def starting_seconds(self) -> float:
        """Time before the first request: compiled code is loaded or built, segments are made, workers start."""
        return (min(w.started_ns for w in self.workers) - self.begun_ns) / 1e9


class Observer(Protocol):
    """Is told how a replay goes, for a progress display."""

    def started(self, phase: str, requests: int) -> None:
        """A phase begins: compiled code is loaded (built if this is its first use), workers start."""

    def progressed(self, counts: Counts) -> None:
        """So much of the running phase is done; called several times a second."""

    def finished(self, phase: Phase) -> None:
        """All requests of a phase are done."""


@dataclass(frozen=True)
class Plan:
    """What to replay: the trace, worker processes, blocks of all caches together, tokens per block."""

    trace_path: str
    workers: int
    blocks: int
    block_size: int


@dataclass(frozen=True)
class _Job:
    """What a worker is to do. Kept small: a process goes on starting only once it has read this."""

    plan: Plan
    worker: int
    requests: int
    segment: str
    scratch: str


def replay(plan: Plan, observer: Observer) -> tuple[Phase, Phase]:
    """Replay the trace on one shared cache, then on private ones that have the same blocks in all.

    Raises TraceError, WorkerFailed, or a ShmradixError where a segment can't be made.
    """
    shared = replay_phase(plan, "shared", 1, observer)
    return shared, replay_phase(plan, "private", plan.workers, observer)


def replay_phase(plan: Plan, name: str, caches: int, observer: Observer) -> Phase:
    """Replay the trace on `caches` segments (1, or one per worker), made for this and removed again."""
    begun_ns = perf_counter_ns()
    requests = len(read_trace(plan.trace_path))
    blocks = plan.blocks // caches
    observer.started(name, requests)
    with segments(max_workers=plan.workers + 1) as (create, remove_all):
        scratch = create("scratch", max_blocks=_SCRATCH_BLOCKS, block_size=_SCRATCH_BLOCK_SIZE)
        names = [create(f"{name}-{i}", max_blocks=blocks, block_size=plan.block_size) for i in range(caches)]
        _warm_up(scratch, 0)
        jobs = [_Job(plan, w, requests, names[w % caches], scratch) for w in range(plan.workers)]
        phase = Phase(name, blocks, begun_ns, _run(jobs, remove_all, observer))
    observer.finished(phase)
    return phase


def _run(jobs: list[_Job], all_attached: Callable[[], None], observer: Observer) -> list[WorkerResult]:
    """Run one worker per job over the whole trace and return their results in the same order."""
    with stops_put_off():
        next_request = SPAWN.Value("q", 0)
        shared_counts: Any = SPAWN.RawArray(c_int64, len(jobs) * len(Counts._fields))
    counts = np.frombuffer(shared_counts, dtype=np.int64).reshape(len(jobs), -1)

    def show_progress() -> None:
        observer.progressed(Counts(*counts.sum(axis=0).tolist()))

    names = sorted({name for job in jobs for name in (job.segment, job.scratch)})
    with crew(_serve_trace, jobs, names, next_request, shared_counts) as members:
        one_message_from_each(members)
        all_attached()
        for member in members:
            with suppress(OSError):  # a worker that has died by now is found below
                member.link.send("go")
        results = one_message_from_each(members, show_progress)
        for member in members:
            member.process.join(EXIT_SECONDS)
    return results


def _serve_trace(
    job: _Job, link: Connection[Any, Any], next_request: Synchronized[int], shared_counts: Any
) -> WorkerResult:
    """Get ready, wait until all workers are, and serve requests to the end of the trace."""
    counts = np.frombuffer(shared_counts, dtype=np.int64).reshape(job.plan.workers, -1)[job.worker]
    trace = read_trace(job.plan.trace_path)
    if len(trace) != job.requests:
        raise TraceError(f"{job.plan.trace_path}: the file has changed since the replay began")
    _warm_up(job.scratch, job.worker + 1)
    with RadixCache.attach(job.segment) as cache:
        server = _Server(cache, job.worker, job.plan.workers, counts)
        link.send("ready")
        link.recv()
        return server.serve_all(trace, next_request)


def _warm_up(scratch: str, seed: int) -> None:
    """Make every call of a replay once, on a scratch segment, so that none is compiled while timed."""
    with RadixCache.attach(scratch) as cache:
        tokens = np.arange(4 * cache.block_size, dtype=np.uint32) + np.uint32(1_000_000 * seed)
        blocks = np.arange(4, dtype=np.uint32) + np.uint32(4 * seed)
        for length in (len(tokens), len(tokens) - 1):
            with cache.lookup(tokens[:length]) as match:
                cache.insert(tokens[:length], blocks, match=match)
        cache.evict(1)


class _Server:
    """Serves requests on one cache, counts hits and times the calls."""

    def __init__(self, cache: RadixCache, worker: int, workers: int, counts: npt.NDArray[np.int64]) -> None:
        self._cache = cache
        self._worker = worker
        self._workers = workers
        self._blocks_used = 0
        self._counts = counts
        self._call_ns = {call: array("q") for call in CALLS}

    def serve_all(self, trace: Trace, next_request: Synchronized[int]) -> WorkerResult:
        """Serve the requests that the shared counter gives this worker, until there are no more."""
        started_ns = ended_ns = perf_counter_ns()
        while (index := _take(next_request)) < len(trace):
            self._serve(trace.request_tokens(index), int(trace.input_lengths[index]))
            ended_ns = perf_counter_ns()
        return WorkerResult(
            Counts(*self._counts.tolist()),
            started_ns,
            ended_ns,
            {call: np.array(times) for call, times in self._call_ns.items()},
        )

    def _serve(self, tokens: _Array, input_length: int) -> None:
        before = perf_counter_ns()
        match = self._cache.lookup(tokens)
        self._call_ns["lookup"].append(perf_counter_ns() - before)
        with match:
            blocks = len(tokens) // self._cache.block_size
            hit_tokens = min(match.matched_tokens, input_length)
            self._counts += (1, blocks, len(match.matched_blocks), input_length, hit_tokens)
            if blocks:
                self._store(tokens, blocks, match)

    def _store(self, tokens: _Array, blocks: int, match: PrefixMatch) -> None:
        """Insert the prompt; evict what doesn't fit, until all is stored or nothing is left to evict."""
        computed = self._new_blocks(blocks - len(match.matched_blocks))
        block_table = np.concatenate([match.matched_blocks, computed])
        while missing := blocks - self._insert(tokens, block_table, match):
            before = perf_counter_ns()
            evicted = self._cache.evict(missing)
            self._call_ns["evict"].append(perf_counter_ns() - before)
            if not len(evicted):
                break

    def _insert(self, tokens: _Array, block_table: _Array, match: PrefixMatch) -> int:
        """Insert the prompt and return how many of its blocks are in the cache now."""
        before = perf_counter_ns()
        acquired = self._cache.insert(tokens, block_table, match=match)
        self._call_ns["insert"].append(perf_counter_ns() - before)
        return acquired.inserted_tokens // self._cache.block_size

    def _new_blocks(self, count: int) -> _Array:
        """Return ids that no other worker gives out: stand-ins for blocks of an engine's pool."""
        if (self._blocks_used + count) * self._workers > NO_BLOCK:
            self._blocks_used = 0
        numbers = np.arange(self._blocks_used, self._blocks_used + count, dtype=np.int64)
        self._blocks_used += count
        return (numbers * self._workers + self._worker).astype(np.uint32)


def _take(next_request: Synchronized[int]) -> int:
    """Return the next request's number and advance the counter that all workers share."""
    with next_request.get_lock():
        index = next_request.value
        next_request.value = index + 1
    return index
