"""What callers may pass, and that every bad argument is refused by name with nothing changed."""

from __future__ import annotations

import array
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

from shmradix import NO_BLOCK, PrefixMatch, RadixCache, errors
from tests.model import all_stats

CacheFactory = Callable[..., RadixCache]
Call = Callable[..., object]

PROMPT = list(range(48))  # three blocks of 16
NEW = list(range(100, 148))
TABLE = [10, 20, 30]


class Bad(NamedTuple):
    """One refused call: arguments, the error, and what its message must name."""

    name: str
    value: Any
    error: type[Exception] | tuple[type[Exception], ...]
    text: str


def ids(rows: list[Bad]) -> list[str]:
    return [row.name for row in rows]


BAD_TOKENS = [
    Bad("negative", [1, 2, -1], ValueError, "-1"),
    Bad("negative_array", np.array([1, -7], np.int64), ValueError, "-7"),
    Bad("above_32_bits", [1, 2**32], ValueError, "4294967296"),
    Bad("above_32_bits_array", np.array([2**40], np.uint64), ValueError, str(2**40)),
    Bad("above_64_bits", [1, 2**64], ValueError, str(2**64)),
    Bad("floats", [1.0, 2.5], TypeError, "float"),
    Bad("float_array", np.array([1.0, 2.0]), TypeError, "float64"),
    Bad("not_a_number", [1, float("nan")], TypeError, "float"),
    Bad("complex", np.array([1j]), TypeError, "complex"),
    Bad("text", "abc", TypeError, "'abc'"),
    Bad("texts", ["a", "b"], TypeError, "'a'"),
    Bad("mixed", [1, "a"], TypeError, "'a'"),
    Bad("bytes", b"abc", TypeError, "b'abc'"),
    Bad("bytearray", bytearray(b"abc"), TypeError, "bytearray(b'abc')"),
    Bad("bools", [True, False], TypeError, "bool"),
    Bad("bool_array", np.array([True]), TypeError, "bool"),
    Bad("two_dimensional", [[1, 2], [3, 4]], ValueError, "(2, 2)"),
    Bad("two_dimensional_array", np.zeros((2, 3), np.uint32), ValueError, "(2, 3)"),
    Bad("ragged", [[1, 2], [3]], (TypeError, ValueError), "tokens"),
    Bad("empty", [], ValueError, "empty"),
    Bad("empty_array", np.empty(0, np.uint32), ValueError, "empty"),
    Bad("masked_array", np.ma.MaskedArray(np.arange(48, dtype=np.uint32), mask=True), TypeError, "MaskedArray"),
    Bad("none", None, TypeError, "None"),
    Bad("holding_none", [1, None], TypeError, "None"),
    Bad("one_number", 5, TypeError, "5"),
    Bad("object_array", np.array([1, 2], object), TypeError, "object"),
    Bad("dictionary", {1: 2}, TypeError, "{1: 2}"),
    Bad("dates", np.array(["2020-01-01"], "datetime64[D]"), TypeError, "datetime64"),
]

TOKEN_CALLS: dict[str, Call] = {
    "lookup": lambda cache, tokens: cache.lookup(tokens),
    "peek": lambda cache, tokens: cache.peek_matched_tokens(tokens),
    "insert": lambda cache, tokens: cache.insert(tokens, TABLE),
    "release": lambda cache, tokens: cache.release(tokens),
    "release_matched": lambda cache, tokens: cache.release_matched(tokens, 16),
}

