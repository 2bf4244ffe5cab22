"""Every operation stopped after every store: what the dead worker leaves, the others must find whole.

An operation runs uncompiled on a copy of a segment (tests/plain.py), which yields its stores. The segment with the
first k of them is what a worker leaves that dies there. A real handle then goes on with it, compiled: it takes the
guard over, rebuilds, buries the dead, and what it finds must be a state that the operation passes through. The same
with a second worker that dies at every store of that recovery, and with the stores between two atomic ones in another
order, as a compiler may put them. A segment that equals one already tried, byte for byte, is not tried again.

`python -m tests.crash_states --help` runs more of it than the tests do.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np
import xxhash

from shmradix import RadixCache, errors, verify
from shmradix.guard import TREE
from shmradix.owner_word import tag_of
from tests.crash_operations import ALL, NOW, Operation, fork, leaves, operations
from tests.crash_shapes import DEAD, HOLDER, SHAPES, SIZES, SURVIVOR, TAKER, VICTIM, Builder, Shape, spell
from tests.model import Model, Request, segment_image
from tests.plain import Kernels, Store, make

SEED = 0x5EED
GONE = (VICTIM, DEAD, TAKER)
# The one invariant that a dead worker may leave broken until it is reaped: docs/invariants.md
MOVED_LEASE = next(i for i, name in enumerate(verify.names(), 1) if name.startswith("a lease pins"))
SHOWN = 20  # failures that are described
FRESH = Request(spell("qqq qqr"))  # what nobody stored


class Limits(NamedTuple):
    """How many states are tried, besides all those of a single stop; None is all."""

    second: int | None  # stops within one recovery
    reordered: int  # other orders of an operation's stores
    second_reordered: int  # and of each recovery's


class State:
    """A state that an operation may leave, and all that follows from it; each is computed once."""

    def __init__(self, model: Model, probes: list[Request]) -> None:
        self.image = model.image()
        self.model, self._probes = fork(model), probes
        for client in GONE:
            self.model.close(client)
        self.buried_image = self.model.image()
        self._answers: list[Any] | None = None

    @property
    def answers(self) -> list[Any]:
        """What the survivor is answered from then on."""
        if self._answers is None:
            self._answers = _answers_of_model(fork(self.model), self._probes)
        return self._answers


@dataclass
class Report:
    """Counts by kind, and what went wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def fail(self, text: str) -> None:
        """Count a failure; the first ones are kept."""
        self.counts["failures"] += 1
        if len(self.failures) < SHOWN:
            self.failures.append(text)

    def add(self, other: Report) -> None:
        """Take another process's report in."""
        self.counts += other.counts
        self.failures = [*self.failures, *other.failures][:SHOWN]

    def __str__(self) -> str:
        return "\n".join(f"{self.counts[kind]:>12,} {kind}" for kind in sorted(self.counts))


