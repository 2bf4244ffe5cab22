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

import numpy as np
import psutil
import pytest

from shmradix import RadixCache
from shmradix.cli import SAMPLE, main
from shmradix.handover import Handover
from shmradix.replay import CALLS, Counts, Phase, Plan, WorkerResult
from shmradix.report import ProgressDisplay, print_json, print_table

STRESS = Path(__file__).parents[1] / "tools" / "stress.py"
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


def made_up_phase(name: str, requests: int, lookup_blocks: int, workers: int = 2) -> Phase:
    times = dict.fromkeys(CALLS, np.full(3, 5_000_000_000))
    counts = Counts(requests // workers, lookup_blocks, lookup_blocks // 2, 512, 256)
    return Phase(name, 1, 0, [WorkerResult(counts, 10**9, 3 * 10**9, times)] * workers)


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
        assert phase["starting_seconds"] > 0
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
    assert re.search(
        r"\nMeasured: \S+ s shared, \S+ s private\.\nStarting the workers took \S+ s and \S+ s before", out
    )
    assert "mean little" not in out
    assert re.search(r"\nThe bytes: one worker wrote the KV of 1,024 tokens, 8 MiB, in \S+ ms, and exited\.\n", out)
    assert re.search(r"\nAnother found 1,024 tokens by the prompt, and read the same bytes in \S+ ms\.\n", out)


def test_the_demos_json_says_what_was_handed_over(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--workers", "1", "--json"]) == 0
    handover = json.loads(capsys.readouterr().out)["handover"]
    assert (handover["prompt_tokens"], handover["found_tokens"], handover["nbytes"]) == (1024, 1024, 8 << 20)
    assert handover["is_same"] is True
    assert min(handover["write_seconds"], handover["read_seconds"]) > 0


def test_bytes_that_differ_are_a_failure(
    trace_path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shmradix.cli.SAMPLE", trace_path)
    monkeypatch.setattr("shmradix.cli.hand_over", lambda: Handover(32, 16, 1 << 20, False, 0.1, 0.1))
    assert main(["demo", "--workers", "1"]) == 1
    out, err = capsys.readouterr()
    assert "Another found 16 tokens" in out
    assert "OTHER BYTES" in out
    assert "read other bytes than the first one wrote" in err


def test_one_of_each_is_named_as_one(trace_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(trace_path).write_text(sample_lines()[0])
    assert main(["replay", trace_path, "--workers", "1", "--blocks", "1"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("1 worker, blocks of 512 tokens\n")
    assert "\nshared cache, 1 block  " in out
    assert "\nThe trace is short (1 request for 1 worker): such figures mean little.\n" in out
    assert "\nOne worker has nobody to share with" in out
    assert "shared cache: 1 request in" in err


@pytest.mark.parametrize(("width", "tables"), [(100, 2), (90, 2), (89, 4), (43, 4), (10, 4)])
def test_no_column_is_lost_on_a_narrow_terminal(
    width: int, tables: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    phases = (made_up_phase(name, 200, 10) for name in ("shared", "private"))
    print_table(Plan("t", 2, 2, 512), *phases)
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    words = out.split()
    assert words.count("total") == tables
    assert "…" not in out
    for cell, count in (("requests", 4), ("p50", 4), ("p99", 4), ("50.00%", 12), ("5,000,000.0", 24)):
        assert words.count(cell) == count, cell


def test_figures_that_say_little_come_with_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    for lookup_blocks, requests, expected in ((10, 200, []), (0, 200, ["fills"]), (10, 98, ["short"])):
        phases = [made_up_phase(name, requests, lookup_blocks) for name in ("shared", "private")]
        for show in (print_table, print_json):
            show(Plan("t", 2, 2, 4096), *phases)
            out, err = capsys.readouterr()
            notes = out.partition("no figure.\n")[2] if show is print_table else err
            assert len(notes.splitlines()) == len(expected)
            assert all(word in notes for word in expected)


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
    err = capsys.readouterr().err
    assert err.startswith("usage: shmradix replay ")
    assert complaint in err


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
    assert err.endswith("\nshmradix: here, lower --blocks or --block-size\n")
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
    assert "was killed by signal 9; all were stopped" in err


@pytest.mark.parametrize(("signum", "delay"), [(signal.SIGINT, 0.0), (signal.SIGINT, 2.0), (signal.SIGTERM, 1.0)])
def test_a_signal_ends_the_replay_tidily(long_trace_path: str, signum: signal.Signals, delay: float) -> None:
    command = [
        sys.executable,
        "-m",
        "shmradix",
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


def test_a_killed_replay_leaves_no_segment(long_trace_path: str) -> None:
    command = [sys.executable, "-m", "shmradix", "replay", long_trace_path, "--workers", "2", "--blocks", "5000"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for has_segments in (True, False):  # made, then all workers attached
            deadline = time.monotonic() + 120
            while bool(segments_of(process.pid)) != has_segments:
                assert time.monotonic() < deadline
                time.sleep(0.005)
        assert process.poll() is None
        workers = psutil.Process(process.pid).children()
    finally:
        process.kill()
        process.wait()
    assert not list(Path("/dev/shm").glob(f"*replay-{process.pid}-*"))
    assert not psutil.wait_procs(workers, timeout=60)[1]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--workers 0", "--workers 0: expected 1 to 63"),
        ("--workers 64", "--workers 64: expected 1 to 63"),
        ("--workers 4 --blocks 95", "--blocks 95: expected 96 "),
        ("--blocks 2000000", "--blocks 2000000: expected 96 "),
        ("--seconds 0", "--seconds 0.0: expected more than 0"),
        ("--seconds nan", "--seconds nan: expected more than 0"),
        ("--seed -1", "--seed -1: expected 0 or more"),
    ],
)
def test_the_stress_tool_refuses_bad_arguments(options: str, complaint: str) -> None:
    ended = run_stress(*options.split())
    assert (ended.returncode, ended.stdout) == (2, "")
    assert complaint in ended.stderr


def test_the_stress_tool_ends_quietly_when_nobody_reads() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = run_stress("--seconds", "0.2", "--workers", "1", "--blocks", "24", stdout=writer)
    os.close(writer)
    said = [line for line in ended.stderr.splitlines() if not line.startswith("shmradix compiles")]  # where it is new
    assert (ended.returncode, said) == (128 + signal.SIGPIPE, [])


def run_stress(*options: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(STRESS.parents[1])}
    command = [sys.executable, str(STRESS), *options]
    return subprocess.run(command, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120)