BAD_INSERTS = [
    Bad("table_too_short", {"block_table": [10, 20]}, ValueError, "2"),
    Bad("table_empty", {"block_table": []}, ValueError, "0"),
    Bad("table_with_no_block", {"block_table": [10, NO_BLOCK, 30]}, ValueError, "4294967295"),
    Bad("table_repeats", {"block_table": [10, 77, 77]}, ValueError, "77"),
    Bad("table_negative", {"block_table": [10, -20, 30]}, ValueError, "-20"),
    Bad("table_above_32_bits", {"block_table": [10, 2**32, 30]}, ValueError, "4294967296"),
    Bad("table_of_floats", {"block_table": [1.0, 2.0, 3.0]}, TypeError, "float"),
    Bad("table_of_texts", {"block_table": ["a", "b", "c"]}, TypeError, "'a'"),
    Bad("table_none", {"block_table": None}, TypeError, "None"),
    Bad("table_two_dimensional", {"block_table": [[10], [20], [30]]}, ValueError, "(3, 1)"),
    Bad("disk_ids_too_short", {"disk_block_ids": [1, 2]}, ValueError, "2"),
    Bad("disk_ids_too_long", {"disk_block_ids": [1, 2, 3, 4]}, ValueError, "4"),
    Bad("disk_ids_negative", {"disk_block_ids": [1, 2, -3]}, ValueError, "-3"),
    Bad("disk_ids_of_floats", {"disk_block_ids": [1.0, 2.0, 3.0]}, TypeError, "float"),
    Bad("matched_negative", {"matched_tokens": -16}, ValueError, "-16"),
    Bad("matched_beyond_the_tokens", {"matched_tokens": 49}, ValueError, "49"),
    Bad("matched_float", {"matched_tokens": 16.0}, TypeError, "16.0"),
    Bad("matched_text", {"matched_tokens": "16"}, TypeError, "'16'"),
    Bad("match_of_another_type", {"match": 16}, TypeError, "16"),
]

BAD_IDENTITIES = [
    Bad("salt_text", {"salt": "tenant"}, TypeError, "'tenant'"),
    Bad("salt_number", {"salt": 7}, TypeError, "7"),
    Bad("salt_empty", {"salt": b""}, ValueError, "salt"),
    Bad("adapter_negative", {"adapter_id": -1}, ValueError, "-1"),
    Bad("adapter_above_64_bits", {"adapter_id": 2**64}, ValueError, str(2**64)),
    Bad("adapter_float", {"adapter_id": 1.5}, TypeError, "1.5"),
    Bad("adapter_text", {"adapter_id": "lora"}, TypeError, "'lora'"),
    Bad("adapter_none", {"adapter_id": None}, TypeError, "None"),
    Bad("keys_too_few", {"block_keys": [1, 2]}, ValueError, "2"),
    Bad("keys_too_many", {"block_keys": [1, 2, 3, 4, 5]}, ValueError, "5"),
    Bad("keys_negative", {"block_keys": [1, 2, -3]}, ValueError, "-3"),
    Bad("keys_above_64_bits", {"block_keys": [1, 2, 2**64]}, ValueError, str(2**64)),
    Bad("keys_of_floats", {"block_keys": [1.0, 2.0, 3.0]}, TypeError, "float"),
    Bad("keys_text", {"block_keys": "abc"}, TypeError, "'abc'"),
]

IDENTITY_CALLS: dict[str, Call] = {
    "lookup": lambda cache, **identity: cache.lookup(PROMPT, **identity),
    "peek": lambda cache, **identity: cache.peek_matched_tokens(PROMPT, **identity),
    "insert": lambda cache, **identity: cache.insert(PROMPT, TABLE, **identity),
    "release": lambda cache, **identity: cache.release(PROMPT, **identity),
    "release_matched": lambda cache, **identity: cache.release_matched(PROMPT, 48, **identity),
}

SALTED = [
    Bad("adapter_float", {"adapter_id": 1.0}, TypeError, "1.0"),
    Bad("adapter_bool", {"adapter_id": True}, TypeError, "True"),
    Bad("adapter_list", {"adapter_id": [1]}, TypeError, "[1]"),
]

BAD_COUNTS = [
    Bad("negative", -1, ValueError, "-1"),
    Bad("float", 1.5, TypeError, "1.5"),
    Bad("text", "3", TypeError, "'3'"),
    Bad("none", None, TypeError, "None"),
]

