"""Looking into a cache: live, busy, dead, and as a file, by the API and by the commands."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shmradix import RadixCache, errors, inspect, layout
from shmradix.cli import main
from shmradix.layout import GUARDS
from tests.actors import SHM, Actor, attach, run_script

CacheFactory = Callable[..., RadixCache]

SIZES: dict[str, Any] = {"max_blocks": None, "num_blocks": 16, "block_size": 4, "block_nbytes": 64, "max_workers": 4}


@pytest.fixture
def cache(cache_factory: CacheFactory) -> RadixCache:
    """Three blocks of one prompt, a lookup that hit two of them and keeps its lease, one private block."""
    cache = cache_factory(**SIZES)
    cache.insert(range(12), cache.allocate(3))
    cache.release(range(12))
    cache.allocate(1)
    return cache


def lookup(state: SimpleNamespace, tokens: list[int]) -> int:
    state.match = state.cache.lookup(tokens)
    return int(state.match.matched_tokens)


def read(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """What a command prints as JSON."""
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def expect_stat(stat: dict[str, Any], alive: int | None, dead: int | None) -> None:
    expected = {
        "block_size": 4, "max_blocks": 16, "num_blocks": 16, "blocks_live": 3, "blocks_private": 1, "leases": 1,
        "namespaces": 1, "snapshots": 0, "claims": 0, "workers_alive": alive, "workers_dead": dead, "max_workers": 4,
        "hit_ratio": 8 / 10, "guards_held_by": dict.fromkeys(GUARDS),
    }  # fmt: skip
    assert {key: stat[key] for key in expected} == expected
    assert (stat["counters"]["lookups"], stat["counters"]["hit_tokens"], stat["counters"]["inserts"]) == (1, 8, 1)
    assert abs(time.time() - stat["created"]) < 600


def test_the_commands_tell_the_truth_live_dead_and_from_a_file(
    cache: RadixCache, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "copy")
    with Actor() as actor:
        actor.do(attach, cache.name)
        assert actor.do(lookup, [*range(8), 99, 99]) == 8
        stat = read(capsys, "stat", cache.name)
        expect_stat(stat, alive=2, dead=0)
        assert stat["file_bytes"] == os.stat(SHM / f"shmradix.{cache.name}").st_size
        mine, theirs = read(capsys, "workers", cache.name)
        assert (mine["pid"], mine["alive"], mine["leases"], mine["private_blocks"]) == (os.getpid(), True, 0, 1)
        assert (theirs["pid"], theirs["alive"], theirs["leases"]) == (actor.pid, True, 1)
        assert theirs["counters"]["lookups"] == 1
        actor.kill()
    expect_stat(read(capsys, "stat", cache.name), alive=1, dead=1)
    assert [worker["alive"] for worker in read(capsys, "workers", cache.name)] == [True, False]
    assert read(capsys, "dump", cache.name, file)["bytes"] == os.stat(file).st_size == stat["index_bytes"]
    expect_stat(read(capsys, "stat", file), alive=None, dead=None)
    assert [worker["alive"] for worker in read(capsys, "workers", file)] == [None, None]
    for where in (cache.name, file):
        assert read(capsys, "verify", where) == []
    (row,) = [row for row in read(capsys, "ls") if row["name"] == cache.name]
    assert (row["blocks_live"], row["problem"]) == (3, None)
    for command in (["ls"], ["stat", file], ["workers", cache.name], ["verify", cache.name]):
        assert main(command) == 0
    out = capsys.readouterr().out
    for part in (cache.name, "DEAD", "80.0%", "unknown", "sound"):
        assert part in out


def test_a_reading_changes_nothing_and_needs_no_slot(cache: RadixCache) -> None:
    path = SHM / f"shmradix.{cache.name}"
    before = path.read_bytes()
    reading = inspect.open(cache.name)
    reading.verify()
    assert path.read_bytes() == before
    assert np.array_equal(reading.views.nodes, cache._segment.views.nodes)


def test_looking_needs_no_numba(cache: RadixCache) -> None:
    script = (
        "import sys; from shmradix.cli import main; assert main(['verify', sys.argv[1]]) == 0; "
        "assert 'numba' not in sys.modules"
    )
    assert "sound" in run_script(script, cache.name).stdout


@pytest.fixture
def guard_word(cache: RadixCache) -> Iterator[np.ndarray]:
    word = cache._segment.views.guards["owner"]
    yield word
    word[0] = 0


def test_what_a_live_worker_is_changing_is_never_shown(cache: RadixCache, guard_word: np.ndarray) -> None:
    guard_word[0] = cache._worker.tag
    with pytest.raises(inspect.WorkersBusy, match="no moment"):
        inspect.open(cache.name, patience=0.2)


def test_a_guard_that_a_dead_worker_holds_is_no_obstacle(cache: RadixCache, guard_word: np.ndarray) -> None:
    with Actor() as actor:
        actor.do(attach, cache.name)
        (other,) = [worker.slot for worker in inspect.open(cache.name).workers if worker.pid == actor.pid]
        generation = int(cache._segment.views.workers["generation"][other])
        guard_word[0] = generation << 16 | other + 1
        actor.kill()
        assert inspect.open(cache.name, patience=0.2).held_by == [other, None]


def test_who_has_a_guard_is_told_whether_alive_or_dead(
    cache: RadixCache, guard_word: np.ndarray, capsys: pytest.CaptureFixture[str]
) -> None:
    tree, snapshots = inspect.guards(cache.name)
    assert (tree.name, tree.slot, tree.pid, tree.alive, tree.seconds, tree.recoveries) == ("tree", *[None] * 4, 0)
    assert (snapshots.name, snapshots.is_waited_for) == ("snapshots", False)
    with Actor() as actor:
        actor.do(attach, cache.name)
        (slot,) = [worker.slot for worker in inspect.open(cache.name).workers if worker.pid == actor.pid]
        generation = int(cache._segment.views.workers["generation"][slot])
        guard_word[0] = 1 << 62 | generation << 16 | slot + 1
        cache._segment.views.guards["acquired_ns"][0] = time.monotonic_ns() - 10**9
        tree = inspect.guards(cache.name)[0]
        assert (tree.slot, tree.pid, tree.alive, tree.is_waited_for) == (slot, actor.pid, True, True)
        assert tree.seconds is not None
        assert tree.seconds >= 1
        actor.kill()
    assert inspect.guards(cache.name)[0].alive is False
    assert read(capsys, "guards", cache.name)[0]["slot"] == slot
    assert main(["guards", cache.name]) == 0
    assert "DEAD" in capsys.readouterr().out


def test_snapshots_are_listed_with_what_they_are(
    cache_factory: CacheFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = cache_factory(max_blocks=16, block_size=4, max_snapshots=8)
    cache.insert(range(16), [1, 2, 3, 4])
    cache.insert_intermediate_snapshot(range(8), 5)
    cache.insert_tail_snapshot(range(16), 6, 77)
    match = cache.lookup(range(16), session=77, max_snapshot_tokens=16)
    assert match.snapshot_slot == 6
    middle, tail = inspect.open(cache.name).snapshots
    assert (middle.tokens, middle.session, middle.slot, middle.tier_key, middle.pins) == (8, 0, 5, None, 0)
    assert "tail" not in middle.flags
    assert (tail.tokens, tail.session, tail.slot, tail.pins, tail.is_cleared) == (16, 77, 6, 1, False)
    assert "tail" in tail.flags
    assert tail.idle <= middle.idle
    inspect.dump(inspect.open(cache.name), tmp_path / "copy")
    assert read(capsys, "snapshots", str(tmp_path / "copy"))[1]["session"] == 77
    assert main(["snapshots", cache.name]) == 0
    assert "tail" in capsys.readouterr().out


def churn(state: SimpleNamespace, seconds: float) -> int:
    """Look up, insert and evict without a pause."""
    random, rounds, deadline = np.random.default_rng(os.getpid()), 0, time.monotonic() + seconds
    while time.monotonic() < deadline:
        rounds += 1
        prompt = random.integers(0, 3, 12)
        with state.cache.lookup(prompt) as match:
            new = state.cache.allocate(3 - len(match.matched_blocks))
            stored = state.cache.insert(prompt, [*match.matched_blocks, *new], match=match)
            state.cache.free(np.intersect1d(stored.duplicates, new))
        if rounds % 64 == 0:
            time.sleep(0.001)  # an engine computes in between
    return rounds


def test_a_sound_cache_never_looks_damaged_while_workers_change_it(cache_factory: CacheFactory) -> None:
    cache = cache_factory(**{**SIZES, "num_blocks": 64})
    readings = 0
    with Actor() as one, Actor() as two:
        for actor in (one, two):
            actor.do(attach, cache.name)
            actor.begin(churn, 3.0)
        for _ in range(30):
            assert inspect.open(cache.name).verify() == []
            readings += 1
        rounds = [actor.answer() for actor in (one, two)]
    assert readings == 30
    assert min(rounds) > 100


DAMAGES: dict[str, tuple[str, str, int, int]] = {
    "a_birth_after_the_clock": ("nodes", "born", -1, 1 << 40),
    "a_use_after_the_clock": ("nodes", "last_use", -1, 1 << 40),
    "another_hash": ("nodes", "hash", -1, 1),
    "a_parent_beyond_the_table": ("nodes", "parent", -1, 1 << 30),
    "no_parent": ("nodes", "parent", -1, 0),
    "no_block": ("nodes", "block", -1, 0xFFFF_FFFF),
    "a_lease_too_many": ("nodes", "leases", -1, 5),
    "a_sibling_that_is_none": ("nodes", "next_sibling", -1, 1),
    "another_key": ("nodes", "block_key", -1, 7),
    "not_in_the_heap": ("nodes", "in_heap", -1, 0),
    "a_total": ("state", "live_blocks", 0, 9),
    "a_mark": ("state", "nodes_used", 0, 1 << 30),
    "a_clock_that_went_back": ("state", "clock", 0, 0),
    "a_heap_beyond_its_table": ("state", "heap_size", 0, 1 << 20),
    "private_blocks": ("state", "private_blocks", 0, 12),
    "a_free_list": ("state", "free_block", 0, 0),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_verify_names_the_damage(
    cache: RadixCache, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    section, field, at, value = DAMAGES[damage]
    reading = inspect.open(cache.name)
    record = np.flatnonzero(reading.views.nodes["born"])[-1] if at < 0 else at
    getattr(reading.views, section)[field][record] = value
    inspect.dump(reading, tmp_path / "damaged")
    assert main(["verify", str(tmp_path / "damaged")]) == 1
    assert capsys.readouterr().out.startswith("invariant ")


def test_what_is_no_cache_is_refused_with_the_reason(
    cache: RadixCache, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "zeros").write_bytes(bytes(8192))
    inspect.dump(inspect.open(cache.name), tmp_path / "short")
    os.truncate(tmp_path / "short", 8192)
    for name, error in (
        ("empty", errors.SegmentForeign), ("zeros", errors.SegmentForeign), ("short", errors.CorruptSegment),
        (".", errors.SegmentForeign), ("nothing", errors.SegmentNotFound),
    ):  # fmt: skip
        with pytest.raises(error):
            inspect.open(tmp_path / name)
    with pytest.raises(FileExistsError):
        inspect.dump(inspect.open(cache.name), tmp_path / "empty")
    assert main(["stat", cache.name[:-1]]) == 2
    assert f"did you mean {cache.name!r}?" in capsys.readouterr().err


def test_ls_goes_on_where_one_cannot_be_read(
    cache: RadixCache, capsys: pytest.CaptureFixture[str], cache_factory: CacheFactory
) -> None:
    other = cache_factory(**SIZES)
    other._segment.views.header["version"] = layout.VERSION + 1
    rows = {row["name"]: row["problem"] for row in read(capsys, "ls")}
    assert rows[cache.name] is None
    assert "has version" in rows[other.name]


def test_ls_leaves_out_what_is_removed_while_it_looks(
    cache: RadixCache, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmradix.inspect.commands.names", lambda: [cache.name, f"{cache.name}-gone"])
    assert [row["name"] for row in read(capsys, "ls")] == [cache.name]


def test_a_slots_new_worker_is_not_said_to_hold_what_the_dead_one_did(cache: RadixCache) -> None:
    cache.lookup(range(8))  # a lease, beside the private block
    record = cache._segment.views.workers[cache._worker.slot]
    record["generation"] += 1
    try:
        (worker,) = inspect.open(cache.name).workers
        assert (worker.leases, worker.private_blocks) == (0, 0)
    finally:
        record["generation"] -= 1
