"""A small /dev/shm, a full one, none: an error at creation that leaves nothing, and never a SIGBUS later."""

from __future__ import annotations

import errno
import itertools
import os
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shmradix import RadixCache, errors, segment
from shmradix import compile as kernels
from shmradix.layout import Geometry
from tests.actors import FILES, SHM
from tests.children import in_child, resources
from tests.namespaces import private_shm, why_not_private

BLOCK = 16
MIB = 1 << 20
MAKERS: dict[str, Callable[..., RadixCache]] = {"create": RadixCache.create, "open": RadixCache.open}


@pytest.fixture(autouse=True, scope="module")
def _warm() -> None:
    """Have the kernels before anything forks."""
    kernels.load()


@pytest.fixture(scope="module")
def private() -> None:
    if why := why_not_private():
        pytest.skip(why)


def in_small_shm(work: Callable[[], object], options: str = "size=2m") -> str:
    """Run `work` in a child whose /dev/shm is empty, its own, and small."""

    def inside() -> object:
        private_shm(options)
        return work()

    return in_child(inside, seconds=60)


def room() -> int:
    status = os.statvfs(SHM)
    return status.f_bavail * status.f_frsize


def fill(leave: int = 0) -> None:
    """Let another file take all of /dev/shm but some bytes."""
    with (SHM / "filler").open("ab", buffering=0) as file:
        while (left := room() - leave) > 0:
            os.posix_fallocate(file.fileno(), file.tell(), left)
            file.seek(left, os.SEEK_CUR)


def others(name: str = "") -> list[str]:
    """What is in the small /dev/shm beside the filler; in everybody's, what has to do with `name`."""
    return sorted(file for file in os.listdir(SHM) if name in file and file != "filler")


def prompt(number: int, blocks: int = 4) -> range:
    start = number * blocks * BLOCK
    return range(start, start + blocks * BLOCK)


def use_up(name: str) -> None:
    """Drive a cache to the end of each capacity, beside a second worker; each must say so, and all go on."""
    with RadixCache.attach(name) as cache:
        geometry = cache._segment.geometry
        blocks = itertools.count()
        for number in range(geometry.max_namespaces + 1):
            tokens, salt = prompt(0), b"%d" % number if number else None
            try:
                cache.insert(tokens, list(itertools.islice(blocks, 4)), salt=salt)
            except errors.NamespacesFull:
                break
            cache.release(tokens, salt=salt)
        else:
            raise AssertionError("the namespaces have no end")
        stored = 4 * BLOCK
        for number in range(1, geometry.max_blocks):
            if stored < 4 * BLOCK:
                break
            stored = cache.insert(prompt(number), list(itertools.islice(blocks, 4))).inserted_tokens
            if stored:
                cache.release(prompt(number))
        assert cache.stats().blocks_live == geometry.max_blocks
        matches = []
        while True:
            try:
                matches.append(cache.lookup(prompt(0)))
            except errors.LeasesFull:
                break
        assert len(matches) > geometry.max_leases // 2
        handles = []
        while True:
            try:
                handles.append(RadixCache.attach(name))
            except errors.WorkersFull:
                break
        assert len(handles) > geometry.max_workers // 2
        for closable in handles:
            closable.close()
        for match in matches:
            match.release()
        assert cache.verify() == []
        assert len(cache.evict(geometry.max_blocks).blocks) == geometry.max_blocks
        assert cache.insert(prompt(1), range(4)).inserted_tokens == 4 * BLOCK
        cache.release(prompt(1))
        cache.clear()
        cache.evict(4)
        assert cache.stats().blocks_live == 0
        assert cache.verify() == []


def make(name: str, max_blocks: int, use: str = "create") -> RadixCache:
    return MAKERS[use](name, max_blocks=max_blocks, max_leases=64, max_workers=8, max_namespaces=16)