BAD_NAMES = [
    Bad("slash", "a/b", ValueError, "a/b"),
    Bad("leading_slash", "/a", ValueError, "/a"),
    Bad("empty", "", ValueError, "''"),
    Bad("dot", ".", ValueError, "'.'"),
    Bad("two_dots", "..", ValueError, "'..'"),
    Bad("too_long", "x" * 300, ValueError, "x" * 20),
    Bad("zero_byte", "a\0b", ValueError, "a"),
    Bad("bytes", b"cache", TypeError, "cache"),
    Bad("number", 5, TypeError, "5"),
    Bad("none", None, TypeError, "None"),
]

NAME_CALLS: dict[str, Call] = {
    "create": lambda name: RadixCache.create(name, max_blocks=4),
    "attach": lambda name: RadixCache.attach(name),
    "open": lambda name: RadixCache.open(name, max_blocks=4),
    "unlink": lambda name: RadixCache.unlink(name),
}

GEOMETRY = ("block_size", "max_blocks", "max_leases", "max_workers", "max_namespaces")
BAD_SIZES = [
    Bad("zero", 0, ValueError, "0"),
    Bad("negative", -1, ValueError, "-1"),
    Bad("huge", 2**31 + 5, ValueError, str(2**31 + 5)),
    Bad("beyond_64_bits", 2**70, ValueError, str(2**70)),
    Bad("float", 4.0, TypeError, "4.0"),
    Bad("text", "4", TypeError, "'4'"),
    Bad("none", None, TypeError, "None"),
]


@pytest.fixture
def cache(cache_factory: CacheFactory) -> RadixCache:
    """A cache that holds PROMPT, leased once by depth 3."""
    cache = cache_factory(max_blocks=16, block_size=16, max_leases=8, max_namespaces=4)
    cache.insert(PROMPT, TABLE)
    return cache


def picture(cache: RadixCache) -> tuple[dict[str, int], list[bytes]]:
    """Everything a refused call must leave as it is."""
    views = cache._segment.views
    arrays = (views.nodes, views.tokens, views.leases, views.namespaces, views.heap, views.buckets)
    return all_stats(cache), [table.tobytes() for table in arrays]


def refuse(cache: RadixCache, row: Bad, call: Callable[[], object]) -> None:
    """The call must fail as the row says and change nothing."""
    before = picture(cache)
    with pytest.raises(row.error) as caught:
        call()
    assert row.text in str(caught.value)
    assert not isinstance(caught.value, errors.ShmradixError)
    assert picture(cache) == before


@pytest.mark.parametrize("call", TOKEN_CALLS.values(), ids=TOKEN_CALLS)
@pytest.mark.parametrize("row", BAD_TOKENS, ids=ids(BAD_TOKENS))
def test_bad_tokens_are_refused(cache: RadixCache, row: Bad, call: Call) -> None:
    refuse(cache, row, lambda: call(cache, row.value))


@pytest.mark.parametrize("row", BAD_INSERTS, ids=ids(BAD_INSERTS))
def test_bad_insert_arguments_are_refused(cache: RadixCache, row: Bad) -> None:
    arguments = {"tokens": NEW, "block_table": [11, 21, 31]} | row.value
    refuse(cache, row, lambda: cache.insert(**arguments))


@pytest.mark.parametrize("call", IDENTITY_CALLS.values(), ids=IDENTITY_CALLS)
@pytest.mark.parametrize("row", BAD_IDENTITIES, ids=ids(BAD_IDENTITIES))
def test_bad_salts_adapters_and_keys_are_refused(cache: RadixCache, row: Bad, call: Call) -> None:
    refuse(cache, row, lambda: call(cache, **row.value))


@pytest.mark.parametrize("row", SALTED, ids=ids(SALTED))
def test_bad_adapters_are_refused_beside_a_known_salt(cache: RadixCache, row: Bad) -> None:
    cache.peek_matched_tokens(PROMPT, adapter_id=1, salt=b"tenant")
    refuse(cache, row, lambda: cache.lookup(PROMPT, salt=b"tenant", **row.value))


