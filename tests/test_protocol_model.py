"""What holds in every state of the locking protocol, which changes would break that, and that the code follows it.

`SHMRADIX_MODEL=release` explores the larger starts, too: minutes, and gigabytes of memory.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shmradix import errors, guard, locks, owner_word, workers
from tests import protocol_model as model
from tests.plain import Kernels
from tests.protocol_model import COMPILED, FIRST, OWNING, PARKED, Graph, Process, Protocol, Shared, Slot, Steps

Start = tuple[Shared, list[Process]]
WAITING = ("step", "timeout", "wake")


def attached(*programs: str) -> Start:
    """Workers that have a slot each and nothing else, and their calls."""
    calls = [tuple(program.split()) for program in programs]
    return Shared((Slot(1, True),) * len(calls)), [Process(c, FIRST[c[0]], i, 1) for i, c in enumerate(calls)]


def fresh(slots: int, *programs: str) -> Start:
    """Processes that have yet to claim a slot of a new segment."""
    return Shared((Slot(),) * slots), [Process(tuple(p.split()), "lock", target=0) for p in programs]


TWICE, HALF = "two processes in the section", "a half-changed tree is used, or passed for whole"
HIDDEN, STRANGE = "leases that no reaper would look for", "a new worker has the leases of another"
MISJUDGED, BURIED = "a live worker is taken for dead", "a live worker is buried"


def flaw(shared: Shared, living: list[Process]) -> str:
    """What is wrong with a state, "" if nothing."""
    inside = [p for p in living if p.at in OWNING]
    wrong = {
        TWICE: len(inside) > 1,
        "a live owner lost its guard": any(shared.word & ~PARKED != p.tag for p in inside),
        "a free guard over a section that is not finished": shared.word == 0 and (shared.dirty or shared.torn),
        HALF: shared.torn and any(p.at in ("read", "begin", "clean", "exchange") for p in inside),
        HIDDEN: any(slot.leases and not slot.pid for slot in shared.slots),
        MISJUDGED: any(p.at == "seize" and q.tag == p.seen & ~PARKED for p in living for q in living),
        BURIED: any(
            p.at in ("begin", "compare", "finish") and p.calls[0] != "work" and q is not p
            and 0 <= q.slot == p.target and 0 < q.generation <= p.doomed for p in inside for q in living
        ),
        "two workers hold one slot": any(p.slot == q.slot >= 0 and p is not q for p in living for q in living),
        STRANGE: any(p.at == "register" and shared.slots[p.slot].leases for p in living),
    }  # fmt: skip
    return next((text for text, holds in wrong.items() if holds), "")


def leases_left(graph: Graph) -> Iterator[Start]:
    """The ends after which one more worker, which claims a slot and reaps, leaves a dead one's leases behind."""
    for shared, living in (graph.parts(state) for state in graph.states if graph.is_over(state)):
        comer = Process(("claim", "reap"), "lock", target=0)
        after = Graph(Protocol(kills=0), (shared._replace(shocks=0), [*living, comer]), flaw)
        assert (after.flaw, after.stuck()) == ("", -1)
        for then, there in (after.parts(s) for s in after.states if after.is_over(s)):
            slots = {p.slot for p in there}  # one that a stopped claimer has stays as it is
            if any(s.leases and i not in slots for i, s in enumerate(then.slots)) and any(p.slot >= 0 for p in there):
                yield shared, living


# --- the protocol holds

STARTS: dict[str, tuple[Protocol, Start]] = {
    "two sections each": (Protocol(), attached(*["work work"] * 3)),
    "readers": (Protocol(), attached(*["peek work"] * 3)),
    "slots are claimed and closed": (Protocol(), fresh(2, *["claim work close"] * 3)),
    "slots are claimed and reaped": (Protocol(), fresh(2, *["claim work reap"] * 3)),
    "waits end in LockTimeout": (Protocol(gives_up=True), fresh(2, *["claim work reap close claim reap"] * 2)),
    "one is stopped": (Protocol(kills=1, stops=1), fresh(2, *["claim work"] * 3)),
    "one is stopped, and there is a reaper": (Protocol(kills=1, stops=1), fresh(2, *["claim work reap"] * 2)),
    "signals while working": (Protocol(kills=1, shocks=1), attached(*["work"] * 3)),
    "signals in all calls": (Protocol(kills=1, shocks=1), fresh(2, *["claim work reap close"] * 2)),
}
LARGE: dict[str, tuple[Protocol, Start]] = {
    "four workers": (Protocol(), attached(*["work"] * 4)),
    "three sections each": (Protocol(), attached(*["work work work"] * 3)),
    "all reap": (Protocol(), fresh(3, *["claim work reap"] * 3)),
    "closing, reaping, working": (Protocol(kills=1), fresh(3, "claim work close", "claim work reap", "claim work")),
    "signals among three": (Protocol(kills=1, shocks=1), attached(*["work reap"] * 3)),
}
ALL = {**STARTS, **LARGE} if os.environ.get("SHMRADIX_MODEL") == "release" else STARTS


