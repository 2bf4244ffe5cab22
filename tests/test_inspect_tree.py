"""The inspector's tree, leases, and why a prompt is cached so far and no further."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmradix import RadixCache, inspect
from shmradix.cli import main
from tests.actors import Actor, attach, hold

CacheFactory = Callable[..., RadixCache]


@pytest.fixture
def cache(cache_factory: CacheFactory) -> RadixCache:
    """Blocks of four: 0-11 in blocks 1 to 3, a branch behind 7 in block 4; adapter 7 has 0-15 in blocks 11 to 14."""
    cache = cache_factory(max_blocks=64, block_size=4, max_workers=4)
    cache.insert(range(12), [1, 2, 3])
    cache.insert([*range(8), 50, 51, 52, 53], [1, 2, 4])
    cache.insert(range(16), [11, 12, 13, 14], adapter_id=7, salt=b"who")
    for tokens, where in ((range(12), {}), ([*range(8), 50, 51, 52, 53], {})):
        cache.release(tokens, **where)
    return cache


def test_a_run_without_a_branch_is_one(cache: RadixCache) -> None:
    found = [
        (run.depth, run.level, run.block_ids, run.tokens, run.leases, run.adapter_id, run.is_salted)
        for run in inspect.runs(inspect.open(cache.name))
    ]
    assert found == [
        (0, 0, [1, 2], list(range(8)), 0, 0, False),
        (2, 1, [3], list(range(8, 12)), 0, 0, False),
        (2, 1, [4], [50, 51, 52, 53], 0, 0, False),
        (0, 0, [11, 12, 13, 14], list(range(16)), 1, 7, True),
    ]


def test_what_was_used_last_is_the_least_idle(cache: RadixCache) -> None:
    cache.lookup(range(12)).release()
    idle = {run.block_ids[-1]: run.idle for run in inspect.runs(inspect.open(cache.name))}
    assert min(idle, key=lambda block: idle[block]) == 3
    assert min(idle.values()) >= 0


def test_what_was_cleared_is_not_shown(cache: RadixCache) -> None:
    cache.clear()
    reading = inspect.open(cache.name)
    assert list(inspect.runs(reading)) == []
    assert inspect.explain(reading, range(12)).reason == "nothing is cached for this adapter and salt"


NOTHING = "nothing is cached for this adapter and salt"
NEAREST, BEHIND = "in the nearest of", "blocks that follow token 7, block"
ENDS: dict[str, tuple[list[int], dict[str, Any], int, str]] = {
    "all_of_it": (list(range(12)), {}, 12, "the whole prompt is cached"),
    "part_of_a_block": (list(range(10)), {}, 8, "the last 2 tokens do not fill a block of 4"),
    "less_than_a_block": ([0, 1], {}, 0, "the last 2 tokens do not fill a block of 4"),
    "a_leaf": (list(range(16)), {}, 12, "nothing is cached behind token 11"),
    "another_token": ([*range(10), 99, 98], {}, 8, f"token 10 is 99, and 10 {NEAREST} 2 {BEHIND} 3"),
    "the_younger_branch": ([*range(8), 50, 51, 52, 9], {}, 8, f"token 11 is 9, and 53 {NEAREST} 2 {BEHIND} 4"),
    "another_beginning": ([0, 1, 9, 9], {}, 0, f"token 2 is 9, and 2 {NEAREST} 1 first blocks, block 1"),
    "another_adapter": (list(range(8)), {"adapter_id": 9}, 0, NOTHING),
    "the_adapter_without_its_salt": (list(range(8)), {"adapter_id": 7}, 0, NOTHING),
    "the_adapter": (list(range(16)), {"adapter_id": 7, "salt": b"who"}, 16, "the whole prompt is cached"),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDS)
def test_why_a_match_ends(cache: RadixCache, case: str) -> None:
    tokens, where, matched, reason = ENDS[case]
    found = inspect.explain(inspect.open(cache.name), tokens, **where)
    assert (found.matched_tokens, found.reason) == (matched, reason)
    with cache.lookup(tokens, **where) as match:
        assert match.matched_tokens == matched
        assert found.block_ids == match.matched_blocks.tolist()


def test_who_has_more_of_a_prompt_is_named(cache: RadixCache) -> None:
    found = inspect.explain(inspect.open(cache.name), range(16))
    assert [(other.adapter_id, other.is_salted, other.matched_tokens) for other in found.others] == [(7, True, 16)]
    assert inspect.explain(inspect.open(cache.name), range(16), 7, b"who").others == []


def test_every_state_of_a_prompt_is_named_with_what_hinders(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=16, block_size=4, max_snapshots=16)
    cache.insert(range(12), [1, 2, 3])
    cache.insert_intermediate_snapshot(range(6), 10)
    cache.insert_tail_snapshot(range(8), 11, 77)
    cache.insert_intermediate_snapshot(range(14), 12)
    cache.insert_intermediate_snapshot([9, *range(5)], 13)  # of another prompt
    cache.insert_intermediate_snapshot(range(4), 14, adapter_id=5)
    alone, deep = "of session 77 alone", "deeper than the 12 tokens that are cached"
    for session, expected in (
        (0, [(6, 10, ""), (8, 11, alone), (14, 12, deep)]),
        (78, [(6, 10, ""), (8, 11, alone), (14, 12, deep)]),
        (77, [(6, 10, ""), (8, 11, ""), (14, 12, deep)]),
    ):
        found = inspect.explain(inspect.open(cache.name), range(16), session=session)
        assert [(state.tokens, state.slot, state.obstacle) for state in found.snapshots] == expected
        with cache.lookup(range(16), session=session, max_snapshot_tokens=16) as match:
            usable = [state for state in found.snapshots if not state.obstacle]
            assert (match.snapshot_tokens, match.snapshot_slot) == (usable[-1].tokens, usable[-1].slot)
    cache.clear()
    found = inspect.explain(inspect.open(cache.name), range(16), session=77)
    assert {state.obstacle for state in found.snapshots} <= {"from before the last clear()"}


def test_a_block_with_a_key_is_told(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=8, block_size=4)
    cache.insert(range(4), [1], block_keys=np.array([0xABC], np.uint64))
    found = inspect.explain(inspect.open(cache.name), range(4))
    assert (found.matched_tokens, found.reason) == (0, "from token 0 on it is cached with a block key only, 0xabc")


def test_random_prompts_end_where_a_lookup_does(cache_factory: CacheFactory) -> None:
    cache, random, blocks = cache_factory(max_blocks=400, block_size=2), np.random.default_rng(5), iter(range(400))
    for _ in range(60):
        tokens = random.integers(0, 3, random.integers(2, 11))
        cache.insert(tokens, [next(blocks) for _ in range(len(tokens) // 2)])
        cache.release(tokens)
    reading = inspect.open(cache.name)
    assert sorted(block for run in inspect.runs(reading) for block in run.block_ids) == sorted(
        reading.views.nodes["block"][1 + reading.geometry.max_namespaces :][
            reading.views.nodes["born"][1 + reading.geometry.max_namespaces :] != 0
        ].tolist()
    )
    for _ in range(60):
        tokens = random.integers(0, 3, random.integers(1, 13))
        with cache.lookup(tokens) as match:
            assert inspect.explain(reading, tokens).block_ids == match.matched_blocks.tolist()


def test_leases_say_whose_they_are_and_since_when(cache: RadixCache, tmp_path: Path) -> None:
    with Actor() as actor:
        actor.do(attach, cache.name)
        actor.do(hold, [*range(8), 8, 9, 77, 77])
        time.sleep(0.05)
        mine, theirs = inspect.open(cache.name).leases
        assert (mine.pid, mine.alive, mine.depth, mine.partial_tokens) == (os.getpid(), True, 4, 0)
        assert (theirs.pid, theirs.alive, theirs.depth, theirs.partial_tokens) == (actor.pid, True, 2, 2)
        assert mine.seconds is not None
        assert theirs.seconds is not None
        assert mine.seconds > theirs.seconds >= 0.05
        actor.kill()
    reading = inspect.open(cache.name)
    assert [lease.alive for lease in reading.leases] == [True, False]
    inspect.dump(reading, tmp_path / "copy")
    assert [(lease.alive, lease.seconds) for lease in inspect.open(tmp_path / "copy").leases] == [(None, None)] * 2


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_the_commands_print_it(
    cache: RadixCache, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = cache.name
    assert len(json.loads(run(capsys, "tree", name, "--json"))) == 4
    for options, count in ((("--depth", "1"), 2), (("--adapter", "7"), 1), (("--min-refs", "1"), 1)):
        assert len(json.loads(run(capsys, "tree", name, *options, "--json"))) == count
    lines = run(capsys, "tree", name).splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["0", "1"], ["8", "9"], ["50", "51"], ["0", "1"]]
    assert lines[2].startswith("  8 9 10 11 ")
    assert len(json.loads(run(capsys, "leases", name, "--json"))) == 1
    assert json.loads(run(capsys, "leases", name, "--older-than", "1000", "--json")) == []
    assert f" {os.getpid()} " in run(capsys, "leases", name)
    (tmp_path / "prompt").write_text("[0, 1, 2, 3,\n 9, 9, 9, 9]")
    monkeypatch.setattr("sys.stdin", io.StringIO("0 1 2 3 9 9 9 9"))
    for tokens in ("0,1,2,3,9,9,9,9", "[0, 1, 2, 3, 9, 9, 9, 9]", str(tmp_path / "prompt"), "-"):
        said = run(capsys, "explain", name, tokens)
        assert said.startswith("4 of 8 tokens are cached, blocks: 1\nIt ends there because token 4 is 9, and 4 in")
    said = run(capsys, "explain", name, " ".join(map(str, range(16))))
    assert "Adapter 7 with a salt has 16 tokens of it." in said
    found = json.loads(run(capsys, "explain", name, "0 1 2 3", "--adapter", "7", "--salt", "who", "--json"))
    assert (found["matched_tokens"], found["block_ids"]) == (4, [11])


def test_explain_prints_the_saved_states(cache_factory: CacheFactory, capsys: pytest.CaptureFixture[str]) -> None:
    cache = cache_factory(max_blocks=16, block_size=4, max_snapshots=4)
    cache.insert(range(8), [1, 2])
    cache.insert_tail_snapshot(range(6), 3, 77)
    assert "\nSnapshot of 6 tokens, slot 3: of session 77 alone.\n" in run(
        capsys, "explain", cache.name, "0 1 2 3 4 5 6"
    )
    said = run(capsys, "explain", cache.name, "0 1 2 3 4 5 6 7", "--session", "77")
    assert "\nSnapshot of 6 tokens, slot 3: can be resumed from.\n" in said


@pytest.mark.parametrize("tokens", ["1,x", "no-such-file", "[]", "[[", "99999999999", "-1 2"])
def test_tokens_that_are_none_are_bad_arguments(
    cache: RadixCache, tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["explain", cache.name, tokens])
    assert raised.value.code == 2
    assert "usage: shmradix explain" in capsys.readouterr().err