@pytest.mark.parametrize("row", BAD_COUNTS, ids=ids(BAD_COUNTS))
def test_bad_counts_are_refused(cache: RadixCache, row: Bad) -> None:
    refuse(cache, row, lambda: cache.evict(row.value))
    refuse(cache, row, lambda: cache.release_matched(PROMPT, row.value))


@pytest.mark.parametrize("call", NAME_CALLS.values(), ids=NAME_CALLS)
@pytest.mark.parametrize("row", BAD_NAMES, ids=ids(BAD_NAMES))
def test_bad_names_are_refused(row: Bad, call: Call) -> None:
    with pytest.raises(row.error, match="name") as caught:
        call(row.value)
    assert row.text in str(caught.value)
    assert row.value not in RadixCache.list()


@pytest.mark.parametrize("size", GEOMETRY)
@pytest.mark.parametrize("row", BAD_SIZES, ids=ids(BAD_SIZES))
def test_senseless_sizes_are_refused(name: str, row: Bad, size: str) -> None:
    arguments = {"max_blocks": 8} | {size: row.value}
    with pytest.raises(row.error, match=size) as caught:
        RadixCache.create(name, **arguments)
    assert row.text in str(caught.value)
    assert name not in RadixCache.list()


def test_a_match_of_another_cache_is_refused(cache: RadixCache, cache_factory: CacheFactory) -> None:
    other = cache_factory(max_blocks=16, block_size=16)
    other.insert(PROMPT, TABLE)
    match = other.lookup(PROMPT)
    refuse(cache, Bad("", None, ValueError, "match"), lambda: cache.insert(NEW, TABLE, match=match))
    assert not match.released


def test_a_match_of_another_handle_is_refused(cache: RadixCache) -> None:
    with RadixCache.attach(cache.name) as other:
        match = other.lookup(PROMPT)
        refuse(cache, Bad("", None, ValueError, "match"), lambda: cache.insert(NEW, TABLE, match=match))


