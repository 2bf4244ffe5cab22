"""The segment as a file: names, permissions, space, foreign files, other versions, removal."""

from __future__ import annotations

import errno
import gc
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import shmradix
from shmradix import RadixCache, errors, layout
from tests.actors import BLOCKS, FILES, PROMPT, SHM, files_of, run_script

CacheFactory = Callable[..., RadixCache]


def path_of(name: str) -> Path:
    return SHM / f"shmradix.{name}"


@pytest.fixture
def path(name: str) -> Iterator[Path]:
    """Where the segment `name` lies; whatever a test puts there is removed."""
    path = path_of(name)
    yield path
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def closed_segment(name: str) -> Path:
    """A good segment that nobody has open."""
    RadixCache.create(name, max_blocks=64).close()
    return path_of(name)


# --- names


@pytest.mark.parametrize("bad", ["", ".", "..", "a/b", "a b", "a.b", "a\0", "ä", "x" * 201])
def test_a_name_that_cannot_be_one_is_refused(bad: str) -> None:
    uses: list[Callable[[], object]] = [lambda: RadixCache.create(bad, max_blocks=1), lambda: RadixCache.attach(bad)]
    for use in uses:
        with pytest.raises(ValueError, match="name="):
            use()


def test_creating_a_name_twice_is_refused_and_the_first_stays(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=64)
    cache.insert(PROMPT, BLOCKS)
    with pytest.raises(errors.SegmentExists, match=cache.name):
        RadixCache.create(cache.name, max_blocks=64)
    assert len(files_of(cache.name)) == FILES
    assert cache.peek_matched_tokens(PROMPT) == 64


def test_attaching_to_nothing_says_so(name: str) -> None:
    with pytest.raises(errors.SegmentNotFound, match=name):
        RadixCache.attach(name)
    assert files_of(name) == []


def test_list_names_the_segments_and_nothing_else(cache_factory: CacheFactory, path: Path) -> None:
    cache = cache_factory(max_blocks=64)
    path.write_text("not a segment")
    assert cache.name in RadixCache.list()
    assert all("sem." not in name and "/" not in name for name in RadixCache.list())
    cache.unlink()
    assert cache.name not in RadixCache.list()


def test_the_mode_does_not_depend_on_the_umask(name: str) -> None:
    before = os.umask(0o077)
    try:
        cache = RadixCache.create(name, max_blocks=64, mode=0o640)
    finally:
        os.umask(before)
    with cache:
        assert {entry: (SHM / entry).stat().st_mode & 0o777 for entry in files_of(name)} == dict.fromkeys(
            files_of(name), 0o640
        )


def test_a_segment_is_private_by_default(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=64)
    assert [(SHM / entry).stat().st_mode & 0o777 for entry in files_of(cache.name)] == [0o600] * FILES


def test_opening_and_closing_many_times_leaves_no_descriptor_and_no_mapping(
    cache_factory: CacheFactory,
) -> None:
    cache = cache_factory(max_blocks=64)

    def resources() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), maps.count(f"shmradix.{cache.name}")

    gc.collect()  # what tests before this one left open closes now, not half-way
    before = resources()
    for _ in range(200):
        with RadixCache.attach(cache.name) as again:
            again.peek_matched_tokens(PROMPT)
    assert resources() == before


# --- what else can lie under a segment's name


def refuses(name: str, error: type[Exception], words: str) -> None:
    """Attaching must raise `error` with `words` in its message and leave the file as it is."""
    path = path_of(name)
    before = path.read_bytes() if path.is_file() else b""
    uses: list[Callable[[], object]] = [lambda: RadixCache.attach(name), lambda: RadixCache.open(name, max_blocks=64)]
    for use in uses:
        with pytest.raises(error, match=words):
            use()
    assert (path.read_bytes() if path.is_file() else b"") == before


@pytest.mark.parametrize("content", [b"", b"hello", b"\0" * 4096, b"\xff" * 100_000], ids=len)
def test_a_foreign_file_is_refused(name: str, path: Path, content: bytes) -> None:
    path.write_bytes(content)
    refuses(name, errors.SegmentForeign, str(path))


