"""The bytes that a segment holds beyond its index, as arrays: the KV of managed blocks, the states in snapshot slots.

They lie in the segment's file, row after row at page boundaries, and are mapped at first use. Closing the handle drops
the mapping; arrays that were taken before keep theirs until they are gone.
"""

import importlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shmradix.inputs import as_count
from shmradix.layout import Geometry
from shmradix.sizes import STORED_AS, stored_as

if TYPE_CHECKING:
    from shmradix.workers import Worker


@dataclass(frozen=True)
class Rows:
    """Where equal rows lie in a segment's file, and what is in one."""

    what: str  # one of them is called
    count: int
    offset: int  # of the first, in bytes
    stride: int  # from one to the next, in bytes
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    dtype_name: str  # what the caller calls it; numpy knows no bfloat16

    @property
    def nbytes(self) -> int:
        """Bytes of one row's content."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def total(self) -> int:
        """Bytes of all rows, with what fills their pages up."""
        return self.count * self.stride


def block_rows(geometry: Geometry) -> Rows:
    """The blocks' KV: of `block_shape` and `dtype`, uint8[block_nbytes] where those were not given."""
    place = "block", geometry.num_blocks, geometry.kv_offset, geometry.block_stride
    if not geometry.block_shape:
        return Rows(*place, (geometry.block_nbytes,), np.dtype(np.uint8), "uint8")
    return Rows(*place, geometry.block_shape, stored_as(geometry.block_dtype), geometry.block_dtype)


def state_rows(geometry: Geometry) -> Rows:
    """The slots' states, uint8[snapshot_nbytes] each."""
    place = "slot", geometry.snapshot_slots, geometry.states_offset, geometry.snapshot_stride
    return Rows(*place, (geometry.snapshot_nbytes,), np.dtype(np.uint8), "uint8")


class Payload:
    """Rows of one shape and dtype in shared memory; `payload[i]` is row i. Nothing is copied, nothing is locked.

    bfloat16 and float8, which numpy does not know, are unsigned integers of their size here. What takes an array raises
    CacheClosed once the handle is closed, and CorruptSegment where the file was cut short.
    """

    def __init__(self, worker: "Worker", rows: Rows) -> None:
        self._worker, self._rows = worker, rows

    def __len__(self) -> int:
        return self._rows.count

    def __getitem__(self, index: int) -> np.ndarray:
        """One row, writable; IndexError beyond the last, and below 0."""
        rows = self._rows
        try:
            at = as_count(rows.what, index, rows.count - 1, f", the cache has {rows.count}")
        except ValueError as error:
            raise IndexError(str(error)) from None
        return self._bytes()[at].view(rows.dtype).reshape(rows.shape)

    @property
    def array(self) -> np.ndarray:
        """All rows as one writable array; its first stride is `stride`, so as a whole it need not be contiguous."""
        rows = self._rows
        return self._bytes().view(rows.dtype).reshape(rows.count, *rows.shape)

    def torch(self) -> Any:
        """All rows as one torch tensor on the same memory, of the dtype given at creation. ImportError without torch.

        Not differentiable, and strided like `array`. Needs torch 2.3 for uint16 and what is stored as that.
        """
        torch = importlib.import_module("torch")
        tensor = torch.from_numpy(self.array)
        return tensor.view(getattr(torch, self._rows.dtype_name)) if self._rows.dtype_name in STORED_AS else tensor

    @property
    def address(self) -> int:
        """Where row 0 begins in this process, at a page boundary; with `nbytes` what cudaHostRegister takes."""
        return self._bytes().ctypes.data

    @property
    def nbytes(self) -> int:
        """Bytes from `address` to the end of the last row's last page."""
        return self._rows.total

    @property
    def stride(self) -> int:
        """Bytes from one row to the next, whole pages."""
        return self._rows.stride

    def __repr__(self) -> str:
        rows = self._rows
        return f"<{type(self).__name__} of {rows.count} {rows.what}s of {rows.shape} {rows.dtype_name}>"

    def _bytes(self) -> np.ndarray:
        """uint8[count, nbytes of a row], mapped."""
        mapped = self._worker.segment.mapped.get(self._rows.what)
        return self._worker.locked(self._map) if mapped is None else mapped

    def _map(self) -> np.ndarray:
        """Map the rows; within `locked`, so that no other thread closes the file meanwhile."""
        segment, rows = self._worker.segment, self._rows
        pages = segment.map_bytes(rows.offset, rows.total).reshape(rows.count, rows.stride)
        return segment.mapped.setdefault(rows.what, pages[:, : rows.nbytes])
