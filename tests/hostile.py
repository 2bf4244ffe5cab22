"""Runs damaged images through processes of their own, so that a crash or a hang is told, and names its image."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.conftest import SHM, fresh_name

ROOT = Path(__file__).parents[1]
SILENCE = 20.0  # seconds; of processor time an image has 2, see hostile_calls.py
MOST_FAULTS = 60  # then there is enough to look at


@dataclass
class Fault:
    """What an image made the package do that it must not do."""

    number: int
    kind: str
    base: str
    what: str

    def __str__(self) -> str:
        return f"image {self.number} ({self.kind}, {self.base}): {self.what}"


@dataclass
class Report:
    """What came of all images."""

    images: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[Fault] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = [f"{self.images} images in {self.seconds:.0f} s, {len(self.faults)} faults"]
        for title, counts in (("outcomes", self.outcomes), ("kinds", self.kinds)):
            lines.append(f"{title}: " + ", ".join(f"{what} {n}" for what, n in counts.most_common()))
        return "\n".join([*map(str, self.faults), *lines])


class Lane:
    """A process that does every `step`-th image, started again after the one that it did not survive."""

    def __init__(self, job: dict[str, Any], report: Report) -> None:
        self.job, self.report = job, report
        self.buffer, self.doing = b"", dict[str, Any]()
        self.start(job["first"])

    def start(self, first: int) -> None:
        command = [sys.executable, "-m", "tests.hostile_calls", json.dumps({**self.job, "first": first})]
        environment = {**os.environ, "PYTHONFAULTHANDLER": ""}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self.heard, self.is_done, self.buffer = time.monotonic(), False, b""
        self.doing = {"begins": first - self.job["step"], "kind": "start", "base": ""}

    def fileno(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def fault(self, what: str) -> None:
        self.report.faults.append(Fault(self.doing["begins"], self.doing["kind"], self.doing["base"], what))

    def listen(self) -> None:
        """Take what the process has said; begin anew after its end."""
        said = os.read(self.fileno(), 1 << 16)
        self.heard = time.monotonic()
        if not said:
            self.end()
            return
        *lines, self.buffer = (self.buffer + said).split(b"\n")
        for line in lines:
            news = json.loads(line)
            if "begins" in news:
                self.doing = news
                continue
            self.report.images += 1
            self.report.kinds[self.doing["kind"]] += 1
            self.report.outcomes[news["outcome"]] += 1
            for what in news["wrong"]:
                self.fault(what)
            self.doing["ended"] = True

    def end(self, hung: bool = False) -> None:
        """See how the process ended, and go on with the next image."""
        _, errors = self.process.communicate()
        code, next_one = self.process.returncode, self.doing["begins"] + self.job["step"]
        if code == 0:
            self.is_done = True
            return
        if hung or code == -signal.SIGPROF:
            self.fault("HANG")
        elif code < 0:
            self.fault(f"KILLED by {signal.Signals(-code).name}")
        else:
            self.fault(f"the process gave up: {errors.decode(errors='replace')[-800:]}")
        started = self.doing["kind"] != "start"
        if started and "ended" not in self.doing:
            self.report.images += 1
            self.report.kinds[self.doing["kind"]] += 1
            self.report.outcomes["DEATH"] += 1
        self.is_done = not started or next_one >= self.job["count"]
        if not self.is_done:
            self.start(next_one)

    def check(self) -> None:
        """End the process if nothing was heard of it for too long."""
        if time.monotonic() - self.heard > SILENCE:
            self.process.kill()
            self.end(hung=True)


@contextlib.contextmanager
def swept() -> Iterator[str]:
    """A prefix for names of caches; a process of its own removes all their files, even where this one is killed."""
    prefix = fresh_name()
    command = ["sh", "-c", f"cat; sleep 0.2; rm -f {SHM}/*shmradix.{prefix}*; sleep 3; rm -f {SHM}/*shmradix.{prefix}*"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as sweeper:
        try:
            yield prefix
            left = sorted(path.name for path in SHM.glob(f"*shmradix.{prefix}*"))
            assert not left, f"images left {left}"
        finally:
            assert sweeper.stdin is not None
            sweeper.stdin.close()
            sweeper.terminate() if not list(SHM.glob(f"*shmradix.{prefix}*")) else None


def run(images: int, seed: int = 0, first: int = 0, lanes: int = 2, plant: dict[int, str] | None = None) -> Report:
    """Do the images `first` to `first + images - 1` of the seed; `plant` has some misbehave, see hostile_calls.py."""
    report, started = Report(), time.monotonic()
    job = {"seed": seed, "count": first + images, "step": lanes, "plant": plant or {}}
    with swept() as prefix:
        running = [Lane({**job, "name": f"{prefix}-{lane}", "first": first + lane}, report) for lane in range(lanes)]
        try:
            while running and len(report.faults) < MOST_FAULTS:
                for lane in select.select(running, [], [], 0.5)[0]:
                    lane.listen()
                for lane in running:
                    lane.check()
                running = [lane for lane in running if not lane.is_done]
        finally:
            for lane in running:
                lane.process.kill()
                lane.process.communicate()
            for path in SHM.glob(f"*shmradix.{prefix}*"):
                path.unlink()
    report.seconds = time.monotonic() - started
    return report