@pytest.mark.parametrize("kind", ["directory", "fifo", "symlink"])
def test_what_is_not_a_regular_file_is_refused(name: str, path: Path, kind: str, tmp_path: Path) -> None:
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        victim = tmp_path / "victim"
        victim.write_bytes(b"precious")
        path.symlink_to(victim)
    refuses(name, errors.SegmentForeign, "not a regular file")


@pytest.mark.parametrize(
    ("field", "value", "error", "words"),
    [
        ("magic", 0, errors.SegmentForeign, "magic"),
        ("version", layout.VERSION + 1, errors.LayoutMismatch, "version"),
        ("version", layout.VERSION - 1, errors.LayoutMismatch, "version"),
        ("byte_order", 0x0403_0201, errors.LayoutMismatch, "byte_order"),
        ("fingerprint", layout.FINGERPRINT ^ 1, errors.LayoutMismatch, "fingerprint"),
        ("boot_id", (1, 2), errors.LayoutMismatch, "boot"),
        ("size", 4096, errors.SegmentForeign, "bytes"),
        ("max_blocks", 65, errors.SegmentForeign, "bytes"),
        ("block_size", 0, errors.LayoutMismatch, "block_size"),
        ("max_leases", 0xFFFF_FFFF, errors.LayoutMismatch, "max_leases"),
    ],
)
def test_a_header_that_does_not_agree_is_refused(
    name: str, field: str, value: int | tuple[int, int], error: type[Exception], words: str
) -> None:
    path = closed_segment(name)
    header = np.frombuffer(path.read_bytes()[: layout.HEADER.itemsize], layout.HEADER).copy()
    header[field] = value
    with path.open("r+b") as file:
        file.write(header.tobytes())
    refuses(name, error, words)


@pytest.mark.parametrize("change", [-1, 1, -4096, 4096])
def test_a_segment_of_another_length_than_its_header_says_is_refused(name: str, change: int) -> None:
    path = closed_segment(name)
    os.truncate(path, path.stat().st_size + change)
    refuses(name, errors.SegmentForeign, "bytes")


@pytest.mark.parametrize("length", [0, 100, 4095, 4096, 8192])
def test_a_truncated_segment_is_refused(name: str, length: int) -> None:
    path = closed_segment(name)
    os.truncate(path, length)
    refuses(name, errors.SegmentForeign, "bytes")


def test_a_segment_that_this_user_may_not_open_is_refused_with_its_owner_and_mode(name: str) -> None:
    path = closed_segment(name)
    path.chmod(0)
    ended = run_script(
        "import os, sys\n"
        "from shmradix import RadixCache, errors\n"
        "if os.geteuid() == 0:\n"
        "    os.seteuid(65534)\n"
        "for use in (RadixCache.attach, lambda name: RadixCache.open(name, max_blocks=64)):\n"
        "    try:\n"
        "        use(sys.argv[1])\n"
        "    except errors.AccessDenied as error:\n"
        "        print(error)\n",
        name,
    )
    lines = ended.stdout.splitlines()
    assert len(lines) == 2, ended
    assert all(name in line and path.owner() in line and "mode 0o0" in line for line in lines)


# --- space


def test_a_full_shared_memory_is_an_error_at_creation_that_says_what_is_needed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fallocate(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=9, f_bavail=7, f_frsize=4096))
    with pytest.raises(errors.SharedMemoryFull) as raised:
        RadixCache.create(name, max_blocks=100_000)
    assert raised.value.errno == errno.ENOSPC
    message = str(raised.value)
    assert "20,480" in message
    assert "max_blocks=100,000" in message
    needed = re.search(r"needs ([\d,]+) bytes", message)
    assert needed
    assert int(needed[1].replace(",", "")) > 100_000 * 64
    assert files_of(name) == []