@pytest.mark.parametrize("name", ALL)
def test_every_state_is_sound_and_has_a_way_on(name: str) -> None:
    graph = Graph(*ALL[name], flaw)
    print(f"{len(graph.states)} states")
    assert not graph.flaw, "\n".join([graph.flaw, *graph.trace()])
    stuck = graph.stuck()  # by steps and time-outs alone, as if no wake-up ever came
    assert stuck < 0, "\n".join(graph.trace(stuck))
    assert not list(leases_left(graph))


class Noticed(Protocol):
    """Sleepers time out where the owner is dead only, and nobody is killed who owes another a wake-up."""

    OWES = -1

    def may_time_out(self, me: Process, shared: Shared, locked: int) -> bool:
        return shared.word != 0 and is_dead(shared.word, me, shared, locked)

    def waited(self, kind: str, me: Process, shared: Shared) -> Steps:
        for _, after, then in super().waited(kind, me, shared):
            yield kind, after._replace(seen=self.OWES if kind == "wake" else 0), then

    def mark(self, me: Process, shared: Shared, locked: int) -> Steps:
        for kind, after, then in super().mark(me, shared, locked):
            yield kind, after._replace(seen=after.seen or self.OWES), then

    def may_die(self, me: Process) -> bool:
        return me.seen != self.OWES and me.at not in ("mark", "post")


def is_dead(word: int, me: Process, shared: Shared, locked: int) -> bool:
    slot, generation = model.owner_of(word)
    return shared.slots[slot].generation != generation or (slot != me.slot and not locked >> slot & 1)


@pytest.mark.parametrize("protocol", [Noticed(), Protocol(kills=0, may_time_out=lambda *_: False)])
def test_only_a_kill_loses_a_wake_up(protocol: Protocol) -> None:
    graph = Graph(protocol, attached(*["work"] * 3), flaw)
    assert (graph.flaw, graph.stuck(WAITING)) == ("", -1)


# --- what would break it


def two_inside(shared: Shared, living: list[Process]) -> str:
    return TWICE if sum(p.at in OWNING for p in living) > 1 else ""


class Semaphore(Protocol):
    """The semaphore is the lock: whoever takes its one token is in the section."""

    def load(self, me: Process, shared: Shared, locked: int) -> Steps:
        if shared.tokens:
            yield "step", me._replace(at="begin"), shared._replace(tokens=0)


class SemaphoreAndOwner(Semaphore):
    """The holder writes down who it is; who waits long takes over from a dead one by compare-and-swap."""

    def load(self, me: Process, shared: Shared, locked: int) -> Steps:
        if shared.tokens:
            yield "step", me._replace(at="sign"), shared._replace(tokens=0)
        elif shared.word and is_dead(shared.word, me, shared, locked):
            yield "timeout", me._replace(at="begin"), shared._replace(word=me.tag, torn=False)

    def sign(self, me: Process, shared: Shared, locked: int) -> Steps:
        yield "step", me._replace(at="begin"), shared._replace(word=me.tag)

    def clean(self, me: Process, shared: Shared, locked: int) -> Steps:
        yield "step", me._replace(at="post"), shared._replace(word=0)


class SemaphoreAndGuess(SemaphoreAndOwner):
    """As before, and a semaphore without an owner is taken for one whose owner died before it signed."""

    def load(self, me: Process, shared: Shared, locked: int) -> Steps:
        yield from super().load(me, shared, locked)
        if not shared.word:
            yield "timeout", me._replace(at="sign"), shared


