"""Sound images of small caches in use, of many shapes, which `hostile_images.py` damages."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from shmradix import RadixCache
from shmradix.layout import Geometry
from tests.conftest import remove_all


class Prompt(NamedTuple):
    """What a call asks for."""

    tokens: list[int]
    adapter_id: int = 0
    salt: bytes | None = None
    block_keys: list[int] | None = None

    def __str__(self) -> str:
        named = ", ".join(f"{key}={value}" for key, value in self.named().items() if value)
        return f"[{' '.join(map(str, self.tokens))}]" + (f" ({named})" if named else "")

    def named(self) -> dict[str, Any]:
        return {"adapter_id": self.adapter_id, "salt": self.salt, "block_keys": self.block_keys}


class Base(NamedTuple):
    """A sound image of a cache in use, and prompts that have something to do with what it holds."""

    name: str
    geometry: Geometry
    image: np.ndarray
    prompts: list[Prompt]
    slots: list[int]  # that workers have


SESSION = 77
A, B, C = list(range(64)), list(range(100, 124)), [7] * 20


class Maker:
    """Two workers at work on a new cache."""

    def __init__(self, name: str, **sizes: Any) -> None:
        plan = {"block_size": 4, "max_blocks": 24, "max_leases": 6, "max_workers": 3, "max_namespaces": 3, **sizes}
        self.one = RadixCache.create(name, **plan)
        self.two = RadixCache.attach(self.one.name)
        self.blocks = itertools.count(1)
        self.prompts: list[Prompt] = []

    def store(self, tokens: list[int], keep: bool = False, worker: int = 1, **named: Any) -> None:
        cache, prompt = (self.one, self.two)[worker - 1], Prompt(tokens, **named)
        count = len(tokens) // cache.block_size
        is_managed = cache._segment.geometry.num_blocks
        table = cache.allocate(count).tolist() if is_managed else [next(self.blocks) for _ in range(count)]
        cache.insert(tokens, table, disk_block_ids=[block + 1000 for block in table], **prompt.named())
        if not keep:
            cache.release(tokens, **prompt.named())
        self.prompts.append(prompt)


def _chain(m: Maker) -> None:
    m.store(A, keep=True)
    m.prompts += [Prompt(A[:30]), Prompt([*A[:8], 9, 9, 9, 9])]


def _branches(m: Maker) -> None:
    for branch in (A[:16], [*A[:8], *B[:8]], [*A[:8], *C[:8]], [*A[:12], 1, 1, 1, 1], B, [*B[:4], 5, 5, 5, 5]):
        m.store(branch)
    m.prompts += [Prompt(A[:10]), Prompt([*B[:4], 5, 5])]


def _namespaces(m: Maker) -> None:
    m.store(A[:16])
    m.store([*A[:12], 3, 3, 3, 3], adapter_id=5)
    m.store(A[:16], salt=b"tenant", keep=True, worker=2)
    m.prompts += [Prompt(A[:14], 5), Prompt(A[:16], 6), Prompt(A[:7], 0, b"tenant")]


def _leases(m: Maker) -> None:
    m.store(A[:24], keep=True)
    m.store([*A[:8], *B[:8]], keep=True, worker=2)
    m.store(B[:12])
    m.one.lookup(A[:14]), m.two.lookup(B[:7]), m.two.lookup(A[:24])
    m.prompts += [Prompt(A[:14]), Prompt(B[:7])]


def _fragmented(m: Maker) -> None:
    m.store([6] * 8, adapter_id=6)
    m.store([8] * 20)
    m.store([9] * 12, salt=b"gone")
    m.one.evict(9)
    m.store(A[:16], keep=True)
    m.store([*A[:4], *C[:8]])
    held = [m.one.lookup(A[:16]) for _ in range(4)]
    for match in (held[2], held[0], held[3]):
        match.release()
    assert len(m.one.evict(3)) == 3


def _cleared(m: Maker) -> None:
    m.store(A[:16], keep=True)
    m.store(B[:12], adapter_id=2)
    m.one.clear()
    m.store([*A[:8], *C[:8]], keep=True, worker=2)
    m.prompts.append(Prompt(A[:14]))


def _full(m: Maker) -> None:
    m.store(A, keep=True)
    m.store(B[:16], adapter_id=1, keep=True, worker=2)
    m.store(C[:16], adapter_id=2)
    for _ in range(4):
        m.one.lookup(A[:9])


def _empty(m: Maker) -> None:
    m.prompts.append(Prompt(A[:8]))


def _odd(m: Maker) -> None:
    m.store(A[:9], block_keys=[1, 2, 3])
    m.store(A[:9], block_keys=[1, 2, 4], keep=True)
    m.store([*A[:6], 1, 1, 1, 2, 2, 2], adapter_id=9)
    m.prompts += [Prompt(A[:8], block_keys=[1, 2]), Prompt(A[:9])]


def _states(m: Maker) -> None:
    """Snapshots of every kind: the two workers' own, pending, pinned, displaced, spilled."""
    one, two, is_managed = m.one, m.two, m.one._segment.geometry.snapshot_slots
    for tokens, keep in ((A[:24], False), ([*A[:8], *B[:8]], True)):
        m.store(tokens, keep)

    def slot(cache: RadixCache) -> int:
        return cache.allocate_snapshot_slot() if is_managed else next(m.blocks)

    def save(tokens: list[int], kind: str = "plain", cache: RadixCache = one) -> None:
        for back in cache.reserve_snapshot(tokens, slot(cache), kind=kind, session=SESSION).commit():
            cache.free_snapshot_slot(back) if is_managed else None

    for tokens in (A[:2], A[:6], A[:10]):
        save(tokens)
    for cache, is_pending in ((one, False), (two, True)):
        spilled: Any = cache.evict_snapshot_to_tier(pending=is_pending)
        cache.free_snapshot_slot(spilled.slot) if is_managed else None
    save(A[:18], "tail")
    save(A[:12], "sibling", two)
    one.lookup(A[:24], session=SESSION), two.lookup(A[:14])
    save(A[:12])  # displaces the pinned sibling
    two.reserve_snapshot([*A[:8], *B[:4]], slot(two), kind="finish")
    slot(two)
    m.prompts += [Prompt(A[:20]), Prompt([*A[:8], *B[:6]])]