def test_what_cannot_fit_is_refused_before_anything_is_reserved(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reserved = []
    monkeypatch.setattr(os, "posix_fallocate", lambda *arguments: reserved.append(arguments))
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=9, f_bavail=7, f_frsize=4096))
    with pytest.raises(errors.SharedMemoryFull, match="max_blocks"):
        RadixCache.create(name, max_blocks=100_000)
    assert not reserved
    assert files_of(name) == []


# --- removal


def test_unlink_leaves_nothing_and_says_whether_it_did_it(name: str) -> None:
    RadixCache.create(name, max_blocks=64).close()
    assert RadixCache.unlink(name)
    assert files_of(name) == []


def test_an_old_handle_does_not_remove_a_newer_segment_of_the_same_name(name: str) -> None:
    with RadixCache.create(name, max_blocks=64) as old:
        assert RadixCache.unlink(name)
        with RadixCache.create(name, max_blocks=64) as new:
            assert new.incarnation != old.incarnation
            assert not old.unlink()
            assert len(files_of(name)) == FILES
            new.insert(PROMPT, BLOCKS)
            with RadixCache.attach(name) as attached:
                assert attached.incarnation == new.incarnation
            assert new.unlink()
        assert not old.unlink()


def test_a_cache_goes_on_working_after_it_was_unlinked(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=64)
    with RadixCache.attach(cache.name) as other:
        cache.insert(PROMPT, BLOCKS)
        assert cache.unlink()
        assert files_of(cache.name) == []
        assert other.lookup(PROMPT).matched_tokens == 64
        other.insert([1] * 16, [1])
        assert cache.peek_matched_tokens([1] * 16) == 16
        with pytest.raises(errors.SegmentNotFound):
            RadixCache.attach(cache.name)


# --- import and compile cache


def test_importing_does_not_import_numba() -> None:
    run_script("import sys, shmradix; assert 'numba' not in sys.modules and 'llvmlite' not in sys.modules")


ONE_ENTRY = """
from numba.core.types import int64
from shmradix.compile import entry

@entry(int64(int64))
def double(number):
    return 2 * number
"""
COMPILE = """
import os, sys
sys.dont_write_bytecode = True
sys.path.insert(0, sys.argv[1])
os.environ[sys.argv[2]] = sys.argv[3]
from shmradix import compile
assert compile.load().double(21) == 42
print(compile.__file__)
"""


def compile_in_a_copy(tmp_path: Path, variable: str) -> tuple[Path, Path]:
    """Load a copy of the package with one small entry point; the package and the cache directory."""
    package, compiled = tmp_path / "site" / "shmradix", tmp_path / "compiled"
    shutil.copytree(Path(shmradix.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "entries.py").write_text(ONE_ENTRY)
    before = sorted(package.rglob("*"))
    ended = run_script(COMPILE, str(package.parent), variable, str(compiled))
    assert Path(ended.stdout.strip()).parent == package
    assert sorted(package.rglob("*")) == before
    return package, compiled


@pytest.mark.parametrize("variable", ["SHMRADIX_CACHE_DIR", "XDG_CACHE_HOME"])
def test_compiled_code_goes_to_a_private_cache_directory_and_never_into_the_package(
    tmp_path: Path, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHMRADIX_CACHE_DIR", raising=False)
    _, compiled = compile_in_a_copy(tmp_path, variable)
    files = list(compiled.rglob("*.nbi"))
    assert files
    assert all(file.parent.stat().st_mode & 0o022 == 0 for file in files)


def test_compiled_code_is_not_loaded_from_a_directory_that_others_can_write(tmp_path: Path) -> None:
    (tmp_path / "compiled").mkdir()
    (tmp_path / "compiled").chmod(0o777)
    _, compiled = compile_in_a_copy(tmp_path, "SHMRADIX_CACHE_DIR")
    assert not list(compiled.rglob("*.nb?"))


def test_views_of_a_closed_segment_can_still_be_read(cache_factory: Callable[..., RadixCache]) -> None:
    cache = cache_factory(max_blocks=3)
    views = cache._segment.views
    cache.close()
    assert views.header["max_blocks"][0] == 3
    assert views.state["live_blocks"][0] == 0
