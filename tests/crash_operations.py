"""Each operation on a shape: a call of one entry point, and the states of the model that it may leave behind."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from shmradix import NO_DISK, errors
from shmradix.cache import LATEST
from shmradix.inputs import NO_IDS, NO_KEYS, as_namespace
from shmradix.owner_word import tag_of
from tests.crash_shapes import DEAD, SIZES, VICTIM, Held, Shape, spell
from tests.model import Chunk, Inserted, Match, Model, Namespace, Node, Request

NOW = 1_000_000  # ns, for what an operation notes as its time
ALL = SIZES["max_blocks"]
TAG = tag_of(VICTIM, 1)


class Operation(NamedTuple):
    """An entry point's call by the victim, and what may be left of it when the victim dies."""

    name: str
    call: Callable[[Any, int], Any]  # of the entry points, compiled or plain, and a handle's address: all answers
    request: Request  # what to ask for afterwards
    states: Callable[[], States]


class States(NamedTuple):
    """The states an operation may leave: those it passes through, from before to after, and what else there may be.

    The others come about where stores between two atomic ones change places.
    """

    passed: list[Model]
    others: list[Model]


def fork(model: Model) -> Model:
    """A copy of the model with nodes and leases of its own."""
    return copy.deepcopy(model)


def _arrays(request: Request) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    adapter, salt = request.namespace
    keys = NO_KEYS if request.keys is None else np.array(request.keys, np.uint64)
    return as_namespace(adapter, salt or None), np.array(request.tokens, np.uint32), keys


