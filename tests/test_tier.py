"""States as files: what a directory of them holds, whoever is killed, stopped or in the way there."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash

from shmradix import errors
from shmradix.tier import FileTier
from tests.actors import Actor
from tests.children import in_child, kill_self

HEADER = 32


def size_of(*states: int) -> int:
    """What states of these sizes take up."""
    return sum(HEADER + state for state in states)


def state_of(key: int, size: int = 100) -> bytes:
    return np.random.default_rng(key).bytes(size)


def file_of(tier: FileTier, key: int) -> Path:
    return tier.path / f"{key:016x}"


def age(tier: FileTier, key: int, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(file_of(tier, key), (then, then))


def files_in(tier: FileTier) -> list[str]:
    return sorted(path.name for path in tier.path.iterdir() if path.name != ".lock")


@pytest.fixture
def tier(tmp_path: Path) -> FileTier:
    """Room for three states of 100 bytes."""
    return FileTier(tmp_path / "tier", size_of(100, 100, 100))


# --- what is put and got


@pytest.mark.parametrize(
    "state", [b"", b"x", bytearray(b"abc"), memoryview(b"abcd"), np.arange(24, dtype=np.float32).reshape(4, 6)]
)
def test_what_was_put_is_got_also_by_another(tier: FileTier, state: Any) -> None:
    assert tier.put(7, state)
    assert tier.get(7) == bytes(memoryview(state).cast("B"))
    assert FileTier(tier.path, 1000).get(7) == tier.get(7)
    assert tier.used_bytes() == size_of(len(memoryview(state).cast("B")))
    assert tier.remove(7)
    assert tier.get(7) is None
    assert not tier.remove(7)
    assert files_in(tier) == []


def test_a_state_that_is_put_again_takes_the_place_of_the_first(tier: FileTier) -> None:
    assert tier.put(1, b"first")
    assert tier.put(1, b"second")
    assert tier.get(1) == b"second"
    assert tier.used_bytes() == size_of(6)


@pytest.mark.parametrize("key", [0, 1, (1 << 64) - 1])
def test_keys_are_all_of_64_bits(tier: FileTier, key: int) -> None:
    assert tier.put(key, b"x")
    assert tier.get(key) == b"x"
    for bad in (-1, 1 << 64):
        with pytest.raises(ValueError, match="key="):
            tier.put(bad, b"x")


def test_directory_and_files_are_the_users_own(tier: FileTier) -> None:
    tier.put(1, b"x")
    paths = [tier.path, file_of(tier, 1), tier.path / ".lock"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o700, 0o600, 0o600]


# --- room


def test_whatever_was_not_used_for_longest_makes_room(tier: FileTier) -> None:
    for key in (1, 2, 3):
        assert tier.put(key, state_of(key))
        age(tier, key, 100 - key)
    assert tier.get(1) == state_of(1)
    assert tier.put(4, state_of(4))
    assert [tier.get(key) is None for key in (1, 2, 3, 4)] == [False, True, False, False]
    assert tier.used_bytes() == size_of(100, 100, 100)
    age(tier, 3, 50)
    age(tier, 1, 40)
    assert tier.put(5, state_of(5, size_of(100) + 100))  # the room of two
    assert [tier.get(key) is None for key in (1, 3, 4, 5)] == [True, True, False, False]


def test_a_state_that_can_never_fit_is_refused_and_pushes_nothing_out(tier: FileTier) -> None:
    assert tier.put(1, state_of(1))
    assert not tier.put(2, bytes(size_of(100, 100, 100) - HEADER + 1))
    assert tier.get(1) == state_of(1)
    assert tier.put(2, bytes(size_of(100, 100, 100) - HEADER))
    assert files_in(tier) == [f"{2:016x}"]


def test_a_smaller_bound_is_kept_from_the_opening_on(tier: FileTier) -> None:
    for key in (1, 2, 3):
        tier.put(key, state_of(key))
        age(tier, key, 100 - key)
    assert FileTier(tier.path, size_of(100)).used_bytes() == size_of(100)
    assert files_in(tier) == [f"{3:016x}"]


def test_what_others_are_writing_counts_and_nothing_goes_in_vain(
    tier: FileTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tier.put(1, state_of(1))
    digest, writing, go_on = xxhash.xxh3_128_digest, threading.Event(), threading.Event()

    def wait_and_digest(state: memoryview) -> bytes:
        if state == state_of(2):
            writing.set()
            go_on.wait(60)
        return digest(state)

    monkeypatch.setattr(xxhash, "xxh3_128_digest", wait_and_digest)
    writer = threading.Thread(target=tier.put, args=(2, state_of(2)))
    writer.start()
    assert writing.wait(60)
    assert tier.get(2) is None
    assert not tier.put(3, bytes(300 - HEADER))  # fits without the one that is being written
    assert tier.get(1) == state_of(1)
    FileTier(tier.path, tier.max_bytes)
    assert tier.put(4, bytes(100 + size_of(0)))  # in the place of the first
    go_on.set()
    writer.join(60)
    assert tier.get(1) is None
    assert tier.get(2) == state_of(2)


def put_for_a_while(state: SimpleNamespace, path: str, max_bytes: int, first: int, seconds: float) -> int:
    """Put and get states, all of different keys, again and again; how many were refused."""
    tier, refused, key, deadline = FileTier(path, max_bytes), 0, first, time.monotonic() + seconds
    while time.monotonic() < deadline:
        size = key * 7919 % 50_000
        refused += not tier.put(key, state_of(key, size))
        assert tier.get(key) in (None, state_of(key, size))
        key += 1
    return refused


def bytes_in(tier: FileTier) -> int:
    """Bytes of all files, whatever their names, at an instant at which nobody makes room."""
    with tier._one_at_a_time():
        sizes = {}
        for path in tier.path.iterdir():
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


def test_processes_that_put_at_once_stay_within_the_bound_together(tmp_path: Path) -> None:
    tier = FileTier(tmp_path, 120_000)
    actors, most = [Actor() for _ in range(2)], 0
    try:
        for number, actor in enumerate(actors):
            actor.begin(put_for_a_while, str(tmp_path), tier.max_bytes, 1 + number * 1_000_000, 2.0)
        while not all(actor._connection.poll(0.002) for actor in actors):
            most = max(most, bytes_in(tier))
        assert all(actor.answer() >= 0 for actor in actors)
    finally:
        for actor in actors:
            actor.kill()
    assert 60_000 < most <= tier.max_bytes
    assert not [name for name in files_in(tier) if name.startswith(".")]


# --- what is damaged, half-written, in the way

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "no state": lambda whole: whole[:HEADER],
    "half a header": lambda whole: whole[:10],
    "cut short": lambda whole: whole[:-1],
    "longer": lambda whole: whole + b"x",
    "another magic": lambda whole: b"X" + whole[1:],
    "another size": lambda whole: whole[:8] + b"\x63" + whole[9:],
    "another checksum": lambda whole: whole[:16] + bytes([whole[16] ^ 1]) + whole[17:],
    "another state": lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]),
    "zeros, as after a crash of the host": lambda whole: bytes(len(whole)),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_no_state_and_goes(tier: FileTier, damage: Callable[[bytes], bytes]) -> None:
    tier.put(1, state_of(1))
    file_of(tier, 1).write_bytes(damage(file_of(tier, 1).read_bytes()))
    assert tier.get(1) is None
    assert files_in(tier) == []


@pytest.mark.parametrize("step", ["posix_fallocate", "rename"])
@pytest.mark.parametrize("after", [False, True])
def test_what_a_killed_writer_left_is_swept(tier: FileTier, step: str, after: bool) -> None:
    original = getattr(os, step)

    def deadly(*arguments: Any) -> None:
        if after:
            original(*arguments)
        kill_self()

    def put_and_die() -> None:
        vars(os)[step] = deadly
        tier.put(1, state_of(1, 250))

    assert in_child(put_and_die) == "killed by 9"
    is_whole = step == "rename" and after
    assert files_in(tier)[0].startswith(".") != is_whole
    assert tier.get(1) == (state_of(1, 250) if is_whole else None)
    assert tier.put(2, state_of(2, 250))  # needs its room
    assert files_in(tier) == [f"{2:016x}"]


def test_the_next_to_open_the_directory_sweeps_what_a_killed_writer_left(tier: FileTier) -> None:
    def put_and_die() -> None:
        vars(os)["rename"] = kill_self
        tier.put(1, state_of(1))

    assert in_child(put_and_die) == "killed by 9"
    assert files_in(tier)
    assert FileTier(tier.path, tier.max_bytes).used_bytes() == 0


def test_a_new_file_is_nobodys_to_sweep_before_its_writer_has_locked_it(
    tier: FileTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its creation and its lock another may look for abandoned files only if it does not wait for the turn."""
    flock, turns = fcntl.flock, []

    def watch(file: Any, how: int) -> None:
        if Path(file.name).name.startswith(f".{1:016x}"):
            turns.append(in_child(lambda: FileTier(tier.path, tier.max_bytes), seconds=1))
        flock(file, how)

    monkeypatch.setattr("shmradix.tier.fcntl.flock", watch)
    assert tier.put(1, state_of(1))
    assert turns == ["hung for 1 s"]
    assert tier.get(1) == state_of(1)


