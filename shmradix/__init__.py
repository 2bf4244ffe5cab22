"""shmradix: a prefix cache for LLM serving that the worker processes of a host share, in POSIX shared memory."""

from shmradix import errors
from shmradix.cache import RadixCache
from shmradix.claiming import Claim
from shmradix.layout import NO_BLOCK, NO_DISK
from shmradix.results import EvictedBlocks, InsertAcquired, PrefixMatch, Stats
from shmradix.version import __version__

__all__ = [
    "NO_BLOCK",
    "NO_DISK",
    "Claim",
    "EvictedBlocks",
    "InsertAcquired",
    "PrefixMatch",
    "RadixCache",
    "Stats",
    "__version__",
    "errors",
]
