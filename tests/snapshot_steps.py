"""Steps of scenarios with snapshots, and who plays them; `test_scenarios.py` for the tree's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shmradix import PrefixMatch, RadixCache
from shmradix.results import Drop, Spill
from tests.test_scenarios import Prompt, Step, prompt_tokens

CacheFactory = Callable[..., RadixCache]
Answer = dict[str, Any]
A, B = 0xAA, 0xBB  # adapters
NOTHING: Answer = {"slot": None, "tokens": 0, "key": None, "tier_tokens": 0}
ELSEWHERE = (500_000, 500_016)  # a prompt with blocks and no snapshot
LONG = 4096


def kv(tokens: Prompt, **where: Any) -> Step:
    """Store the prompt's blocks; nobody leases them."""
    return Step("kv", {"tokens": prompt_tokens(tokens), **where}, {})


def save(tokens: Prompt, slot: int, *freed: int, kind: str = "plain", session: int = 0, **where: Any) -> Step:
    """A snapshot of all of `tokens` in `slot`, and the slots that this gives back."""
    args = {"tokens": prompt_tokens(tokens), "slot": slot, "kind": kind, "session": session, **where}
    return Step("save", args, {"freed": sorted(freed)})


def put(tokens: Prompt, slot: int, *freed: int, session: int = 0, adapter: int = 0) -> Step:
    """insert_with_snapshot, the lease dropped at once."""
    args = {"tokens": prompt_tokens(tokens), "slot": slot, "session": session, "adapter_id": adapter}
    return Step("put", args, {"freed": list(freed)})


def find(tokens: Prompt, slot: int | None = None, depth: int = 0, keep: str = "", **args: Any) -> Step:
    """A lookup that names this resident snapshot, or none; released at once unless `keep` names it."""
    expect = {name: args.pop(name) for name in ("matched", "is_tail", "why") if name in args}
    return Step(
        "find",
        {"tokens": prompt_tokens(tokens), "keep": keep, **args},
        NOTHING | {"slot": slot, "tokens": depth} | expect,
    )


def tiered(tokens: Prompt, key: str, depth: int, **args: Any) -> Step:
    """A lookup that names the snapshot spilled as `key`."""
    args = {"tokens": prompt_tokens(tokens), "keep": "", **args}
    return Step("find", args, NOTHING | {"key": key, "tier_tokens": depth})


def see(session: int) -> Step:
    """A lookup by the session that uses no snapshot: its tail lease starts again."""
    return find(ELSEWHERE, session=session, matched=16)


def gone(*slots: int | None) -> list[Step]:
    """Evictions, and the slot that each gives."""
    return [Step("evict", {}, {"slot": slot}) for slot in slots]


def spill(slot: int | None, depth: int = 0, key: str = "", least: int = 0) -> Step:
    """An eviction to the tier; with `key` the snapshot is spilled and its key so named, else dropped."""
    answer = None if slot is None else (Spill if key else Drop).__name__
    return Step("spill", {"name": key, "min_tokens": least}, {"answer": answer, "slot": slot, "depth": depth})


def promote(key: str, slot: int, done: bool = True) -> Step:
    return Step("promote", {"key": key, "slot": slot}, {"done": done})


def forget(key: str, done: bool = True) -> Step:
    return Step("forget", {"key": key}, {"done": done})


def drop(match: str) -> Step:
    return Step("drop", {"match": match}, {})


def evicts(*blocks: int) -> Step:
    """An eviction of one block of the tree."""
    return Step("evict_block", {}, {"blocks": list(blocks)})


def stat(**expect: int) -> Step:
    return Step("stats", {}, expect)