def test_a_fork_in_the_middle_keeps_nobody_waiting(tier: FileTier) -> None:
    gate, gate_end = os.pipe()
    with tier._one_at_a_time():
        pid = os.fork()
        if pid == 0:
            os.close(gate_end)
            os.read(gate, 1)
            os._exit(0)
    try:
        assert in_child(lambda: tier.put(1, b"x"), seconds=5) == "True"
    finally:
        os.close(gate_end)
        os.close(gate)
        os.waitpid(pid, 0)


def test_no_link_is_followed(tier: FileTier, tmp_path: Path) -> None:
    tier.put(1, state_of(1))
    elsewhere = tmp_path / "elsewhere"
    file_of(tier, 1).rename(elsewhere)
    before = elsewhere.read_bytes()
    for use in (lambda: tier.get(1) is None, lambda: tier.put(1, b"new"), lambda: tier.remove(1)):
        file_of(tier, 1).unlink(missing_ok=True)
        file_of(tier, 1).symlink_to(elsewhere)
        assert use()
        assert not file_of(tier, 1).is_symlink()
        assert elsewhere.read_bytes() == before
    assert tier.used_bytes() == 0
    (tier.path / ".lock").unlink()
    (tier.path / ".lock").symlink_to(tmp_path / "lock")
    with pytest.raises(errors.TierError):
        tier.put(1, b"new")
    assert not (tmp_path / "lock").exists()


