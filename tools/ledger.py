"""What the stress tool asks for and what it remembers: random prompts, and a ledger of what every block holds."""

from __future__ import annotations

import hashlib
import mmap
import os
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shmradix import NO_DISK

BLOCK_SIZE = 4
ALPHABET = 3
SHARED_PREFIXES = 24
MOST_PREFIX_BLOCKS = 16
MOST_EXTENSION_BLOCKS = 8
MOST_BLOCKS = MOST_PREFIX_BLOCKS + MOST_EXTENSION_BLOCKS  # of a prompt
NAMESPACES: tuple[tuple[int, bytes | None], ...] = ((0, None), (0, b"tenant"), (7, None))

AWAY, HELD, OFFERED = 0, 1, 2  # a block in a worker's row: not its own, its own, handed to an insert under way
COUNTERS = (
    "operations", "checked", "tokens", "evicted", "inserted", "duplicates", "short", "starved", "clears", "saved",
    "resumed", "spilled", "faulted_in", "slotless",
)  # fmt: skip

RECORD = np.dtype(
    [
        ("tokens", "<u4", BLOCK_SIZE),
        ("key", "<u8"),
        ("parent", "<u8"),
        ("prefix", "<u8"),
        ("stored_at", "<i8"),
    ]
)
SLOTS = 64  # for snapshots
SLOT_STATE = np.dtype(
    [
        ("digest", "<u8"),  # of the prefix; of a worker's own slot: random
        ("depth", "<i8"),  # in tokens; -1: a worker's own
        ("hash", "<u8", 2),  # that the index knows the prefix by
        ("saved_at", "<i8"),
    ]
)
TIERED = np.dtype([("key", "<u8"), ("check", "<u8"), ("state", SLOT_STATE)])


class Ledger:
    """What every block and slot holds and who has the blocks, in a mapped file that all workers write."""

    def __init__(self, path: str, workers: int, blocks: int) -> None:
        layout = np.dtype(
            [
                ("content", RECORD, (blocks,)),
                ("counts", "<i8", (workers, len(COUNTERS))),
                ("clears_begun", "<i8", (workers,)),
                ("cleared_at", "<i8", (workers,)),
                ("slots", SLOT_STATE, (SLOTS,)),
                ("tiered", TIERED, (SLOTS // 2,)),
                ("held", "u1", (workers, blocks)),
            ]
        )
        with open(path, "r+b") as file:
            file.truncate(layout.itemsize)
            self._map = mmap.mmap(file.fileno(), layout.itemsize)
        whole = np.frombuffer(self._map, layout)[0]
        self.content: NDArray[np.void] = whole["content"]
        self.counts: NDArray[np.int64] = whole["counts"]
        self.clears_begun: NDArray[np.int64] = whole["clears_begun"]
        self.cleared_at: NDArray[np.int64] = whole["cleared_at"]
        self.slots: NDArray[np.void] = whole["slots"]
        self.tiered: NDArray[np.void] = whole["tiered"]
        self.held: NDArray[np.uint8] = whole["held"]


@dataclass(frozen=True)
class Prompt:
    """What one request asks for, and the digest of every whole-block prefix of it (the namespace first)."""

    tokens: NDArray[np.uint32]
    adapter_id: int
    salt: bytes | None
    block_keys: NDArray[np.uint64] | None
    chain: NDArray[np.uint64]

    @property
    def full_blocks(self) -> int:
        return len(self.chain) - 1

    @property
    def chunks(self) -> NDArray[np.uint32]:
        return self.tokens[: self.full_blocks * BLOCK_SIZE].reshape(-1, BLOCK_SIZE)

    @property
    def keys(self) -> NDArray[np.uint64]:
        """One key a started block: 0 where the prompt has none."""
        return np.zeros(self.full_blocks + 1, np.uint64) if self.block_keys is None else self.block_keys


def digest_chain(prompt_start: bytes, chunks: NDArray[np.uint32], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The digest of the namespace and of each longer prefix, one more than there are chunks."""
    running = hashlib.blake2b(prompt_start, digest_size=8)
    digests = [running.copy().digest()]
    for chunk, key in zip(chunks, keys, strict=False):
        running.update(chunk.tobytes() + key.tobytes())
        digests.append(running.copy().digest())
    return np.frombuffer(b"".join(digests), np.uint64)


def disk_ids_of(chain: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """The disk block that belongs to each prefix: the same for whoever stores it, none for a third of them."""
    return np.where(chain % 3 == 0, NO_DISK, chain & 0x3FFFFFFF).astype(np.uint32)


class Prompts:
    """An endless supply of prompts that share a few prefixes; all workers share the prefixes of one seed."""

    def __init__(self, seed: int, number: int) -> None:
        shared = np.random.default_rng(seed)
        self._prefixes = [
            shared.integers(0, ALPHABET, BLOCK_SIZE * int(shared.integers(0, MOST_PREFIX_BLOCKS + 1)), np.uint32)
            for _ in range(SHARED_PREFIXES)
        ]
        self._random = np.random.default_rng([seed, number, os.getpid(), time.monotonic_ns()])

    def draw(self) -> Prompt:
        """A shared prefix, perhaps cut, with random tokens after it."""
        pick = self._random
        prefix = self._prefixes[int(pick.integers(SHARED_PREFIXES))]
        if pick.random() < 0.2:
            prefix = prefix[: int(pick.integers(0, len(prefix) + 1))]
        length = int(pick.integers(1, MOST_EXTENSION_BLOCKS * BLOCK_SIZE + 1))
        tokens = np.concatenate([prefix, pick.integers(0, ALPHABET, length, np.uint32)]).astype(np.uint32)
        full = len(tokens) // BLOCK_SIZE
        adapter_id, salt = NAMESPACES[int(pick.integers(len(NAMESPACES)))]
        started = -(-len(tokens) // BLOCK_SIZE)
        block_keys = pick.integers(1, 3, started, np.uint64) if pick.random() < 0.1 else None
        keys = np.zeros(full, np.uint64) if block_keys is None else block_keys
        chunks = tokens[: full * BLOCK_SIZE].reshape(-1, BLOCK_SIZE)
        return Prompt(
            tokens, adapter_id, salt, block_keys, digest_chain(repr((adapter_id, salt)).encode(), chunks, keys)
        )
