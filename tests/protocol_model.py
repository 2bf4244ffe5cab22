"""The guard and the worker slots as a state machine, one access to something shared a step, and a search through it.

`Protocol` says what `guard.py`, `parking.py`, `entries.py` and `workers.py` do: a method for each step, named after it.
A step is one access to the segment, the semaphore or the kernel's locks; what touches private data only, or words that
nobody else writes, is part of the step before. `explore` visits every state that any interleaving reaches, with
processes killed, stopped or interrupted on the way, and `Graph.stuck` finds those from which there is no way on.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

PARKED = 1 << 62


def tag_of(slot: int, generation: int) -> int:
    """What a worker writes into the owner word."""
    return generation << 16 | slot + 1


class Slot(NamedTuple):
    """A worker slot; `leases` is the generation that took those recorded under it, 0 if there are none."""

    generation: int = 0
    pid: bool = False
    leases: int = 0


class Shared(NamedTuple):
    """The segment and the semaphore; `torn` says that the tree is half changed, `shocks` counts interrupts so far."""

    slots: tuple[Slot, ...]
    word: int = 0
    dirty: bool = False
    torn: bool = False
    tokens: int = 0
    shocks: int = 0


class Process(NamedTuple):
    """One process with one worker: where it is, in which of its calls, and what it remembers."""

    calls: tuple[str, ...]  # this one and those to come, keys of FIRST
    at: str
    slot: int = -1  # whose byte it has locked as its own
    generation: int = 0
    parked: int = 0  # PARKED once it has waited
    seen: int = 0  # the owner word it sleeps on
    over: bool = False  # whether it took the guard over, and does not work yet
    target: int = -1  # the slot it tries to lock, or buries
    doomed: int = 0  # the generation up to which it buries
    listed: tuple[int, ...] = ()  # the slots it has yet to look at
    outer: Process | None = None  # the call that a signal handler interrupted, while the handler makes one

    @property
    def tag(self) -> int:
        return tag_of(self.slot, self.generation)


DEAD = Process((), "dead")
OWNING = ("read", "set_dirty", "begin", "compare", "finish", "inspect", "rebuild", "clean", "exchange")
FIRST = {"claim": "lock", "work": "load", "peek": "load", "reap": "look", "close": "load"}
COMPILED = (*OWNING, "swap", "mark")  # where no Python runs that an exception could strike

Steps = Iterator[tuple[str, Process, Shared]]  # of which kind, and what is afterwards
State = tuple[int, ...]  # numbers of a Shared and of Processes, these sorted: it does not matter who is who


class Protocol:
    """What the code does, and how much may go wrong. With other limits, or other steps, it is another protocol."""

    kills = 2
    stops = 0  # processes stopped for good, outside the guard
    unstopped: tuple[str, ...] = ("number",)  # and not right after a claim locked its slot: see the tests
    shocks = 0  # signals whose handler raises an exception, or uses the worker, at any place where Python runs
    gives_up = False  # whether a wait may end in LockTimeout
    most_tokens = 2  # the semaphore's; more than there are sleepers

    def __init__(self, **changes: Any) -> None:
        vars(self).update(changes)

    # --- a section: entries.py, guard.py; the wait for it: workers.py _run_parked, parking.py ---------------

    def load(self, me: Process, shared: Shared, locked: int) -> Steps:
        yield "step", me._replace(at="announce", parked=PARKED) if shared.word else me._replace(at="swap"), shared

    def swap(self, me: Process, shared: Shared, locked: int) -> Steps:
        if shared.word == 0:
            at = "read" if me.calls[0] == "peek" else "set_dirty"
            yield "step", me._replace(at=at, seen=0), shared._replace(word=me.tag | me.parked)
        else:
            yield "step", me._replace(at="load"), shared
            yield "step", me._replace(at="announce", parked=PARKED), shared

    def read(self, me: Process, shared: Shared, locked: int) -> Steps:
        yield "step", me._replace(at="clean"), shared

    def set_dirty(self, me: Process, shared: Shared, locked: int) -> Steps:
        yield "step", me._replace(at="begin"), shared._replace(dirty=True)

    def begin(self, me: Process, shared: Shared, locked: int) -> Steps:
        """The first store of the work; of a burial, the leases go."""
        at = "finish" if me.calls[0] == "work" else "compare"
        if at == "compare" and shared.slots[me.target].leases <= me.doomed:
            shared = with_slot(shared, me.target, leases=0)
        yield "step", me._replace(at=at), shared._replace(torn=True)

    def compare(self, me: Process, shared: Shared, locked: int) -> Steps:
        """Whether the pid of the buried slot goes, too: not where a later generation has it by now."""
        same = shared.slots[me.target].generation == me.doomed
        yield "step", me._replace(at="finish", target=me.target if same else -1), shared

    def finish(self, me: Process, shared: Shared, locked: int) -> Steps:
        """The last store of the work: a lease is taken; of a burial, the pid goes."""
        if me.calls[0] == "work":
            shared = with_slot(shared, me.slot, leases=me.generation)
        elif me.target >= 0:
            shared = with_slot(shared, me.target, pid=False)
        yield "step", me._replace(at="clean"), shared._replace(torn=False)

    def clean(self, me: Process, shared: Shared, locked: int) -> Steps:
        yield "step", me._replace(at="exchange"), shared._replace(dirty=False)

    def exchange(self, me: Process, shared: Shared, locked: int) -> Steps:
        after = me._replace(at="post") if shared.word & PARKED else self.answered(me)
        yield "step", after, shared._replace(word=0)

    def post(self, me: Process, shared: Shared, locked: int) -> Steps:
        yield "step", self.answered(me), shared._replace(tokens=min(shared.tokens + 1, self.most_tokens))

    def announce(self, me: Process, shared: Shared, locked: int) -> Steps:
        at = "load" if shared.word == 0 else "sleep" if shared.word & PARKED else "mark"
        yield "step", me._replace(at=at, seen=shared.word or me.seen), shared

    def mark(self, me: Process, shared: Shared, locked: int) -> Steps:
        if shared.word == me.seen:
            word = me.seen | PARKED
            yield "step", me._replace(at="sleep", seen=word), shared._replace(word=word)
        else:
            yield "step", me._replace(at="announce", seen=0), shared

    def sleep(self, me: Process, shared: Shared, locked: int) -> Steps:
        if shared.tokens:
            yield from self.waited("wake", me, shared._replace(tokens=shared.tokens - 1))
        if self.may_time_out(me, shared, locked):
            yield "timeout", me._replace(at="judge"), shared

    def may_time_out(self, me: Process, shared: Shared, locked: int) -> bool:
        return True

    def waited(self, kind: str, me: Process, shared: Shared) -> Steps:
        """Awake, and the owner is not known to be dead: try again, or find that it has been too long."""
        yield kind, me._replace(at="load", seen=0), shared
        if self.gives_up:
            yield "give up", self.raised(me), shared

    def judge(self, me: Process, shared: Shared, locked: int) -> Steps:
        """The first half of is_dead: the generation."""
        slot, generation = owner_of(me.seen)
        same = shared.slots[slot].generation == generation
        yield "step", me._replace(at="judge_lock" if same else "seize"), shared

    def judge_lock(self, me: Process, shared: Shared, locked: int) -> Steps:
        """The second half: the kernel's lock on the slot, as others hold it."""
        slot, _ = owner_of(me.seen)
        if slot == me.slot or locked >> slot & 1:
            yield from self.waited("step", me, shared)
        else:
            yield "step", me._replace(at="seize"), shared

    def seize(self, me: Process, shared: Shared, locked: int) -> Steps:
        if shared.word == me.seen:
            yield "step", me._replace(at="inspect", seen=0, over=True), shared._replace(word=me.tag | PARKED)
        else:
            yield "step", me._replace(at="load", seen=0), shared

    def inspect(self, me: Process, shared: Shared, locked: int) -> Steps:
        yield "step", me._replace(at="rebuild" if shared.dirty else "clean"), shared

    def rebuild(self, me: Process, shared: Shared, locked: int) -> Steps:
        yield "step", me._replace(at="clean"), shared._replace(torn=False)

    # --- calls: workers.py ----------------------------------------------------------------------------------

    def answered(self, me: Process) -> Process:
        """Where a call goes on once the guard is given back."""
        if me.over:
            return me._replace(at="load", over=False)
        me = me._replace(parked=0, seen=0)
        if me.calls[0] == "reap":
            return self.reaping(me, me.listed)
        place = {"claim": "register", "close": "drop"}.get(me.calls[0])
        return me._replace(at=place) if place else self.ended(me)

    def raised(self, me: Process) -> Process:
        """Where a call goes on that could not wait for its section, or was interrupted outside it."""
        if me.outer:
            return self.raised(me.outer)
        if me.calls[0] in ("claim", "close"):
            return me._replace(at="drop", parked=0, seen=0, over=False)
        return self.ended(me)

    def ended(self, me: Process) -> Process:
        """The next call, or rest: the worker lives on with what it has; a handler's ends where it interrupted."""
        if me.outer:
            return me.outer
        calls = me.calls[1:]
        call = calls[0] if calls else ""
        target, doomed = {"claim": (0, 0), "close": (me.slot, me.generation)}.get(call, (-1, 0))
        at = FIRST.get(call, "rest")
        return Process(calls, at, me.slot, me.generation, target=target, doomed=doomed)

    def lock(self, me: Process, shared: Shared, locked: int) -> Steps:
        """_lock_a_slot: the next slot's byte."""
        if not locked >> me.target & 1:
            yield "step", me._replace(at="number", slot=me.target), shared
        elif me.target + 1 < len(shared.slots):
            yield "step", me._replace(target=me.target + 1), shared
        else:
            yield "step", me._replace(at="drop"), shared  # WorkersFull

    def number(self, me: Process, shared: Shared, locked: int) -> Steps:
        doomed = shared.slots[me.slot].generation
        me = me._replace(at="load", generation=doomed + 1, doomed=doomed)
        yield "step", me, with_slot(shared, me.slot, generation=me.generation)

    def register(self, me: Process, shared: Shared, locked: int) -> Steps:
        yield "step", self.ended(me), with_slot(shared, me.slot, pid=True)

    def drop(self, me: Process, shared: Shared, locked: int) -> Steps:
        """forget: the kernel drops the byte. A claim that failed is the end of the worker."""
        calls = me.calls if me.calls[0] == "close" else ()
        yield "step", self.ended(me._replace(calls=calls, slot=-1, generation=0)), shared

    def look(self, me: Process, shared: Shared, locked: int) -> Steps:
        found = tuple(i for i, slot in enumerate(shared.slots) if slot.pid and i != me.slot)
        yield "step", self.reaping(me, found), shared

    def reaping(self, me: Process, listed: tuple[int, ...]) -> Process:
        return me._replace(at="doom", target=listed[0], doomed=0, listed=listed[1:]) if listed else self.ended(me)

    def doom(self, me: Process, shared: Shared, locked: int) -> Steps:
        """_reap: which generation to bury, if it is dead."""
        yield "step", me._replace(at="suspect", doomed=shared.slots[me.target].generation), shared

    def suspect(self, me: Process, shared: Shared, locked: int) -> Steps:
        same = shared.slots[me.target].generation == me.doomed
        yield "step", me._replace(at="suspect_lock" if same else "load"), shared

    def suspect_lock(self, me: Process, shared: Shared, locked: int) -> Steps:
        yield "step", self.reaping(me, me.listed) if locked >> me.target & 1 else me._replace(at="load"), shared

    # --- what may go wrong ----------------------------------------------------------------------------------

    def steps(self, me: Process, shared: Shared, locked: int) -> Steps:
        """Everything that may happen to one process next; `locked` are the bytes that others hold, a bit each."""
        if me.at in ("dead", "stopped"):
            return
        if self.may_die(me):
            yield "kill", DEAD, shared
        if me.at not in (*OWNING, *self.unstopped):
            yield "stop", Process((), "stopped", me.slot, me.generation), shared
        if me.at not in (*COMPILED, "rest") and shared.shocks < self.shocks:
            shaken = shared._replace(shocks=shared.shocks + 1)
            yield "exception", self.raised(me), shaken
            if self.may_nest(me):
                yield "handler", Process(("work",), "load", me.slot, me.generation, outer=me), shaken
        if me.at != "rest":
            yield from getattr(self, me.at)(me, shared, locked)

    def may_die(self, me: Process) -> bool:
        return True

    def may_nest(self, me: Process) -> bool:
        return me.calls[0] not in ("claim", "close")  # whose handlers' calls are refused


