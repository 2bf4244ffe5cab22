"""The inspector's commands that change something: they ask first, and take nothing from those who use it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable

import pytest

from shmradix import RadixCache, layout
from shmradix.cli import main
from shmradix.inspect.reading import living_slots
from tests.actors import Actor, attach, files_of, hold, store
from tests.conftest import fresh_name, remove_all

CacheFactory = Callable[..., RadixCache]


@pytest.fixture
def cache(cache_factory: CacheFactory) -> RadixCache:
    return cache_factory(max_blocks=16, block_size=4, max_workers=4)


def answer(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_a_cache_that_is_used_stays_unless_forced(cache: RadixCache, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rm", cache.name, "--yes"]) == 2
    assert "used by 1 workers" in capsys.readouterr().err
    assert cache.name in RadixCache.list()
    assert main(["rm", cache.name, "--yes", "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"removed": [cache.name]}
    assert files_of(cache.name) == []


@pytest.mark.parametrize(("said", "goes"), [("y\n", True), ("YES\n", True), ("n\n", False), ("", False)])
def test_rm_asks(
    cache: RadixCache, said: str, goes: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.close()
    answer(monkeypatch, said)
    assert main(["rm", cache.name]) == (0 if goes else 2)
    assert f"remove {cache.name}? [y/N]" in capsys.readouterr().err
    assert (files_of(cache.name) == []) == goes


def test_a_dead_workers_cache_is_unused_a_living_ones_is_not(cache: RadixCache) -> None:
    cache.close()
    with Actor() as actor:
        actor.do(attach, cache.name)
        assert len(living_slots(cache.name)) == 1
        actor.kill()
    assert living_slots(cache.name) == set()
    assert main(["rm", cache.name, "--yes"]) == 0


def test_stale_takes_what_nobody_uses_and_nothing_else(
    cache: RadixCache, cache_factory: CacheFactory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unused, older = fresh_name(), cache_factory(max_blocks=4)
    try:
        RadixCache.create(unused, max_blocks=4).close()
        older._segment.views.header["version"] = layout.VERSION + 1
        older.close()
        mine = [cache.name, older.name, unused]
        monkeypatch.setattr("shmradix.inspect.changes.names", lambda: mine)  # others' caches are not ours to remove
        assert main(["rm", "--stale", "--yes", "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"removed": [older.name, unused]}
        assert cache.name in RadixCache.list()
        assert main(["rm", "--stale"]) == 0
        assert "nothing to remove" in capsys.readouterr().out
    finally:
        remove_all(unused)


@pytest.mark.parametrize("arguments", [[], ["some", "--stale"]])
def test_rm_wants_a_name_or_stale(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(["rm", *arguments])


@pytest.mark.parametrize("command", ["rm", "reap"])
def test_a_name_that_does_not_exist_is_no_success(
    cache: RadixCache, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, cache.name[:-1], "--yes"]) == 2
    assert f"did you mean {cache.name!r}?" in capsys.readouterr().err


def test_reap_frees_what_the_dead_hold(
    cache: RadixCache, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Actor() as actor:
        actor.do(attach, cache.name)
        actor.do(store, list(range(8)), [1, 2])
        actor.do(hold, list(range(8)))
        actor.kill()
    assert cache.stats().leases == 1
    answer(monkeypatch, "no\n")
    assert main(["reap", cache.name]) == 2
    assert cache.stats().leases == 1
    assert main(["reap", cache.name, "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"workers": 1, "leases": 1, "private_blocks": 0}
    assert cache.stats().leases == 0
    assert cache.peek_matched_tokens(range(8)) == 8
    assert main(["reap", cache.name]) == 0  # nothing to do: nothing to ask
    assert "0 dead workers" in capsys.readouterr().out


@pytest.fixture
def managed(cache_factory: CacheFactory) -> RadixCache:
    """Three prompts of two blocks: the second is the longest unused, the third is leased."""
    cache = cache_factory(max_blocks=None, num_blocks=8, block_size=4)
    for number in (1, 2, 3):
        cache.insert([number] * 8, cache.allocate(2))
        cache.release([number] * 8)
    cache.lookup([1] * 8).release()
    cache.lookup([3] * 8)
    return cache


def test_evict_takes_the_longest_unused(managed: RadixCache, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evict", managed.name, "2", "--yes"]) == 0
    assert "2 blocks are free" in capsys.readouterr().out
    assert [managed.peek_matched_tokens([number] * 8) for number in (1, 2, 3)] == [8, 0, 8]


def test_clear_forgets_everything(
    managed: RadixCache, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, "n\n")
    assert main(["clear", managed.name]) == 2
    assert managed.peek_matched_tokens([1] * 8) == 8
    answer(monkeypatch, "y\n")
    assert main(["clear", managed.name]) == 0
    assert "4 blocks are free" in capsys.readouterr().out  # the leased ones follow
    assert [managed.peek_matched_tokens([number] * 8) for number in (1, 2, 3)] == [0, 0, 0]


@pytest.mark.parametrize("command", [["evict", "5"], ["clear"]])
def test_blocks_that_the_engine_manages_are_evicted_only_by_name(
    cache: RadixCache, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    cache.insert(range(8), [41, 42])
    cache.release(range(8))
    command = [command[0], cache.name, *command[1:], "--yes"]
    assert main(command) == 2
    assert "take --json" in capsys.readouterr().err
    assert cache.peek_matched_tokens(range(8)) == 8
    assert main([*command, "--json"]) == 0
    assert sorted(json.loads(capsys.readouterr().out)["blocks"]) == [41, 42]
    assert cache.peek_matched_tokens(range(8)) == 0


@pytest.mark.parametrize("count", ["0", "-1", "x", "1.5"])
def test_a_count_that_is_none_is_a_bad_argument(managed: RadixCache, count: str) -> None:
    with pytest.raises(SystemExit):
        main(["evict", managed.name, count])
