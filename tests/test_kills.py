"""Workers that are killed: while they use a cache in every way, one after another, many at once, as pid 1.

The killing itself is done by tools/kills.py; the locks that it must find out to be broken show that it would find out.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from shmradix import RadixCache
from tests.actors import files_of

TOOL = Path(__file__).parents[1] / "tools" / "kills.py"
PROMPT = list(range(64))


def run_tool(*arguments: str) -> tuple[int, str, dict[str, str]]:
    """Exit status, all output, and the figures by their names."""
    environment = {**os.environ, "PYTHONPATH": str(TOOL.parents[1])}
    command = [sys.executable, str(TOOL), *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    lines = [line for line in ended.stdout.splitlines() if len(line) > 18]
    print(ended.stdout)
    return ended.returncode, ended.stdout + ended.stderr, {line[:18].strip(): line[18:] for line in lines}


def number_of(figure: str) -> int:
    return int(figure.split()[0].replace(",", "").rstrip(";"))


@pytest.mark.parametrize("lock", ["semaphore", "owner"])
def test_the_killer_finds_out_a_broken_lock_within_a_thousand_kills(lock: str) -> None:
    status, output, figures = run_tool("--job", lock, "--kills", "1000")
    assert status == 1, output
    assert "WRONG: hang" in output or "in the section at once" in output or "the counter says" in output, output
    assert "ended by itself" not in output, output
    assert number_of(figures["until"]) <= 1000


def test_the_guard_in_the_place_of_a_broken_lock_survives_a_thousand_kills() -> None:
    status, output, figures = run_tool("--job", "guard", "--kills", "1000")
    assert status == 0, output
    assert number_of(figures["kills"]) >= 1000
    assert number_of(figures["takeovers"]) > 10


def test_two_thousand_kills_lose_nothing_that_was_acknowledged_and_stop_nobody() -> None:
    status, output, figures = run_tool("--kills", "2000", "--workers", "8")
    assert status == 0, output
    assert number_of(figures["kills"]) >= 2000
    assert number_of(figures["takeovers"]) > 10
    assert number_of(figures["rebuilds"]) > 10


def test_kills_of_workers_that_compute_kv_lose_no_block_leave_no_half_written_one_and_stop_no_waiter() -> None:
    status, output, figures = run_tool("--job", "kv", "--kills", "500", "--workers", "4", "--seed", "1")
    assert status == 0, output
    assert number_of(figures["kills"]) >= 500
    assert number_of(figures["takeovers"]) > 0


def test_workers_that_are_each_pid_1_of_a_pid_namespace_are_told_apart() -> None:
    permitted = subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True, text=True)
    if permitted.returncode:
        pytest.skip(f"no pid namespaces here: {permitted.stderr.strip()}")
    status, output, figures = run_tool("--kills", "300", "--namespaces")
    assert status == 0, output
    assert number_of(figures["takeovers"]) > 0


# --- slots


@contextmanager
def forked(count: int, work: Callable[[], str]) -> Iterator[tuple[list[int], Callable[[], list[str]]]]:
    """Children that do `work` and wait to be killed: their pids, and a call that begins and returns what they say."""
    begin, begin_end = os.pipe()
    answer, answer_end = os.pipe()
    pids = []
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            signal.alarm(120)
            os.close(begin_end)
            os.read(begin, 1)  # the end of the pipe
            try:
                said = work()
            except BaseException as error:
                said = repr(error)
            os.write(answer_end, said[:1000].encode() + b"\n")
            while True:
                signal.pause()
        pids.append(pid)

    def answers() -> list[str]:
        os.close(begin_end)
        said = b""
        while said.count(b"\n") < count:
            assert select.select([answer], [], [], 120)[0], f"only these of {count} answered: {said!r}"
            said += os.read(answer, 65536)
        return said.decode().splitlines()

    try:
        yield pids, answers
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
        for fd in (begin, answer, answer_end):
            os.close(fd)


def hold_a_lease(name: str) -> str:
    """Attach, lease the prompt for as long as the process lives, and say which slot that is."""
    cache = RadixCache.attach(name)
    match = cache.lookup(PROMPT)
    HELD.append(match)
    return f"{cache._worker.slot} {match.matched_tokens}"


HELD: list[object] = []


def with_prompt(cache: RadixCache) -> RadixCache:
    cache.insert(PROMPT, [1, 2, 3, 4])
    cache.release(PROMPT)
    return cache


def test_ten_times_as_many_dead_workers_as_there_are_slots_leave_room_for_the_next(
    cache_factory: Callable[..., RadixCache],
) -> None:
    cache = with_prompt(cache_factory(max_workers=8, max_leases=9))
    before = len(os.listdir("/proc/self/fd")), files_of(cache.name)
    for _ in range(80):
        with forked(1, lambda: hold_a_lease(cache.name)) as (_, answers):
            assert answers()[0].split()[1] == "64"
    assert (len(os.listdir("/proc/self/fd")), files_of(cache.name)) == before
    assert cache.reap() == 1  # each attach reaped the one before
    stats = cache.stats()
    assert (stats.workers, stats.leases) == (1, 0)
    assert cache.verify() == []


def test_32_attach_at_once_beside_32_dead_ones(cache_factory: Callable[..., RadixCache]) -> None:
    cache = with_prompt(cache_factory(max_workers=33, max_leases=64))
    with forked(32, lambda: hold_a_lease(cache.name)) as (_, answers):
        assert len({answer.split()[0] for answer in answers()}) == 32
        assert cache.stats().leases == 32
    with forked(32, lambda: hold_a_lease(cache.name)) as (_, answers):
        said = answers()
        assert {answer.split()[0] for answer in said} == {str(slot) for slot in range(1, 33)}, said
        assert {answer.split()[1] for answer in said} == {"64"}, said
        stats = cache.stats()
        assert (stats.workers, stats.leases) == (33, 32)
    assert cache.reap() == 32
    assert cache.stats().leases == 0
    assert cache.evict(10).blocks.tolist() == [4, 3, 2, 1]
    assert cache.verify() == []


def test_a_killer_that_is_killed_itself_leaves_nothing_behind() -> None:
    environment = {**os.environ, "PYTHONPATH": str(TOOL.parents[1])}
    killer = subprocess.Popen([sys.executable, str(TOOL), "--kills", "100000"], env=environment)
    name, deadline = f"kills-{killer.pid}-", time.monotonic() + 120
    try:
        while len(family := psutil.Process(killer.pid).children(recursive=True)) < 9:
            assert time.monotonic() < deadline, "no workers"
            time.sleep(0.05)
        time.sleep(1)
        assert files_of(name)
    finally:
        killer.kill()
        killer.wait()
    deadline = time.monotonic() + 60
    while files_of(name) or list(Path(tempfile.gettempdir()).glob(f"{name}*")) or any(p.is_running() for p in family):
        assert time.monotonic() < deadline, (files_of(name), family)
        time.sleep(0.1)
