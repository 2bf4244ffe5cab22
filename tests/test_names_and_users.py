"""What else can be at a segment's names, whose it may be, and what an unlucky create or unlink leaves: nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import posix_ipc
import psutil
import pytest

from shmradix import RadixCache, errors, locks, segment, workers
from tests.actors import BLOCKS, FILES, PROMPT, SHM, files_of, run_script
from tests.children import Interruption, in_child, kill_self, raise_interruption, resources

CacheFactory = Callable[..., RadixCache]
NOBODY, GROUP = 65534, 54_321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users")


@pytest.fixture(autouse=True, scope="module")
def _warm() -> None:
    """Have the kernels before anything forks."""
    workers.compile.load()


@pytest.fixture
def temporary(name: str) -> Iterator[Path]:
    """Where the segment `name` is made; whatever a test puts there is removed."""
    path = SHM / f".shmradix.{name}.new"
    yield path
    with contextlib.suppress(FileNotFoundError):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


USES: dict[str, Callable[[str], RadixCache]] = {
    "create": lambda name: RadixCache.create(name, max_blocks=4),
    "open": lambda name: RadixCache.open(name, max_blocks=4),
}
OBSTACLES: dict[str, Callable[[Path], object]] = {
    "symlink": lambda path: path.symlink_to("/nowhere"),
    "symlink to a file": lambda path: path.symlink_to(__file__),
    "directory": lambda path: path.mkdir(),
    "fifo": lambda path: os.mkfifo(path),
    "socket": lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
}


# --- the temporary name


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", OBSTACLES)
def test_what_is_in_the_way_at_the_temporary_name_is_named(name: str, temporary: Path, kind: str, use: str) -> None:
    OBSTACLES[kind](temporary)
    said = in_child(lambda: USES[use](name))
    assert said.startswith("SegmentForeign: "), said
    assert str(temporary) in said
    assert files_of(name) == [temporary.name]


@as_root
@pytest.mark.parametrize("mode", [0o600, 0o666])
@pytest.mark.parametrize("use", USES)
def test_another_users_file_at_the_temporary_name_is_named(name: str, temporary: Path, use: str, mode: int) -> None:
    temporary.touch()
    temporary.chmod(mode)
    said = in_child(lambda: (become(NOBODY, NOBODY), USES[use](name)))
    assert said.startswith("AccessDenied: "), said
    assert str(temporary) in said
    assert files_of(name) == [temporary.name]


def test_what_a_dead_creator_left_at_the_temporary_name_is_swept(name: str, temporary: Path) -> None:
    temporary.write_bytes(b"half a segment")
    with RadixCache.create(name, max_blocks=4) as cache:
        assert len(files_of(name)) == FILES
        cache.unlink()


# --- hard links


@pytest.mark.parametrize("use", [RadixCache.attach, USES["open"]], ids=["attach", "open"])
def test_a_segment_with_another_name_is_refused(name: str, use: Callable[[str], RadixCache]) -> None:
    RadixCache.create(name, max_blocks=4).close()
    other = SHM / f"other-{name}"
    os.link(SHM / f"shmradix.{name}", other)
    try:
        with pytest.raises(errors.SegmentForeign, match="hard links"):
            use(name)
    finally:
        other.unlink()
    use(name).close()


@pytest.mark.parametrize("creator_lives", [True, False])
def test_a_creators_temporary_link_does_not_hinder_an_open(name: str, temporary: Path, creator_lives: bool) -> None:
    RadixCache.create(name, max_blocks=4).close()
    os.link(SHM / f"shmradix.{name}", temporary)
    creator = locks.open_for_locks(temporary, os.O_RDWR)
    try:
        if creator_lives:
            assert locks.try_lock(creator, locks.CREATOR_BYTE)
        with RadixCache.attach(name), USES["open"](name) as cache:
            assert not cache.created
        assert temporary.exists() == creator_lives
    finally:
        creator.close()


# --- a create that fails


def no_room(*_: object, **__: object) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def on_second_call(real: Callable[..., Any], fail: Callable[..., Any]) -> Callable[..., Any]:
    calls = []

    def function(*args: Any, **named: Any) -> Any:
        calls.append(args)
        return fail() if len(calls) == 2 else real(*args, **named)

    return function


STEPS = {
    "fchmod": (os, "fchmod"),
    "fallocate": (os, "posix_fallocate"),
    "pwrite": (os, "pwrite"),
    "mmap": (segment.mmap, "mmap"),
    "semaphore": (segment.semaphores, "make"),
    "link": (os, "link"),
    "posix semaphore": (posix_ipc, "Semaphore"),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("step", STEPS)
def test_a_create_without_room_leaks_nothing_and_says_so(
    name: str, step: str, use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = resources(name)
    monkeypatch.setattr(*STEPS[step], no_room)
    with pytest.raises(OSError) as raised:
        USES[use](name)
    assert raised.value.errno == errno.ENOSPC
    if step != "fchmod":  # which needs no room
        assert isinstance(raised.value, errors.SharedMemoryFull)
    assert (resources(name), files_of(name)) == (before, [])


@pytest.mark.parametrize("step", STEPS)
def test_a_create_that_is_interrupted_leaks_nothing(name: str, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = resources(name)
    monkeypatch.setattr(*STEPS[step], lambda *_, **__: raise_interruption())
    with pytest.raises(Interruption):
        USES["create"](name)
    assert (resources(name), files_of(name)) == (before, [])


def test_a_create_that_fails_at_its_second_semaphore_leaks_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = resources(name)
    monkeypatch.setattr(segment.semaphores, "make", on_second_call(segment.semaphores.make, no_room))
    with pytest.raises(errors.SharedMemoryFull):
        USES["create"](name)
    assert (resources(name), files_of(name)) == (before, [])


@pytest.mark.parametrize("step", ["Parking", "_start_time", "make_handle"])
def test_a_create_whose_worker_fails_leaks_nothing(name: str, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = resources(name)
    monkeypatch.setattr(workers, step, lambda *_, **__: raise_interruption())
    with pytest.raises(Interruption):
        USES["create"](name)
    assert (resources(name), files_of(name)) == (before, [])


@pytest.mark.parametrize("use", [RadixCache.create, RadixCache.open])
@pytest.mark.parametrize(
    "bad", [-1, 0, float("nan"), float("inf"), 10**400, "x", True, [1]], ids=lambda bad: f"{bad}"[:4]
)
def test_a_bad_time_out_is_refused_before_anything_is_made(name: str, use: Callable[..., RadixCache], bad: Any) -> None:
    before = resources(name)
    with pytest.raises((TypeError, ValueError), match="lock_timeout="):
        use(name, max_blocks=4, lock_timeout=bad)
    assert (resources(name), files_of(name)) == (before, [])


@pytest.mark.parametrize("use", [RadixCache.create, RadixCache.open])
@pytest.mark.parametrize("bad", [0, 0o400, 0o200, 0o066, 0o177, 0o1600, -1, "rw", True], ids=str)
def test_a_mode_that_shuts_out_the_owner_is_refused(name: str, use: Callable[..., RadixCache], bad: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="mode="):
        use(name, max_blocks=4, mode=bad)
    assert files_of(name) == []


# --- users


def become(uid: int, gid: int, groups: tuple[int, ...] = ()) -> None:
    os.setgroups(groups)
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


@as_root
@pytest.mark.parametrize(
    ("mode", "gid", "groups", "is_let_in"),
    [
        (0o660, NOBODY, (GROUP,), True),
        (0o660, GROUP, (), True),
        (0o666, NOBODY, (GROUP,), True),
        (0o660, NOBODY, (), False),
        (0o666, NOBODY, (), False),
        (0o640, NOBODY, (GROUP,), False),
        (0o606, NOBODY, (GROUP,), False),
        (0o606, NOBODY, (), False),
        (0o600, NOBODY, (GROUP,), False),
    ],
)
def test_another_users_segment_is_refused_but_with_a_group_mode_and_a_common_group(
    name: str, mode: int, gid: int, groups: tuple[int, ...], is_let_in: bool
) -> None:
    os.setegid(GROUP)
    try:
        cache = RadixCache.create(name, max_blocks=4, mode=mode)
    finally:
        os.setegid(0)
    before = {file: (SHM / file).stat() for file in files_of(name)}

    def use() -> int:
        become(NOBODY, gid, groups)
        with RadixCache.attach(name) as other:
            other.insert(range(16), [1])
            return other.peek_matched_tokens(range(16))

    said = in_child(use)
    with cache:
        assert said == "16" if is_let_in else said.startswith("AccessDenied"), said
        assert cache.peek_matched_tokens(range(16)) == (16 if is_let_in else 0)
        assert cache.stats().workers == 1
    assert [(file.st_mode, file.st_uid, file.st_gid) for file in before.values()] == [
        (stat.S_IFREG | mode, 0, GROUP)
    ] * FILES


@as_root
def test_root_is_not_lured_into_another_users_segment(name: str) -> None:
    RadixCache.create(name, max_blocks=4, mode=0o666).close()
    for file in files_of(name):
        os.chown(SHM / file, NOBODY, NOBODY)
    for use in (RadixCache.attach, USES["open"]):
        with pytest.raises(errors.AccessDenied, match="belongs to user"):
            use(name)


@pytest.mark.parametrize("variable", ["SHMRADIX_CACHE_DIR", "XDG_CACHE_HOME"])
@pytest.mark.parametrize("umask", [0o002, 0o000, 0o077], ids=oct)
def test_no_umask_stops_the_compile_cache(tmp_path: Path, umask: int, variable: str) -> None:
    script = (
        "import os, sys\n"
        "os.environ.pop('SHMRADIX_CACHE_DIR', None)\n"
        "os.environ[sys.argv[1]] = sys.argv[2]\n"
        "os.umask(int(sys.argv[3]))\n"
        "from shmradix import compile\n"
        "print(compile._cache)\n"
    )
    ended = run_script(script, variable, str(tmp_path / "compiled"), str(umask))
    directory = Path(ended.stdout.strip())
    assert directory.is_relative_to(tmp_path), ended.stdout
    assert [stat.S_IMODE(path.stat().st_mode) for path in (directory, directory.parent)] == [0o700, 0o700]


# --- who is named


@pytest.mark.parametrize(
    ("field", "change"),
    [("start_time", 1), ("pid_namespace", 1), ("pid", 2**32 - 1), ("pid", 2**31), ("pid", 0), ("pid", 1)],
)
def test_no_message_names_a_process_that_is_not_the_worker(
    cache_factory: CacheFactory, field: str, change: int
) -> None:
    cache = cache_factory(max_workers=2)
    with RadixCache.attach(cache.name, lock_timeout=0.05) as waiter:
        views: Any = cache._segment.views
        record = views.workers[cache._worker.slot : cache._worker.slot + 1]
        record[field] = change if field == "pid" else record[field] + change
        views.guards["owner"][0] = cache._worker.tag
        with pytest.raises(errors.LockTimeout) as timeout:
            waiter.peek_matched_tokens(PROMPT)
        views.guards["owner"][0] = 0
        with pytest.raises(errors.WorkersFull) as full:
            RadixCache.attach(cache.name)
        record["pid"] = os.getpid()  # what closing looks at no more
    names = {psutil.Process(pid).name() for pid in (1, os.getpid())}
    for message in (str(timeout.value), str(full.value)):
        first = message.split("pid ", 1)[1].split(")")[0]
        assert "another pid namespace" in first or "exiting or gone" in first, message
        assert not any(name in first for name in names), message


# --- unlink


@pytest.mark.parametrize("after", [False, True])
def test_a_death_in_unlink_leaves_nothing_that_the_next_does_not_remove(name: str, after: bool) -> None:
    cache = RadixCache.create(name, max_blocks=4)
    unlink = os.unlink

    def deadly(path: Any, **named: Any) -> None:
        if after:
            unlink(path, **named)
        kill_self()

    def unlink_and_die() -> None:
        vars(os)["unlink"] = deadly
        RadixCache.unlink(name)

    assert in_child(unlink_and_die) == "killed by 9"
    with cache:
        assert cache.insert(PROMPT, BLOCKS).inserted_tokens == 64
    with contextlib.suppress(errors.SegmentNotFound):
        assert RadixCache.unlink(name) is not after
    assert files_of(name) == []


def test_an_attach_in_the_middle_of_an_unlink_leaves_no_semaphore(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    RadixCache.create(name, max_blocks=4).close()
    unlink = os.unlink

    def attach_first(path: Any) -> None:
        if str(path).endswith(f"/shmradix.{name}"):
            RadixCache.attach(name).close()
        unlink(path)

    monkeypatch.setattr(os, "unlink", attach_first)
    assert RadixCache.unlink(name)
    assert files_of(name) == []


def test_semaphores_of_a_segment_whose_file_was_removed_go_with_the_next_of_its_name(name: str) -> None:
    for _ in range(3):
        RadixCache.create(name, max_blocks=4).close()
        assert len(files_of(name)) == FILES
        (SHM / f"shmradix.{name}").unlink()
    RadixCache.create(name, max_blocks=4).close()
    assert RadixCache.unlink(name)
    assert files_of(name) == []


@pytest.mark.parametrize("kind", OBSTACLES)
def test_unlink_refuses_what_is_no_file(name: str, kind: str) -> None:
    path = SHM / f"shmradix.{name}"
    OBSTACLES[kind](path)
    try:
        said = in_child(lambda: RadixCache.unlink(name))
        assert said.startswith("SegmentForeign: "), said
        assert files_of(name) == [path.name]
    finally:
        path.rmdir() if kind == "directory" else path.unlink()
