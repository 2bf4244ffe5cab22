"""The command line: what it prints, its exit status, and that no segment and no worker is left."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import resources
from multiprocessing import active_children
from pathlib import Path

import pytest

from shmradix import RadixCache
from shmradix.cli import SAMPLE, main
from shmradix.replay import Counts
from shmradix.report import ProgressDisplay

NUMBERS = {
    "requests", "lookup_blocks", "hit_blocks", "hit_ratio", "lookup_tokens", "hit_tokens", "token_hit_ratio",
    "seconds", "requests_per_s", "latency_us",
}  # fmt: skip


def sample_lines() -> list[str]:
    return (resources.files("shmradix") / "data" / SAMPLE).read_text().splitlines(keepends=True)


@pytest.fixture
def trace_path(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(sample_lines()[:100]))
    return str(path)


@pytest.fixture
def long_trace_path(tmp_path: Path) -> str:
    """A trace that takes long enough to be disturbed."""
    path = tmp_path / "long.jsonl"
    path.write_text("".join(sample_lines() * 20))
    return str(path)


def segments_of(pid: int) -> list[str]:
    return [name for name in RadixCache.list() if f"replay-{pid}-" in name]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not active_children()
    assert not segments_of(os.getpid())


def test_replay_prints_one_json_object(trace_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", trace_path, "--workers", "2", "--blocks", "4000", "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert (report["workers"], report["blocks"], report["block_size"]) == (2, 4000, 512)
    for phase in (report, report["private"]):
        assert phase.keys() >= NUMBERS
        assert phase["requests"] == 100
        assert phase["hit_ratio"] == phase["hit_blocks"] / phase["lookup_blocks"]
        assert [worker["worker"] for worker in phase["per_worker"]] == [0, 1]
        assert all(worker.keys() >= NUMBERS for worker in phase["per_worker"])
        assert phase["latency_us"]["lookup"]["calls"] == 100
        assert 0 < phase["latency_us"]["lookup"]["p50"] <= phase["latency_us"]["lookup"]["p99"]
    assert report["private"]["blocks_per_cache"] == 2000
    assert "shared cache: 100 requests in" in err
    assert "private caches: 100 requests in" in err


def test_demo_explains_and_shows_that_sharing_pays(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--workers", "2"]) == 0
    out, _ = capsys.readouterr()
    assert "2 worker processes serve 800 real chat requests" in out
    assert "shared cache, 8,000 blocks" in out
    assert "private caches, 4,000 blocks each" in out
    times = float(out.rsplit(" times as many", 1)[0].rsplit(" ", 1)[1])
    assert times > 1.2


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--version"], ["--help"], ["replay", "--help"], ["demo", "--help"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 0
        out, _ = capsys.readouterr()
        assert out.startswith("shmradix " if arguments == ["--version"] else "usage: shmradix")
        assert arguments == ["--version"] or "\n  shmradix " in out


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--workers 0 --blocks 10", "argument --workers: 0 is not in 1 to 256"),
        ("--workers 257 --blocks 1000", "argument --workers: 257 is not in 1 to 256"),
        ("--workers two --blocks 10", "argument --workers: 'two' is not a whole number"),
        ("--workers 2 --blocks 0", "argument --blocks: 0 is not in 1 to"),
        ("--workers 2 --blocks 9999999999", "argument --blocks: 9999999999 is not in 1 to"),
        ("--workers 4 --blocks 3", "--blocks 3 is less than one block for each of --workers 4"),
        ("--workers 2 --blocks 10 --block-size 0", "argument --block-size: 0 is not in 1 to"),
        ("--workers 2", "the following arguments are required: --blocks"),
    ],
)
def test_bad_sizes_are_refused(options: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["replay", "no-such-file.jsonl", *options.split()])
    assert stop.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_damaged_trace_is_named(trace_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Path(trace_path).open("a") as trace:
        trace.write('{"timestamp": 5}\n')
    assert main(["replay", trace_path, "--workers", "2", "--blocks", "100"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"shmradix: {trace_path}, line 101: field 'input_length' is missing\n"


def test_a_segment_that_cannot_be_made(
    trace_path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reserve = os.posix_fallocate

    def refuse_large(fd: int, offset: int, length: int) -> None:
        """Be a /dev/shm that has room for the scratch segment only."""
        if length > 1 << 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", refuse_large)
    assert main(["replay", trace_path, "--workers", "1", "--blocks", "4000"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(r"\nshmradix: segment 'replay-.*' needs .* bytes", err)
    assert "Traceback" not in err


def test_a_worker_s_death_ends_the_replay(
    long_trace_path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def kill_one(self: ProgressDisplay, counts: Counts) -> None:
        if counts.requests:
            active_children()[0].kill()

    monkeypatch.setattr(ProgressDisplay, "progressed", kill_one)
    assert main(["replay", long_trace_path, "--workers", "2", "--blocks", "5000"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "was killed by signal 9; the replay was stopped" in err


@pytest.mark.parametrize(("signum", "delay"), [(signal.SIGINT, 0.0), (signal.SIGINT, 2.0), (signal.SIGTERM, 1.0)])
def test_a_signal_ends_the_replay_tidily(long_trace_path: str, signum: signal.Signals, delay: float) -> None:
    command = [
        sys.executable,
        "-m",
        "shmradix.cli",
        "replay",
        long_trace_path,
        "--workers",
        "2",
        "--blocks",
        "5000",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    assert "starting workers" in process.stderr.readline()
    time.sleep(delay)
    os.killpg(process.pid, signum)  # as a terminal's Ctrl-C does: the workers get it too
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signum
    assert out == ""
    assert "Traceback" not in err
    assert not segments_of(process.pid)
