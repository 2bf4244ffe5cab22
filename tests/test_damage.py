"""A damaged segment: a call raises CorruptSegment or gives an answer that can be, and the next call is not blamed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from shmradix import PrefixMatch, RadixCache, errors, workers
from shmradix.owner_word import tag_of
from tests.children import in_child

CacheFactory = Callable[..., RadixCache]
SIZES: dict[str, int] = {
    "block_size": 4, "max_blocks": 24, "max_leases": 6, "max_workers": 3, "max_namespaces": 3,
}  # fmt: skip
PROMPT, LEASED, NEW, SALT = list(range(16)), list(range(100, 112)), list(range(200, 212)), b"tenant"
WHOLE = 1 << 32


@pytest.fixture(autouse=True, scope="module")
def _warm() -> None:
    """Have the kernels before anything forks."""
    workers.compile.load()


class Patient:
    """A cache with a bit of everything, and what is needed to make it whole again."""

    def __init__(self, cache: RadixCache) -> None:
        self.cache = cache
        cache.insert([6] * 4, [30], adapter_id=6)
        cache.release([6] * 4, adapter_id=6)
        cache.insert([8] * 20, [20, 21, 22, 23, 24])
        cache.release([8] * 20)
        cache.insert(PROMPT, [10, 11, 12, 13])
        cache.release(PROMPT)
        cache.insert(PROMPT[:8], [0, 1], salt=SALT)
        cache.insert([*PROMPT[:4], 7, 7, 7, 7], [10, 9])
        cache.release([*PROMPT[:4], 7, 7, 7, 7])
        assert len(cache.evict(6)) == 6  # free nodes, a free namespace
        self.match: PrefixMatch = cache.lookup([*LEASED])
        cache.insert(LEASED, [40, 41, 42], match=self.match)
        self.partial = cache.lookup(PROMPT[:6])
        cache.lookup(PROMPT).release()  # a free lease
        state: Any = cache._segment.views.state[0]
        assert all(state[head] for head in ("free_node", "free_namespace", "free_lease", "heap_size"))
        self._held = self.match._lease, self.match._born
        self._raw = np.ndarray(cache._segment.geometry.size, np.uint8, cache._segment._map)
        self._image = self._raw.copy()
        assert cache.verify() == []

    def restore(self) -> None:
        self._raw[:] = self._image
        self.match._lease, self.match._born = self._held
        self.match.released = self.partial.released = False
        self.cache._worker.unreturned = []

    def is_well(self) -> bool:
        stats = self.cache.stats()
        sound = self.cache.peek_matched_tokens(PROMPT) == 16 and self.cache.verify() == []
        return sound and (stats.leases, stats.namespaces) == (3, 2)


def sane_match(match: PrefixMatch, tokens: list[int]) -> bool:
    lengths = len(match.matched_blocks) * 4 == match.matched_tokens <= len(tokens)
    return lengths and match.matched_tokens >= 0 and 0 <= match.partial_tokens <= 4


def sane_insert(cache: RadixCache, tokens: list[int], table: list[int], **named: Any) -> bool:
    stored = cache.insert(tokens, table, **named)
    given = set(table)
    return (
        0 <= stored.inserted_tokens <= len(tokens)
        and stored.inserted_tokens % 4 == 0
        and set(stored.blocks.tolist()) | set(stored.duplicates.tolist()) <= given
    )


def sane_stats(cache: RadixCache) -> bool:
    stats, geometry = cache.stats(), cache._segment.geometry
    return (
        0 <= stats.blocks_leased <= stats.blocks_live <= geometry.max_blocks
        and stats.blocks_evictable == stats.blocks_live - stats.blocks_leased
        and stats.blocks_free == geometry.max_blocks - stats.blocks_live
        and 0 <= stats.leases <= geometry.max_leases
        and 0 <= stats.namespaces <= geometry.max_namespaces
        and 0 <= stats.workers <= geometry.max_workers
    )


def attach(cache: RadixCache) -> bool:
    with RadixCache.attach(cache.name, lock_timeout=2) as other:
        return sane_match(other.lookup(PROMPT), PROMPT)


def verify(cache: RadixCache) -> bool:
    return isinstance(cache.verify(), list)


CALLS: dict[str, Callable[[Patient], bool]] = {
    "lookup": lambda p: sane_match(p.cache.lookup([*PROMPT, 9]), [*PROMPT, 9]),
    "lookup_partial": lambda p: sane_match(p.cache.lookup(PROMPT[:7]), PROMPT[:7]),
    "peek": lambda p: 0 <= p.cache.peek_matched_tokens(PROMPT) <= 16,
    "insert": lambda p: sane_insert(p.cache, NEW, [50, 51, 52]),
    "insert_below": lambda p: sane_insert(p.cache, [*PROMPT, *NEW], [10, 11, 12, 13, 50, 51, 52]),
    "insert_namespace": lambda p: sane_insert(p.cache, NEW, [50, 51, 52], salt=b"another"),
    "insert_match": lambda p: sane_insert(p.cache, [*LEASED, *NEW], [40, 41, 42, 50, 51, 52], match=p.match),
    "insert_matched": lambda p: sane_insert(p.cache, [*LEASED, *NEW], [40, 41, 42, 50, 51, 52], matched_tokens=12),
    "release": lambda p: p.cache.release(LEASED) is None,
    "release_match": lambda p: p.match.release() is None,
    "release_partial": lambda p: p.partial.release() is None,
    "evict": lambda p: len(p.cache.evict(100)) <= 24,
    "clear": lambda p: len(p.cache.clear()) <= 24,
    "stats": lambda p: sane_stats(p.cache),
    "reap": lambda p: 0 <= p.cache.reap() <= 3,
    "verify": lambda p: verify(p.cache),
    "attach": lambda p: attach(p.cache),
}
EXPECTED = (errors.CorruptSegment, errors.LeasesFull, errors.NamespacesFull, errors.LeaseError)


def call_and_judge(patient: Patient, call: str) -> str:
    """What a call on the damaged segment did: an error's name, "sane", or what is wrong with it."""
    try:
        return "sane" if CALLS[call](patient) else "INSANE"
    except EXPECTED as error:
        return type(error).__name__
    except ValueError as error:  # insert with a match, whose path is not what it was
        return "sane" if "do not start with the prompt" in str(error) else f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class Damage(NamedTuple):
    section: str
    field: str | None
    value: int

    def do(self, cache: RadixCache) -> None:
        section = getattr(cache._segment.views, self.section)
        if self.section == "state":
            section[self.field] = self.value
        elif self.field is None:
            section[:] = self.value
        else:
            section[self.field][1:] = self.value  # also of records that are free