def size_of(max_blocks: int) -> int:
    return Geometry(BLOCK, max_blocks, 16, 64, 8, 0, max_claims=256).size


# --- a file system that is too small


@pytest.mark.usefixtures("private")
@pytest.mark.parametrize("is_foreseen", [True, False])
@pytest.mark.parametrize("use", MAKERS)
def test_a_cache_that_does_not_fit_fails_at_its_creation_and_leaves_nothing(
    name: str, use: str, is_foreseen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_foreseen:  # somebody else takes the room after we looked
        monkeypatch.setattr(segment, "_room", lambda: 1 << 40)

    def work() -> object:
        before = resources(name)
        with pytest.raises(errors.SharedMemoryFull) as raised:
            make(name, 50_000, use)
        assert raised.value.errno == errno.ENOSPC
        assert f"needs {size_of(50_000):,} bytes" in str(raised.value)
        assert "max_blocks=50,000" in str(raised.value)
        assert "--shm-size" in str(raised.value)
        assert (others(), resources(name), room()) == ([], before, 2 * MIB)
        make(name, 100, use).close()  # and one that fits can be had at once
        return len(others())

    assert in_small_shm(work) == f"{FILES}"


@pytest.mark.usefixtures("private")
@pytest.mark.parametrize("is_foreseen", [True, False])
def test_to_the_page_a_cache_fits_and_works_or_fails_and_leaves_nothing(
    name: str, is_foreseen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_foreseen:
        monkeypatch.setattr(segment, "_room", lambda: 1 << 40)
    size = -(-size_of(1000) // 4096) * 4096

    def work(pages: int) -> object:
        fill(leave=size + pages * 4096)
        try:
            make(name, 1000).close()
        except errors.SharedMemoryFull:
            return others()
        use_up(name)
        return len(others())

    needed = FILES - 1  # a page for each semaphore
    said = [in_small_shm(partial(work, pages)) for pages in range(-1, needed + 2)]
    assert said == ["[]"] * (needed + 1) + [f"{FILES}"] * 2


@pytest.mark.usefixtures("private")
def test_to_the_inode_a_cache_fits_and_works_or_fails_and_leaves_nothing(name: str) -> None:
    def work() -> object:
        try:
            make(name, 100).close()
        except OSError as error:
            return errno.errorcode[error.errno or 0], others()
        use_up(name)
        return len(others())

    said = [in_small_shm(work, f"size=2m,nr_inodes={inodes}") for inodes in range(1, 8)]
    full = said.count("('ENOSPC', [])")
    assert full >= 3, said
    assert said == ["('ENOSPC', [])"] * full + [f"{FILES}"] * (7 - full)


# --- one that is full later


@pytest.mark.usefixtures("private")
def test_a_full_file_system_does_not_disturb_a_cache_that_is_there(name: str) -> None:
    def work() -> object:
        cache = make(name, 5_000)
        cache.insert(prompt(0), range(4))
        fill()
        assert room() == 0
        assert cache.peek_matched_tokens(prompt(0)) == 4 * BLOCK
        cache.clear()
        cache.release(prompt(0))
        cache.evict(4)
        use_up(name)
        assert in_child(lambda: use_up(name)) == "None"
        forked = in_child(lambda: cache.insert(prompt(3), range(4)).inserted_tokens)  # a worker of its own by now
        assert forked == f"{4 * BLOCK}"
        with pytest.raises(errors.SharedMemoryFull):
            make(f"{name}-2", 10)
        assert cache.verify() == []
        cache.close()
        RadixCache.unlink(name)
        return others()

    assert in_small_shm(work) == "[]"


@pytest.mark.usefixtures("private")
def test_every_page_of_a_fresh_cache_is_there_however_full_the_file_system_is(name: str) -> None:
    def work() -> object:
        with make(name, 10_000) as cache:
            fill()
            for page in range(0, len(cache._segment._map), 4096):  # a store where there is no page is a SIGBUS
                cache._segment._map[page] = cache._segment._map[page]
            return cache.verify()

    assert in_small_shm(work) == "[]"


@pytest.mark.usefixtures("private")
def test_an_attach_that_must_make_the_semaphore_anew_says_where_there_is_no_room(name: str) -> None:
    def work() -> object:
        with make(name, 100) as cache:
            for path in SHM.glob("sem.*"):
                path.unlink()
            fill()
            before = resources(name), others()
            with pytest.raises(OSError) as raised:
                RadixCache.attach(name)
            assert raised.value.errno == errno.ENOSPC
            assert (resources(name), others()) == before
            (SHM / "filler").unlink()
            RadixCache.attach(name).close()
            return cache.stats().workers

    assert in_small_shm(work) == "1"


# --- none at all


@pytest.mark.usefixtures("private")
@pytest.mark.parametrize("use", MAKERS)
@pytest.mark.parametrize("mount", [{"read_only": True}, {"target": SHM.parent}], ids=["read-only", "missing"])
def test_a_shared_memory_that_is_missing_or_read_only_is_an_error_that_says_so(
    name: str, use: str, mount: dict[str, Any]
) -> None:
    def work() -> object:
        private_shm(**mount)
        before = resources(name)
        with pytest.raises(errors.NoSharedMemory, match="mount a writable tmpfs"):
            make(name, 10, use)
        with pytest.raises(errors.SegmentNotFound):
            RadixCache.attach(name)
        return resources(name) == before

    assert in_child(work) == "True"


# --- limits of the process


@pytest.mark.parametrize("use", ["create", "open", "attach"])
def test_with_few_descriptors_left_a_cache_is_had_or_nothing_is_left(name: str, use: str) -> None:
    def had(limit: int, usual: tuple[int, int]) -> bool:
        """Whether a cache can be had below this limit of descriptors; it is closed at once."""
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, usual[1]))
        try:
            (RadixCache.attach(name) if use == "attach" else make(name, 100, use)).close()
        except OSError as error:
            if error.errno != errno.EMFILE and "maximum number of files" not in str(error):  # `posix_ipc`'s has none
                raise
            return False
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, usual)
        return True

    def work() -> object:
        keeper = make(name, 100) if use == "attach" else None
        limit, usual = len(os.listdir("/proc/self/fd")) + 20, resource.getrlimit(resource.RLIMIT_NOFILE)
        taken: list[int] = []
        while not taken or taken[-1] < limit - 1:
            taken.append(os.dup(2))
        (descriptors, maps), files = resources(name), others(name)
        outcomes = []
        for spare in range(12):
            outcomes.append(had(limit, usual))
            if outcomes[-1] and not keeper:
                RadixCache.unlink(name)
            assert resources(name) == (descriptors - spare, maps), outcomes
            assert others(name) == files, outcomes
            os.close(taken.pop())
        if keeper:
            assert keeper.stats().workers == 1
        assert outcomes == sorted(outcomes)
        return outcomes.count(False) > 2, outcomes.count(True) > 2

    assert in_child(work) == "(True, True)"


@pytest.mark.parametrize("use", ["create", "open", "attach"])
def test_without_address_space_for_the_mapping_nothing_is_left(name: str, use: str) -> None:
    blocks = 100_000  # more than what the allocator has in reserve

    def work() -> object:
        keeper = make(name, blocks) if use == "attach" else None
        before, files = resources(name), others(name)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + size_of(blocks) // 2, limits[1]))
        with pytest.raises(OSError) as raised:
            RadixCache.attach(name) if keeper else make(name, blocks, use)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        assert raised.value.errno in (errno.ENOMEM, errno.ENOSPC)
        del raised
        assert (resources(name), others(name)) == (before, files)
        with RadixCache.attach(name) if keeper else make(name, blocks, use) as cache:
            return cache.insert(prompt(0), range(4)).inserted_tokens

    assert in_child(work) == "64"