def _rows(request: Request, rows: int) -> np.ndarray:
    return np.zeros((rows, len(request.tokens) // SIZES["block_size"]), np.uint32)


def _lookup(shape: Shape, name: str, request: Request) -> Operation:
    def states() -> States:
        after, leased = fork(shape.model), fork(shape.model)
        if after.lookup(VICTIM, request).lease is None:
            return States([shape.model], [])
        path = leased.walk(request)
        partial = leased.partial(path[-1], leased.chunks(request)[len(path) - 1])
        leased.take(VICTIM, partial[0] if partial else path[-1], path[-1])
        return States([shape.model, leased, after], [])

    def call(entries: Any, handle: int) -> Any:
        rows = _rows(request, 2)
        return entries.lookup(handle, TAG, NOW, *_arrays(request), rows), rows

    return Operation(f"lookup {name}", call, request, states)


def _insert(
    shape: Shape, name: str, request: Request, disk: bool = False, held: Held | None = None, matched: int = 0
) -> Operation:
    table = list(range(500, 500 + len(request.tokens) // SIZES["block_size"]))
    disks = [block + 1000 for block in table] if disk else None
    lease = (held.real._lease, held.real._born, held.real._epoch) if held else (0, 0, -1)

    def call(entries: Any, handle: int) -> Any:
        disk_table = np.array(disks, np.uint32) if disks else NO_IDS
        tables, rows, counts = (np.array(table, np.uint32), disk_table), _rows(request, 5), np.zeros(5, np.int64)
        answer = entries.insert(handle, TAG, NOW, *_arrays(request), *tables, matched, *lease, rows, counts)
        return answer, rows, counts

    def states() -> States:
        return _insert_states(shape.model, request, table, disks, matched, held.ours if held else None)

    return Operation(f"insert {name}", call, request, states)


def _insert_states(
    model: Model, request: Request, table: list[int], disks: list[int] | None, matched: int, match: Match | None
) -> States:
    after, own = copy.deepcopy((model, match))
    try:
        answer = after.insert(VICTIM, request, table, disks, matched, own)
    except errors.ShmradixError:
        return States([model], [])
    if not answer.tokens:
        return States([model], [])
    given, stored = disks or [NO_DISK] * len(table), len(answer.blocks)
    leases = zip(model.leases, after.leases)
    moved = [i for i, (old, new) in enumerate(leases) if old.node.path() != new.node.path()]

    def state(adopted: Sequence[int], stored: int, stamped: bool, leased: bool) -> Model:
        """The insert up to there: disk blocks taken over, nodes made, the last use noted, the lease moved."""
        part = fork(model)
        path = part.walk(request)
        for place in adopted:
            path[1 + place].disk = given[place]
        if stored and not path:
            part.roots.append(Node(request.namespace, part.epoch))
            path = [part.roots[-1]]
        for place in range(len(path) - 1, len(path) - 1 + stored):
            path.append(part.create(path[-1], part.chunks(request)[place], table[place], given[place], Inserted()))
        if stamped:
            part.stamp(path[1:])
        if leased:
            for lease in moved:
                part.drop(part.leases[lease])
            if moved or len(after.leases) > len(model.leases):
                part.take(VICTIM, path[-1], path[-1])
        return part

    known = model.walk(request)[1:]
    places = [i for i, node in enumerate(known) if node.disk == NO_DISK != given[i]]
    passed = [state(places[:n], 0, False, False) for n in range(len(places) + 1)]
    passed += [state(places, n, True, False) for n in range(min(1, stored), stored + 1)]
    passed.append(state(places, stored, True, True))
    assert passed[-1].image() == after.image()
    subsets = [some for n in range(len(places) + 1) for some in itertools.combinations(places, n)]
    ends = itertools.product((False, True), repeat=2) if not stored else [(False, False)]
    return States(passed, [state(some, 0, *end) for end in ends for some in subsets])


def _release(shape: Shape, held: Held, number: int) -> Iterator[Operation]:
    request = held.ours.request

    def states(by_path: bool) -> States:
        after, own = copy.deepcopy((shape.model, held.ours))
        if by_path:
            after.release(VICTIM, request)
        else:
            after.release_match(own)
        return States([shape.model, after], [])

    def release(entries: Any, handle: int) -> Any:
        return entries.release(handle, TAG, NOW, held.real._lease, held.real._born)

    def release_path(entries: Any, handle: int) -> Any:
        return entries.release_path(
            handle, TAG, NOW, *_arrays(request), 0, len(request.tokens) // SIZES["block_size"], 1
        )

    yield Operation(f"release match {number}", release, request, lambda: states(False))
    yield Operation(f"release path {number}", release_path, request, lambda: states(True))


def _evict(shape: Shape, limit: int, known: Request, hidden: bool = False) -> Operation:
    def states() -> States:
        passed = [shape.model]
        for _ in range(limit):
            after = fork(passed[-1])
            ends = [node for node in after.nodes() if not node.children and not node.pins]
            if not [node for node in ends if not hidden or node.epoch < after.epoch]:
                break
            after.evict(1)
            passed.append(after)
        return States(passed, [])

    def call(entries: Any, handle: int) -> Any:
        rows, counts = np.zeros((2, limit), np.uint32), np.zeros(1, np.int64)
        latest = shape.hidden_at if hidden else LATEST
        return entries.evict(handle, TAG, NOW, limit, latest, rows, counts), rows, counts

    return Operation(f"evict {limit}{' hidden' * hidden}", call, known, states)


def _bury(shape: Shape, client: int, known: Request) -> Operation:
    def states() -> States:
        order = sorted(_held_by(shape, client), key=lambda held: held.real._lease)
        places = [shape.model.leases.index(held.ours.lease) for held in order if held.ours.lease]
        passed = [shape.model]
        for count in range(1, len(places) + 1):
            after = fork(shape.model)
            for lease in [after.leases[place] for place in places[:count]]:
                after.drop(lease)
            passed.append(after)
        return States(passed, [])

    def call(entries: Any, handle: int) -> Any:
        return entries.bury(handle, TAG, NOW, client, 1)

    return Operation(f"bury {client}", call, known, states)


def _hide(shape: Shape, known: Request) -> Operation:
    def states() -> States:
        after = fork(shape.model)
        after.epoch += 1
        return States([shape.model, after], [])

    def call(entries: Any, handle: int) -> Any:
        return entries.hide_all(handle, TAG, NOW)

    return Operation("hide all", call, known, states)


def _reads(shape: Shape, known: Request) -> Iterator[Operation]:
    def states() -> States:
        return States([shape.model], [])

    def peek(entries: Any, handle: int) -> Any:
        rows = _rows(known, 2)
        return entries.peek(handle, TAG, NOW, *_arrays(known), rows), rows

    def totals(entries: Any, handle: int) -> Any:
        return entries.totals(handle, TAG, NOW, np.zeros(1 + SIZES["max_namespaces"] + ALL, np.uint8))

    yield Operation("peek", peek, known, states)
    yield Operation("totals", totals, known, states)


def _held_by(shape: Shape, client: int) -> list[Held]:
    return [held for held in shape.held if held.client == client and held.ours.lease is not None]


def _request(path: Sequence[Chunk], namespace: Namespace, more: tuple[int, ...] = ()) -> Request:
    tokens = tuple(itertools.chain.from_iterable(tokens for tokens, _ in path)) + more
    keys = tuple(key for _, key in path)
    keys += (0,) * (len(tokens) // SIZES["block_size"] - len(keys))
    return Request(tokens, namespace, keys if any(keys) else None)


def leaves(model: Model) -> list[Request]:
    """The prompts that end at leaves, of the current epoch."""
    ends = [node for node in model.nodes() if not node.children and node.epoch == model.epoch]
    return sorted(_request(node.path(), node.namespace) for node in ends)


def operations(shape: Shape) -> Iterator[Operation]:
    """All operations on the shape, with the arguments that make a difference."""
    model, unknown, full = shape.model, Request(spell("zzz zzz z")), ALL * SIZES["block_size"]
    known = leaves(model) or [unknown]
    yield _lookup(shape, "of nothing", unknown)
    yield _lookup(shape, "in no namespace", Request(known[0].tokens, (9, b"none")))
    yield _insert(shape, "apart", Request(spell("new neu nio n")), disk=True)
    yield _insert(shape, "a namespace", Request(spell("new neu"), (0, b"new")))
    yield _insert(shape, "too much", Request(tuple(range(full + 5))))
    for number, leaf in enumerate(dict.fromkeys((known[0], known[-1]))):
        path, namespace = model.chunks(leaf)[:-1], leaf.namespace
        deeper = _request(path, namespace, spell("new neu"))
        yield _lookup(shape, f"of leaf {number}", leaf)
        yield _lookup(shape, f"beyond leaf {number}", deeper)
        if path:
            beside = _request(path[:-1], namespace, (*path[-1][0][:2], 1))
            yield _lookup(shape, f"beside leaf {number}", beside)
        yield _insert(shape, f"of leaf {number}", leaf)
        yield _insert(shape, f"of leaf {number} with disk blocks", leaf, disk=True)
        yield _insert(shape, f"beyond leaf {number}", deeper, disk=True)
    for number, held in enumerate(_held_by(shape, VICTIM)):
        request = held.ours.request
        covered = held.ours.lease.anchor.path() if held.ours.lease else ()
        deeper = _request(covered, request.namespace, spell("new neu"))
        yield from _release(shape, held, number)
        yield _insert(shape, f"match {number} again", request, disk=True, held=held)
        yield _insert(shape, f"beyond match {number}", deeper, held=held)
        yield _insert(shape, f"beyond lease {number}", deeper, matched=len(covered) * SIZES["block_size"])
    for limit in (1, 4, ALL):
        yield _evict(shape, limit, known[0])
    yield _evict(shape, ALL, known[0], hidden=True)
    yield _bury(shape, DEAD, known[0])
    yield _bury(shape, VICTIM, known[0])
    yield _hide(shape, known[0])
    yield from _reads(shape, known[0])