def with_slot(shared: Shared, slot: int, **changes: Any) -> Shared:
    changed = shared.slots[slot]._replace(**changes)
    return shared._replace(slots=(*shared.slots[:slot], changed, *shared.slots[slot + 1 :]))


def owner_of(word: int) -> tuple[int, int]:
    return (word & 0xFFFF) - 1, (word & ~PARKED) >> 16


# --- the search

KINDS = ("step", "timeout", "wake", "give up", "exception", "handler", "kill", "stop")
Flaw = Callable[[Shared, list[Process]], str]  # what is wrong with a state, given the processes that were not killed


class Graph:
    """Every state that a protocol reaches from a start, up to the first with a flaw; that is the last then."""

    def __init__(self, protocol: Protocol, start: tuple[Shared, list[Process]], flaw: Flaw) -> None:
        self.protocol, self.flaw = protocol, ""
        self._things: list[Any] = []  # Shared and Processes by their numbers
        self._numbers: dict[Any, int] = {}
        self._moves: dict[State, list[tuple[str, int, int]]] = {}
        self._dead = self._number(DEAD)
        self._parents = array("l", [0])
        self._sources, self._targets, self._kinds = array("l"), array("l"), bytearray()
        self._start = (self._number(start[0]), *map(self._number, start[1]))
        self.states: list[State] = [_sorted(self._start)]
        self._search(flaw)

    def _number(self, thing: Shared | Process) -> int:
        number = self._numbers.setdefault(thing, len(self._things))
        if number == len(self._things):
            self._things.append(thing)
        return number

    def parts(self, state: State) -> tuple[Shared, list[Process]]:
        """A state's shared part, and its processes that were not killed."""
        return self._things[state[0]], [self._things[i] for i in state[1:] if i != self._dead]

    def _search(self, flaw: Flaw) -> None:
        states, places = self.states, {self.states[0]: 0}
        for place, state in enumerate(states):  # which grows meanwhile
            self.flaw = flaw(*self.parts(state))
            if self.flaw:
                del states[place + 1 :]
                return
            for kind, unsorted in self._successors(state):
                after = _sorted(unsorted)
                target = places.setdefault(after, len(states))
                if target == len(states):
                    states.append(after)
                    self._parents.append(place)
                self._sources.append(place)
                self._targets.append(target)
                self._kinds.append(KINDS.index(kind))

    def _successors(self, state: State) -> Iterator[tuple[str, State]]:
        """Whatever may happen next: its kind, and the state after it with the processes in the order they had."""
        slots = [self._things[i].slot for i in state[1:]]
        may_kill = state.count(self._dead) < self.protocol.kills
        may_stop = sum(self._things[i].at == "stopped" for i in state[1:]) < self.protocol.stops
        for place in range(1, len(state)):
            if state[place] in state[1:place]:
                continue  # it would do what its twin does
            locked = sum(1 << slot for other, slot in enumerate(slots, 1) if slot >= 0 and other != place)
            for kind, shared, process in self._moves_of(state[place], state[0], locked):
                if (kind != "kill" or may_kill) and (kind != "stop" or may_stop):
                    yield kind, (shared, *state[1:place], process, *state[place + 1 :])

    def _moves_of(self, process: int, shared: int, locked: int) -> list[tuple[str, int, int]]:
        key = (process, shared, locked)
        if key not in self._moves:
            steps = self.protocol.steps(self._things[process], self._things[shared], locked)
            self._moves[key] = [(kind, self._number(s), self._number(p)) for kind, p, s in steps]
        return self._moves[key]

    def stuck(self, kinds: tuple[str, ...] = ("step", "timeout")) -> int:
        """The first state from which steps of these kinds never bring all to rest; -1 if there is none."""
        first, following = array("l", [-1]) * len(self.states), array("l", [-1]) * len(self._sources)
        for edge, target in enumerate(self._targets):
            if KINDS[self._kinds[edge]] in kinds:
                following[edge], first[target] = first[target], edge
        good = bytearray(len(self.states))
        todo = [i for i, state in enumerate(self.states) if self.is_over(state)]
        while todo:
            place = todo.pop()
            edge = -1 if good[place] else first[place]
            good[place] = True
            while edge >= 0:
                todo.append(self._sources[edge])
                edge = following[edge]
        return good.find(0)

    def is_over(self, state: State) -> bool:
        """Whether every process is at rest, stopped or dead."""
        return all(self._things[i].at in ("rest", "stopped", "dead") for i in state[1:])

    def trace(self, place: int = -1) -> list[str]:
        """A shortest way to a state, by default the last one: who did what, and what it changed."""
        way = [place % len(self.states)]
        while way[-1]:
            way.append(self._parents[way[-1]])
        now, lines = self._start, []
        for place in way[-2::-1]:
            kind, after = next(move for move in self._successors(now) if _sorted(move[1]) == self.states[place])
            who = next(i for i in range(1, len(now)) if now[i] != after[i])
            doing = f"{'ABCDEFGH'[who - 1]} {self._things[now[who]].at}" + f": {kind}" * (kind != "step")
            lines.append(" ".join([doing, *_changes(self._things[now[0]], self._things[after[0]])]))
            now = after
        return lines


def _sorted(state: State) -> State:
    return (state[0], *sorted(state[1:]))


def _changes(before: Shared, after: Shared) -> list[str]:
    slots = [f"slot{i}={(*new,)}" for i, (old, new) in enumerate(zip(before.slots, after.slots)) if new != old]
    return slots + [f"{k}={b:#x}" for k, a, b in zip(Shared._fields[1:], before[1:], after[1:]) if a != b]