def test_a_directory_in_the_place_of_a_file_is_an_error_and_stays(tier: FileTier) -> None:
    file_of(tier, 1).mkdir()
    for use in (lambda: tier.put(1, b"x"), lambda: tier.get(1), lambda: tier.remove(1)):
        with pytest.raises(errors.TierError, match=f"{1:016x}"):
            use()
    assert files_in(tier) == [f"{1:016x}"]


def test_a_removed_directory_takes_no_state_and_has_none(tier: FileTier) -> None:
    tier.put(1, b"x")
    file_of(tier, 1).unlink()
    (tier.path / ".lock").unlink()
    tier.path.rmdir()
    with pytest.raises(errors.TierError):
        tier.put(1, b"x")
    assert tier.get(1) is None
    assert not tier.remove(1)
    assert not tier.path.exists()


def test_a_directory_that_may_not_be_used_is_an_error(tier: FileTier) -> None:
    tier.put(1, b"x")

    def use() -> str:
        if os.geteuid() == 0:
            os.setuid(65534)
        else:
            tier.path.chmod(0)
        said = []
        for call in (lambda: tier.put(2, b"x"), lambda: tier.get(1), lambda: tier.remove(1)):
            try:
                said.append(str(call()))
            except errors.TierError as error:
                said.append(f"TierError {error.__cause__.errno if isinstance(error.__cause__, OSError) else ''}")
        return " ".join(said)

    assert in_child(use) == " ".join([f"TierError {errno.EACCES}"] * 3)
    tier.path.chmod(0o700)
    assert tier.get(1) == b"x"


@pytest.mark.parametrize("step", ["posix_fallocate", "rename"])
def test_a_put_that_fails_leaves_nothing(tier: FileTier, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise raised

    for raised in (OSError(errno.ENOSPC, "no room"), KeyboardInterrupt()):
        expected = errors.TierError if isinstance(raised, OSError) else KeyboardInterrupt
        with monkeypatch.context() as patch:
            patch.setattr(os, step, fail)
            with pytest.raises(expected):
                tier.put(1, state_of(1))
        assert files_in(tier) == []
    assert tier.put(1, state_of(1))
