"""Reads request traces in the Mooncake format: one JSON object a line.

Fields of a line: ``timestamp`` (ms from the start), ``input_length`` and ``output_length`` (tokens) and
``hash_ids``, one id per started 512-token block of the prompt. The tokens themselves are not part of such a
trace, so every id is given its own fixed 512 tokens here.
"""

from __future__ import annotations

import json
import math
import os
import stat
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

TOKENS_PER_ID = 512
MAX_DISTINCT_IDS = 2**32 // TOKENS_PER_ID

_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PK\x03\x04")  # gzip, bzip2, xz, zstd, zip
_TOKEN_OFFSETS = np.arange(TOKENS_PER_ID, dtype=np.uint32)


class TraceError(ValueError):
    """A trace that can't be read; the message names the file, the line and what is wrong."""


@dataclass(frozen=True)
class Trace:
    """The requests of a trace in arrival order, with the ids renumbered 0, 1, ... by first appearance."""

    ids: npt.NDArray[np.uint32]
    """The ids of all requests, one request after the other."""
    starts: npt.NDArray[np.int64]
    """Where each request starts in `ids`, and where the last one ends."""
    input_lengths: npt.NDArray[np.int64]
    """Prompt tokens of each request."""
    distinct_ids: int

    def __len__(self) -> int:
        return len(self.input_lengths)

    def request_ids(self, index: int) -> npt.NDArray[np.uint32]:
        """Return the ids of one request."""
        return self.ids[self.starts[index] : self.starts[index + 1]]

    def request_tokens(self, index: int) -> npt.NDArray[np.uint32]:
        """Return one request's prompt, 512 tokens per id: token j of id i is i * 512 + j."""
        first = self.request_ids(index) * np.uint32(TOKENS_PER_ID)
        return (first[:, np.newaxis] + _TOKEN_OFFSETS).ravel()


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a whole trace; raises TraceError when the file or one of its lines is no good."""
    dense: dict[int, int] = {}
    ids, starts, lengths = array("I"), array("q", [0]), array("q")
    for number, line in _numbered_lines(Path(path)):
        try:
            request = _parse(line)
            ids.extend([dense.setdefault(hash_id, len(dense)) for hash_id in request["hash_ids"]])
            if len(dense) > MAX_DISTINCT_IDS:
                raise ValueError(f"more than {MAX_DISTINCT_IDS:,} distinct hash ids, the most supported")
        except ValueError as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
        starts.append(len(ids))
        lengths.append(request["input_length"])
    if not lengths:
        raise TraceError(f"{path}: the file is empty, no request in it")
    return Trace(
        np.array(ids, dtype=np.uint32),
        np.array(starts, dtype=np.int64),
        np.array(lengths, dtype=np.int64),
        len(dense),
    )


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines with their numbers from 1; blank lines may only be at the end."""
    blank = 0
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise TraceError(f"{path}: not a regular file (every worker opens the trace for itself)")
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if number == 1 and line.startswith(_COMPRESSED):
                    raise TraceError(f"{path}: compressed? unpack it first")
                if line.isspace():
                    blank = blank or number
                elif blank:
                    raise TraceError(f"{path}, line {blank}: the line is blank")
                else:
                    yield number, line
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error


def _parse(line: bytes) -> dict[str, Any]:
    """Return the checked object of one line; raises ValueError saying what is wrong with it."""
    try:
        request = json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} (column {error.colno})") from error
    except UnicodeDecodeError as error:
        raise ValueError("not JSON: not UTF-8 text") from error
    except ValueError as error:
        raise ValueError("a number with too many digits") from error
    except RecursionError as error:
        raise ValueError("not JSON: nested too deeply") from error
    if not isinstance(request, dict):
        raise ValueError(f"expected a JSON object, got {_shown(request)}")
    for field in ("timestamp", "input_length", "output_length", "hash_ids"):
        if field not in request:
            raise ValueError(f"field {field!r} is missing")
    _check_timestamp(request["timestamp"])
    _check_whole_number("input_length", request["input_length"], 1)
    _check_whole_number("output_length", request["output_length"], 0)
    _check_hash_ids(request["hash_ids"], request["input_length"])
    return request


def _check_timestamp(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"'timestamp' must be a number, got {_shown(value)}")
    if not 0 <= value < math.inf:
        raise ValueError(f"'timestamp' must be 0 or more, got {_shown(value)}")


def _check_whole_number(field: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{field!r} must be a whole number, got {_shown(value)}")
    if value < least:
        raise ValueError(f"{field!r} must be {least} or more, got {_shown(value)}")


def _check_hash_ids(value: object, input_length: int) -> None:
    if not isinstance(value, list):
        raise ValueError(f"'hash_ids' must be a list, got {_shown(value)}")
    if not value:
        raise ValueError("'hash_ids' is empty")
    for hash_id in value:
        if type(hash_id) is not int:
            raise ValueError(f"'hash_ids' must hold whole numbers only, got {_shown(hash_id)}")
        if hash_id < 0:
            raise ValueError(f"'hash_ids' must not be negative, got {hash_id}")
    needed = -(-input_length // TOKENS_PER_ID)
    if needed != len(value):
        raise ValueError(
            f"'input_length' {input_length} takes {needed} hash ids (one per started block of "
            f"{TOKENS_PER_ID} tokens), but 'hash_ids' has {len(value)}"
        )


def _shown(value: object) -> str:
    """Return the value as JSON, cut short."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
