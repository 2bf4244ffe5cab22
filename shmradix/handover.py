"""The end of the demo: what one worker wrote into the cache's blocks, another finds by the prompt alone, and reads.

The writer is gone before the reader begins. All that goes between them is the segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import xxhash

from shmradix import RadixCache
from shmradix.crew import EXIT_SECONDS, crew, one_message_from_each, segments

BLOCKS, BLOCK_SIZE, BLOCK_NBYTES = 64, 16, 128 << 10  # 8 MiB in all: a container has 64 MiB of shared memory
_PROMPT = np.arange(BLOCKS * BLOCK_SIZE, dtype=np.uint32)


class _Part(NamedTuple):
    """What a worker did: tokens that it stored or found, the digest of their bytes, seconds."""

    tokens: int
    digest: str
    seconds: float


@dataclass(frozen=True)
class Handover:
    """What was handed over: tokens written and found, bytes, seconds to write and to read; whether it was the same."""

    prompt_tokens: int
    found_tokens: int
    nbytes: int
    is_same: bool
    write_seconds: float
    read_seconds: float


def hand_over() -> Handover:
    """Let two processes do it, one after the other. Raises WorkerFailed, or a ShmradixError where there is no room."""
    with segments(max_workers=3) as (create, remove_all):
        name = create("bytes", num_blocks=BLOCKS, block_size=BLOCK_SIZE, block_nbytes=BLOCK_NBYTES)
        with crew(_take_part, [(name, _write), (name, _read)], [name]) as members:
            one_message_from_each(members)
            remove_all()
            parts: list[_Part] = []
            for member in members:
                member.link.send("go")
                parts += one_message_from_each([member])
                member.process.join(EXIT_SECONDS)
    written, read = parts
    return Handover(
        written.tokens, read.tokens, BLOCKS * BLOCK_NBYTES, written[:2] == read[:2], written.seconds, read.seconds
    )


def _take_part(job: tuple[str, Any], link: Connection[Any, Any]) -> _Part:
    name, part = job
    with RadixCache.attach(name) as cache:
        cache.lookup([0]).release()  # compiles, where nobody has, before the time runs
        link.send("ready")
        link.recv()
        return part(cache)


def _write(cache: RadixCache) -> _Part:
    """Store the prompt; random bytes stand for what a model would compute."""
    kv = np.random.default_rng().integers(0, 256, (BLOCKS, BLOCK_NBYTES), np.uint8)
    started = perf_counter()
    blocks = cache.allocate(BLOCKS)
    cache.kv.scatter(blocks, kv)
    stored = cache.insert(_PROMPT, blocks)
    seconds = perf_counter() - started
    return _Part(stored.inserted_tokens, xxhash.xxh3_128_hexdigest(kv.data), seconds)


def _read(cache: RadixCache) -> _Part:
    started = perf_counter()
    with cache.lookup(_PROMPT) as match:
        kv = cache.kv.gather(match.matched_blocks)
        seconds = perf_counter() - started
        return _Part(match.matched_tokens, xxhash.xxh3_128_hexdigest(kv.data), seconds)
