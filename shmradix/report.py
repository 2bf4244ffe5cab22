"""Shows a replay: progress on stderr, then a table or a JSON object."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from time import monotonic
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.box import SIMPLE
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from shmradix.handover import Handover
from shmradix.replay import Counts, Phase, Plan, WorkerResult

_PLAIN_LINE_SECONDS = 5.0
_PLAIN_WIDTH = 100
_UNLIMITED_WIDTH = 1000
_FEW_REQUESTS = 50  # for each worker
_COLUMNS = (
    "requests", "blocks\nhit", "tokens\nhit", "requests\nper s",
    "lookup\np50 us", "lookup\np99 us", "insert\np50 us", "insert\np99 us",
)  # fmt: skip
_ALL, _HALVES = slice(0, 8), (slice(0, 4), slice(4, 8))
_TITLES = {"shared": "shared cache", "private": "private caches"}


class ProgressDisplay:
    """Follows a replay on stderr: a live bar on a terminal, else a line now and then. A context manager."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._live = console.is_terminal and not console.is_dumb_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._progress.add_task("", visible=False, note="")
        self._title = ""
        self._requests = 0
        self._next_line = 0.0

    def __enter__(self) -> ProgressDisplay:
        if self._live:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._progress.stop()

    def started(self, phase: str, requests: int) -> None:
        """A phase begins: compiled code is loaded (built if this is its first use), workers start."""
        self._title, self._requests, self._next_line = f"{_TITLES[phase]:<14}", requests, 0.0
        self._task = self._progress.add_task(self._title, total=requests, note="starting workers")
        self._say("starting workers")

    def progressed(self, counts: Counts) -> None:
        """So much of the running phase is done."""
        note = self._update(counts)
        if monotonic() >= self._next_line:
            if self._next_line:
                self._say(f"{counts.requests:,} of {self._requests:,} requests, {note}")
            self._next_line = monotonic() + _PLAIN_LINE_SECONDS

    def finished(self, phase: Phase) -> None:
        """All requests of a phase are done."""
        total = phase.total()
        self._update(total.counts)
        requests = counted(total.counts.requests, "request")
        self._say(f"{requests} in {total.seconds:.2f} s, after {phase.starting_seconds:.1f} s of starting")

    def _update(self, counts: Counts) -> str:
        """Move the bar and return the note beside it."""
        note = f"{counts.hit_ratio:.1%} of blocks hit"
        self._progress.update(self._task, completed=counts.requests, note=note)
        return note

    def _say(self, text: str) -> None:
        if not self._live:
            print(f"{self._title.strip()}: {text}", file=sys.stderr, flush=True)


