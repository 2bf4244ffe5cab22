"""What the halves of `RadixCache` share: the segment, the worker, namespaces."""

from typing import TYPE_CHECKING

import numpy as np

from shmradix.inputs import BASE_NAMESPACE, as_namespace
from shmradix.results import PrefixMatch
from shmradix.segment import Segment

if TYPE_CHECKING:
    from shmradix.workers import Worker

_NAMESPACES_KEPT = 4096  # digests of salts that a handle remembers


class Handle:
    """An attached segment and its worker."""

    _worker: "Worker"

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._namespaces: dict[tuple[int, bytes], np.ndarray] = {}
        self._pins: dict[tuple[int, int], tuple[int, int]] = {}  # a match's pin by its lease, for a release by tokens
        self.name = segment.name
        self.block_size = segment.geometry.block_size
        self.max_blocks = segment.geometry.max_blocks
        self._hash_seed = int(segment.views.header["hash_seed"][0])
        self.incarnation = segment.incarnation
        """Differs for every segment ever created, also under one name."""

    def _namespace(self, adapter_id: int, salt: bytes | None) -> np.ndarray:
        if type(adapter_id) is not int or type(salt) is not bytes:
            base = type(adapter_id) is int and adapter_id == 0 and salt is None
            return BASE_NAMESPACE if base else as_namespace(adapter_id, salt)
        known = self._namespaces.get((adapter_id, salt))
        if known is None:
            known = as_namespace(adapter_id, salt)
            if len(self._namespaces) >= _NAMESPACES_KEPT:
                self._namespaces.clear()
            self._namespaces[adapter_id, salt] = known
        return known

    def _namespace_of(self, match: PrefixMatch, namespace: np.ndarray) -> np.ndarray:
        if not isinstance(match, PrefixMatch):
            raise TypeError(f"match={match!r}: expected a PrefixMatch")
        if match._owner is not self:
            raise ValueError(f"match={match!r} comes from another cache handle: look the prompt up in this one")
        if namespace is not BASE_NAMESPACE and not np.array_equal(namespace, match._namespace):
            raise ValueError("adapter_id and salt differ from the match's: leave them out, or look up with them")
        return match._namespace
