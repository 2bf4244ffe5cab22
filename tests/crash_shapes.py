"""What the crash-state test starts from: trees of several shapes, built by real handles and the model in lockstep."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from shmradix import NO_DISK, PrefixMatch, RadixCache
from shmradix.guard import TREE
from shmradix.owner_word import tag_of
from tests.model import Match, Model, Namespace, Request

SURVIVOR, VICTIM, HOLDER, DEAD, TAKER = range(5)  # workers by slot: see crash_states.World
SIZES = {"block_size": 3, "max_blocks": 20, "max_namespaces": 3, "max_leases": 12, "max_workers": 5}
BASE: Namespace = (0, b"")


def spell(text: str) -> tuple[int, ...]:
    """The tokens of a prompt: "abc abd" is two blocks that agree in two tokens."""
    return tuple(text.replace(" ", "").encode())


class Held(NamedTuple):
    """A match that was not released: whose, the cache's and the model's."""

    client: int
    real: PrefixMatch
    ours: Match


class Shape(NamedTuple):
    """A segment's bytes and the same as a model, with the matches that are held."""

    name: str
    image: np.ndarray
    model: Model
    held: list[Held]
    hidden_at: int  # the clock of the last clear()


class Builder:
    """Does the same to a cache and to a model."""

    def __init__(self, caches: list[RadixCache]) -> None:
        self.caches = caches
        sizes = [SIZES[name] for name in ("block_size", "max_blocks", "max_leases", "max_namespaces")]
        self.model = Model(sizes[0], sizes[1], sizes[2], sizes[3])
        self.held: list[Held] = []
        self.hidden_at = 0
        self._blocks = itertools.count(10)

    def hold(self, text: str, client: int = VICTIM, namespace: Namespace = BASE, keys: Any = None) -> Held:
        """Look a prompt up and keep the lease."""
        request = Request(spell(text), namespace, keys)
        real = self.caches[client].lookup(request.tokens, **request.identity())
        held = Held(client, real, self.model.lookup(client, request))
        assert real.matched_tokens == held.ours.tokens
        self.held.append(held)
        return held

    def drop(self, held: Held) -> None:
        """Release a match."""
        held.real.release()
        self.model.release_match(held.ours)
        self.held.remove(held)

    def keep(
        self, text: str, client: int = SURVIVOR, namespace: Namespace = BASE, disk: int = 0, keys: Any = None
    ) -> Held:
        """Store a prompt, from the block `disk` of every four on with disk blocks, and keep the lease."""
        held = self.hold(text, client, namespace, keys)
        request = held.ours.request
        table = [next(self._blocks) for _ in range(len(request.tokens) // SIZES["block_size"])]
        disks = [block + 1000 if i % 4 >= 4 - disk else NO_DISK for i, block in enumerate(table)]
        identity = request.identity()
        self.caches[client].insert(request.tokens, table, disk_block_ids=disks, match=held.real, **identity)
        self.model.insert(client, request, table, disks, 0, held.ours)
        return held

    def store(self, *texts: str, namespace: Namespace = BASE, disk: int = 0, keys: Any = None) -> None:
        """Store prompts and release them."""
        for text in texts:
            self.drop(self.keep(text, SURVIVOR, namespace, disk, keys))

    def use(self, *texts: str, namespace: Namespace = BASE) -> None:
        """Look prompts up and release them."""
        for text in texts:
            self.drop(self.hold(text, SURVIVOR, namespace))

    def evict(self, count: int) -> None:
        """Take out blocks."""
        blocks = self.caches[SURVIVOR].evict(count).blocks.tolist()
        assert blocks == [block for block, _ in self.model.evict(count)]

    def clear(self) -> None:
        """Hide everything and evict what nobody leases."""
        self.hide()
        self.evict(len(self.model.nodes()))

    def hide(self) -> None:
        """Hide everything and evict nothing: a clear() whose worker died between its two sections."""
        worker: Any = self.caches[SURVIVOR]._worker
        self.hidden_at = worker.run(worker.entries.hide_all)[2]
        self.model.epoch += 1

    def die(self) -> None:
        """Leave the tree guard as a worker that died in a section does, to nobody alive."""
        guards: Any = self.caches[SURVIVOR]._segment.views.guards
        guards["owner"][TREE], guards["dirty"][TREE] = tag_of(TAKER, 1 << 40), 1


def _empty(to: Builder) -> None:
    pass


def _chain(to: Builder) -> None:
    to.store("aaa bbb ccc ddd eee", disk=2)
    to.hold("aaa bbb ccc")


def _wide(to: Builder) -> None:
    to.store(*(f"aa{last}" for last in "abcdef"))
    to.store(*(f"aaa bb{last}" for last in "xyz"), disk=3)
    to.store("aaa bbz ccc", keys=(0, 0, 5))
    to.use("aab", "aaa bbx")
    to.hold("aaa bbw", HOLDER)


def _deep(to: Builder) -> None:
    to.store("aaa bbb ccc ddd eee", disk=3)
    to.store("aaa bbb ccc dde", "aaa bbb fff ggg", "aaa hhh", "iii jjj", "iii jjk kkk")
    to.use("aaa hhh", "aaa bbb ccc", "iii jjk kkk")
    to.hold("aaa bbb ccc ddx")


def _namespaces(to: Builder) -> None:
    to.store("aaa bbb", "aaa bbc ddd")
    to.store("aaa bbb ccc", "eee", namespace=(7, b""))
    to.store("aaa bbb", namespace=(0, b"tenant"))
    to.hold("aaa bbb", namespace=(7, b""))
    to.use("aaa bbb")


def _full(to: Builder) -> None:
    to.store("aaa bbb ccc ddd eee fff ggg hhh", "aaa bbb iii jjj kkk lll", disk=1)
    to.store("mmm nnn ooo ppp qqq rrr sss ttt")
    to.hold("mmm nnn")
    to.hold("aaa bbb iii", HOLDER)


def _fragmented(to: Builder) -> None:
    to.store("aaa bbb ccc", "aaa bbd ddd", namespace=(7, b""))
    to.store("aaa bbb", namespace=(0, b"tenant"))
    to.store("mmm nnn ooo", "ppp qqq", "rrr", "aaa bbb", disk=2)
    to.use("mmm nnn", "mmm nno")
    first, second, third = to.hold("mmm nnn ooo"), to.hold("ppp", HOLDER), to.hold("aaa", DEAD)
    to.drop(first)
    to.drop(third)
    to.evict(9)
    to.drop(second)
    to.store("uuu vvv", "www xxx yyy")
    to.keep("www xxx zzz", VICTIM)
    to.evict(2)


def _leased(to: Builder) -> None:
    to.store("aaa bbb ccc ddd", "aaa bbb ccd", "aaa eee fff", "ggg hhh")
    to.store("aaa bbb", namespace=(7, b""))
    for client in (VICTIM, DEAD, HOLDER):
        to.keep("aaa bbb ccc ddd", client)
        to.hold("aaa eex", client)
    to.drop(to.hold("ggg", HOLDER))
    to.hold("aaa bbb", DEAD, (7, b""))
    to.hold("ggg hhh", DEAD)
    to.drop(to.hold("ggg", HOLDER))


def _hidden(to: Builder) -> None:
    to.store("aaa bbb ccc", "aaa bbd", "eee fff")
    to.store("aaa bbb", "ggg", namespace=(7, b""))
    to.hold("aaa bbb ccc")
    to.hold("aaa bbd", DEAD)
    to.hold("ggg", HOLDER, (7, b""))
    to.clear()
    to.store("aaa bbb hhh", "iii")
    to.hold("aaa bbb")


def _clearing(to: Builder) -> None:
    to.store("aaa bbb ccc", "aaa bbd", "eee fff")
    to.store("ggg", namespace=(7, b""))
    to.hold("aaa bbd", HOLDER)
    to.hold("eee fff", DEAD)
    to.hide()
    to.store("aaa bbb")


def _rebuilt(to: Builder) -> None:
    _fragmented(to)
    to.hold("uuu vvx", DEAD)
    to.die()
    to.store("aaa bbb", namespace=(7, b""))


SHAPES: dict[str, Callable[[Builder], None]] = {
    "empty": _empty, "chain": _chain, "wide": _wide, "deep": _deep, "namespaces": _namespaces, "full": _full,
    "fragmented": _fragmented, "leased": _leased, "hidden": _hidden, "clearing": _clearing, "rebuilt": _rebuilt,
}  # fmt: skip