def goes_to(at: str) -> Any:
    """A step that does nothing else."""
    return lambda me, shared, locked: [("step", me._replace(at=at), shared)]


SOUND = Protocol()
TWO, THREE, CLAIMS = attached(*["work"] * 2), attached(*["work"] * 3), fresh(2, *["claim work"] * 3)
REAPS = fresh(2, *["claim work reap"] * 3)
REUSED = TWO[0], [*TWO[1], *fresh(2, "claim work")[1]]

# What is changed; a start; the flaw, or "" where somebody waits for ever; the step after which that is so.
BROKEN: dict[str, tuple[Protocol, Start, str, str]] = {
    "a semaphore": (Semaphore(kills=1, clean=goes_to("post")), TWO, "", "begin: kill"),
    "a semaphore and an owner": (SemaphoreAndOwner(kills=1), TWO, "", "sign: kill"),
    "a semaphore, an owner, a guess": (SemaphoreAndGuess(), TWO, TWICE, "sign"),
    "no time-outs": (Protocol(may_time_out=lambda *_: False), TWO, "", "set_dirty: kill"),
    "taking over forgets PARKED": (Noticed(seize=lambda me, *rest: [
        (kind, after, then._replace(word=then.word & ~(PARKED * (after.at == "inspect"))))
        for kind, after, then in SOUND.seize(me, *rest)
    ]), THREE, "", "load: kill"),
    "trying again forgets PARKED": (Protocol(
        kills=0, may_time_out=lambda *_: False, swap=lambda me, *rest: SOUND.swap(me._replace(parked=0), *rest)
    ), THREE, "", "announce"),
    "liveness without the generation": (Protocol(kills=1, judge=goes_to("judge_lock")), REUSED, "", "lock"),
    "dirty cleared before the work": (Protocol(set_dirty=goes_to("begin")), TWO, HALF, "inspect"),
    "no rebuild": (Protocol(inspect=goes_to("clean")), TWO, HALF, "inspect"),
    "taking over whoever is slow": (Protocol(
        judge_lock=lambda me, shared, locked: SOUND.judge_lock(me, shared, 0)
    ), TWO, MISJUDGED, "judge_lock"),
    "taking over by a plain store": (Protocol(
        seize=lambda me, shared, locked: SOUND.seize(me, shared._replace(word=me.seen), locked)
    ), THREE, TWICE, "seize"),
    "reaping whoever there is": (Protocol(suspect_lock=goes_to("load")), REAPS, BURIED, "set_dirty"),
    "a burial clears any pid": (Protocol(compare=goes_to("finish")), REAPS, HIDDEN, "finish"),
    "claiming buries nobody": (Protocol(number=lambda me, *rest: [
        (kind, after._replace(at="register"), then) for kind, after, then in SOUND.number(me, *rest)
    ]), CLAIMS, STRANGE, "number"),
    "handlers use a claiming worker": (Protocol(shocks=1, may_nest=lambda me: me.slot >= 0), CLAIMS, HIDDEN, "finish"),
    # So it is: for the few instructions from a claim's lock to its generation, a dead predecessor looks alive.
    "one is stopped while it claims": (Protocol(kills=1, stops=1, unstopped=()), CLAIMS, "", "number: stop"),
}  # fmt: skip


@pytest.mark.parametrize("change", BROKEN)
def test_a_change_that_breaks_it_is_found_out(change: str) -> None:
    protocol, (shared, processes), expected, last = BROKEN[change]
    is_semaphore = isinstance(protocol, Semaphore)
    start = shared._replace(tokens=int(is_semaphore)), processes
    graph = Graph(protocol, start, two_inside if is_semaphore else flaw)
    place = len(graph.states) - 1 if graph.flaw else graph.stuck(WAITING)
    assert place >= 0, "nothing found"
    trace = graph.trace(place)
    print("\n".join(trace))
    assert graph.flaw == expected
    assert trace[-1].partition(" ")[2].startswith(last)


# --- the code does what the model says

DIRTY, BYTES = guard._DIRTY, locks.FIRST_WORKER_BYTE


