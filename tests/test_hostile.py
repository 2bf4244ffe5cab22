"""Hostile segments: whatever the bytes are, a call answers what can be or raises what is documented, and soon."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmradix import PrefixMatch, RadixCache
from shmradix.errors import CorruptSegment
from shmradix.owner_word import PARKED, tag_of
from tests import hostile, hostile_images
from tests.conftest import SHM, fresh_name
from tests.hostile_bases import Prompt
from tests.hostile_calls import Truth, flaw_of_match
from tests.hostile_images import Plan

CacheFactory = Callable[..., RadixCache]
IMAGES = int(os.environ.get("SHMRADIX_HOSTILE_IMAGES", "10000"))


def test_no_damage_makes_a_call_crash_hang_grow_or_match_what_is_not_there() -> None:
    report = hostile.run(IMAGES)
    assert not report.faults, str(report)
    assert report.images == IMAGES
    if IMAGES >= 10_000:  # the listed ones, each once, and then the random ones
        assert len(report.kinds) >= 25
        assert min(report.outcomes[o] for o in ("answered", "CorruptSegment", "SegmentForeign", "LayoutMismatch")) > 100


@pytest.mark.parametrize(
    ("what", "said"),
    [("signal", "KILLED by SIGSEGV"), ("loop", "HANG"), ("memory", "memory grew"), ("leak", "descriptors are left")],
)
def test_a_package_that_misbehaves_is_told_with_its_image(what: str, said: str) -> None:
    report = hostile.run(7, seed=3, lanes=1, plant={4: what})
    assert report.images == 7
    assert [fault.number for fault in report.faults] == [4], str(report)
    assert said in report.faults[0].what
    assert report.faults[0].kind == Plan(3, fresh_name()).image(4).kind


def test_silence_is_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile, "SILENCE", 4.0)
    report = hostile.run(3, seed=3, lanes=1, plant={1: "sleep"})
    assert [(fault.number, fault.what) for fault in report.faults] == [(1, "HANG")]
    assert report.images == 3


def test_an_image_is_made_again_from_its_seed_and_number() -> None:
    one, two = Plan(5, fresh_name()), Plan(5, fresh_name())
    listed = len(one.changes)
    for number in (0, 17, listed - 1, listed, listed + 12345):
        first, again = one.image(number), two.image(number)
        assert (first.kind, first.base.name, first.are_alive) == (again.kind, again.base.name, again.are_alive)
        different = np.flatnonzero(first.data != again.data) if len(first.data) == len(again.data) else [0]
        sections = {section.name: section for section in first.base.geometry.sections()}
        own = range(sections["leases"].offset)  # times, process ids
        assert all(at in own or in_lease_time(first, at) for at in different), first.kind
    assert {change.kind for change in one.changes} >= {f"cycle {chain}" for chain in hostile_images.CHAINS}


def in_lease_time(image: hostile_images.Image, at: int) -> bool:
    leases = next(section for section in image.base.geometry.sections() if section.name == "leases")
    return leases.offset <= at < leases.offset + leases.nbytes and 8 <= (at - leases.offset) % 64 < 16


def test_a_wrong_match_is_seen(cache_factory: CacheFactory) -> None:
    cache = cache_factory(block_size=4, max_blocks=16)
    tokens = list(range(10))
    cache.insert(tokens, [5, 6])
    cache.insert([*tokens[:4], 9, 9, 9, 9], [5, 7], salt=b"other")
    match = cache.lookup([*tokens[:8], 1, 2])
    truth = Truth(cache._segment.views, cache._segment.geometry)

    def flaw(blocks: list[int], agree: int = 0, block: int | None = None, **prompt: Any) -> str:
        rows = np.array([blocks, blocks], np.uint32)
        said = PrefixMatch(cache, match._namespace, rows, len(blocks), 4, 0, 0, block, agree, 0)
        return flaw_of_match(truth, Prompt(**{"tokens": tokens, **prompt}), said)

    assert flaw([5, 6]) == flaw([5]) == flaw([]) == flaw([5], 4, 6) == ""
    assert "hold something else" in flaw([6, 5])
    assert "hold something else" in flaw([5, 6], tokens=[*tokens[:7], 70])
    assert "hold something else" in flaw([5, 6], adapter_id=1)
    assert "hold something else" in flaw([5, 6], salt=b"other")
    assert "hold something else" in flaw([5, 7], salt=b"other")
    assert "hold something else" in flaw([5, 6], block_keys=[0, 1])
    assert "are others" in flaw([5], 4, 7)
    assert "are others" in flaw([5], 3, 6, tokens=[*tokens[:6], 70])
    assert "are others" in flaw([], 4, 6, tokens=tokens[4:])  # the same tokens after others
    assert "lengths" in flaw([5, 6, 7])
    match.release()
    cache._segment.views.nodes["born"][1:] = 0
    assert "hold something else" in flaw_of_match(Truth(truth.views, truth.geometry), Prompt(tokens), match)
    cache._segment.views.nodes["leases"] = 0


def test_a_partial_block_follows_the_matched_prefix(cache_factory: CacheFactory) -> None:
    cache = cache_factory(block_size=4, max_blocks=16)
    cache.insert([1] * 4 + [9] * 4, [10, 11])
    cache.release([1] * 4 + [9] * 4)
    nodes: Any = cache._segment.views.nodes
    leaf = int(np.flatnonzero(nodes["block"] == 11)[0])
    root = int(nodes["parent"][nodes["parent"][leaf]])
    nodes["first_child"][root], before = leaf, nodes["first_child"][root].copy()
    with pytest.raises(CorruptSegment):
        cache.lookup([9] * 4)
    nodes["first_child"][root] = before
    assert cache.lookup([9] * 4).partial_block is None


def test_the_dead_are_not_matched(cache_factory: CacheFactory) -> None:
    cache = cache_factory(block_size=4, max_blocks=16)
    cache.insert([1] * 8, [10, 11])
    cache.release([1] * 8)
    nodes: Any = cache._segment.views.nodes
    for node in np.flatnonzero(nodes["born"]).tolist():
        nodes["born"][node], before = 0, int(nodes["born"][node])
        with pytest.raises(CorruptSegment):
            cache.peek_matched_tokens([1] * 8)
        nodes["born"][node] = before
    assert cache.verify() == []


@pytest.mark.parametrize("guard", [0, 1])
def test_a_worker_does_not_wait_for_itself(cache_factory: CacheFactory, guard: int) -> None:
    cache = cache_factory(block_size=4, max_blocks=16)
    views: Any = cache._segment.views
    views.guards["owner"][guard] = tag_of(1, int(views.workers["generation"][1]) + 1) | PARKED
    with RadixCache.attach(cache.name, lock_timeout=5) as other:
        assert other.peek_matched_tokens([1] * 8) == 0
    views.guards["owner"][1] = 0
    assert cache.verify() == []


def test_an_insert_that_meets_damage_stores_nothing_below_nothing(cache_factory: CacheFactory) -> None:
    cache = cache_factory(block_size=4, max_blocks=16)
    cache.insert([1] * 4, [10])
    cache.release([1] * 4)
    views: Any = cache._segment.views
    for field in ("free_namespace", "free_node"):
        views.state[field] = int(np.flatnonzero(views.nodes["born"])[0 if field == "free_namespace" else -1])
        with pytest.raises(CorruptSegment):
            cache.insert([2] * 8, [20, 21], salt=b"new")
        blocks = np.flatnonzero(views.nodes["born"])[1:]
        blocks = blocks[blocks >= 1 + cache._segment.geometry.max_namespaces]
        assert views.nodes["block"][blocks].tolist() == [10]
        assert views.state["live_blocks"][0] == 1
        views.state[field] = 0


def test_nothing_is_stored_below_a_dead_root(cache_factory: CacheFactory) -> None:
    cache = cache_factory(block_size=4, max_blocks=16)
    cache.insert([1] * 8, [10, 11])
    match = cache.lookup([1] * 8)
    views: Any = cache._segment.views
    for node in np.flatnonzero(views.nodes["born"])[:2].tolist():  # the root, and the first block
        views.nodes["born"][node], before = 0, int(views.nodes["born"][node])
        with pytest.raises(ValueError, match="do not start with the prompt"):
            cache.insert([1] * 8 + [2] * 4, [10, 11, 12], match=match)
        views.nodes["born"][node] = before
    assert cache.verify() == []
    assert cache.insert([1] * 8 + [2] * 4, [10, 11, 12], match=match).inserted_tokens == 12


def test_nothing_is_left_by_a_run_that_is_killed() -> None:
    code = "import os, threading; from tests import hostile; threading.Timer(3, os.kill, (os.getpid(), 9)).start(); "
    code += "print(flush=True); hostile.run(100_000, seed=9)"
    before = {path.name for path in SHM.glob("*shmradix.*")}
    with subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[1]) as process:
        pid = process.pid
    mine = f"test-{pid}-"
    for _ in range(100):
        left = {path.name for path in SHM.glob(f"*shmradix.{mine}*")} - before
        if not left:
            break
        subprocess.run(["sleep", "0.1"], check=True)
    assert not left


def test_the_command_line_runs_a_few() -> None:
    tool = Path(__file__).parents[1] / "tools" / "hostile.py"
    command = [sys.executable, str(tool), "--images", "40", "--seed", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.startswith("40 images in ")