def judge(name: str, damages: list[Damage]) -> str:
    """Do every call after every damage; what was not as it must be, a line each."""
    cache = RadixCache.attach(name, lock_timeout=5)
    patient, bad = Patient(cache), []
    if not patient.is_well():
        return "the patient is not well to begin with"
    for damage in damages:
        for call in CALLS:
            patient.restore()
            damage.do(cache)
            said = call_and_judge(patient, call)
            patient.restore()
            if said not in ("sane", *(error.__name__ for error in EXPECTED)):
                bad.append(f"{damage}: {call}: {said}")
            try:
                if not patient.is_well():
                    bad.append(f"{damage}: {call}: {said}: the next call gives a wrong answer")
            except errors.ShmradixError as error:
                bad.append(f"{damage}: {call}: {said}: the next call is blamed: {error!r}")
    patient.restore()
    return "\n".join(bad)


TOTALS = (
    "nodes_used", "free_node", "namespaces_used", "free_namespace", "leases_used", "free_lease", "live_blocks",
    "live_namespaces", "live_leases", "heap_size",
)  # fmt: skip
NODE_FIELDS = (
    "parent", "first_child", "next_sibling", "prev_sibling", "hash_next", "in_heap", "leases", "hash", "born",
    "block", "last_use",
)  # fmt: skip
LEASE_FIELDS = ("worker", "node", "anchor", "depth", "next_free", "partial_tokens", "born", "generation", "epoch")


def values(field: str) -> list[int]:
    small = [0, 1, 2, 3, 4, 6, 7, 8, 24, 25, 28, 29]
    return small if field in ("born", "last_use", "generation", "epoch") else [*small, 1 << 31, WHOLE - 2, WHOLE - 1]


@pytest.mark.parametrize("field", TOTALS)
def test_no_total_or_list_head_makes_a_call_answer_nonsense(cache_factory: CacheFactory, field: str) -> None:
    cache = cache_factory(**SIZES)
    damages = [Damage("state", field, value) for value in values(field)]
    assert in_child(lambda: judge(cache.name, damages), 60) == ""