def counted(number: int, noun: str) -> str:
    """Return "1 block", "2 blocks" and the like."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def print_json(plan: Plan, shared: Phase, private: Phase, handover: Handover | None = None) -> None:
    """Print one JSON object on stdout; ratios are 0 to 1, latencies microseconds. Notes go to stderr."""
    report: dict[str, Any] = {
        "trace": plan.trace_path,
        "workers": plan.workers,
        "blocks": plan.blocks,
        "block_size": plan.block_size,
        **_phase_numbers(shared),
        "private": _phase_numbers(private),
    }
    if handover:
        report["handover"] = asdict(handover)
    print(json.dumps(report, indent=2))
    for note in notes(plan, shared):
        print(note, file=sys.stderr)


def print_table(plan: Plan, shared: Phase, private: Phase, handover: Handover | None = None) -> None:
    """Print both phases, worker by worker and in total, on stdout, and what the difference is."""
    width = Console().width if sys.stdout.isatty() else _PLAIN_WIDTH
    print(f"{counted(plan.workers, 'worker')}, blocks of {counted(plan.block_size, 'token')}\n")
    for phase in (shared, private):
        whole = _table(phase, _ALL)
        for table in [whole] if _width(whole) <= width else [_table(phase, half) for half in _HALVES]:
            # Rather wider than the terminal, which wraps it, than without some of its columns.
            Console(width=max(width, _width(table)), highlight=False).print(table, "")
    print("\n".join([comparison(shared, private), _times(shared, private), *notes(plan, shared)]))
    if handover:
        print(_handed_over(handover))


def comparison(shared: Phase, private: Phase) -> str:
    """Return in a few plain words how much more the shared cache found."""
    ours, theirs = shared.total().counts, private.total().counts
    text = f"Prompt tokens found in the cache: {ours.token_hit_ratio:.1%} shared, {theirs.token_hit_ratio:.1%} private."
    if theirs.hit_tokens:
        text += f" Sharing found {ours.hit_tokens / theirs.hit_tokens:.2f} times as many."
    return text


def notes(plan: Plan, shared: Phase) -> list[str]:
    """Return what a reader must know about figures that say less than they seem to."""
    counts, lines = shared.total().counts, []
    if not counts.lookup_blocks:
        tokens = counted(plan.block_size, "token")
        lines.append(f"No prompt fills a block of {tokens}, so nothing could be stored or found: lower --block-size.")
    if counts.requests < _FEW_REQUESTS * plan.workers:
        requests, workers = counted(counts.requests, "request"), counted(plan.workers, "worker")
        lines.append(f"The trace is short ({requests} for {workers}): such figures mean little.")
    if plan.workers == 1:
        lines.append("One worker has nobody to share with: give --workers 2 or more to see a difference.")
    return lines


def _handed_over(handover: Handover) -> str:
    """Return what the second worker found of what the first one wrote, and whether it was that."""
    size = f"{handover.nbytes / 2**20:.0f} MiB"
    same = "the same bytes" if handover.is_same else "OTHER BYTES"
    return (
        f"The bytes: one worker wrote the KV of {counted(handover.prompt_tokens, 'token')}, {size}, in "
        f"{handover.write_seconds * 1e3:.1f} ms, and exited.\nAnother found {counted(handover.found_tokens, 'token')} "
        f"by the prompt, and read {same} in {handover.read_seconds * 1e3:.1f} ms."
    )


def _times(shared: Phase, private: Phase) -> str:
    """Return how long the run took, and how much of that was measured."""
    serving = f"{shared.total().seconds:.2f} s shared, {private.total().seconds:.2f} s private"
    starting = f"{shared.starting_seconds:.1f} s and {private.starting_seconds:.1f} s"
    return f"Measured: {serving}.\nStarting the workers took {starting} before that, which is in no figure."


def _width(table: Table) -> int:
    """Return the width that shows all of the table."""
    console = Console(width=_UNLIMITED_WIDTH)
    return Measurement.get(console, console.options, table).maximum


def _table(phase: Phase, columns: slice) -> Table:
    each = " each" if phase.name == "private" else ""
    title = f"{_TITLES[phase.name]}, {counted(phase.blocks_per_cache, 'block')}{each}"
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE, padding=0, show_edge=False)
    table.add_column("worker", no_wrap=True)
    for heading in _COLUMNS[columns]:
        table.add_column(heading, justify="right", no_wrap=True, min_width=8)
    for number, worker in enumerate(phase.workers):
        table.add_row(str(number), *_cells(worker)[columns])
    table.add_section()
    table.add_row("total", *_cells(phase.total())[columns], style="bold")
    return table


def _cells(result: WorkerResult) -> list[str]:
    counts, cells = result.counts, []
    cells += [f"{counts.requests:,}", f"{counts.hit_ratio:.2%}", f"{counts.token_hit_ratio:.2%}"]
    cells.append(f"{result.requests_per_s:,.0f}")
    for call in ("lookup", "insert"):
        cells += [_shown(_percentile_us(result.call_ns[call], percent)) for percent in (50, 99)]
    return cells


def _shown(microseconds: float | None) -> str:
    return "-" if microseconds is None else f"{microseconds:,.1f}"


def _phase_numbers(phase: Phase) -> dict[str, Any]:
    per_worker = [{"worker": number, **_numbers(worker)} for number, worker in enumerate(phase.workers)]
    return {
        **_numbers(phase.total()),
        "starting_seconds": phase.starting_seconds,
        "blocks_per_cache": phase.blocks_per_cache,
        "per_worker": per_worker,
    }


def _numbers(result: WorkerResult) -> dict[str, Any]:
    counts = result.counts
    return {
        **counts._asdict(),
        "hit_ratio": counts.hit_ratio,
        "token_hit_ratio": counts.token_hit_ratio,
        "seconds": result.seconds,
        "requests_per_s": result.requests_per_s,
        "latency_us": {call: _latency(times) for call, times in result.call_ns.items()},
    }


def _latency(times_ns: npt.NDArray[np.int64]) -> dict[str, float | int | None]:
    return {
        "calls": len(times_ns),
        "p50": _percentile_us(times_ns, 50),
        "p99": _percentile_us(times_ns, 99),
    }


def _percentile_us(times_ns: npt.NDArray[np.int64], percent: int) -> float | None:
    """Return a percentile in microseconds, None of nothing."""
    return round(float(np.percentile(times_ns, percent)) / 1000, 3) if len(times_ns) else None