class World:
    """A segment whose worker 0 goes on, worker 2 lives and holds leases, and workers 1, 3 and 4 are dead."""

    def __init__(self, name: str) -> None:
        creator = RadixCache.create(name, **SIZES)
        creator._segment.views.header["hash_seed"] = SEED
        creator.close()
        self.caches = [RadixCache.attach(name) for _ in range(SIZES["max_workers"])]
        self.survivor, self.geometry = self.caches[SURVIVOR], self.caches[SURVIVOR]._segment.geometry
        self.memory = np.ndarray(self.geometry.size, np.uint8, buffer=self.survivor._segment._map)
        self.shapes = self._shapes()
        for client in GONE:
            self.caches[client]._worker.forget()  # its kernel lock, as when a process dies
        parking: Any = self.survivor._worker._parking[TREE]
        parking.sleep = lambda: False  # the guard's owner is dead whenever it is held: nothing to wait for
        self._image = np.empty_like(self.memory)
        self._volatile = self._volatile_bytes()

    def close(self) -> None:
        """Remove the segment."""
        del self.memory
        self.survivor.unlink()
        for cache in self.caches:
            cache.close()

    def _shapes(self) -> list[Shape]:
        blank, shapes = self.memory.copy(), []
        for name, build in SHAPES.items():
            self.memory[:] = blank
            builder = Builder(self.caches)
            build(builder)
            shapes.append(Shape(name, self.memory.copy(), builder.model, builder.held, builder.hidden_at))
            assert not self.survivor.verify()
        return shapes

    def _volatile_bytes(self) -> np.ndarray:
        """Where a recovered segment differs from run to run: the guards, and the counters of who recovered it."""
        mark = np.zeros_like(self.memory)
        views = self.geometry.views(mark)
        views.guards.view(np.uint8)[:] = 1
        views.workers[SURVIVOR : SURVIVOR + 1].view(np.uint8)[:] = 1
        return np.flatnonzero(mark)

    def _fixed(self, image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        views = self.geometry.views(image)
        return views.header.view(np.uint8), views.workers[HOLDER : HOLDER + 1].view(np.uint8)

    def recover(self, crashed: np.ndarray) -> bytes:
        """Let the survivor go on after a crash; a digest of what it made of it, which is in the segment then."""
        self.memory[:] = crashed
        worker = self.survivor._worker
        worker.run(worker.entries.copy, self._image)
        self._image[self._volatile] = 0
        return xxhash.xxh3_128_digest(self._image.data)

    def judge(self, shape: Shape, states: list[State], probes: list[Request]) -> frozenset[int]:
        """Which of the states the recovered segment may be in; AssertionError where it is in none, or unsound."""
        broken = verify.check(self.survivor._segment.views, self.geometry)
        assert {found.number for found in broken} <= {MOVED_LEASE}, f"recovered: {broken}"
        image, leases = segment_image(self.survivor), _leases_of(self.memory, self.geometry, HOLDER)
        fit = [i for i, state in enumerate(states) if state.image == image]
        assert fit, f"recovered is no state that the operation passes through: {image}"
        assert leases == _leases_of(shape.image, self.geometry, HOLDER), "a live worker's lease changed"
        for now, then in zip(self._fixed(self.memory), self._fixed(shape.image)):
            assert np.array_equal(now, then), "the header or a live worker's record changed"
        pids = self.geometry.views(self.memory).workers["pid"]
        dead = sum(bool(pids[client]) for client in GONE)
        assert self.survivor.reap() == dead, "not all dead workers were reaped"
        assert not (broken := self.survivor.verify()), f"reaped: {broken}"
        image = segment_image(self.survivor)
        fit = [i for i in fit if states[i].buried_image == image]
        assert fit, f"reaped is no state that the operation passes through: {image}"
        assert leases == _leases_of(self.memory, self.geometry, HOLDER), "reaping changed a live worker's lease"
        answers = _answers_of_cache(self.survivor, self.caches[HOLDER], probes)
        fit = [i for i in fit if states[i].answers == answers]
        assert fit, f"the survivor was answered {answers}"
        return frozenset(fit)


def _leases_of(image: np.ndarray, geometry: Any, client: int) -> list[Any]:
    leases = geometry.views(image).leases
    fields = [name for name in leases.dtype.names if name not in ("next_free", "padding", "reserved")]
    return [
        (i, leases[i][fields].tolist())
        for i in range(len(leases))
        if leases[i]["born"] and leases[i]["worker"] == client + 1
    ]


def _answers_of_cache(cache: RadixCache, holder: RadixCache, probes: list[Request]) -> list[Any]:
    answers: list[Any] = [cache.peek_matched_tokens(probe.tokens, **probe.identity()) for probe in probes]
    for probe in probes[:2]:
        with cache.lookup(probe.tokens, **probe.identity()) as match:
            partial = (match.partial_block, match.partial_tokens) if match.partial_block is not None else None
            answers.append((match.matched_tokens, match.matched_blocks.tolist(), partial))
    with cache.lookup(FRESH.tokens) as match:
        try:
            answers.append(cache.insert(FRESH.tokens, [800, 801], match=match).inserted_tokens)
        except errors.NamespacesFull:
            answers.append("full")
    assert not (broken := cache.verify()), f"used: {broken}"
    for _ in range(2):
        evicted = cache.evict(ALL)
        answers.append(list(zip(evicted.blocks.tolist(), evicted.disk_block_ids.tolist())))
        leases = holder._segment.views.leases
        for lease in np.flatnonzero((leases["born"] != 0) & (leases["worker"] == HOLDER + 1)).tolist():
            holder._worker.run(holder._worker.entries.release, lease, int(leases["born"][lease]))
    assert not (broken := cache.verify()), f"emptied: {broken}"
    stats = cache.stats()
    assert (stats.blocks_free, stats.leases, stats.namespaces) == (ALL, 0, 0), stats
    return answers


def _answers_of_model(model: Model, probes: list[Request]) -> list[Any]:
    answers: list[Any] = [model.peek(probe) for probe in probes]
    for probe in probes[:2]:
        match = model.lookup(SURVIVOR, probe)
        answers.append((match.tokens, match.blocks, match.partial))
        model.release_match(match)
    match = model.lookup(SURVIVOR, FRESH)
    try:
        answers.append(model.insert(SURVIVOR, FRESH, [800, 801], None, 0, match).tokens)
    except errors.NamespacesFull:
        answers.append("full")
    model.release_match(match)
    for _ in range(2):
        answers.append(model.evict(ALL))
        model.close(HOLDER)
    return answers


class Trial:
    """One operation on one shape, dying in every way."""

    def __init__(self, world: World, shape: Shape, operation: Operation, kernels: Kernels, report: Report) -> None:
        self.world, self.shape, self.operation, self.kernels, self.report = world, shape, operation, kernels, report
        self.chance = random.Random(f"{SEED} {shape.name} {operation.name}")
        passed, others = operation.states()
        self.last = len(passed) - 1
        probes = [operation.request, *leaves(shape.model)[:4], *leaves(passed[-1])[:4]]
        self.probes = list(dict.fromkeys(probes))
        self.states = [State(model, self.probes) for model in (*passed, *others)]
        self.judged: dict[bytes, frozenset[int] | str] = {}
        self.tried: dict[int, frozenset[int] | None] = {}

    def run(self, limits: Limits) -> None:
        """Try all its crash states."""
        tape, _ = self.kernels.record(self.shape.image, self.world.geometry, VICTIM, self.operation.call)
        self.report.counts["operations"] += 1
        self.report.counts["stores"] += tape.count
        last, reached = self.last, 0
        image = self.shape.image.copy()
        for stop in range(len(tape.stores) + 1):
            make(image, tape.stores[stop - 1 : stop] if stop else [])
            where = f"store {stop} of {len(tape.stores)}"
            found = self._try("stops", image, where)
            if found is None:
                continue
            passed = [i for i in sorted(found) if reached <= i <= last]
            ends = {0: 0, len(tape.stores): last}
            if not passed or ends.get(stop, passed[0]) not in passed:
                self._fail(where, f"state {sorted(found)} of {last} after {reached}")
            reached = max(reached, min(passed, default=0))
            self._die_again(image, where, found, limits)
        for _ in range(limits.reordered):
            if chosen := another_order(tape.stores, self.chance):
                image = make(self.shape.image.copy(), (tape.stores[i] for i in chosen))
                self._try("reordered", image, f"stores {chosen}")
        self.report.counts["crash states"] += len(self.tried)

    def _die_again(self, crashed: np.ndarray, where: str, expected: frozenset[int], limits: Limits) -> None:
        """Stop whoever takes the guard over, too: what there is must not change by that."""
        owner = int(self.world.geometry.views(crashed).guards["owner"][TREE])
        if not owner:
            return

        def recover(entries: Any, handle: int) -> None:
            word = entries.announce(handle, TREE)
            entries.take_over(handle, tag_of(TAKER, 1), NOW, TREE, word)

        tape, _ = self.kernels.record(crashed, self.world.geometry, TAKER, recover)
        stops = range(1, len(tape.stores) + 1)
        chosen = set(stops)
        if limits.second is not None and limits.second < len(stops):
            chosen = set(self.chance.sample(stops, limits.second))
        image = crashed.copy()
        for stop in stops:
            make(image, tape.stores[stop - 1 : stop])
            if stop in chosen:
                self._expect("second stops", image, f"{where}, then {stop} of {len(stops)} of the recovery", expected)
        for _ in range(limits.second_reordered):
            if some := another_order(tape.stores, self.chance):
                image = make(crashed.copy(), (tape.stores[i] for i in some))
                self._expect("second reordered", image, f"{where}, then stores {some} of the recovery", expected)

    def _expect(self, kind: str, image: np.ndarray, where: str, expected: frozenset[int]) -> None:
        found = self._try(kind, image, where)
        if found is not None and found != expected:
            self._fail(where, f"state {sorted(found)}, without the second stop {sorted(expected)}")

    def _try(self, kind: str, image: np.ndarray, where: str) -> frozenset[int] | None:
        """Which states a crash leads to; None where that went wrong. One that was tried before leads to the same."""
        self.report.counts[kind] += 1
        crash = xxhash.xxh3_64_intdigest(image.data)
        if crash not in self.tried:
            try:
                self.tried[crash] = self._found(image)
            except Exception as error:
                self.tried[crash] = None
                self._fail(where, f"{type(error).__name__}: {error}")
        return self.tried[crash]

    def _found(self, crashed: np.ndarray) -> frozenset[int]:
        digest = self.world.recover(crashed)
        if digest not in self.judged:
            self.report.counts["recovered segments judged"] += 1
            try:
                self.judged[digest] = self.world.judge(self.shape, self.states, self.probes)
            except Exception as error:
                self.judged[digest] = f"{type(error).__name__}: {error}"
        found = self.judged[digest]
        assert not isinstance(found, str), found
        return found

    def _fail(self, where: str, what: str) -> None:
        self.report.fail(f"{self.shape.name}: {self.operation.name}: {where}: {what}"[:1500])


def another_order(stores: list[Store], chance: random.Random) -> list[int]:
    """Some of the stores, such that another order of those between two atomic ones has them first; [] if it has not."""
    if not stores:
        return []
    at = chance.randrange(len(stores))
    start = max((i for i in range(at) if stores[i].ordered), default=-1) + 1
    end = min((i for i in range(start, len(stores)) if stores[i].ordered), default=len(stores))
    share, missing, chosen = chance.random(), set(), list(range(start))
    for i in range(start, end):
        word = stores[i].word  # stores to the same word keep their order
        if word not in missing and chance.random() < share:
            chosen.append(i)
        else:
            missing.add(word)
    return chosen if chosen != list(range(len(chosen))) else []


def run_part(name: str, part: int, parts: int, limits: Limits) -> Report:
    """One process's share."""
    report, kernels, world = Report(), Kernels(), World(name)
    try:
        everything = [(shape, operation) for shape in world.shapes for operation in operations(shape)]
        for shape, operation in everything[part::parts]:
            Trial(world, shape, operation, kernels, report).run(limits)
    finally:
        world.close()
    return report


def run(names: list[str], limits: Limits) -> Report:
    """All of it, in as many processes as there are names for their segments."""
    report, parts = Report(), len(names)
    with ProcessPoolExecutor(parts, get_context("spawn")) as pool:
        jobs = [pool.submit(run_part, name, part, parts, limits) for part, name in enumerate(names)]
        for job in jobs:
            report.add(job.result())
    return report


def main() -> int:
    """Run it from a shell."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash_states", description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--second", type=int, help="second stops within each recovery (all)")
    parser.add_argument("--reordered", type=int, default=300, help="other orders of each operation's stores (300)")
    parser.add_argument("--second-reordered", type=int, default=10, help="and of each recovery's (10)")
    chosen = parser.parse_args()
    names = [f"crash-states-{os.getpid()}-{part}" for part in range(chosen.processes)]
    started = time.monotonic()
    report = run(names, Limits(chosen.second, chosen.reordered, chosen.second_reordered))
    print(report, f"{time.monotonic() - started:>12.0f} seconds", *report.failures, sep="\n")
    return bool(report.counts["failures"])


if __name__ == "__main__":
    raise SystemExit(main())