class Tape:
    """The model's memory under the real code: each access must be the model's next, and finds what the model has."""

    def __init__(self, seed: int) -> None:
        self.chance, self.locked = random.Random(seed), 0
        self.shared, (self.me,) = fresh(3, "claim work peek reap close")
        self.lock_timeout = self.chance.choice([None, None, 0])
        self.protocol = Protocol(gives_up=self.lock_timeout == 0)

    def access(self, *steps: str, slot: int | None = None) -> tuple[Shared, str]:
        """Make the model's next step, which must be one of these. Returns what was there before, and its kind."""
        while self.me.at == "finish" and self.me.target < 0 and self.me.calls[0] != "work":
            self._step()  # a burial that leaves the pid to a later generation
        self._disturb()
        me, before = self.me, self.shared
        assert me.at in steps
        if me.at not in (*COMPILED, "drop") and self.chance.random() < 0.01:
            self.me = self.protocol.raised(me)
            raise KeyboardInterrupt
        owner = model.owner_of(me.seen)[0] if me.at.startswith("judge") else me.target
        assert slot in (None, me.slot if me.at in ("number", "register") else owner)
        return before, self._step()

    def _step(self) -> str:
        kinds = ("step", "timeout", "wake") if self.lock_timeout is None else ("step", "timeout", "give up")
        moves = [m for m in self.protocol.steps(self.me, self.shared, self.locked) if m[0] in kinds]
        kind, self.me, self.shared = self.chance.choice(moves) if self.me.at == "sleep" else moves[-1]
        return kind

    def _disturb(self) -> None:
        """What other processes may do in between: anything but to touch what is this one's."""
        chance, me, shared = self.chance, self.me, self.shared
        if me.at in OWNING:
            self.shared = shared._replace(word=shared.word | chance.choice([0, PARKED]))
        elif chance.random() < 0.4:
            self.locked = chance.randrange(8) & ~(1 << me.slot if me.slot >= 0 else 0)
            raised = [Slot(old.generation + chance.randrange(2), chance.random() < 0.5) for old in shared.slots]
            slots = [old if i == me.slot else raised[i] for i, old in enumerate(shared.slots)]
            owner = chance.randrange(3)
            word = model.tag_of(owner, chance.randrange(slots[owner].generation + 1)) | chance.choice([0, PARKED])
            word *= chance.random() < 0.6 and word & ~PARKED != me.tag
            self.shared = Shared(tuple(slots), word, chance.random() < 0.5, False, chance.randrange(3))

    def __getitem__(self, key: Any) -> Any:
        """A word of the guard, a column of the slots' records, or one of these."""
        if isinstance(key, int):
            return self.access("inspect")[0].dirty if key == DIRTY else 0
        return np.zeros((3, 99)) if key == "counters" else Records(self, key)

    def __setitem__(self, word: int, value: int) -> None:
        assert word not in (0, DIRTY)

    def swap(self, words: Any, index: int, expected: int, new: int) -> int:
        before, _ = self.access("swap", "mark", "seize")
        assert before.word != expected or self.shared.word == new
        return before.word

    def work(self, seg: Any, *burial: int) -> None:
        assert burial in ((), (self.me.target, self.me.doomed))
        self.access("begin")
        if not burial:
            self.access("finish")

    def is_locked(self, fd: int, byte: int) -> bool:
        self.access("judge_lock", "suspect_lock", slot=byte - BYTES)
        return bool(self.locked >> byte - BYTES & 1)

    def try_lock(self, fd: int, byte: int) -> bool:
        self.access("lock", slot=byte - BYTES)
        return self.me.slot >= 0


class Records:
    """A field of all slots' records (`key` is its name), or the record of one (a slice)."""

    def __init__(self, tape: Tape, key: Any) -> None:
        self.tape, self.key = tape, key

    def __array__(self, *_: Any) -> np.ndarray:
        return np.array([slot.pid for slot in self.tape.access("look")[0].slots])

    def __getitem__(self, key: Any) -> Any:
        if isinstance(self.key, slice):
            return [self.tape.shared.slots[self.key.start].generation]  # nobody else raises it
        if key == self.tape.me.slot and self.tape.me.at not in ("compare", "judge"):
            return self.tape.me.generation  # a reaper about to pass itself by
        return self.tape.access("compare", "judge", "doom", "suspect", slot=key)[0].slots[key].generation

    def __setitem__(self, key: Any, value: int) -> None:
        if self.key == "pid":
            self.tape.access("finish", slot=key)
        elif key in ("generation", "pid"):
            self.tape.access("number" if key == "generation" else "register", slot=self.key.start)
            assert key == "pid" or self.tape.me.generation == value