@pytest.mark.parametrize(
    ("tokens", "keys"),
    [
        (NEW, None),
        (PROMPT[:32], None),
        ([*PROMPT[:47], 99, *NEW], None),
        ([99, *PROMPT[1:]], None),
        (PROMPT, [0, 1, 0]),
    ],
    ids=["other", "shorter", "differs_last", "differs_first", "keys_differ"],
)
def test_tokens_that_do_not_continue_the_match_are_refused(
    cache: RadixCache, tokens: list[int], keys: list[int] | None
) -> None:
    match = cache.lookup(PROMPT)
    table = list(range(10, 10 + len(tokens) // 16))
    row = Bad("", None, ValueError, "matched_tokens=48")
    refuse(cache, row, lambda: cache.insert(tokens, table, match=match, block_keys=keys))


def test_a_released_match_is_refused(cache: RadixCache) -> None:
    match = cache.lookup(PROMPT)
    match.release()
    before = picture(cache)
    with pytest.raises(errors.LeaseError, match="released"):
        cache.insert(PROMPT, TABLE, match=match)
    assert picture(cache) == before


@pytest.mark.parametrize(
    "call",
    [
        lambda cache: cache.release(NEW),
        lambda cache: cache.release(PROMPT, adapter_id=1),
        lambda cache: cache.release(PROMPT, salt=b"tenant"),
        lambda cache: cache.release(PROMPT, block_keys=[1, 2, 3]),
        lambda cache: cache.release(PROMPT[:32]),
        lambda cache: cache.release_matched(PROMPT, 32),
        lambda cache: cache.insert(PROMPT, TABLE, matched_tokens=32),
        lambda cache: cache.insert(NEW, TABLE, matched_tokens=48),
    ],
    ids=["prompt", "adapter", "salt", "keys", "above_it", "depth", "extend_above", "extend_other"],
)
def test_releasing_or_extending_what_is_not_held_is_refused(cache: RadixCache, call: Call) -> None:
    before = picture(cache)
    with pytest.raises(errors.LeaseError):
        call(cache)
    assert picture(cache) == before


CLOSED_CALLS: dict[str, Call] = {
    "lookup": lambda cache: cache.lookup(PROMPT),
    "peek": lambda cache: cache.peek_matched_tokens(PROMPT),
    "insert": lambda cache: cache.insert(PROMPT, TABLE),
    "release": lambda cache: cache.release(PROMPT),
    "release_matched": lambda cache: cache.release_matched(PROMPT, 16),
    "evict": lambda cache: cache.evict(1),
    "clear": lambda cache: cache.clear(),
    "reap": lambda cache: cache.reap(),
    "stats": lambda cache: cache.stats(),
}


@pytest.mark.parametrize("call", CLOSED_CALLS.values(), ids=CLOSED_CALLS)
def test_a_closed_cache_refuses_every_call(cache: RadixCache, call: Call) -> None:
    with RadixCache.attach(cache.name) as other:
        cache.close()
        before = picture(other)
        with pytest.raises(errors.CacheClosed, match=cache.name):
            call(cache)
        assert picture(other) == before
    assert cache.closed


def test_closing_twice_and_releasing_afterwards_do_nothing(cache: RadixCache) -> None:
    match = cache.lookup(PROMPT)
    with RadixCache.attach(cache.name) as other:
        cache.close()
        before = picture(other)
        cache.close()
        match.release()
        assert picture(other) == before
        assert other.stats().leases == 0


def read_only(tokens: list[int]) -> np.ndarray:
    frozen = np.array(tokens, np.uint32)
    frozen.setflags(write=False)
    return frozen


KINDS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "range": lambda values: range(values[0], values[-1] + 1),
    "array_I": lambda values: array.array("I", values),
    "array_q": lambda values: array.array("q", values),
    "memoryview": lambda values: memoryview(array.array("I", values)),
    "memoryview_of_16_bits": lambda values: memoryview(array.array("H", values)),
    "numpy_scalars": lambda values: [np.int64(value) for value in values],
    **{f"numpy_{kind}": partial(np.array, dtype=kind) for kind in KINDS},
    "big_endian": lambda values: np.array(values, ">u4"),
    "big_endian_64": lambda values: np.array(values, ">i8"),
    "non_contiguous": lambda values: np.repeat(np.array(values, np.uint32), 2)[::2],
    "reversed_view": lambda values: np.array(values[::-1], np.uint32)[::-1],
    "read_only": read_only,
    "unaligned": lambda values: np.frombuffer(b"\0" + np.array(values, np.uint32).tobytes(), np.uint32, offset=1),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_of_integers_is_accepted(form: Callable[[list[int]], Any], cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=16, block_size=16)
    prompt, table, disk = list(range(40, 88)), [70, 71, 72], [5, 6, 7]
    got = cache.insert(form(prompt), form(table), disk_block_ids=form(disk), block_keys=form(disk))
    assert got.blocks.tolist() == table
    assert got.disk_block_ids.tolist() == disk
    assert cache.peek_matched_tokens(prompt, block_keys=disk) == 48
    match = cache.lookup(form(prompt), block_keys=form(disk))
    assert match.matched_blocks.tolist() == table
    cache.release_matched(form(prompt), 48, block_keys=form(disk))
    cache.release(form(prompt), block_keys=form(disk))
    assert cache.stats().leases == 0


def test_the_largest_values_are_accepted(cache_factory: CacheFactory) -> None:
    cache = cache_factory(max_blocks=4, block_size=2)
    largest: dict[str, Any] = {"adapter_id": 2**64 - 1, "block_keys": [2**64 - 1], "salt": bytes(range(256)) * 4}
    cache.insert([2**32 - 1, 0], [2**32 - 2], disk_block_ids=[2**32 - 2], **largest)
    match: PrefixMatch = cache.lookup([2**32 - 1, 0], **largest)
    assert match.matched_blocks.tolist() == match.matched_disk_block_ids.tolist() == [2**32 - 2]
    assert cache.peek_matched_tokens([2**32 - 1, 0]) == 0
