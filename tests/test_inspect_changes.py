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
