"""Replays with real worker processes, against a plain simulation of a leaf-first LRU cache."""

import json
import os
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

from shmradix import RadixCache
from shmradix.cli import SAMPLE
from shmradix.replay import Counts, Phase, Plan, replay, replay_phase

UNLIMITED = 1 << 20
Request = list[int]


class Watcher:
    """Keeps what a replay reports on its way."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.named: list[str] = []
        self.last = Counts(0, 0, 0, 0, 0)

    def started(self, phase: str, requests: int) -> None:
        self.phases.append(phase)

    def progressed(self, counts: Counts) -> None:
        self.last = counts
        self.named += segments()

    def finished(self, phase: Phase) -> None:
        self.last = phase.total().counts


def segments() -> list[str]:
    return [name for name in RadixCache.list() if f"replay-{os.getpid()}-" in name]


def leaf_first_lru_hits(requests: list[Request], capacity: int, ids_per_block: int = 1) -> int:
    """Serve the requests one by one: count what is held, store the rest in place of the oldest leaves."""
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    parent_of: dict[int, int] = {}
    children: dict[int, int] = {0: 0}
    used: dict[int, int] = {}
    hits = 0
    for now, ids in enumerate(requests, 1):
        path, node = [], 0
        for i in range(0, len(ids) // ids_per_block * ids_per_block, ids_per_block):
            key = (node, tuple(ids[i : i + ids_per_block]))
            node = numbers.setdefault(key, len(numbers) + 1)
            path.append(node)
        held = [node for node in path if node in used]
        hits += len(held)
        used.update(dict.fromkeys(held[-1:], now))
        for parent, node in zip([0, *path], path, strict=False):
            if node in used:
                continue
            if len(used) == capacity:
                leaves = [n for n in used if not children[n] and n not in path]
                if not leaves:
                    break
                oldest = min(leaves, key=lambda n: used[n])
                above, stamp = parent_of[oldest], used.pop(oldest)
                children[above] -= 1
                if above:
                    used[above] = max(used[above], stamp)
            used[node], children[node], parent_of[node] = now, 0, parent
            children[parent] += 1
    return hits


@pytest.fixture
def requests() -> list[Request]:
    lines = (resources.files("shmradix") / "data" / SAMPLE).read_text().splitlines()
    return [json.loads(line)["hash_ids"] for line in lines[:250]]


@pytest.fixture
def trace_path(tmp_path: Path) -> str:
    lines = (resources.files("shmradix") / "data" / SAMPLE).read_text().splitlines(keepends=True)
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(lines[:250]))
    return str(path)


@pytest.fixture(autouse=True)
def no_segment_is_left() -> Iterator[None]:
    yield
    assert not segments()


@pytest.mark.parametrize("capacity", [300, 1000, 3000, UNLIMITED])
def test_one_worker_hits_as_often_as_the_simulation(requests: list[Request], trace_path: str, capacity: int) -> None:
    blocks = min(capacity, 10_000)
    total = replay_phase(Plan(trace_path, 1, blocks, 512), "shared", 1, Watcher()).total()
    assert total.counts.requests == len(requests)
    assert total.counts.lookup_blocks == sum(map(len, requests))
    assert total.counts.hit_blocks == leaf_first_lru_hits(requests, capacity)
    assert len(total.call_ns["lookup"]) == len(requests)
    assert len(total.call_ns["insert"]) >= len(requests)
    assert min(times.min() for times in total.call_ns.values() if len(times)) > 0


def test_larger_blocks_hold_several_ids(requests: list[Request], trace_path: str) -> None:
    total = replay_phase(Plan(trace_path, 1, 5_000, 1024), "shared", 1, Watcher()).total()
    assert total.counts.lookup_blocks == sum(len(ids) // 2 for ids in requests)
    assert total.counts.hit_blocks == leaf_first_lru_hits(requests, UNLIMITED, ids_per_block=2)


def test_tokens_count_up_to_the_prompt_s_length(trace_path: str) -> None:
    total = replay_phase(Plan(trace_path, 1, 10_000, 512), "shared", 1, Watcher()).total()
    lines = [json.loads(line) for line in Path(trace_path).read_text().splitlines()]
    assert total.counts.lookup_tokens == sum(line["input_length"] for line in lines)
    seen: set[int] = set()
    expected = 0
    for line in lines:
        held = sum(1 for hash_id in line["hash_ids"] if hash_id in seen)
        expected += min(held * 512, line["input_length"])
        seen.update(line["hash_ids"])
    assert total.counts.hit_tokens == expected


def test_two_workers_share_the_work_and_the_cache(requests: list[Request], trace_path: str) -> None:
    watcher = Watcher()
    shared, private = replay(Plan(trace_path, 2, 10_001, 512), watcher)
    assert watcher.phases == ["shared", "private"]
    assert watcher.named == []  # by the first request the segments' names are gone: nobody killed leaves one behind
    assert (shared.blocks_per_cache, private.blocks_per_cache) == (10_001, 5_000)
    best = leaf_first_lru_hits(requests, UNLIMITED)
    for phase in (shared, private):
        assert len(phase.workers) == 2
        total = phase.total()
        assert total.counts.requests == len(requests) == sum(w.counts.requests for w in phase.workers)
        assert total.counts.lookup_blocks == sum(map(len, requests))
        assert 0 < total.counts.hit_blocks <= best
        assert total.seconds > 0
        assert 0.01 < phase.starting_seconds < 300
        assert total.requests_per_s > 0
    # At most one request at a time is served beside another, so little of the sharing can be missed.
    assert shared.total().counts.hit_blocks > 0.8 * best
    assert watcher.last == private.total().counts