@pytest.mark.parametrize(
    ("section", "field"),
    [
        *(("nodes", field) for field in NODE_FIELDS),
        *(("leases", field) for field in LEASE_FIELDS),
        ("buckets", None), ("heap", "node"), ("heap", "last_use"),
    ],
)  # fmt: skip
def test_no_record_makes_a_call_answer_nonsense_crash_or_hang(
    cache_factory: CacheFactory, section: str, field: str | None
) -> None:
    cache = cache_factory(**SIZES)
    damages = [Damage(section, field, value) for value in values(field or section)]
    assert in_child(lambda: judge(cache.name, damages), 60) == ""  # in a child: a store out of bounds would end it


@pytest.mark.parametrize(
    ("field", "value", "call"),
    [
        ("live_blocks", 25, "stats"), ("live_blocks", 25, "insert"), ("live_blocks", WHOLE - 1, "insert_match"),
        ("live_leases", 7, "stats"), ("live_leases", 7, "lookup"), ("live_leases", WHOLE - 1, "insert"),
        ("live_namespaces", 4, "stats"), ("live_namespaces", 4, "insert_namespace"),
        ("free_node", 28, "insert"), ("free_node", WHOLE - 1, "insert_below"), ("free_node", 1, "insert"),
        ("free_namespace", 28, "insert_namespace"), ("free_namespace", WHOLE - 1, "insert_namespace"),
        ("free_namespace", 5, "insert_namespace"), ("free_lease", 7, "lookup"), ("free_lease", WHOLE - 1, "insert"),
        ("leases_used", 0, "release"), ("leases_used", 0, "attach"), ("leases_used", 0, "stats"),
        ("leases_used", 8, "release"), ("leases_used", 8, "stats"), ("leases_used", WHOLE - 1, "insert_matched"),
        ("heap_size", 25, "evict"), ("heap_size", WHOLE - 1, "evict"),
    ],
)  # fmt: skip
def test_damage_that_a_call_meets_is_said(cache_factory: CacheFactory, field: str, value: int, call: str) -> None:
    patient = Patient(cache_factory(**SIZES))
    Damage("state", field, value).do(patient.cache)
    with pytest.raises(errors.CorruptSegment, match=patient.cache.name):
        CALLS[call](patient)
    patient.restore()
    assert patient.is_well()


def test_a_free_list_that_leads_to_what_is_in_use_is_noticed(cache_factory: CacheFactory) -> None:
    patient = Patient(cache_factory(**SIZES))
    views: Any = patient.cache._segment.views
    live_node = int(np.flatnonzero(views.nodes["born"])[-1])
    live_lease = int(np.flatnonzero(views.leases["born"])[-1])
    live_root = int(np.flatnonzero(views.nodes["born"])[0])
    for field, index, call in (
        ("free_node", live_node, "insert"),
        ("free_lease", live_lease, "lookup"),
        ("free_namespace", live_root, "insert_namespace"),
    ):
        Damage("state", field, index).do(patient.cache)
        with pytest.raises(errors.CorruptSegment):
            CALLS[call](patient)
        patient.restore()
        assert patient.is_well()


def test_what_a_rebuild_of_a_damaged_segment_meets_is_not_reported_later(cache_factory: CacheFactory) -> None:
    patient = Patient(cache_factory(**SIZES))
    views: Any = patient.cache._segment.views
    for field in ("first_child", "next_sibling", "hash_next", "in_heap"):
        views.nodes[field] = WHOLE - 1
    for field in TOTALS:
        if not field.endswith("_used"):
            views.state[field] = WHOLE - 1
    views.guards["owner"][0], views.guards["dirty"][0] = tag_of(0, 1 << 40), 1
    assert patient.cache.peek_matched_tokens(PROMPT) == 16
    assert patient.is_well()


def test_a_random_noise_is_survived(cache_factory: CacheFactory) -> None:
    cache = cache_factory(**SIZES)

    def shake() -> str:
        patient, chance, bad = Patient(RadixCache.attach(cache.name, lock_timeout=5)), np.random.default_rng(7), []
        sections = {section.name: section for section in cache._segment.geometry.sections()}
        for _ in range(1000):
            patient.restore()
            for _ in range(int(chance.choice([1, 1, 2, 8]))):
                names = ["state", "leases", "nodes", "heap", "buckets", "namespaces", "tokens"]
                section = sections[str(chance.choice(names))]
                patient._raw[section.offset + int(chance.integers(section.nbytes))] = chance.integers(256)
            for call in chance.permutation(list(CALLS))[:6]:
                said = call_and_judge(patient, str(call))
                if said not in ("sane", *(error.__name__ for error in EXPECTED)):
                    bad.append(f"{call}: {said}")
        patient.restore()
        if not patient.is_well():
            bad.append("not well at the end")
        return "\n".join(bad)

    assert in_child(shake, 60) == ""
