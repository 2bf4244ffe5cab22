"""The bytes of managed blocks and of snapshot slots: in place, copied in and out, and sealed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shmradix import RadixCache, errors
from tests.actors import SHM, Actor, attach
from tests.children import in_child
from tests.conftest import fresh_name, remove_all

CacheFactory = Callable[..., RadixCache]

PAGE = 4096
SHAPE = (2, 3, 5)
COUNT = 8
SIZES: dict[str, Any] = {
    "max_blocks": None, "num_blocks": COUNT, "block_size": 4, "block_shape": SHAPE, "dtype": "float32",
    "max_workers": 4,
}  # fmt: skip


@pytest.fixture
def cache(cache_factory: CacheFactory) -> RadixCache:
    """Eight blocks of 2 x 3 x 5 floats."""
    return cache_factory(**SIZES)


@pytest.fixture
def sealing(cache_factory: CacheFactory) -> RadixCache:
    """The same, with checksums."""
    return cache_factory(**SIZES, checksums=True)


def numbers(count: int, start: int = 0) -> np.ndarray:
    """Blocks of which no two elements are equal."""
    return start + np.arange(count * int(np.prod(SHAPE)), dtype=np.float32).reshape(count, *SHAPE)


# --- in place -------------------------------------------------------------------------------------------------


def test_a_block_is_a_writable_view_of_the_shared_bytes(cache: RadixCache) -> None:
    block = int(cache.allocate(1)[0])
    view = cache.kv[block]
    assert (view.shape, view.dtype, view.flags.writeable, view.flags.c_contiguous) == (SHAPE, np.float32, True, True)
    view[1, 2, 3] = 7.5
    assert cache.kv.array[block, 1, 2, 3] == 7.5
    assert np.shares_memory(view, cache.kv.array)
    with RadixCache.attach(cache.name) as other:
        assert other.kv[block][1, 2, 3] == 7.5
        assert not np.shares_memory(view, other.kv.array)  # another mapping of the same file


@pytest.mark.parametrize("index", [-1, COUNT, 2**63])
def test_a_block_that_there_is_not_is_an_index_error(cache: RadixCache, index: int) -> None:
    with pytest.raises(IndexError, match=rf"block.*{index}.*{COUNT}"):
        cache.kv[index]


@pytest.mark.parametrize("index", ["1", 1.5, None, slice(2)])
def test_a_block_is_chosen_by_a_whole_number(cache: RadixCache, index: Any) -> None:
    with pytest.raises(TypeError):
        cache.kv[index]


def test_a_loop_over_the_blocks_ends(cache: RadixCache) -> None:
    assert sum(1 for _ in cache.kv) == len(cache.kv) == COUNT


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE])
def test_blocks_lie_at_page_boundaries_one_behind_the_other(cache_factory: CacheFactory, nbytes: int) -> None:
    cache = cache_factory(max_blocks=None, num_blocks=3, block_nbytes=nbytes)
    kv, pages = cache.kv, -(-nbytes // PAGE)
    assert (kv.stride, kv.nbytes, kv.array.shape) == (pages * PAGE, 3 * pages * PAGE, (3, nbytes))
    assert kv.address % PAGE == 0
    assert [kv[block].ctypes.data for block in range(3)] == [kv.address + block * kv.stride for block in range(3)]


@pytest.mark.parametrize("name", ["bool", "int8", "uint16", "float16", "float64", "complex64", "int64"])
def test_the_dtype_is_kept_by_those_who_attach(cache_factory: CacheFactory, name: str) -> None:
    cache = cache_factory(max_blocks=None, num_blocks=2, block_shape=(4,), dtype=name)
    with RadixCache.attach(cache.name) as other:
        assert (other.kv.array.dtype, other.kv.array.shape) == (np.dtype(name), (2, 4))
        assert name in repr(other.kv)


@pytest.mark.parametrize(("name", "stored"), [("bfloat16", "uint16"), ("float8_e4m3fn", "uint8")])
def test_what_numpy_does_not_know_is_unsigned_numbers_of_its_size(
    cache_factory: CacheFactory, name: str, stored: str
) -> None:
    cache = cache_factory(max_blocks=None, num_blocks=2, block_shape=(4,), dtype=f"torch.{name}")
    assert cache.kv[0].dtype == stored
    with pytest.raises(TypeError, match=rf"float32.*{stored}.*{name}"):
        cache.kv.scatter(cache.allocate(1), np.zeros((1, 4), np.float32))


@pytest.mark.parametrize(
    ("sizes", "error"),
    [
        ({"block_nbytes": -1}, ValueError),
        ({"block_nbytes": 2.5}, TypeError),
        ({"block_shape": (4,)}, ValueError),
        ({"dtype": "float32"}, ValueError),
        ({"block_shape": (0, 4), "dtype": "float32"}, ValueError),
        ({"block_shape": (4,), "dtype": "object"}, ValueError),
        ({"block_shape": (4,), "dtype": "no such"}, TypeError),
        ({"block_shape": (4,), "dtype": ">f4"}, ValueError),
        ({"block_shape": (4,), "dtype": "float32", "block_nbytes": 15}, ValueError),
    ],
)
def test_bytes_that_make_no_sense_are_refused_and_nothing_is_created(
    name: str, sizes: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        RadixCache.create(name, num_blocks=4, **sizes)
    assert not list(SHM.glob(f"*{name}*"))


def test_huge_pages_are_a_wish(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=None, num_blocks=2, block_nbytes=PAGE, huge_pages=True)
    cache.kv[1][:] = 5
    assert cache._segment.geometry.kv_offset % (2 << 20) == 0
    with RadixCache.attach(cache.name) as other:
        assert int(other.kv[1].sum()) == 5 * PAGE


def test_a_cache_without_bytes_says_how_to_get_some(cache_factory: CacheFactory) -> None:
    with pytest.raises(ValueError, match="block_nbytes"):
        _ = cache_factory(max_blocks=None, num_blocks=4).kv
    with pytest.raises(ValueError, match="snapshot_nbytes"):
        _ = cache_factory(snapshot_slots=4, max_snapshots=4).states


# --- copies ---------------------------------------------------------------------------------------------------


def test_what_is_scattered_is_gathered_in_the_order_asked_for(cache: RadixCache) -> None:
    blocks, source = cache.allocate(5), numbers(5)
    cache.kv.scatter(blocks, source)
    order = [3, 0, 3, 4]
    assert np.array_equal(cache.kv.gather(blocks[order]), source[order])
    out = np.full((4, *SHAPE), -1, np.float32)
    assert cache.kv.gather(blocks[order].tolist(), out) is out
    assert np.array_equal(out, source[order])


def test_none_is_a_number_of_blocks(cache: RadixCache) -> None:
    assert cache.kv.gather([]).shape == (0, *SHAPE)
    cache.kv.scatter([], np.empty((0, *SHAPE), np.float32))


def test_a_source_may_be_strided_or_read_only_or_lie_in_the_cache(cache: RadixCache) -> None:
    blocks = cache.allocate(4)
    source = numbers(8)[::2]
    source.flags.writeable = False
    cache.kv.scatter(blocks, source)
    assert np.array_equal(cache.kv.gather(blocks), source)
    low, high = min(blocks), max(blocks)
    before = cache.kv.gather([high, *range(low, high)])
    cache.kv.scatter(range(low, high + 1), np.roll(cache.kv.array[low : high + 1], 1, axis=0))
    assert np.array_equal(cache.kv.gather(range(low, high + 1)), before)
    cache.kv.scatter(range(low + 1, high + 1), cache.kv.array[low:high])  # each to the next: read before it is written
    assert np.array_equal(cache.kv.gather(range(low + 1, high + 1)), before[:-1])


@pytest.mark.parametrize("blocks", [[COUNT], [-1], [0, 2**40], [[0]], ["0"], [0.5], None])
def test_ids_that_are_none_are_refused_with_nothing_copied(cache: RadixCache, blocks: Any) -> None:
    mine = cache.allocate(COUNT)
    cache.kv.scatter(mine, numbers(COUNT))
    out = np.full((1, *SHAPE), -1, np.float32)
    with pytest.raises((ValueError, TypeError)):
        cache.kv.gather(blocks, out)
    with pytest.raises((ValueError, TypeError)):
        cache.kv.scatter(blocks, out)
    assert (out == -1).all()
    assert np.array_equal(cache.kv.gather(mine), numbers(COUNT))


def test_a_block_can_be_read_twice_but_not_written_twice(cache: RadixCache) -> None:
    block = cache.allocate(1)[0]
    cache.kv.scatter([block], numbers(1))
    with pytest.raises(ValueError, match=str(block)):
        cache.kv.scatter([block, block], numbers(2, start=100))
    assert np.array_equal(cache.kv.gather([block, block]), np.concatenate([numbers(1)] * 2))


WRONG = {
    "a_list": ([[0.0]], TypeError),
    "another_dtype": (np.zeros((2, *SHAPE), np.float64), TypeError),
    "another_byte_order": (np.zeros((2, *SHAPE), ">f4"), TypeError),
    "too_few": (np.zeros((1, *SHAPE), np.float32), ValueError),
    "flat": (np.zeros((2, int(np.prod(SHAPE))), np.float32), ValueError),
}


@pytest.mark.parametrize(("array", "error"), WRONG.values(), ids=WRONG)
def test_arrays_of_another_kind_are_refused_with_nothing_copied(
    cache: RadixCache, array: Any, error: type[Exception]
) -> None:
    blocks = cache.allocate(2)
    cache.kv.scatter(blocks, numbers(2, start=1))
    with pytest.raises(error, match="src"):
        cache.kv.scatter(blocks, array)
    with pytest.raises(error, match="out"):
        cache.kv.gather(blocks, array)
    assert np.array_equal(cache.kv.gather(blocks), numbers(2, start=1))


def test_an_out_that_cannot_be_filled_is_refused(cache: RadixCache) -> None:
    strided = np.zeros((4, *SHAPE), np.float32)[::2]
    read_only = np.zeros((2, *SHAPE), np.float32)
    read_only.flags.writeable = False
    for out in (strided, read_only, cache.kv.array[:2]):
        with pytest.raises(ValueError, match="out"):
            cache.kv.gather([0, 1], out)


def test_only_ones_own_private_blocks_are_written(cache: RadixCache) -> None:
    mine = cache.allocate(4)
    with RadixCache.attach(cache.name) as other:
        theirs = other.allocate(1)
        cache.insert(range(4), mine[:1])
        free = np.setdiff1d(np.arange(COUNT), [*mine, *theirs])[:1]
        for foreign, where in ((theirs, "private to"), (mine[:1], "in the tree"), (free, "free")):
            with pytest.raises(errors.BlockError, match=where):
                cache.kv.scatter([mine[1], foreign[0]], numbers(2))
        assert not cache.kv.gather(mine).any()


# --- checksums ------------------------------------------------------------------------------------------------


def test_a_gather_refuses_bytes_that_are_not_those_that_were_sealed(sealing: RadixCache) -> None:
    blocks = sealing.allocate(3)
    sealing.kv.scatter(blocks, numbers(3))
    assert np.array_equal(sealing.kv.gather(blocks), numbers(3))
    sealing.kv.check(blocks)
    sealing.kv[blocks[1]].view(np.uint8).reshape(-1)[-1] ^= 1
    for reading in (sealing.kv.gather, sealing.kv.check):
        with pytest.raises(errors.CorruptBlock, match=f"block {blocks[1]} holds other bytes"):
            reading(blocks)
    assert np.array_equal(sealing.kv.gather(blocks[[0, 2]]), numbers(3)[[0, 2]])
    sealing.kv.seal(blocks)
    sealing.kv.gather(blocks)


def test_the_seal_ends_with_the_next_allocation(sealing: RadixCache) -> None:
    blocks = sealing.allocate(COUNT)
    sealing.kv.scatter(blocks, numbers(COUNT))
    sealing.free(blocks)
    again = sealing.allocate(1)
    with pytest.raises(errors.CorruptBlock, match="not sealed since it was allocated"):
        sealing.kv.gather(again)


def test_only_ones_own_private_blocks_are_sealed(sealing: RadixCache) -> None:
    blocks = sealing.allocate(1)
    sealing.kv.scatter(blocks, numbers(1))
    sealing.insert(range(4), blocks)
    sealing.kv[blocks[0]][:] = 0
    with pytest.raises(errors.BlockError, match="in the tree"):
        sealing.kv.seal(blocks)
    with pytest.raises(errors.CorruptBlock):
        sealing.kv.check(blocks)


def test_without_checksums_nothing_is_sealed(cache: RadixCache) -> None:
    for call in (cache.kv.seal, cache.kv.check):
        with pytest.raises(ValueError, match="checksums=True"):
            call([0])


# --- other processes ------------------------------------------------------------------------------------------


def read(state: SimpleNamespace, tokens: list[int]) -> np.ndarray:
    """The KV of a prompt, as another process finds it."""
    with state.cache.lookup(tokens) as match:
        return np.array(state.cache.kv.gather(match.matched_blocks))


def compute(state: SimpleNamespace, tokens: list[int], content: np.ndarray) -> None:
    blocks = state.cache.allocate(len(content))
    state.cache.kv.scatter(blocks, content)
    state.cache.insert(tokens, blocks)


def test_what_one_worker_wrote_another_reads_also_when_the_writer_is_killed(sealing: RadixCache) -> None:
    with Actor() as writer, Actor() as reader:
        for actor in (writer, reader):
            actor.do(attach, sealing.name)
        writer.do(compute, list(range(8)), numbers(2))
        writer.kill()
        assert np.array_equal(reader.do(read, list(range(8))), numbers(2))


def test_a_forked_child_sees_the_bytes_through_the_views_of_before(cache: RadixCache) -> None:
    blocks = cache.allocate(1)
    view = cache.kv[blocks[0]]

    def write() -> float:
        view[0, 0, 0] = 3
        return float(view[0, 0, 0])

    assert in_child(write) == "3.0"
    assert view[0, 0, 0] == 3


def test_the_bytes_go_with_the_handle_and_arrays_stay(cache: RadixCache) -> None:
    kv, block = cache.kv, cache.allocate(1)[0]
    view = kv[block]
    view[:] = 2
    cache.close()
    for take in (lambda: kv[0], lambda: kv.array, lambda: kv.address, lambda: kv.gather([0])):
        with pytest.raises(errors.CacheClosed):
            take()
    assert (view == 2).all()
    remove_all(cache.name)
    assert (view == 2).all()


def test_threads_that_take_the_bytes_at_once_get_one_mapping(cache: RadixCache) -> None:
    started, addresses = threading.Barrier(8), []

    def take() -> None:
        started.wait()
        addresses.append(cache.kv.address)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert addresses == [addresses[0]] * 8


def test_a_file_cut_short_is_an_error_and_no_bus_error(cache: RadixCache) -> None:
    os.truncate(SHM / f"shmradix.{cache.name}", cache._segment.geometry.size)
    with pytest.raises(errors.CorruptSegment, match="cut short"):
        cache.kv.gather([0])


def test_more_bytes_than_there_is_memory_are_refused_at_creation() -> None:
    available = os.statvfs(SHM).f_bavail * os.statvfs(SHM).f_frsize
    name = fresh_name()
    with pytest.raises(errors.SharedMemoryFull, match="num_blocks=16"):
        RadixCache.create(name, num_blocks=16, block_nbytes=available)
    assert not list(SHM.glob(f"*{name}*"))


# --- states ---------------------------------------------------------------------------------------------------


def test_a_snapshot_slot_has_bytes_of_its_own(cache_factory: CacheFactory) -> None:
    cache = cache_factory(**SIZES, snapshot_slots=3, max_snapshots=3, snapshot_nbytes=PAGE + 10)
    cache.kv.array[:] = 9
    slot = cache.allocate_snapshot_slot()
    assert (len(cache.states), cache.states.stride, cache.states[slot].dtype) == (3, 2 * PAGE, np.uint8)
    assert not cache.states.array.any()
    cache.states[slot][:] = np.arange(PAGE + 10) % 251
    cache.insert(range(8), cache.allocate(2))
    cache.insert_intermediate_snapshot(range(6), slot)
    with (
        RadixCache.attach(cache.name) as other,
        other.lookup(range(8), max_snapshot_tokens=8, require_snapshot=True) as match,
    ):
        assert match.snapshot_slot == slot
        assert np.array_equal(other.states[slot], np.arange(PAGE + 10) % 251)
    assert (cache.kv.array == 9).all()


# --- torch ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not find_spec("torch"), reason="needs torch")
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e5m2", "uint8"])
def test_torch_sees_the_same_memory_in_the_dtype_of_the_cache(cache_factory: CacheFactory, name: str) -> None:
    import torch

    cache = cache_factory(max_blocks=None, num_blocks=3, block_shape=(2, 5), dtype=getattr(torch, name))
    tensor = cache.kv.torch()
    assert (tensor.dtype, tuple(tensor.shape)) == (getattr(torch, name), (3, 2, 5))
    tensor[1] = 2
    assert tensor[1].float().eq(2).all()
    assert cache.kv[1].any()
    assert not cache.kv[0].any()


@pytest.mark.skipif(bool(find_spec("torch")), reason="has torch")
def test_without_torch_the_rest_works(cache: RadixCache) -> None:
    with pytest.raises(ImportError):
        cache.kv.torch()
    assert cache.kv.array.shape == (COUNT, *SHAPE)
