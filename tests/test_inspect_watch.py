"""`stat --watch`: what changed since the last look."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from shmradix import RadixCache, inspect
from shmradix.cli import main
from shmradix.inspect.watch import intervals

CacheFactory = Callable[..., RadixCache]


@pytest.fixture
def cache(cache_factory: CacheFactory) -> RadixCache:
    return cache_factory(max_blocks=16, block_size=4)


def test_an_interval_counts_what_happened_in_it_alone(cache: RadixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def use(seconds: float) -> None:
        cache.insert(range(8), [1, 2])
        for tokens in (range(8), range(100, 108)):
            cache.lookup(tokens).release()
        cache.release(range(8))

    use(0)
    monkeypatch.setattr("time.sleep", use)
    rows = intervals(lambda: inspect.open(cache.name), 1.0)
    for _ in range(2):
        row = next(rows)
        assert row["lookups_per_s"] * row["seconds"] == pytest.approx(2)
        assert row["inserts_per_s"] * row["seconds"] == pytest.approx(1)
        assert (row["hit_ratio"], row["blocks_live"], row["leases"], row["workers_alive"]) == (0.5, 2, 0, 1)


def test_a_busy_moment_is_part_of_the_next_interval(cache: RadixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = 0

    def read() -> inspect.Reading:
        nonlocal reads
        reads += 1
        if reads in (2, 3):
            raise inspect.WorkersBusy("no moment")
        return inspect.open(cache.name)

    monkeypatch.setattr("time.sleep", lambda _: cache.lookup([1]).release())
    row = next(intervals(read, 1.0))
    assert (row["lookups_per_s"] * row["seconds"], row["hit_ratio"]) == (pytest.approx(3), 0)


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_it_goes_on_until_the_cache_is_gone(
    cache: RadixCache, options: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter(range(3))

    def sleep(_: float) -> None:
        if next(looks) == 2:
            cache.unlink()

    monkeypatch.setattr("shmradix.inspect.watch.time.sleep", sleep)
    assert main(["stat", cache.name, "--watch", "0.5", *options]) == 2
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert "no cache" in err
    if options:
        assert [json.loads(line)["hit_ratio"] for line in lines] == [None, None]
    else:
        assert lines[0].split()[0] == "blocks"
        assert [line.split()[0] for line in lines[1:]] == ["0", "0"]


@pytest.mark.parametrize("seconds", ["0", "-1", "x", "nan", "inf"])
def test_intervals_that_are_none_are_bad_arguments(cache: RadixCache, seconds: str) -> None:
    with pytest.raises(SystemExit):
        main(["stat", cache.name, "--watch", seconds])