def _pools(m: Maker) -> None:
    _states(m)


def _managed(m: Maker) -> None:
    """Blocks of either worker's own, stored, and free ones, in no order."""
    m.store(A[:16], keep=True)
    m.store([*A[:8], *B[:8]])
    m.store(C[:12], worker=2)
    own = m.one.allocate(4)
    m.two.allocate(3)
    m.one.free(own[1:3])
    m.one.evict(2)
    m.prompts.append(Prompt(A[:14]))


def _claims(m: Maker) -> None:
    """Claims of either worker, of which one goes on after a part was inserted, one is over and one is waited for."""
    m.store(A[:8])
    done, part = m.one.claim(C), m.one.claim(A)
    assert m.two.claim(B).is_mine
    assert m.one.claim(B).is_waiting
    part.insert([*m.one.lookup(A[:8]).matched_blocks, next(m.blocks)], num_tokens=12)
    done.release()
    m.prompts += [Prompt(A), Prompt(B), Prompt([*B[:4], 5, 5, 5, 5])]


SHAPES: list[tuple[Callable[[Maker], None], dict[str, Any]]] = [
    (_chain, {}), (_branches, {}), (_namespaces, {}), (_leases, {}), (_fragmented, {}), (_cleared, {}), (_full, {}),
    (_empty, {}), (_odd, {"block_size": 3, "max_snapshots": 2}),
    (_states, {"max_snapshots": 9, "snapshot_slots": 7, "tail_lease": 2}),
    (_pools, {"max_snapshots": 9, "retention": "chain"}), (_managed, {"num_blocks": 20}),
    (_claims, {"max_claims": 5}),
]  # fmt: skip


def bases(name: str) -> list[Base]:
    """One for each shape, always with the same hashes; `name` is for the caches that they are copied from."""
    made, chance = [], np.random.default_rng(1)

    def randbits(bits: int) -> int:
        return int.from_bytes(chance.bytes(8), "little") >> (64 - bits)

    for shape, sizes in SHAPES:
        with mock.patch("secrets.randbits", randbits):
            maker = Maker(f"{name}{shape.__name__}", **sizes)
        try:
            shape(maker)
            assert maker.one.verify() == []
            geometry = maker.one._segment.geometry
            image = np.ndarray(geometry.size, np.uint8, maker.one._segment._map).copy()
            made.append(Base(shape.__name__[1:], geometry, image, maker.prompts, [0, 1]))
        finally:
            maker.one.close()
            maker.two.close()
            remove_all(maker.one.name)
    return made