def run_code(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(500):
        run_worker(kernels, Tape(seed), monkeypatch)


def run_worker(kernels: Any, tape: Tape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a worker's calls on the model's memory, and see that both come to their end."""
    kernels.entries.open_views = lambda handle: SimpleNamespace(guard_words=tape, workers=tape, private=[0] * 99)
    kernels.leases.drop_all_of = kernels.tree.hide_all = tape.work
    kernels.pool.free_all_of = kernels.claims.drop_all_of = lambda seg, slot, generation: None  # the burial has begun
    kernels.tree.peek = lambda *_: tape.access("read")
    kernels.recovery.rebuild = lambda seg: tape.access("rebuild")
    kernels.guard.SPINS = 1
    kernels.guard.load_acquire = lambda words, index: tape.access("load", "announce")[0].word
    kernels.guard.store_release = lambda words, index, value: tape.access("set_dirty" if value else "clean")
    kernels.guard.exchange = lambda words, index, new: tape.access("exchange")[0].word
    kernels.guard.compare_and_swap = tape.swap
    parked = SimpleNamespace(
        sleep=lambda: tape.access("sleep")[1] != "timeout", wake=lambda: tape.access("post"), close=lambda: None
    )
    monkeypatch.setattr(locks, "try_lock", tape.try_lock)
    monkeypatch.setattr(locks, "is_locked_by_others", tape.is_locked)
    monkeypatch.setattr(workers, "compile", SimpleNamespace(load=lambda: kernels.entries))
    monkeypatch.setattr(workers, "make_handle", lambda *_: np.zeros(99))
    monkeypatch.setattr(workers, "_parking", lambda segment, guard: parked)
    monkeypatch.setattr(workers.Worker, "describe", lambda self, slot: "")
    segment: Any = SimpleNamespace(
        name="", geometry=SimpleNamespace(max_workers=3, max_snapshots=0, num_blocks=0), close=lambda: None,
        open_for_locks=lambda: SimpleNamespace(close=lambda: tape.access("drop")),
        views=SimpleNamespace(workers=tape, guards={"acquired_ns": [0], "owner": np.zeros(2, np.int64)}),
    )  # fmt: skip
    with contextlib.suppress(errors.WorkersFull, errors.LockTimeout, KeyboardInterrupt):
        worker = workers.Worker(segment, tape.lock_timeout)
        work, peek = kernels.entries.hide_all, kernels.entries.peek
        for call in (worker.run, work), (worker.run, peek, 0, 0, 0, 0), (worker.reap,), (worker.close,):
            with contextlib.suppress(errors.LockTimeout, KeyboardInterrupt):
                call[0](*call[1:])
    assert (tape.me.at, tape.me.slot) == ("rest", -1)


def test_the_code_makes_the_accesses_of_the_model_whatever_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    run_code(Kernels(), monkeypatch)


DEPARTURES = [
    ("guard", "store_release(words, owner + _DIRTY, 0)", "pass"),
    ("guard", "words, owner, dead, tag | PARKED", "words, owner, dead, tag"),
    ("guard", "word == 0 or word & PARKED", "word == 0"),
    ("entries", "    recovery.rebuild(seg)", "    pass"),
    ("entries", 'if seg.workers["generation"][slot] == generation:', "if True:"),
]


@pytest.mark.parametrize("change", DEPARTURES)
def test_code_that_departs_from_the_model_is_found_out(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError):
        run_code(Kernels(change), monkeypatch)


def test_the_owner_word_is_laid_out_as_in_the_code() -> None:
    for slot, generation in ((0, 1), (1, 2), (65534, owner_word.MAX_GENERATION - 1)):
        word = model.tag_of(slot, generation)
        assert word == owner_word.tag_of(slot, generation) < PARKED == guard.PARKED
        assert model.owner_of(word | PARKED) == owner_word.owner_of(word | PARKED) == (slot, generation)