class Player:
    """Plays steps on one cache. `kv` numbers blocks from 10 on; tier keys have names."""

    def __init__(self, cache: RadixCache) -> None:
        self.cache = cache
        self.next_block = 10
        self.keys: dict[str, int] = {"never a key": 123}
        self.matches: dict[str, PrefixMatch] = {}

    def table(self, tokens: list[int]) -> list[int]:
        count = -(-len(tokens) // self.cache.block_size)
        self.next_block += count
        return list(range(self.next_block - count, self.next_block))

    def kv(self, tokens: list[int], **where: Any) -> Answer:
        self.cache.insert(tokens, self.table(tokens), **where)
        self.cache.release(tokens, **where)
        return {}

    def save(self, tokens: list[int], slot: int, kind: str, session: int, **where: Any) -> Answer:
        return {"freed": sorted(save_as(self.cache, kind, tokens, slot, session, **where))}

    def put(self, tokens: list[int], slot: int, session: int, adapter_id: int) -> Answer:
        table = self.table(tokens)
        freed, _ = self.cache.insert_with_snapshot(tokens, table, slot, session=session, adapter_id=adapter_id)
        if len(tokens) >= self.cache.block_size:
            self.cache.release(tokens, adapter_id=adapter_id)
        return {"freed": freed}

    def find(self, tokens: list[int], keep: str, **args: Any) -> Answer:
        match = self.cache.lookup(tokens, **args)
        self.matches[keep] = match
        if not keep:
            match.release()
        names = {key: name for name, key in self.keys.items()}
        return {
            "matched": match.matched_tokens,
            "slot": match.snapshot_slot,
            "tokens": match.snapshot_tokens,
            "key": names.get(match.snapshot_tier_key or 0),
            "tier_tokens": match.snapshot_tier_tokens,
            "is_tail": match.snapshot_is_tail,
            "why": match.no_snapshot,
        }

    def drop(self, match: str) -> Answer:
        self.matches[match].release()
        return {}

    def release(self, tokens: list[int]) -> Answer:
        self.cache.release(tokens)
        return {}

    def release_matched(self, tokens: list[int], matched_tokens: int) -> Answer:
        self.cache.release_matched(tokens, matched_tokens)
        return {}

    def evict(self) -> Answer:
        return {"slot": self.cache.evict_snapshot_lru()}

    def evict_block(self) -> Answer:
        return {"blocks": self.cache.evict(1).blocks.tolist()}

    def spill(self, name: str, min_tokens: int) -> Answer:
        got = self.cache.evict_snapshot_to_tier(min_tokens)
        if got is None:
            return {"answer": None, "slot": None, "depth": 0}
        if isinstance(got, Spill):
            assert got.key not in self.keys.values()
            self.keys[name] = got.key
        return {"answer": type(got).__name__, "slot": got.slot, "depth": got.tokens}

    def promote(self, key: str, slot: int, match: str = "") -> Answer:
        return {"done": self.cache.promote_snapshot(self.keys[key], slot, match=self.matches[match] if match else None)}

    def forget(self, key: str) -> Answer:
        return {"done": self.cache.forget_snapshot_tier_key(self.keys[key])}

    def stats(self) -> Answer:
        stats = self.cache.stats()
        assert stats.snapshots == self.cache.snapshot_count()
        return {name: getattr(stats, name) for name in stats.__slots__}


def save_as(cache: RadixCache, kind: str, tokens: Any, slot: int, session: int, **where: Any) -> list[int]:
    """The method for this kind of snapshot."""
    if kind == "tail":
        return cache.insert_tail_snapshot(tokens, slot, session, **where)
    if kind == "sibling":
        return cache.insert_tail_sibling_snapshot(tokens, slot, session, **where)
    if kind == "finish":
        return cache.reserve_snapshot(tokens, slot, kind=kind, session=session, **where).commit()
    return cache.insert_intermediate_snapshot(tokens, slot, session=session, **where)


def cache_with(cache_factory: CacheFactory, length: int = 64, **sizes: Any) -> RadixCache:
    """A cache that has blocks 0, 1, ... for the prompt range(length), leased by nobody."""
    cache = cache_factory(**{"max_blocks": 256, "block_size": 16, "max_snapshots": 8, **sizes})
    cache.insert(range(length), range(length // cache.block_size))
    cache.release(range(length))
    return cache


def anchor(cache: RadixCache, tokens: Any, **args: Any) -> tuple[int | None, int]:
    """The slot and depth that a lookup names; released again."""
    with cache.lookup(tokens, **args) as match:
        return match.snapshot_slot, match.snapshot_tokens


def play(cache: RadixCache, steps: list[Step]) -> None:
    player = Player(cache)
    for number, step in enumerate(steps):
        answer = getattr(player, step.op)(**step.args)
        where = f"step {number}, {step.op}" + repr({k: v for k, v in step.args.items() if k != "tokens"})
        assert {name: answer.get(name) for name in step.expect} == step.expect, where
