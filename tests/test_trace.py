"""Reading traces: what a good one becomes and how a damaged one is refused."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shmradix.trace import TraceError, read_trace

GOOD: dict[str, Any] = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [7, 3]}


def write(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))
    return path


def test_ids_are_renumbered_by_first_appearance(tmp_path: Path) -> None:
    second = {**GOOD, "timestamp": 1.5, "input_length": 1025, "hash_ids": [7, 10**30, 9], "extra": None}
    trace = read_trace(write(tmp_path / "t.jsonl", json.dumps(GOOD), json.dumps(second)))
    assert len(trace) == 2
    assert trace.distinct_ids == 4
    assert trace.request_ids(0).tolist() == [0, 1]
    assert trace.request_ids(1).tolist() == [0, 2, 3]
    assert trace.input_lengths.tolist() == [1000, 1025]


def test_every_id_has_its_own_512_tokens(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t.jsonl", json.dumps(GOOD)))
    tokens = trace.request_tokens(0)
    assert tokens.dtype == np.uint32
    assert tokens.flags.c_contiguous
    assert tokens.tolist() == list(range(1024))


def test_blank_lines_at_the_end_are_no_damage(tmp_path: Path) -> None:
    assert len(read_trace(write(tmp_path / "t.jsonl", json.dumps(GOOD), "", "  "))) == 1


def test_a_blank_line_in_the_middle_is(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", json.dumps(GOOD), "", "", json.dumps(GOOD))
    with pytest.raises(TraceError, match=r"t\.jsonl, line 2: the line is blank"):
        read_trace(path)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"timestamp": 0, "input', r"not JSON: Unterminated string starting at \(column 18\)"),
        (b"\xff\xfe\x00", "not JSON"),
        ("[" * 100_000, "not JSON: nested too deeply"),
        ('{"timestamp": ' + "9" * 5000, "a number with too many digits"),
        ("[1, 2]", r"expected a JSON object, got \[1, 2\]"),
        ({"timestamp": ...}, "field 'timestamp' is missing"),
        ({"input_length": ...}, "field 'input_length' is missing"),
        ({"output_length": ...}, "field 'output_length' is missing"),
        ({"hash_ids": ...}, "field 'hash_ids' is missing"),
        ({"timestamp": "soon"}, "'timestamp' must be a number, got \"soon\""),
        ({"timestamp": -1}, "'timestamp' must be 0 or more, got -1"),
        ({"timestamp": float("nan")}, "'timestamp' must be 0 or more, got NaN"),
        ({"input_length": 1000.0}, "'input_length' must be a whole number, got 1000.0"),
        ({"input_length": True}, "'input_length' must be a whole number, got true"),
        ({"input_length": 0}, "'input_length' must be 1 or more, got 0"),
        ({"output_length": -2}, "'output_length' must be 0 or more, got -2"),
        ({"output_length": None}, "'output_length' must be a whole number, got null"),
        ({"hash_ids": "7 3"}, "'hash_ids' must be a list, got \"7 3\""),
        ({"hash_ids": []}, "'hash_ids' is empty"),
        ({"hash_ids": [7, -3]}, "'hash_ids' must not be negative, got -3"),
        ({"hash_ids": [7, "3"]}, "'hash_ids' must hold whole numbers only, got \"3\""),
        ({"hash_ids": [7, False]}, "'hash_ids' must hold whole numbers only, got false"),
        ({"input_length": 1025}, "'input_length' 1025 takes 3 hash ids .* but 'hash_ids' has 2"),
        ({"input_length": 512}, "'input_length' 512 takes 1 hash ids .* but 'hash_ids' has 2"),
    ],
)
def test_damage_is_named_with_file_and_line(tmp_path: Path, line: str | bytes | dict[str, Any], complaint: str) -> None:
    if isinstance(line, dict):
        line = json.dumps({key: value for key, value in {**GOOD, **line}.items() if value is not ...})
    path = write(tmp_path / "t.jsonl", json.dumps(GOOD), line, json.dumps(GOOD))
    with pytest.raises(TraceError, match=rf"t\.jsonl, line 2: {complaint}"):
        read_trace(path)


def test_files_that_are_no_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"gone\.jsonl: No such file or directory"):
        read_trace(tmp_path / "gone.jsonl")
    (tmp_path / "packed.jsonl").write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    with pytest.raises(TraceError, match=r"packed\.jsonl: compressed\? unpack it first"):
        read_trace(tmp_path / "packed.jsonl")
    with pytest.raises(TraceError, match="not a regular file"):
        read_trace(tmp_path)
    with pytest.raises(TraceError, match=r"empty\.jsonl: the file is empty"):
        read_trace(write(tmp_path / "empty.jsonl"))
